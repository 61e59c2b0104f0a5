"""A stop needs evidence: the incident's rule stops on noise, ours does not, and refuses to be set up where it would."""

import math

import numpy as np
import pytest

from assay.errors import DataError, UsageError
from assay.statistics.early_stopping import (
    Noise,
    StoppingRule,
    choose_best,
    compare_losses,
    mann_kendall_p,
    paired_noise,
    plan_stopping,
    should_stop,
    widening_gap,
)

RULE = StoppingRule(min_improvement=0.01, patience=3, evaluations=20)


def history(rng, *, evaluations, fall=0.0, noise=0.02, jitter=0.0, sequences=64, skewed=False):
    """Held-out losses whose mean falls by `fall` per evaluation; `noise` is that of one sequence's change."""
    own = rng.normal(3, 0.5, sequences)
    shape = (evaluations, sequences)
    scatter = (rng.exponential(size=shape) - 1) if skewed else rng.normal(size=shape)
    course = -fall * np.arange(evaluations) + jitter * rng.normal(size=evaluations)
    return list(own + course[:, None] + noise / math.sqrt(2) * scatter)


def stops_at(losses, rule):
    """The evaluation after which the rule stopped, or None."""
    for seen in range(rule.before_first_look + 1, len(losses) + 1):
        if should_stop(losses[:seen], rule).stop:
            return seen
    return None


# ── the incident: a validation mean over 2 batches with σ = 0.04, patience 2, 24 epochs, loss still falling ───────────

FALLING = 0.01  # per epoch
SIGMA, PATIENCE, EPOCHS = 0.04, 2, 24


def classic_stop(means, patience):
    """Stop when the best has not been beaten for `patience` evaluations."""
    best, waited = math.inf, 0
    for epoch, value in enumerate(means):
        best, waited = (value, 0) if value < best else (best, waited + 1)
        if waited >= patience:
            return epoch
    return None


def test_the_classic_rule_stops_on_noise_nearly_always():
    rng = np.random.default_rng(0)
    runs = [9.7 - FALLING * np.arange(EPOCHS) + SIGMA * rng.normal(size=EPOCHS) for _ in range(1000)]
    stops = [stop for stop in (classic_stop(run, PATIENCE) for run in runs) if stop is not None]
    assert len(stops) / 1000 > 0.95
    assert np.median(stops) < 8


def test_our_rule_does_not_stop_the_incidents_run():
    rng = np.random.default_rng(1)
    rule = StoppingRule(min_improvement=FALLING * PATIENCE, patience=PATIENCE, evaluations=EPOCHS)
    stopped = 0
    for _ in range(200):
        two_batches = history(rng, evaluations=EPOCHS, fall=FALLING, noise=2 * SIGMA, sequences=2)
        stopped += stops_at(two_batches, rule) is not None
    assert stopped / 200 <= 0.05


def test_the_incidents_rule_is_refused_with_a_way_out():
    per_batch = SIGMA * math.sqrt(2)
    with pytest.raises(UsageError, match="would stop on noise") as refused:
        plan_stopping(Noise(math.sqrt(2) * per_batch, 2), FALLING, patience=PATIENCE, evaluations=EPOCHS)
    sentence = str(refused.value)
    assert "±0.057" in sentence
    enough = int(sentence.split("hold out at least ")[1].split()[0])
    assert enough == 828  # ((2.754 + 0.842) · 0.08 / 0.01)²: the risk of one of 17 looks, and the power
    plan_stopping(Noise(math.sqrt(2) * per_batch, enough), FALLING, patience=PATIENCE, evaluations=EPOCHS)
    with pytest.raises(UsageError):
        plan_stopping(Noise(math.sqrt(2) * per_batch, enough - 1), FALLING, patience=PATIENCE, evaluations=EPOCHS)


# ── the rule ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("jitter", "skewed"), [(0, False), (0, True), (0.003, False), (0.01, False)])
def test_false_stops_stay_below_the_level_over_all_looks(jitter, skewed):
    rng = np.random.default_rng(2)
    fall = RULE.min_improvement / RULE.patience  # exactly what the rule is to notice, so the hardest case
    runs = (history(rng, evaluations=20, fall=fall, jitter=jitter, skewed=skewed) for _ in range(300))
    assert sum(stops_at(run, RULE) is not None for run in runs) / 300 <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("evaluations", [12, 48])
@pytest.mark.parametrize("patience", [2, 6])
def test_false_stops_stay_below_the_level_for_other_plans(evaluations, patience):
    rng = np.random.default_rng(3)
    rule = StoppingRule(0.01, patience, evaluations)
    for jitter, skewed in ((0, False), (0, True), (0.003, False), (0.01, False)):
        made = {"evaluations": evaluations, "fall": 0.01 / patience, "jitter": jitter, "skewed": skewed}
        stopped = sum(stops_at(history(rng, **made), rule) is not None for _ in range(600))
        assert stopped / 600 <= 0.05, made


def test_a_run_that_improves_no_more_is_stopped_and_said_why():
    rng = np.random.default_rng(4)
    stops = [stops_at(history(rng, evaluations=20, jitter=0.001), RULE) for _ in range(100)]
    assert sum(stop is not None for stop in stops) >= 90
    decision = should_stop(history(rng, evaluations=20, jitter=0.001, fall=-0.01), RULE)
    assert decision.stop
    assert "less than the 0.01 asked for" in decision.reason
    assert decision.evidence["improvement"].high < 0.01


def test_no_look_before_there_is_evidence_nor_beyond_the_plan():
    still = [np.full(8, 2.0)] * 21
    assert not should_stop(still[:7], RULE).stop
    assert should_stop(still[:8], RULE).stop
    assert not should_stop(still, RULE).stop


def test_the_trend_is_the_least_squares_line():
    rng = np.random.default_rng(5)
    losses = history(rng, evaluations=9, fall=0.02, noise=0.1, jitter=0.05)
    means = np.array([one.mean() for one in losses[-4:]])
    found = should_stop(losses, RULE).evidence["improvement"]
    assert found.mean == pytest.approx(-3 * np.polyfit(np.arange(4), means, 1)[0], abs=1e-12)


def test_noise_is_that_of_the_change():
    before, after = np.array([1.0, 2.0, 3.0]), np.array([0.9, 1.8, 3.0])
    found = paired_noise(before, after)
    assert (found.per_sequence, found.sequences) == pytest.approx((0.1, 3))
    with pytest.raises(DataError, match="sizes"):
        paired_noise(before, after[:2])


@pytest.mark.parametrize("bad", [{"min_improvement": 0}, {"patience": 0}, {"level": 1.0}, {"evaluations": 7}])
def test_a_rule_that_makes_no_sense_is_refused(bad):
    with pytest.raises(UsageError):
        StoppingRule(**{"min_improvement": 0.01, "patience": 2, "evaluations": 24, **bad})


def test_a_loss_that_is_not_finite_is_an_error_not_a_stop():
    losses = history(np.random.default_rng(6), evaluations=9)
    losses[4][7] = math.nan
    for judge in (lambda: should_stop(losses, RULE), lambda: choose_best(losses)):
        with pytest.raises(DataError, match="loss of evaluation 4, sequence 7 is nan"):
            judge()


# ── comparing and choosing ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_is_claimed_only_where_the_pairs_show_it():
    rng = np.random.default_rng(7)
    before = rng.normal(3, 0.5, 100)
    better = compare_losses(before, before - 0.01 + 0.01 * rng.normal(size=100))
    assert better.verdict == "better"
    assert better.change.high < 0
    assert compare_losses(before, before + 0.01 + 0.01 * rng.normal(size=100)).verdict == "worse"
    assert compare_losses(before, rng.normal(2.99, 0.5, 100)).verdict == "not shown"


def test_false_claims_of_a_change_are_rare():
    rng = np.random.default_rng(8)
    claims = [compare_losses(*history(rng, evaluations=2, sequences=16)).verdict != "not shown" for _ in range(2000)]
    assert 0.03 < np.mean(claims) <= 0.06


def test_best_and_last_are_kept_apart():
    rng = np.random.default_rng(9)
    own = rng.normal(3, 0.5, 50)
    losses = [own + level + 0.01 * rng.normal(size=50) for level in (0.5, 0.2, 0.0, 0.0005, 0.3)]
    choice = choose_best(losses)
    assert {choice.best, *choice.ties} == {2, 3}
    assert choice.last == 4
    assert "worse by 0.2998 [" in choice.reason
    assert choose_best(losses[:2]).best == choose_best(losses[:2]).last == 1
    tied = choose_best([*losses[:3], losses[2] + 0.001 * rng.normal(size=50) + 1e-4])
    assert tied.last in tied.ties
    assert "not shown to be worse" in tied.reason


# ── the gap ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_over_fitting_is_said_in_words():
    train, held_out = np.linspace(9.69, 9.52, 8), np.linspace(9.78, 9.92, 8)
    said = widening_gap(train, held_out)
    assert said is not None
    assert "widened from 0.09 to 0.4" in said
    assert said.endswith("held-out loss rose from 9.78 at evaluation 0 to 9.92: over-fitting")


def test_a_gap_that_widens_while_both_fall_is_not_called_over_fitting():
    steps = np.arange(10)
    said = widening_gap(4 - 0.2 * steps, 4.1 - 0.1 * steps)
    assert said is not None
    assert "by heart" in said


def test_a_gap_that_does_not_widen_is_not_mentioned():
    rng = np.random.default_rng(10)
    course = 2 + 2 * (1 + np.arange(24)) ** -0.5
    said = [widening_gap(course + 0.02 * rng.normal(size=24), course + 0.1 + 0.02 * rng.normal(size=24)) for _ in range(1000)]
    assert sum(one is not None for one in said) <= 10
    assert widening_gap([3, 2, 1], [3.1, 2.6, 2.1]) is None  # three evaluations cannot show a trend
    assert widening_gap(course, course + 1e-4 * np.arange(24)) is None  # a trend too small to matter


def test_mann_kendall_is_exact():
    assert mann_kendall_p([1, 2, 3, 4]) == pytest.approx(1 / 24)
    assert mann_kendall_p([4, 3, 2, 1]) == pytest.approx(1)
    assert mann_kendall_p([1, 3, 2, 4]) == pytest.approx(4 / 24)
    assert mann_kendall_p([5, 5, 5, 5, 5]) > 0.5


def test_train_and_held_out_come_in_pairs():
    with pytest.raises(DataError, match="one of each per evaluation"):
        widening_gap([1, 2], [1, 2, 3])
