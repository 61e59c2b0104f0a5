"""Effects: the interval and the p-value agree, exact tests equal their definitions, and what is needed would suffice."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from assay.errors import DataError
from assay.statistics.effects import (
    boschloo_p,
    counts_effect,
    counts_power,
    fewest_runs,
    holm,
    needed_counts,
    needed_pairs,
    needed_runs,
    paired_effect,
    permutation_p,
    runs_effect,
    sign_flip_p,
    visible_change,
)
from assay.statistics.estimate import mean_rate, paired, proportion

from .test_estimate import worst_coverage

scores = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=6, max_size=30)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), after=scores, level=st.sampled_from([0.8, 0.95, 0.99]))
def test_the_interval_leaves_out_0_exactly_where_p_allows(data, after, level):
    before = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=len(after), max_size=len(after)))
    half = len(after) // 2
    for effect in (paired_effect(after, before), runs_effect(after[:half], before[half:]),
                   counts_effect(sum(map(bool, after)), len(after), sum(map(bool, before)), len(before))):
        assert effect.interval(level).contains(0) == (effect.p > 1 - level)
        assert effect.interval(level).contains(effect.mean)


@settings(max_examples=40, deadline=None)
@given(after=scores)
def test_sides_turn(after):
    before = after[::-1]
    forth, back = paired_effect(after, before), paired_effect(before, after)
    assert forth.p == pytest.approx(back.p, abs=1e-12)
    assert forth.interval().low == pytest.approx(-back.interval().high, abs=1e-9)


def test_scores_of_0_and_1_are_paired_as_ever():
    rng = np.random.default_rng(0)
    for _ in range(50):
        after, before = rng.random((2, 40)) < rng.random()
        old, new = paired(after, before), paired_effect(after.astype(float), before.astype(float)).interval()
        assert (new.low, new.high) == pytest.approx((old.low, old.high), abs=1e-9)


def test_sign_flips_are_mcnemars_test_and_count_every_arrangement():
    assert sign_flip_p([1, 1, 1, 1, 1, -1, 0, 0]) == pytest.approx(stats.binomtest(5, 6).pvalue)
    changes = np.array([0.5, 0.25, 1.0, -0.25, 0.75])
    sums = [abs(np.dot(signs, np.abs(changes))) for signs in itertools.product((1, -1), repeat=5)]
    assert sign_flip_p(changes) == pytest.approx(np.mean(np.array(sums) >= changes.sum() - 1e-9))
    assert sign_flip_p([0.0, 0.0]) == 1.0


def test_many_sign_flips_are_drawn_and_agree_with_the_normal_law():
    changes = np.random.default_rng(1).normal(0.15, 1, 300)
    z = abs(changes.sum()) / math.sqrt((changes**2).sum())
    assert sign_flip_p(changes) == pytest.approx(2 * stats.norm.sf(z), abs=0.01)
    assert sign_flip_p(changes) == sign_flip_p(changes)


def test_permutations_are_scipys():
    rng = np.random.default_rng(2)
    for sizes in ((3, 4), (4, 6), (2, 7)):
        after, before = rng.normal(size=sizes[0]), rng.normal(0.5, 1, size=sizes[1])
        theirs = stats.permutation_test((after, before), lambda a, b: abs(a.mean() - b.mean()), alternative="greater", n_resamples=np.inf)
        assert permutation_p(after, before) == pytest.approx(theirs.pvalue)


def test_three_runs_against_three_can_never_show_5_percent():
    assert runs_effect([1, 1.001, 1.002], [2, 2.001, 2.002]).p == pytest.approx(0.1)
    assert runs_effect([1, 1.001, 1.002], [2, 2.001, 2.002]).interval().contains(0)
    assert permutation_p([1, 2, 3], [10, 11, 12]) == pytest.approx(0.1)
    assert permutation_p([1, 2, 3, 4], [10, 11, 12, 13]) < 0.05
    assert fewest_runs(0.95) == 4


@pytest.mark.parametrize("table", [(2, 4, 0, 6), (3, 4, 0, 6), (5, 8, 1, 8), (7, 10, 3, 12), (0, 5, 0, 5), (11, 15, 4, 9)])
def test_boschloo_is_scipys(table):
    after, of_after, before, of_before = table
    theirs = stats.boschloo_exact([[after, before], [of_after - after, of_before - before]]).pvalue
    assert boschloo_p(*table) == pytest.approx(min(1.0, theirs), abs=2e-5)


@pytest.mark.parametrize(("after", "before"), [(3, 3), (4, 6), (8, 5), (20, 20)])
def test_boschloo_never_claims_more_often_than_its_level(after, before):
    rejects = np.array([[boschloo_p(a, after, b, before) <= 0.05 for b in range(before + 1)] for a in range(after + 1)])
    for rate in np.linspace(0.005, 0.995, 200):
        chance = np.outer(stats.binom.pmf(np.arange(after + 1), after, rate), stats.binom.pmf(np.arange(before + 1), before, rate))
        assert chance[rejects].sum() <= 0.05 + 1e-6


@pytest.mark.parametrize(("after", "before"), [(2, 2), (4, 6), (5, 5), (12, 9)])
def test_counts_cover_every_pair_of_rates_exactly(after, before):
    effects = [[counts_effect(a, after, b, before).interval() for b in range(before + 1)] for a in range(after + 1)]
    low, high = (np.array([[getattr(one, side) for one in row] for row in effects]) for side in ("low", "high"))
    rates = np.concatenate([[0, 0.004], np.linspace(0.02, 1, 40)])
    for new in rates:
        for old in rates:
            chance = np.outer(stats.binom.pmf(np.arange(after + 1), after, new), stats.binom.pmf(np.arange(before + 1), before, old))
            assert chance[(low <= new - old + 1e-12) & (new - old - 1e-12 <= high)].sum() >= 0.95


def test_a_rate_of_whole_scores_is_a_proportion_and_a_rare_one_covers():
    assert mean_rate([1, 0, 0]) == proportion(1, 3)
    assert worst_coverage([(e.low, e.high) for e in (mean_rate([1] * k + [0] * (20 - k)) for k in range(21))], 20) >= 0.95
    assert mean_rate([0.5] * 10).low < 0.45  # ten equal scores do not make certainty
    with pytest.raises(DataError, match="between 0 and 1"):
        mean_rate([0.5, 1.5])
    with pytest.raises(DataError, match="at least 2"):
        mean_rate([0.5])


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_one_run_shows_nothing():
    effect = runs_effect([1.0], [2.0, 2.1, 2.2])
    assert effect.p == 1.0
    assert effect.interval().low == -math.inf
    assert effect.needed() is None


def test_what_is_needed_suffices_four_times_in_five():
    rng = np.random.default_rng(3)
    pairs = needed_pairs(0.3, 1.0)
    shown = [paired_effect(rng.normal(0.3, 1, pairs), np.zeros(pairs)).p <= 0.05 for _ in range(100)]
    assert np.mean(shown) == pytest.approx(0.8, abs=0.1)
    runs = needed_runs(1.0, 1.0)
    shown = [permutation_p(rng.normal(1, 1, runs), rng.normal(0, 1, runs)) <= 0.05 for _ in range(40)]
    assert np.mean(shown) == pytest.approx(0.8, abs=0.15)
    counts = needed_counts(0.5, 0.0)
    assert counts_power(counts, 0.5, 0.0) >= 0.8 > counts_power(counts - 1, 0.5, 0.0)
    assert needed_counts(0.3, 0.3) is None
    assert needed_counts(0.02, 0.015) == pytest.approx(10_800, rel=0.02)


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(DataError, match="the same problems"):
        paired_effect([1, 2, 3], [1, 2])
    with pytest.raises(DataError, match="proportion"):
        counts_effect(5, 4, 0, 6)


def test_the_change_that_an_evaluation_says_it_could_see_is_seen_eight_times_in_ten():
    """Of scores that change at will, by so much on average; a quarter of it is mostly not seen."""
    draw = np.random.default_rng(0)
    before = (draw.random((2000, 200)) < 0.3).astype(float)
    change = visible_change(before[0])
    for part, low, high in ((1.0, 0.7, 0.9), (0.25, 0.0, 0.25)):
        after = (draw.random(before.shape) < 0.3 + part * change).astype(float)
        assert low < float((stats.ttest_rel(after, before, axis=1).pvalue < 0.05).mean()) < high
    assert visible_change(np.zeros(8)) > 0
