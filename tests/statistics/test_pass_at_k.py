"""pass@k and majority@k of one problem: identities that every wrong version breaks."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import DataError, UsageError
from assay.statistics.estimate import majority, pass_at_k

counts = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(counts)
def test_identities(case):
    n, correct, k = case
    found = pass_at_k(n, correct, k)
    assert pass_at_k(n, correct, 1) == pytest.approx(correct / n, abs=1e-12)
    assert (found == 0) == (correct == 0)
    assert (found == 1) == (n - correct < k)
    assert found >= pass_at_k(n, max(correct - 1, 0), k)
    assert found >= pass_at_k(n, correct, max(k - 1, 1))


def test_it_is_the_share_of_subsets_with_a_right_one():
    for n, correct, k in ((5, 2, 3), (6, 1, 4), (7, 3, 2)):
        hits = [any(i < correct for i in subset) for subset in itertools.combinations(range(n), k)]
        assert pass_at_k(n, correct, k) == pytest.approx(np.mean(hits), abs=1e-12)


def test_it_is_unbiased_and_the_plug_in_is_not():
    rng, p, n, k = np.random.default_rng(0), 0.2, 16, 8
    correct = rng.binomial(n, p, 20_000)
    truth = 1 - (1 - p) ** k
    assert np.mean([pass_at_k(n, c, k) for c in correct]) == pytest.approx(truth, abs=0.004)
    assert abs(np.mean(1 - (1 - correct / n) ** k) - truth) > 0.02


def test_large_counts_stay_exact():
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5, abs=1e-12)
    assert math.isclose(pass_at_k(1319 * 16, 1, 1), 1 / (1319 * 16))


@pytest.mark.parametrize(("n", "k"), [(1, 2), (16, 17), (16, 0), (0, 1)])
def test_more_samples_than_were_drawn_are_refused(n, k):
    with pytest.raises(UsageError, match="number of samples"):
        pass_at_k(n, 0, k)


def test_impossible_counts_are_refused():
    for correct in (-1, 5):
        with pytest.raises(DataError, match="no count"):
            pass_at_k(4, correct, 2)


def test_the_majority_decides_and_a_tie_is_a_draw():
    assert majority(["7", "7", "8"], [True, True, False]) == 1.0
    assert majority(["7", "8", "8"], [True, False, False]) == 0.0
    assert majority(["7", "8"], [True, False]) == 0.5
    assert majority([None, None, "7"], [False, False, True]) == 1.0
    assert majority([None, None], [False, False]) == 0.0


def test_one_answer_cannot_be_right_and_wrong():
    with pytest.raises(DataError, match="right in one sample and wrong in another"):
        majority(["7", "7"], [True, False])
