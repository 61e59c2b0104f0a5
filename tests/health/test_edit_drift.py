"""Drift of a probe: texts on other prompts, before an edit and after it."""

from pathlib import Path

import pytest
import torch

from assay.health.degenerate import Malformed
from assay.health.edit_drift import LARGEST_DRIFT, EditDrift, check_edit_drift, fitting_prompts, probe_edit
from assay.health.generation_probe import GeneratedText, Health, ProbeSample
from assay.health.probe_prompts import BUILT_IN_PROMPTS, TEXT_BEGINNINGS
from assay.verdict import Outcome
from assay.zoo.editing_faults import opened_facts_model


def health(wrong: int, surprise: float, uneven: float = 0.0) -> Health:
    """`uneven`: every other prompt's texts cost so much more than the mean, and the others so much less."""
    bad = Malformed("repetition", "again and again")
    said = [GeneratedText("words", "length", (), surprise + 0.01 * i + uneven * (-1) ** i) for i in range(len(BUILT_IN_PROMPTS))]
    return Health("a model", tuple(ProbeSample(prompt, 0, said[i], bad if i < wrong else None)
                                   for i, prompt in enumerate(BUILT_IN_PROMPTS)))


@pytest.mark.parametrize(("after", "outcome"), [
    (health(0, 1.0), Outcome.PROVEN),
    (health(1, 1.3), Outcome.PROVEN),  # one of sixteen shows nothing
    (health(9, 1.0), Outcome.REFUTED),
    (health(0, 1.0 + LARGEST_DRIFT + 0.1), Outcome.REFUTED),
    (health(0, 1.0 + LARGEST_DRIFT, uneven=0.4), Outcome.UNPROVEN),  # 0.5 and an interval around it
    (health(0, 1.0 + LARGEST_DRIFT - 0.1, uneven=0.4), Outcome.UNPROVEN),
    (health(0, 1.2, uneven=0.4), Outcome.PROVEN),
    (health(9, 1.0 + LARGEST_DRIFT, uneven=0.4), Outcome.REFUTED),
])
def test_both_numbers_sway_the_verdict(after: Health, outcome: Outcome):
    verdict = check_edit_drift(EditDrift(health(0, 1.0), after))
    assert (verdict.check, verdict.outcome) == ("probe", outcome)


def test_the_drift_is_paired_by_prompt():
    found = EditDrift(health(0, 1.0), health(2, 1.25)).estimates()
    drift = found["probe, nats a token under the model before, change"]
    assert drift.mean == pytest.approx(0.25)
    assert drift.high - drift.low < 1e-9  # prompts differ from each other, but not in how much they moved
    assert (found["probe, malformed, before"].mean, found["probe, malformed, after"].mean) == (0, 2 / 16)


@pytest.mark.arithmetic
def test_the_same_weights_drift_by_nothing_and_other_weights_by_something(tmp_path: Path):
    before, after = opened_facts_model(tmp_path / "a"), opened_facts_model(tmp_path / "b")
    same = probe_edit(before, after, rounds=1, seed=0)
    assert same is not None
    assert [s.said.text for s in same.before.samples] == [s.said.text for s in same.after.samples]
    assert same.drift().mean == 0
    with torch.no_grad():
        after.model.blocks[0].mlp.down.weight.mul_(3)
    after.engine = None  # what it computed is of the weights before
    other = probe_edit(before, after, rounds=1, seed=0)
    assert other is not None
    assert other.drift().mean > 0.05


def test_what_does_not_fit_is_not_asked_and_then_nothing_is_proven(tmp_path: Path):
    opened = opened_facts_model(tmp_path / "model")
    assert len(fitting_prompts(opened, TEXT_BEGINNINGS, raw=True)) == len(TEXT_BEGINNINGS)
    assert not any(prompt.expected.ends for prompt in fitting_prompts(opened, BUILT_IN_PROMPTS, raw=True))
    object.__setattr__(opened.model.config, "max_length", 70)
    assert probe_edit(opened, opened, rounds=1, seed=0) is None
    assert check_edit_drift(None).outcome is Outcome.UNPROVEN
