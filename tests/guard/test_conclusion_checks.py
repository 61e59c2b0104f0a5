"""Checks on conclusions from held-out losses."""

import numpy as np
import pytest

from assay.guard.conclusion_checks import check_best, check_budget, check_early_stopping, check_generalisation_gap
from assay.learn.lr_schedule import Budget, Schedule
from assay.verdict import Outcome, without_optional

RULE = {"planned": 24, "min_improvement": 0.01, "patience": 3}


def history(evaluations: int, improving: float, *, sequences: int, noise: float, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    own = random.normal(0, 0.5, sequences)  # some text is harder; pairing takes this out
    return [3.0 - improving * i + own + random.normal(0, noise, sequences) for i in range(evaluations)]


def test_a_run_that_had_all_its_evaluations_did_not_stop():
    assert check_early_stopping(history(24, 0.0, sequences=2, noise=0.04), **RULE).outcome is Outcome.PROVEN


def test_a_stop_with_evidence_is_proven():
    assert check_early_stopping(history(12, 0.0, sequences=400, noise=0.01), **RULE).outcome is Outcome.PROVEN


def test_a_stop_while_the_loss_still_falls_is_refuted():
    found = check_early_stopping(history(12, 0.02, sequences=400, noise=0.01), **RULE)
    assert found.outcome is Outcome.REFUTED
    assert "the run stopped after 12 of 24 evaluations" in found.reason


def test_a_stop_where_noise_hides_everything_is_refuted_with_what_would_suffice():
    found = check_early_stopping(history(5, 0.02, sequences=2, noise=0.06, seed=1), **RULE)
    assert found.outcome is Outcome.REFUTED
    assert "by a rule that could not know: stopping refused" in found.reason
    assert "hold out at least" in found.reason


@pytest.mark.parametrize("seed", range(5))
def test_training_loss_that_lags_behind_is_no_gap(seed: int):
    """A mean over the steps since the last look lies above held-out loss while both fall, less and less."""
    noise = np.random.default_rng(seed).normal(0, 0.01, 8)
    held_out = np.array([4.0, 3.0, 2.4, 2.0, 1.8, 1.7, 1.62, 1.58])
    lagging = np.array([6.0, 4.4, 3.1, 2.3, 1.95, 1.78, 1.68, 1.61])
    assert check_generalisation_gap(lagging + noise, held_out).outcome is Outcome.PROVEN


def test_text_learned_by_heart_is_said():
    train = np.linspace(3.0, 1.0, 8)
    assert check_generalisation_gap(train, np.full(8, 3.0) - np.linspace(0, 0.3, 8)).outcome is Outcome.REFUTED
    rising = check_generalisation_gap(train, 3.0 + np.linspace(0, 0.3, 8))
    assert rising.outcome is Outcome.REFUTED
    assert "over-fitting" in rising.reason


def test_a_run_of_fewer_steps_than_were_asked_for_is_refuted():
    schedule = Schedule(Budget(10, None, "wsd", 0, 0.5))
    assert check_budget(schedule, 10).outcome is Outcome.PROVEN
    found = check_budget(schedule, 7)
    assert found.outcome is Outcome.REFUTED
    assert "before the 10 steps that it was to take" in found.reason
    assert check_budget(schedule, 7, "the loss no longer falls").outcome is Outcome.PROVEN


def test_the_best_is_the_lowest_that_was_printed():
    """The scores of an issue: step 60 was called the best."""
    printed = {20: 0.341, 40: 0.338, 60: 0.519, 80: 0.370}
    assert check_best(40, printed).outcome is Outcome.PROVEN
    assert "0.338 was printed of step 40" in check_best(60, printed).reason
    assert check_best(60, printed).outcome is check_best(100, printed).outcome is Outcome.REFUTED
    assert check_best(20, printed | {20: 0.338 + 1e-6}).outcome is Outcome.PROVEN


def test_a_best_that_was_not_saved_is_said_and_never_handed_over():
    printed, unsaved = {20: 0.341, 40: 0.338, 60: 0.519, 80: 0.370}, {40: "it was too dear", 60: "so was this"}
    found = check_best(20, printed, unsaved)
    assert found.outcome is Outcome.UNPROVEN
    assert without_optional([found]) == [], "what is handed over is proven all the same"
    assert found.reason == ("the best evaluation (step 40, 0.338) was not saved: it was too dear; the best of what was saved is step 20 "
                            "(0.341), which is handed over")
    assert check_best(40, printed, unsaved).outcome is check_best(80, printed, unsaved).outcome is Outcome.REFUTED
    assert check_best(40, printed, {60: "worse anyway"}).outcome is Outcome.PROVEN
