"""Known answers: each number of the table by another route, and a mistake in any function found."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from assay.statistics import early_stopping, effects, estimate, known_answers, sequential
from assay.statistics.known_answers import BEFORE, KNOWN, NEW, OF_COUNTS, OLD, RATES, RATES_BEFORE, RIGHT, check_statistics
from assay.verdict import Outcome

CHANGE = np.array(NEW) - np.array(OLD)


def due(name):
    return (KNOWN | OF_COUNTS)[name][1]


def test_a_sound_package_gives_every_known_answer():
    found = check_statistics(of_counts=True)
    assert found.outcome is Outcome.PROVEN, found.reason
    assert str(len(KNOWN) + len(OF_COUNTS)) in found.reason


@pytest.mark.parametrize(("name", "successes", "n", "level"), [("proportion", 7, 20, 0.95), ("proportion of none", 0, 5, 0.9),
                                                               ("proportion of all", 5, 5, 0.95), ("mean of zeros and ones", 3, 4, 0.95)])
def test_exact_intervals_are_scipys(name, successes, n, level):
    interval = stats.binomtest(successes, n).proportion_ci(level, "exact")
    assert due(name)[1:3] == pytest.approx((interval.low, interval.high), abs=1e-9)


@pytest.mark.parametrize(("name", "scores"), [("mean", NEW), ("paired", CHANGE), ("paired by name", [1.0 - 3, 2 - 1.5, 4 - 1])])
def test_intervals_of_means_are_students(name, scores):
    interval = stats.ttest_1samp(scores, 0.0).confidence_interval(0.95)
    assert due(name)[:3] == pytest.approx((np.mean(scores), interval.low, interval.high), abs=1e-9)


def test_p_values_are_scipys_and_those_of_counting():
    assert due("Welch") == pytest.approx(stats.ttest_ind(NEW, OLD, equal_var=False).pvalue, abs=1e-9)
    apart = stats.ttest_ind(NEW, OLD[:8], equal_var=False).confidence_interval(0.95)
    assert due("difference of means")[1:3] == pytest.approx([apart.low, apart.high], abs=1e-9)
    assert due("Fisher") == pytest.approx(stats.fisher_exact([[60, 50], [40, 80]]).pvalue, abs=1e-9)
    assert due("Boschloo")[0] == pytest.approx(stats.boschloo_exact([[5, 1], [1, 5]], n=256).pvalue, rel=0.01)
    flips = [sum(sign * size for sign, size in zip(signs, CHANGE, strict=True))
             for signs in itertools.product((-1, 1), repeat=10)]
    assert due("paired effect")[1] == pytest.approx(np.mean(np.abs(flips) >= abs(CHANGE.sum()) * (1 - 1e-12)), abs=1e-9)
    order = [sum((later > earlier) - (later < earlier) for earlier, later in itertools.combinations(series, 2))
             for series in itertools.permutations([1, 2, 1.5, 3, 4, 3.5])]
    assert due("Mann–Kendall") == pytest.approx(np.mean(np.array(order) >= order[0]), abs=1e-9)


def test_sequential_bounds_are_the_edges_of_the_mixture():
    """P(data) under Beta(½, ½), over P(data | rate), is 20 there."""
    for bad, n, edge in ((3, 40, due("sequential")[0]), (3, 40, due("sequential")[1]), (0, 64, due("sequential")[3])):
        mixture = stats.betabinom.pmf(bad, n, 0.5, 0.5)
        assert mixture / stats.binom.pmf(bad, n, edge) == pytest.approx(20, rel=1e-5)


def test_paired_zeros_and_ones_hold_what_mcnemar_allows():
    gained, lost = 4, 1
    assert sum(a > b for a, b in zip(RIGHT, BEFORE, strict=True)) == gained
    assert stats.binomtest(min(gained, lost), gained + lost).pvalue > 0.05
    assert due("paired zeros and ones")[1] < 0 < due("paired zeros and ones")[2]


def test_rates_that_only_rise_are_as_likely_as_all_signs_alike():
    raised = np.count_nonzero(np.array(RATES) - np.array(RATES_BEFORE))
    assert due("paired effect of rates")[1] == pytest.approx(2 / 2**raised)
    assert math.comb(6, 3) - math.comb(4, 3) == round(due("pass@3") * math.comb(6, 3))


@pytest.mark.parametrize(("module", "name", "wrong"), [
    (estimate, "_jackknife_variance", lambda above, below: 0.0),
    (estimate, "_unseen_variance", lambda rate, units: 0.0),
    (estimate, "standard_errors", lambda level, degrees: 1.96),
    (effects, "_with_unseen", lambda change: (float(change.mean()), 0.1)),
    (effects, "_t_p", lambda centre, error, degrees: 0.0),
    (sequential, "_log_beta", lambda a, b: 0.0),
    (early_stopping, "_jitter_variance", lambda means: (0.0, 1.0)),
    (known_answers, "holm", lambda p_values: [0.0 for _ in p_values]),
])
def test_a_mistake_in_the_arithmetic_is_named(monkeypatch, module, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    found = check_statistics()
    assert found.outcome is Outcome.REFUTED
    assert "known is" in found.reason
