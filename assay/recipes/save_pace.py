"""Pace of a run's checkpoints: as often as they cost little of its time, and at least twice an hour. What they hold is the step's alone."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal

LITTLE = 0.02  # of the loop's time: what saving may cost
OF_COPIES = 0.25  # share of it that is for copies of the best weights in memory; the rest is for checkpoints
FREE_COPIES = 5.0  # seconds of copying that are always allowed: what short runs of small models take in all
Turn = Literal["save", "save waiting", "copy", "pass over", "wait"]
LEAST_APART, MOST_APART = 120.0, 1800.0  # seconds between two checkpoints
USUAL = 32  # readings of undisturbed steps by which others are judged slow


class Allowance:
    """A share of the time that may be spent. What is spent is owed, and the time that goes by pays it off, at that share of it: while
    one spends only where nothing is owed, all but the last sum spent lies within the share."""

    def __init__(self, share: float, now: Callable[[], float]) -> None:
        self.share, self._now, self._at, self._owed = share, now, now(), 0.0

    @property
    def owed(self) -> float:
        """Seconds that are not yet paid off."""
        now = self._now()
        self._owed, self._at = max(0.0, self._owed - self.share * (now - self._at)), now
        return self._owed

    def spend(self, seconds: float) -> None:
        self._owed = self.owed + seconds


class SavePace:
    """Pace of saving: says when the next checkpoint may come, by what those before it cost the loop: the time that it stood still, and what
    steps took longer while they were written and proven beside it. A copy of the best weights in memory has an allowance of its own."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self._written_at, self._state_at = now, now(), now()
        self._saves, self._copies = Allowance((1 - OF_COPIES) * LITTLE, now), Allowance(OF_COPIES * LITTLE, now)
        self._stood = 0.0  # for the last one
        self.slowed = 0.0  # seconds that steps took longer, in all
        self._slower = 0.0  # since something of a checkpoint is under way
        self._undisturbed: list[float] = []  # seconds a step
        self._disturbed = False  # when steps were last read
        self._rested = True  # steps were undisturbed since the last one

    def saved(self, cost: float, *, state_at: float | None = None) -> None:
        """Record that a checkpoint was made just now, for which the loop stood still for so many seconds; its state is of now, or of an
        earlier time."""
        self._saves.spend(cost)
        self._written_at, self._stood, self._rested, self._disturbed = self.now(), cost, False, True
        self._state_at = self._written_at if state_at is None else state_at

    def copied(self, cost: float) -> None:
        """Record that the best weights were copied to memory; the loop stood still for so many seconds."""
        self._copies.spend(cost)

    def read(self, seconds: float, steps: int, *, beside: bool) -> None:
        """Record that `steps` steps took `seconds` each. `beside`: something of a checkpoint is under way now; if so or if it was at the
        last reading, these steps shared the machine with it."""
        if not (beside or self._disturbed):
            self._undisturbed, self._rested = [*self._undisturbed, seconds][-USUAL:], True
        elif self._undisturbed:
            self._slower += steps * (seconds - statistics.median(self._undisturbed))  # also less: noise must not add up
        if not beside:
            self._saves.spend(max(0.0, self._slower))
            self.slowed, self._slower = self.slowed + max(0.0, self._slower), 0.0
        self._disturbed = beside

    def turn(self, *, best: bool, waiting: bool, room: bool) -> Turn:
        """Decide what is done with the state of now, where nothing but the time decides. It is of the `best` evaluation so far or not; the
        one before may be `waiting` in memory to be saved; and memory may have `room` for a copy.

        What waits is saved before anything newer is, so that the best up to a checkpoint is on the disk with it."""
        if self.due():
            return "save waiting" if waiting and not best else "save"
        if not best:
            return "wait"
        if room and self._copies.owed <= FREE_COPIES:
            return "copy"
        return "save" if self._affordable() else "pass over"

    def due(self) -> bool:
        """A checkpoint is: those before are paid off, or the newest state on the disk is half an hour old."""
        now = self.now()
        return now - self._state_at >= MOST_APART or (now - self._written_at >= LEAST_APART and self._affordable())

    def _affordable(self) -> bool:
        """Whether a checkpoint is affordable: those before are written, proven and paid off, and steps since then have shown what they take
        alone."""
        return self._rested and not self._disturbed and self._saves.owed == 0

    def state(self) -> dict[str, float]:
        """State for a checkpoint: a run that resumes from it owes what this one did, and the checkpoint itself, which costs what the last
        did."""
        return {"owed": self._saves.owed + self._stood, "owed_for_copies": self._copies.owed, "stood": self._stood}

    def restore(self, state: Mapping[str, float]) -> None:
        self._saves.spend(state["owed"])
        self._copies.spend(state["owed_for_copies"])
        self._stood = state["stood"]
