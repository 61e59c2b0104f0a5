"""Each check on a run's numbers finds its fault, and is silent on runs without one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.guard.series_checks import (
    ChangePoint,
    check_constant_loss,
    check_detector,
    check_finite,
    check_inherited_loss,
    check_initial_loss,
    check_learning_rate,
    check_step_time,
)
from assay.verdict import Outcome, proven, refuted

PROVEN, REFUTED, UNPROVEN = Outcome.PROVEN, Outcome.REFUTED, Outcome.UNPROVEN


def curves(rng, runs, steps, *, noise=0.02, correlation=0.0, tails=None):
    """Realistic losses: warm-up, a power law to a floor, noise in proportion to the loss, correlated, heavy-tailed."""
    draw = lambda low, high: rng.uniform(low, high, (runs, 1))
    t, warm = np.arange(1, steps + 1), draw(20, 300)
    trained = np.where(t < warm, t * t / (2 * warm), t - warm / 2)
    course = draw(1, 3.5) + draw(5, 9) * (1 + trained / draw(5, 100)) ** -draw(0.15, 0.5)
    shocks = rng.normal(size=(runs, steps)) if tails is None else rng.standard_t(tails, (runs, steps)) / math.sqrt(2)
    scatter = np.empty_like(shocks)
    scatter[:, 0] = shocks[:, 0]
    for i in range(1, steps):
        scatter[:, i] = correlation * scatter[:, i - 1] + math.sqrt(1 - correlation**2) * shocks[:, i]
    return course * (1 + noise * scatter)


# ── change points ────────────────────────────────────────────────────────────────────────────────────────────────────

PER_STEP = 1e-4  # the promised rate of false alarms
NOISES = [{"noise": 0.004}, {"noise": 0.02}, {"noise": 0.07, "correlation": 0.3}, {"noise": 0.02, "tails": 4},
          {"noise": 0.02, "correlation": 0.6}, {"noise": 0.07, "correlation": 0.6, "tails": 4}]


def alarms_per_step(losses):
    steps = alarms = 0
    for loss in losses:
        verdict = ChangePoint().feed(loss)
        alarms += verdict.outcome == REFUTED
        steps += verdict.evidence["step"] if verdict.outcome == REFUTED else len(loss)
    return alarms / steps


@pytest.mark.parametrize("kind", NOISES)
def test_false_alarms_are_as_rare_as_stated(kind):
    assert alarms_per_step(curves(np.random.default_rng(0), 10, 5000, **kind)) <= PER_STEP


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOISES)
def test_false_alarms_are_as_rare_as_stated_over_a_million_steps(kind):
    assert alarms_per_step(curves(np.random.default_rng(1), 100, 10_000, **kind)) <= PER_STEP


@pytest.mark.parametrize(
    ("fault", "within", "cause"),
    [
        (lambda k: 2.0, 4, "jumped up"),
        (lambda k: 0.6, 10, "jumped up"),
        (lambda k: np.where(k < 4, 1.0, 0.0), 4, "jumped up"),
        (lambda k: -0.6, 10, "dropped"),
        (lambda k: np.minimum(4, 0.05 * k), 40, "jumped up"),
        (lambda k: np.minimum(4, 0.005 * k), 400, "climbed"),
    ],
    ids=["jump", "small jump", "spike of 4 steps", "drop", "divergence", "slow climb"],
)
def test_a_change_is_found_within_a_few_steps(fault, within, cause):
    rng = np.random.default_rng(2)
    causes = []
    for loss in curves(rng, 30, 2000, noise=0.01, correlation=0.3):
        at = int(rng.integers(500, 1500))
        loss[at:] += fault(np.arange(loss.size - at))
        verdict = ChangePoint().feed(loss)
        assert verdict.outcome == REFUTED
        assert 0 <= verdict.evidence["step"] - at < within
        causes.append(verdict.evidence["cause"])
    assert sum(cause in found for found in causes) >= 20


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 400), max_size=8), jump=st.booleans())
def test_it_does_not_matter_in_which_pieces_the_losses_come(seed, cuts, jump):
    (loss,) = curves(np.random.default_rng(seed), 1, 400)
    loss[300:] += 3 * jump
    watch = ChangePoint()
    verdicts = [watch.feed(piece) for piece in np.split(loss, sorted(cuts))]
    assert verdicts[-1] == ChangePoint().feed(loss)
    assert (verdicts[-1].outcome == REFUTED) == jump


def test_losses_fed_one_by_one_are_judged_alike():
    (loss,) = curves(np.random.default_rng(8), 1, 500, noise=0.01)
    loss[400:] += 0.5
    watch = ChangePoint()
    verdicts = [watch.feed([value]) for value in loss]
    assert verdicts[-1] == ChangePoint().feed(loss)
    assert 400 < verdicts[-1].evidence["step"] < 410
    assert verdicts[399].outcome == PROVEN


def test_an_alarm_stands_and_too_few_losses_prove_nothing():
    (loss,) = curves(np.random.default_rng(3), 1, 300)
    assert ChangePoint().feed(loss[:64]).outcome == UNPROVEN
    assert ChangePoint().feed([]).outcome == UNPROVEN
    watch = ChangePoint()
    watch.feed(loss)
    alarm = watch.feed(loss[-1] + np.full(8, 5.0))
    assert alarm.outcome == REFUTED
    assert watch.feed(loss[-50:]) == alarm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 40, 150])
def test_a_loss_that_is_not_finite_is_a_change_at_its_step(bad, at):
    (loss,) = curves(np.random.default_rng(4), 1, 200)
    loss[at] = bad
    watch = ChangePoint()
    for verdict in (ChangePoint().feed(loss), [watch.feed([value]) for value in loss][-1]):
        assert verdict.outcome == REFUTED
        assert verdict.evidence["step"] == at


def test_a_text_known_by_heart_may_flicker():
    rng = np.random.default_rng(5)
    loss = 5 * np.exp(-np.arange(1500) / 60) + 0.004 * rng.exponential(size=1500) ** 2
    assert ChangePoint().feed(loss).outcome == PROVEN


def test_a_loss_without_any_scatter_is_no_alarm():
    assert ChangePoint().feed(2 + 5 * (1 + np.arange(1000)) ** -0.4).outcome == PROVEN


# ── finite, and the detector's own test ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_found(bad):
    verdict = check_finite([1.0, 2.0, bad, 3.0], "grad_norm")
    assert verdict.outcome == REFUTED
    assert verdict.evidence["at"] == 2
    assert "grad_norm" in verdict.reason


def test_finite_needs_values():
    assert check_finite([1.0]).outcome == PROVEN
    assert check_finite([]).outcome == UNPROVEN


def test_the_self_test_passes_ours_and_fails_detectors_that_do_not_detect():
    assert check_detector().outcome == PROVEN
    never = lambda values: proven("counter", "nan iterations: 0")
    filtered = lambda values: check_finite([v for v in values if not math.isnan(v)])
    equality = lambda values: refuted("x", "") if math.nan in values else proven("x", "")
    only_last = lambda values: check_finite(values[-1:])
    always = lambda values: refuted("x", "")
    for broken in (never, filtered, equality, only_last, always):
        assert check_detector(broken).outcome == REFUTED


# ── constant, repeated, placeholder ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("placeholder", [0.0, 1.0, math.log(2), float(np.float32(math.log(2))), 0.6931])
def test_a_placeholder_is_named(placeholder):
    falling = [9.7, 9.6, 9.55]
    assert check_constant_loss([*falling, placeholder, placeholder]).outcome != REFUTED
    verdict = check_constant_loss([*falling, placeholder, placeholder, placeholder])
    assert verdict.outcome == REFUTED
    assert verdict.evidence["at"] == 3
    assert "placeholder" in verdict.reason


def test_a_loss_that_stands_still_or_comes_back_is_refuted():
    losses = curves(np.random.default_rng(6), 1, 100)[0].astype(np.float32)
    still = check_constant_loss([*losses, *[losses[-1]] * 4])
    assert (still.outcome, still.evidence["at"]) == (REFUTED, 99)
    assert check_constant_loss([*losses, *[losses[-1]] * 3]).outcome == PROVEN
    again = check_constant_loss([*losses, *losses[20:25]])
    assert (again.outcome, again.evidence["at"], again.evidence["before"]) == (REFUTED, 100, 20)
    assert check_constant_loss([*losses, *losses[20:24]]).outcome == PROVEN


def test_losses_of_a_run_are_not_constant():
    for losses in curves(np.random.default_rng(7), 20, 3000):
        assert check_constant_loss(losses.astype(np.float32)).outcome == PROVEN
    assert check_constant_loss(np.linspace(0.70, 0.69, 2001)).outcome == PROVEN  # passes ln 2 and does not stay
    assert check_constant_loss([3.0, 2.9]).outcome == UNPROVEN


# ── the first loss ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("logit_std", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("vocab", [256, 8192])
def test_random_logits_start_inside_the_band(vocab, logit_std):
    rng = np.random.default_rng(8)
    logits = np.float32(logit_std) * rng.standard_normal((1000, vocab), dtype=np.float32)
    loss = float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[:, 0]))
    assert check_initial_loss(loss, vocab).outcome == PROVEN


@pytest.mark.parametrize("wrong", [math.log(8192) - 0.11, math.log(8192) + 0.61, 1.0, math.nan, math.inf])
def test_a_first_loss_outside_the_band_is_refuted(wrong):
    assert check_initial_loss(wrong, 8192).outcome == REFUTED


def test_a_narrow_model_has_a_narrow_band():
    assert check_initial_loss(math.log(256) + 0.3, 256).outcome == PROVEN
    assert check_initial_loss(math.log(256) + 0.3, 256, logit_std=0.1).outcome == REFUTED


def test_a_child_starts_at_its_parent():
    assert check_inherited_loss(2.105, 2.1).outcome == PROVEN
    for first in (2.2, 2.0, math.nan):
        assert check_inherited_loss(first, 2.1).outcome == REFUTED


# ── time, tokens, learning rate ──────────────────────────────────────────────────────────────────────────────────────


def test_steps_that_do_no_work_are_too_fast():
    rng = np.random.default_rng(9)
    times = [30.0, 12.0, *rng.uniform(0.9, 1.3, 60), 25.0, *rng.uniform(0.9, 1.3, 60)]  # compiling, saving
    assert check_step_time(times).outcome == PROVEN
    assert check_step_time([*times, 0.01, 0.01]).outcome == PROVEN
    exhausted = check_step_time([*times, 0.01, 0.01, 0.01])
    assert (exhausted.outcome, exhausted.evidence["at"]) == (REFUTED, len(times))
    assert check_step_time(times[:18]).outcome == UNPROVEN


def test_no_step_is_faster_than_the_machine():
    assert check_step_time([1.0] * 30, floor=0.5).outcome == PROVEN
    assert check_step_time([1.0] * 30 + [0.4], floor=0.5).evidence["at"] == 30
    for impossible in (0.0, -1.0, math.nan):
        assert check_step_time([1.0] * 30 + [impossible]).outcome == REFUTED


def cosine(step, total=1000, peak=3e-4):
    return peak * (1 + math.cos(math.pi * min(1, step / total))) / 2


def test_the_learning_rate_is_the_plans():
    planned = [cosine(step) for step in range(100, 200)]
    assert check_learning_rate(planned, cosine, start=100).outcome == PROVEN
    assert check_learning_rate(np.array(planned, np.float32).tolist(), cosine, start=100).outcome == PROVEN
    late = check_learning_rate(planned, cosine, start=101)
    assert (late.outcome, late.evidence["step"]) == (REFUTED, 101)
    assert check_learning_rate([*planned[:5], math.nan], cosine, start=100).evidence["step"] == 105
    assert check_learning_rate([], cosine).outcome == UNPROVEN


@pytest.mark.parametrize("processes", [2, 8])
def test_a_scheduler_stepped_once_per_process_is_recognised(processes):
    verdict = check_learning_rate([cosine(processes * step) for step in range(400)], cosine)
    assert (verdict.outcome, verdict.evidence["step"]) == (REFUTED, 1)
    assert f"stepped {processes} times a step" in verdict.reason


def test_a_learning_rate_of_0_before_the_end_is_refuted_even_if_planned():
    short = lambda step: cosine(step, total=10)
    rates = [short(step) for step in range(21)]
    assert check_learning_rate(rates, short, last_step=20).evidence["step"] == 10
    assert check_learning_rate(rates[:11], short, last_step=10).outcome == PROVEN
