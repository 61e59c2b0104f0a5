"""The floor is that of what was said, by the prompt that was answered at length."""

import pytest
import torch

from assay.generate.generation_request import Completion
from assay.guard.policy_identity import measure_logprob_floor
from assay.recipes.grpo_preflight import LAST_BITS, rollout_floor
from assay.recipes.prompts import Prompt
from assay.testing.tiny_models import tiny_model


def said(prompt: int, length: int, logprob: float = -1.0) -> tuple[Prompt, Completion]:
    draw = torch.Generator().manual_seed(100 * prompt + length)
    ids = tuple(torch.randint(0, 256, (length,), generator=draw).tolist())
    asked = Prompt(f"p{prompt}", tuple(range(prompt, prompt + 7)), "", {})
    return asked, Completion(ids, (logprob,) * length, "length", "0@")


def test_of_the_longest_completions_of_one_prompt_and_of_nothing_else():
    model = tiny_model()
    drawn = [said(0, 20), said(0, 2), said(0, 21), said(1, 9), said(1, 12), said(1, 10), said(1, 11), said(1, 3)]
    floor = rollout_floor(model, drawn, 1.0)
    assert floor.tokens == 4 * 9  # of prompt 1, all but the shortest; prompt 0 said 2 tokens once, and has no four that are longer
    due = measure_logprob_floor(model, [(*range(1, 8), *drawn[place][1].ids) for place in (4, 6, 5, 3)], 1.0, prompt=7)
    assert (floor.mean, floor.most) == (due.mean, pytest.approx(max(due.most, LAST_BITS)))


def test_what_was_rare_is_known_less_well():
    rare = rollout_floor(tiny_model(), [said(0, 5), said(0, 6, logprob=-1000.0)], 1.0)
    assert rare.most == 1000 * LAST_BITS
