"""Law of the checks: where nothing was compared, or what was compared is no number, nothing is PROVEN."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.guard import distillation_checks
from assay.guard.distillation_checks import check_agreement, check_drawn_tokens
from assay.guard.example_audit import check_batch
from assay.guard.kto_checks import check_kl_estimate
from assay.guard.policy_identity import LogprobFloor, check_on_policy
from assay.guard.preference_checks import check_pairs
from assay.guard.rollout_checks import check_rewards_again, check_still_ends
from assay.guard.staleness_checks import check_stale_weights
from assay.guard.trajectory_checks import check_trajectory_weights
from assay.learn.distillation import DistillationSettings
from assay.testing.tiny_models import tiny_model
from assay.verdict import Outcome, Verdict
from assay.witness.replay import gradient_errors

FLOOR = LogprobFloor(0.0, 0.0, 1)
PROMPT, OTHER, SAID = (1, 2), (1, 5), (3, 4)


def batch(documents: list[list[int]], weight: list[list[float]], **streams: Any) -> Batch:
    """One row a list, of tokens 1 to 4 over and over."""
    held = torch.tensor(documents, dtype=torch.int32)
    tokens = (torch.arange(held.shape[1]) % 4 + 1).expand(held.shape).clone()
    return Batch(tokens, torch.tensor(weight), held, **streams)


def zeros(like: Batch) -> Tensor:
    return torch.zeros_like(like.weight)


def own_words(documents: list[list[int]], weight: list[list[float]]) -> Verdict:
    return check_drawn_tokens(batch(documents, weight), [(PROMPT, SAID), (OTHER, SAID)])


def kl_of_no_answer() -> Verdict:
    one_sided = batch([[0] * 4 + [1] * 4], [[0.0, 0, 1, 1, 0, 0, 0, 0]])
    return check_kl_estimate(tiny_model(), Batch(**one_sided.streams(), reference=zeros(one_sided), baseline=zeros(one_sided)))


def two_that_say_the_same(weight: float) -> Verdict:
    """Two trajectories of one text, each of which is due 1."""
    said: Any = SimpleNamespace(episode="0", tokens=2, sequences=[SimpleNamespace(ids=(1, 2, 3, 4))])
    made = batch([[0] * 4, [0] * 4], [[0.0, 0, weight / 2, weight / 2]] * 2)
    return check_trajectory_weights(made, [said, said], [True, True], "sequence", 2)


def stale_of_nothing() -> Verdict:
    rows = batch([[0] * 4], [[0.0, 0, 1, 1]])
    same = Batch(**rows.streams(), behaviour=zeros(rows), advantage=zeros(rows))
    return check_stale_weights(same, zeros(rows), zeros(rows), {}, 2.0, FLOOR)


def clipped_is_no_number() -> Verdict:
    return check_on_policy({"sampling/importance_sampling_ratio/mean": 1.0, "sampling/sampling_logp_difference/mean": 0.0,
                            "clip_ratio/region_mean": math.nan}, FLOOR, 0.2)


NOTHING: dict[str, Callable[[], Verdict]] = {
    "own words: none": lambda: own_words([[-1] * 4], [[0.0] * 4]),
    "own words: one twice, the other lost": lambda: own_words([[0] * 4 + [1] * 4], [[0.0, 0, 1, 1] * 2]),
    "batch: no example named": lambda: check_batch(batch([[0] * 4], [[0.0, 0, 1, 1]], positions=torch.arange(4).int()[None]), {}),
    "pairs: none": lambda: check_pairs([]),
    "endings: no completion": lambda: check_still_ends([], []),
    "kl: no mismatched answer": kl_of_no_answer,
    "trajectory weights: all alike, and each twice": lambda: two_that_say_the_same(2.0),
    "importance: no token asked anew": stale_of_nothing,
    "on policy: a clip that is no number": clipped_is_no_number,
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_compared_is_never_proven(case: str):
    assert NOTHING[case]().outcome is not Outcome.PROVEN


def test_their_twins_with_something_to_compare_are_proven():
    assert own_words([[0] * 4], [[0.0, 0, 1, 1]]).outcome is Outcome.PROVEN  # the second did not fit
    assert two_that_say_the_same(1.0).outcome is Outcome.PROVEN


def test_agreement_that_is_no_number_or_of_no_token_is_not_proven(monkeypatch: pytest.MonkeyPatch):
    student, teacher, blend = tiny_model(), tiny_model(seed=1), DistillationSettings()
    counts, nothing = (batch([[0] * 4], [[0.0, 0, weight, weight]]) for weight in (1.0, 0.0))
    assert check_agreement(student, teacher, counts, blend).outcome is Outcome.PROVEN
    assert check_agreement(student, teacher, nothing, blend).outcome is Outcome.UNPROVEN
    compared = distillation_checks.compare_tokens
    monkeypatch.setattr(distillation_checks, "compare_tokens", lambda *given, **named: (
        found := compared(*given, **named))._replace(kl=found.kl * math.nan))
    assert check_agreement(student, teacher, counts, blend).outcome is Outcome.REFUTED


def test_a_second_scoring_says_how_many_it_was_of():
    again = check_rewards_again([{"rule": 1.0}] * 5, [{"rule": 1.0}, *[{"rule": None}] * 4], 0.0)
    assert again.evidence["completions"] == 1
    assert again.reason.startswith("1 of 5 ")


def test_the_witness_takes_a_gradient_that_is_no_number_for_a_wrong_one():
    due = SimpleNamespace(gradients={"a": torch.ones(2).double(), "b": torch.ones(2).double()})
    kept: Any = SimpleNamespace(options={"max_grad_norm": 1.0}, compute="float32", before={}, moment=lambda *_: torch.zeros(2).double())
    right = due.gradients
    for found in (right | {"b": right["b"] * math.nan}, right | {"a": right["a"] * math.inf}):
        assert gradient_errors(kept, due, due, due.gradients, found, 1.0)[0] > 1  # type: ignore[arg-type]
