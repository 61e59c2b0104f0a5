"""Two modes are found and named, ordinary noise between seeds is not, and a departure is dated."""

import math

import numpy as np
import pytest

from assay.errors import DataError
from assay.statistics.estimate import mean
from assay.statistics.seed_stability import collapse_bound, stability
from assay.verdict import Outcome

SEEDS = (42, 314, 1337)


def test_the_record_attempt():
    found = stability({42: 1.0696, 314: 1.1214, 1337: 1.1214}, metric="bpb")
    assert found.sentence.startswith(
        "two modes: {42} near 1.0696 and {314, 1337} near 1.1214; a mean is not a summary; worst seed 1.1214"
    )
    assert found.collapsed == (314, 1337)
    assert (found.worst_seed, found.worst) == (314, 1.1214)
    assert found.verdict().outcome == Outcome.REFUTED


def test_ordinary_seeds_are_one_mode_with_what_they_do_not_exclude():
    found = stability({42: 1.0696, 314: 1.0701, 1337: 1.0689}, metric="bpb")
    assert found.mean == mean([1.0696, 1.0701, 1.0689])
    assert found.collapsed == ()
    assert "one mode: bpb 1.0695 [1.0680, 1.0710] (n=3)" in found.sentence
    assert found.sentence.endswith("3 of 3 clean only bounds the collapse rate below 63 %")
    assert found.verdict().outcome == Outcome.PROVEN


def test_the_bound_is_the_rate_that_would_have_shown():
    for n in (1, 3, 20):
        assert (1 - collapse_bound(n)) ** n == pytest.approx(0.05)
    assert round(100 * collapse_bound(3)) == 63


@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("noise", [0.0005, 0.005, 0.01])
def test_noise_between_seeds_is_not_two_modes(n, noise):
    rng = np.random.default_rng(n)
    alarms = [len(stability(dict(enumerate(3 * (1 + noise * rng.normal(size=n))))).modes) == 2 for _ in range(600)]
    assert np.mean(alarms) <= 0.05


def test_given_noise_is_the_scale():
    accuracy = {1: 0.38, 2: 0.43, 3: 0.44}
    assert stability(accuracy, lower_is_better=False, noise=0.012).modes[0].seeds == (1, 2, 3)
    parted = stability(accuracy, lower_is_better=False, noise=0.005)
    assert [mode.seeds for mode in parted.modes] == [(2, 3), (1,)]
    assert parted.worst_seed == 1


def test_an_accuracy_without_a_scale_is_not_judged():
    found = stability({1: 0.38, 2: 0.43, 3: 0.44}, metric="accuracy", lower_is_better=False)
    assert found.modes == ()
    assert "modes not judged" in found.sentence
    assert found.verdict().outcome == Outcome.UNPROVEN


def test_collapsed_seeds_may_scatter():
    found = stability({1: 3.00, 2: 3.01, 3: 9.0, 4: 5.2, 5: 10.2, 6: 2.99})
    assert [mode.seeds for mode in found.modes] == [(1, 2, 6), (3, 4, 5)]
    assert found.worst_seed == 5


def test_a_spread_without_a_break_is_one_mode():
    assert len(stability(dict(enumerate(np.linspace(3.0, 3.3, 9)))).modes) == 1
    assert len(stability({1: 3.0, 2: 3.085, 3: 3.185, 4: 3.28}).modes) == 1  # wide gaps, none of them a break


def test_a_seed_without_a_number_collapsed():
    found = stability({42: 1.07, 314: math.nan, 1337: 1.069})
    assert found.not_finite == found.collapsed == (314,)
    assert found.mean is None
    assert found.worst_seed == 314
    assert "seed(s) 314 is not finite: collapsed" in found.sentence
    assert found.verdict().outcome == Outcome.REFUTED
    assert stability({1: math.inf, 2: math.nan}).collapsed == (1, 2)


def test_one_seed_proves_nothing():
    found = stability({42: 1.07})
    assert found.mean is None
    assert "1 of 1 clean only bounds the collapse rate below 95 %" in found.sentence
    assert found.verdict().outcome == Outcome.UNPROVEN
    with pytest.raises(DataError, match="at least one seed"):
        stability({})


# ── departures ───────────────────────────────────────────────────────────────────────────────────────────────────────

STEPS = np.arange(10, 2010, 10)


def curve(rng, *, offset=0.0, leaves=None, by=0.06, within=200, noise=0.002):
    """A falling loss that from `leaves` on moves away by `by` over `within` steps."""
    away = 0 if leaves is None else by * np.clip((STEPS - leaves) / within, 0, 1)
    values = 1 + 2 * STEPS**-0.3 + offset + away + noise * rng.normal(size=STEPS.size)
    return list(zip(STEPS.tolist(), values.tolist(), strict=True))


def test_the_step_at_which_each_collapsing_seed_left_the_healthy_one():
    rng = np.random.default_rng(0)
    for _ in range(20):
        leaves = dict(zip(SEEDS[1:], (int(step) for step in rng.integers(30, 150, 2) * 10), strict=True))
        losses = {42: curve(rng)} | {seed: curve(rng, offset=0.004, leaves=step) for seed, step in leaves.items()}
        found = stability({seed: points[-1][1] for seed, points in losses.items()}, {"loss": losses})
        assert found.collapsed == (314, 1337)
        for departure in found.departures:
            assert 0 <= departure.step - leaves[departure.seed] <= 100
            assert departure.metric == "loss"
            assert departure.value > departure.others


def test_an_ordinary_offset_is_no_departure():
    rng = np.random.default_rng(5)
    losses = {1: curve(rng, noise=0.0005), 2: curve(rng, offset=0.006, leaves=1500, noise=0.0005)}
    found = stability({seed: losses[seed][-1][1] for seed in losses}, {"loss": losses})
    assert 1500 <= found.departures[0].step <= 1550


def test_the_metric_that_left_first_is_named():
    rng = np.random.default_rng(1)
    losses = {42: curve(rng), 314: curve(rng, leaves=1500)}
    norms = {42: curve(rng, noise=0.05), 314: curve(rng, leaves=1200, by=5, noise=0.05)}
    found = stability({s: losses[s][-1][1] for s in losses}, {"loss": losses, "grad_norm": norms})
    (departure,) = found.departures
    assert departure.metric == "grad_norm"
    assert 1200 <= departure.step <= 1300
    assert f"seed 314 left the others at step {departure.step} in grad_norm" in found.sentence


def test_a_visit_outside_is_no_departure():
    rng = np.random.default_rng(2)
    visited = [(step, value + (0.5 if 300 <= step < 400 else 0)) for step, value in curve(rng, leaves=1500)]
    found = stability({1: 1.2, 2: 1.26}, {"loss": {1: curve(rng), 2: visited}})
    assert found.departures[0].step >= 1500


def test_a_curve_that_becomes_nan_left_there():
    rng = np.random.default_rng(3)
    broken = [(step, value if step < 900 else math.nan) for step, value in curve(rng)]
    found = stability({1: 1.2, 2: 1.201, 3: math.nan}, {"loss": {1: curve(rng), 2: curve(rng), 3: broken}})
    assert (found.departures[0].seed, found.departures[0].step) == (3, 900)
    alone = stability({3: math.nan}, {"loss": {3: broken}})
    assert alone.departures[0].step == 900


def test_healthy_seeds_have_no_departure_and_curves_set_the_scale():
    rng = np.random.default_rng(4)
    noisy = {seed: curve(rng, noise=0.05) for seed in SEEDS}
    found = stability({seed: noisy[seed][-1][1] for seed in SEEDS}, {"loss": noisy})
    assert found.departures == ()
    assert found.noise == pytest.approx(0.05, rel=0.4)
    accuracy = {seed: [(step, 0.4 + 0.02 * rng.normal()) for step, _ in noisy[seed]] for seed in SEEDS}
    judged = stability({1: 0.38, 2: 0.43, 3: 0.44}, {"acc": dict(enumerate(accuracy.values(), 1))}, metric="acc",
                       lower_is_better=False)
    assert len(judged.modes) == 1


def test_without_curves_no_departure_is_claimed():
    assert stability({1: 1.0, 2: 2.0}).departures == ()
    assert stability({1: 1.0, 2: 2.0}, {"loss": {1: [(10, 1.0)], 2: [(20, 2.0)]}}).departures == ()
