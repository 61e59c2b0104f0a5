"""Halving finds the first bad one in few looks, looks at both ends first, and says what it assumes."""

import math

import pytest

from assay.comparison.bisection import bisect_first_bad
from assay.errors import UsageError


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_it_finds_every_first_bad_one_in_few_looks(count: int):
    for first in range(1, count):
        asked: list[int] = []
        found = bisect_first_bad(range(count), lambda i, first=first, asked=asked: asked.append(i) or i >= first)
        assert (found.last_good, found.first_bad) == (first - 1, first)
        assert len(asked) == len(set(asked)) == len(found.looked) <= 2 + math.ceil(math.log2(count))


def test_the_ends_are_said_and_not_searched():
    assert bisect_first_bad(range(9), lambda i: False).first_bad is None
    already = bisect_first_bad(range(9), lambda i: True)
    assert (already.last_good, already.first_bad) == (None, 0)
    assert "bad already" in already.sentence
    assert len(already.looked) == 2


def test_looking_at_all_needs_no_assumption():
    recovers = {3, 8}
    assert bisect_first_bad(range(9), recovers.__contains__, every=True).first_bad == 3
    assert bisect_first_bad(range(9), recovers.__contains__).first_bad == 8  # what halving finds where bad does not stay bad
    assert bisect_first_bad(range(9), lambda i: False, every=True).first_bad is None
    assert "taking what is bad to stay bad" in bisect_first_bad(range(9), recovers.__contains__).sentence


def test_nothing_cannot_be_bisected():
    with pytest.raises(UsageError):
        bisect_first_bad([], lambda i: True)
