"""Pace of a run's checkpoints: as often as they cost little of its time, and at least twice an hour. What they hold is the step's alone."""

import statistics
import time
from collections.abc import Callable

LITTLE = 0.02  # of the loop's time: what saving may cost
LEAST_APART, MOST_APART = 120.0, 1800.0  # seconds between two
USUAL = 32  # readings of undisturbed steps by which others are judged slow


class SavePace:
    """Pace of saving: says when the next checkpoint may come, by what the last one cost the loop: the time that it stood still, and what
    steps took longer while the checkpoint was written and proven beside them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._saved_at, self._stood, self._slowed = now, now(), 0.0, 0.0
        self._undisturbed: list[float] = []  # seconds a step
        self._disturbed = False  # when steps were last read

    def saved(self, cost: float) -> None:
        """Record that a checkpoint was made just now; the loop stood still for so many seconds."""
        self._saved_at, self._stood, self._slowed = self._now(), cost, 0.0

    def read(self, seconds: float, steps: int, *, beside: bool) -> None:
        """Record that `steps` steps took `seconds` each. `beside`: something of a checkpoint is under way now; if so or if it was at the
        last reading, these steps shared the machine with it."""
        if not (beside or self._disturbed):
            self._undisturbed = [*self._undisturbed, seconds][-USUAL:]
        elif self._undisturbed:
            self._slowed += steps * (seconds - statistics.median(self._undisturbed))  # also less: noise must not add up
        self._disturbed = beside

    @property
    def apart(self) -> float:
        return min(MOST_APART, max(LEAST_APART, (self._stood + max(0.0, self._slowed)) / LITTLE))

    def due(self) -> bool:
        return self._now() - self._saved_at >= self.apart
