"""Steps of `assay distill --divergence-top-k`, replayed: sound ones are proven for each divergence, faults of the few tokens are seen."""

import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from assay.learn import distillation
from assay.recipes.witness_records import pending_records
from assay.verdict import Outcome, Verdict
from assay.witness.replay import replay_step
from assay.zoo.witness_faults import train_witnessed

FEW = 5


def replayed(folder: Path, divergence: str) -> list[Verdict]:
    train_witnessed(folder / "run", "distill", divergence=divergence, divergence_top_k=FEW, temperature=2.0, max_steps=2)
    return [replay_step(record) for record in pending_records(folder / "run")]


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_sound_steps_are_proven(divergence: str, tmp_path: Path):
    found = replayed(tmp_path, divergence)
    assert [verdict.outcome for verdict in found] == [Outcome.PROVEN] * 2, found


def others_forgotten(divergence: Any, k: int, by_student: bool, ours: Tensor, theirs: Tensor) -> Any:
    """The few are made to sum to 1, in the place of an outcome for all others: nothing holds the student's other tokens down."""
    ids = (ours if by_student else theirs).topk(k).indices
    term, slopes = divergence(ours.gather(1, ids).log_softmax(-1), theirs.gather(1, ids).log_softmax(-1))
    return term, ours.new_zeros(ours.shape).scatter(1, ids, slopes)


def slope_of_the_rest_lost(divergence: Any, k: int, by_student: bool, ours: Tensor, theirs: Tensor) -> Any:
    """The right loss, and no gradient for the tokens that are not among the few."""
    term, slopes = distillation_as_it_is(divergence, k, by_student, ours, theirs)
    kept = ours.scatter(1, (ours if by_student else theirs).topk(k).indices, -math.inf) == -math.inf
    return term, slopes * kept


FAULTS = {"one token more": lambda divergence, k, *given: distillation_as_it_is(divergence, k + 1, *given),
          "the other's likeliest": lambda divergence, k, by_student, *given: distillation_as_it_is(divergence, k, not by_student, *given),
          "others forgotten": others_forgotten, "slope of the rest lost": slope_of_the_rest_lost}
distillation_as_it_is = distillation.among_top_k


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_few_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distillation, "among_top_k", FAULTS[fault])
    found = replayed(tmp_path, "reverse")
    assert all(verdict.outcome is Outcome.REFUTED for verdict in found), found
    assert "are not those of these texts" in found[0].reason
