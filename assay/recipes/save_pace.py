"""Pace of a run's checkpoints: as often as they cost little of its time, and at least twice an hour. What they hold is the step's alone."""

import time
from collections.abc import Callable

LITTLE = 0.02  # of the loop's time: what saving may cost
LEAST_APART, MOST_APART = 120.0, 1800.0  # seconds between two; a proof takes of the machine, too


class SavePace:
    """Says when the next checkpoint may come, by what the last one cost the loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._saved_at, self._cost = now, now(), 0.0

    def saved(self, cost: float) -> None:
        """One was made just now; the loop stood still for so many seconds."""
        self._saved_at, self._cost = self._now(), cost

    @property
    def apart(self) -> float:
        return min(MOST_APART, max(LEAST_APART, self._cost / LITTLE))

    def due(self) -> bool:
        return self._now() - self._saved_at >= self.apart
