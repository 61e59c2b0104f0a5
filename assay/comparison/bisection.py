"""Bisection: the first bad one of many in a row, found by looking at few of them.

It is assumed that what is bad stays bad. The ends are looked at first: where the last is good or the first is bad, that is said
instead of searched for. Whoever doubts the assumption looks at all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from assay.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Bisection(Generic[T]):
    """`first_bad` is None where the last is good; `last_good` is None where the first is bad already."""

    count: int
    last_good: T | None
    first_bad: T | None
    looked: dict[T, bool] = field(default_factory=dict)  # in the order of looking: was it bad?

    @property
    def sentence(self) -> str:
        said = f"looked at {len(self.looked)} of {self.count}"
        if self.first_bad is None:
            return f"none is bad at the end: {self.last_good} is good ({said})"
        if self.last_good is None:
            return f"{self.first_bad}, the first there is, is bad already ({said})"
        assumed = ", taking what is bad to stay bad" if len(self.looked) < self.count else ""
        return f"{self.first_bad} is the first bad one; {self.last_good} is good ({said}{assumed})"


def bisect_first_bad(row: Sequence[T], bad: Callable[[T], bool], *, every: bool = False) -> Bisection[T]:
    """`bad` is asked once of each that is looked at. `every`: of all, in order, which needs no assumption."""
    if not row:
        raise UsageError("there is nothing to bisect")
    looked: dict[T, bool] = {}

    def is_bad(index: int) -> bool:
        if row[index] not in looked:
            looked[row[index]] = bad(row[index])
        return looked[row[index]]

    if every:
        return _first_of_all(row, is_bad, looked)
    if not is_bad(len(row) - 1):
        return Bisection(len(row), row[-1], None, looked)
    if is_bad(0):
        return Bisection(len(row), None, row[0], looked)
    good, found = 0, len(row) - 1
    while found - good > 1:
        middle = (good + found) // 2
        good, found = (good, middle) if is_bad(middle) else (middle, found)
    return Bisection(len(row), row[good], row[found], looked)


def _first_of_all(row: Sequence[T], is_bad: Callable[[int], bool], looked: dict[T, bool]) -> Bisection[T]:
    first = min((index for index in range(len(row)) if is_bad(index)), default=None)
    if first is None:
        return Bisection(len(row), row[-1], None, looked)
    return Bisection(len(row), row[first - 1] if first else None, row[first], looked)
