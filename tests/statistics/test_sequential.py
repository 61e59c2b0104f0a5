"""The rate that may be looked at after every sample: it errs as often as it says, over all looks together."""

import math

import numpy as np
import pytest

from assay.statistics.sequential import clean_samples_needed, excludes, sequential_bounds


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.3])
def test_all_looks_together_err_at_most_one_time_in_twenty(rate):
    rng, erred, runs = np.random.default_rng(int(rate * 100)), 0, 300
    for _ in range(runs):
        bad = np.cumsum(rng.random(300) < rate)
        erred += any(excludes(rate, int(k), n) for n, k in enumerate(bad, 1))
    assert erred / runs <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)


def test_a_plain_interval_looked_at_every_time_would_err_more_often():
    from assay.statistics.estimate import proportion

    rng, erred, runs = np.random.default_rng(0), 0, 100
    for _ in range(runs):
        bad = np.cumsum(rng.random(150) < 0.3)
        erred += any(not proportion(int(k), n).contains(0.3) for n, k in enumerate(bad, 1))
    assert erred / runs > 0.09


def test_clean_samples_bound_what_they_say():
    assert [clean_samples_needed(rate) for rate in (0.05, 0.02, 0.01)] == [116, 320, 680]
    for rate in (0.2, 0.05, 0.01):
        n = clean_samples_needed(rate)
        assert sequential_bounds(0, n)[1] <= rate < sequential_bounds(0, n - 1)[1]


def test_the_bounds_are_where_exclusion_begins():
    for bad, n in ((0, 7), (3, 40), (35, 72), (9, 9)):
        low, high = sequential_bounds(bad, n)
        assert not excludes((low + bad / n) / 2, bad, n)
        assert not excludes((high + bad / n) / 2, bad, n)
        assert bad == 0 or excludes(low * 0.999, bad, n)
        assert bad == n or excludes(high + 0.001 * (1 - high), bad, n)


def test_ends():
    assert sequential_bounds(0, 0) == (0.0, 1.0)
    assert sequential_bounds(0, 10)[0] == 0.0
    assert sequential_bounds(10, 10)[1] == 1.0
    low, high = sequential_bounds(35, 72)
    assert 0.3 < low < 35 / 72 < high < 0.68
