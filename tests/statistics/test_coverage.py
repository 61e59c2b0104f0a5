"""95 % intervals hold 95 % of simulated truths, and verdicts claim what is not so at most as often as their level says."""

import pytest

from .coverage import CLAIMS, INTERVALS, share

QUICK = 400  # truths, of up to 100 units: two standard errors of a share of 0.95 are 0.022


@pytest.mark.parametrize("name", INTERVALS)
def test_intervals_hold_the_truth(name):
    assert share(INTERVALS[name], QUICK, seed=11, most=100) >= 0.94 - 0.022


@pytest.mark.parametrize("name", CLAIMS)
def test_verdicts_keep_their_level(name):
    assert share(CLAIMS[name], QUICK, seed=12, most=100) <= 0.05 + 0.022


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERVALS)
def test_intervals_hold_two_thousand_truths(name):
    assert share(INTERVALS[name], 2000) >= 0.94


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_verdicts_keep_their_level_over_two_thousand_truths(name):
    assert share(CLAIMS[name], 2000) <= 0.05 + 0.01  # two standard errors of 2,000 truths
