"""GRPO preflight on one rollout that is not trained on: the floor of sampler and trainer, that seeds count, that a fork holds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from assay.data.batch import Batch
from assay.generate.generation_request import Sampling
from assay.guard.policy_identity import LogprobFloor, measure_logprob_floor
from assay.guard.rollout_checks import check_rollout_seeds
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.recipes.prompts import Prompt
from assay.recipes.rollout_batch import Drawn, Layout, batch_logprobs, of_completions
from assay.recipes.rollouts import COMPARED, Sampler
from assay.verdict import Verdict, proven, refuted

FLOOR_TEXTS = 4
LAST_BITS = 4 * torch.finfo(torch.float32).eps  # of a log-probability: that much is lost in the sums it comes from


def rollout_floor(model: Transformer, drawn: Drawn, temperature: float) -> LogprobFloor:
    """Log-probability floor, measured on the prompt that was answered at length. It grows with the logits, and with how rare what was said
    is."""
    prompt, said = max(_longest_of_each_prompt(drawn), key=lambda answered: len(answered[1][-1]))
    with uncompiled():  # token by token, every length would be compiled anew
        found = measure_logprob_floor(model, [(*prompt, *ids) for ids in said], temperature, len(prompt))
    rarest = max(-logprob for _, completion in drawn for logprob in completion.logprobs)
    return replace(found, most=max(found.most, LAST_BITS * rarest))


def _longest_of_each_prompt(drawn: Drawn) -> Iterator[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    for _, members in groupby(drawn, key=lambda pair: pair[0].id):
        pairs = list(members)
        yield pairs[0][0].ids, sorted((completion.ids for _, completion in pairs), key=len)[-FLOOR_TEXTS:][::-1]


def check_seeds_count(sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling) -> Verdict:
    """Check that seeds reach the sampler: the same prompts under two seeds."""
    one, two = (sampler.draw(prompts, replace(sampling, seed=sampling.seed + more), ("seeds",), 1) for more in (1, 2))
    return check_rollout_seeds([c for group in one for c in group], [c for group in two for c in group])


def check_forked_policy(parent: Transformer, child: Transformer, batch: Batch, drawn: Drawn, temperature: float,
                        floor: LogprobFloor) -> Verdict:
    """The child answers as its parent does, opened anew: neither an adapter nor anything else was lost on the way."""
    shown = next(batch.split(COMPARED))
    prompts = [prompt.ids for prompt, _ in drawn[: len(shown)]]
    due, found = (of_completions(batch_logprobs(model, shown, temperature, Layout(COMPARED), entropy=False), shown, prompts)
                  for model in (parent, child))
    apart = max(float(np.abs(np.subtract(one, two)).mean()) for one, two in zip(due, found, strict=True))
    words = f"child and parent are {apart:.1e} nats a token apart; the floor allows {floor.bound_alone:.1e}"
    return (proven if apart <= floor.bound_alone else refuted)("fork", words, apart=str(apart))
