"""Learning-rate schedules: pure functions of the step that return the multiplier of every group's peak rate; and a run's own.

Steps count from 0. Warm-up never gives 0, so the first step moves; from step `total` on the multiplier is `floor`.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from assay.errors import UsageError

Multiplier = Callable[[int], float]  # of every group's peak rate, at a step
LEAST_DOWN = 3.5  # steps that are left when the way down begins, or more: one step at the peak rate is no way down


def cosine(step: float, total: float, warmup: float = 0, peak: float = 1.0, floor: float = 0.1) -> float:
    """Linear warm-up to `peak` at step `warmup`, then half a cosine down to `floor` at step `total`."""
    _check(step, total, warmup, total - warmup, peak, floor)
    if step < warmup:
        return _warming(step, warmup, peak)
    done = min(1.0, (step - warmup) / (total - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def warmup_stable_decay(step: float, total: float, warmup: float, decay: float, peak: float = 1.0,
                        floor: float = 0.0) -> float:
    """Linear warm-up to `peak` at step `warmup`, flat, then linearly down to `floor` over the last `decay` steps."""
    _check(step, total, warmup, decay, peak, floor)
    if step < warmup:
        return _warming(step, warmup, peak)
    left = min(1.0, max(0.0, (total - step) / decay))
    return floor + (peak - floor) * left


def _warming(step: float, warmup: float, peak: float) -> float:
    return peak * (step + 1) / (warmup + 1)


def _check(step: float, total: float, warmup: float, decay: float, peak: float, floor: float) -> None:
    if not step >= 0:
        raise UsageError(f"schedule: step is {step}; steps count from 0")
    if not (warmup >= 0 and decay > 0 and warmup + decay <= total):
        raise UsageError(f"schedule: {warmup} steps of warm-up and {decay} of decay do not fit into {total}; "
                         "train longer, or shorten them (decay needs at least one step)")
    if not 0 <= floor <= peak:
        raise UsageError(f"schedule: floor {floor} and peak {peak}; expected 0 ≤ floor ≤ peak")

# ---------------------------------------------------------------- a run's schedule


@dataclass(frozen=True)
class Budget:
    """`steps` or `minutes`, one of them; where time decides, the last step is found on the way."""

    steps: int | None
    minutes: float | None
    schedule: Literal["wsd", "cosine"]
    warmup: int
    decay: float  # share of the run over which wsd goes down

    def __post_init__(self) -> None:
        if self.schedule == "cosine" and self.steps is None:
            raise UsageError("--lr-scheduler-type cosine must know its last step from the first: give steps, or use --lr-scheduler-type "
                             "wsd with --minutes")


class Schedule:
    """Learning-rate schedule: knows when the run will end, once it is decided, and how much time all its sessions took. It ends at a
    `multiple` of steps."""

    def __init__(self, budget: Budget, multiple: int = 1):
        self.budget, self.multiple, self.clock = budget, multiple, Clock()
        self.stop_at, self.decay_from = budget.steps, None
        self._spent = 0.0  # seconds of earlier sessions

    stop_at: int | None
    decay_from: int | None

    def begin(self) -> None:
        """The clock counts from here: what was loaded, checked and saved before the first step is none of the budget's time."""
        self.clock = Clock(self._spent)

    def multiplier(self, step: int) -> float:
        """Learning-rate multiplier of every peak rate: a pure function of the step, once it is known when the way down begins."""
        warmup = self.budget.warmup
        if self.stop_at is None:
            return min(1.0, (step + 1) / (warmup + 1))
        if self.budget.schedule == "cosine":
            return cosine(step, self.stop_at, min(warmup, self.stop_at // 2))
        decay = max(1, round(self.budget.decay * self.stop_at)) if self.decay_from is None else self.stop_at - self.decay_from
        return warmup_stable_decay(step, self.stop_at, min(warmup, self.stop_at - decay), decay)

    def decide_end(self, done: int, seconds_a_step: float | None) -> bool:
        """Decide, under a budget of time, when the run ends: when the flat part's share of it is over, what is left is the way down, in
        steps. Where steps are so slow that few are left by then, it begins while there is time for two."""
        minutes = self.budget.minutes
        if minutes is None or self.stop_at is not None or done <= self.budget.warmup or seconds_a_step is None:
            return False
        left = 60 * minutes - self.clock.seconds
        if left > max(self.budget.decay * 60 * minutes, LEAST_DOWN * seconds_a_step):
            return False
        self.decay_from, stop_at = done, done + max(1, int(0.98 * left / seconds_a_step))
        self.stop_at = -(-stop_at // self.multiple) * self.multiple
        return True

    def over(self, done: int) -> bool:
        late = self.budget.minutes is not None and self.clock.seconds >= 60 * self.budget.minutes
        return late or (self.stop_at is not None and done >= self.stop_at)

    def state(self) -> dict[str, Any]:
        return {"seconds": self.clock.seconds, "decay_from": self.decay_from, "stop_at": self.stop_at, "schedule": self.budget.schedule}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._spent, self.decay_from = state["seconds"], state["decay_from"]
        self.clock = Clock(self._spent)
        self.stop_at = self.budget.steps or state["stop_at"]


class Clock:
    """Wall time of a run over all its sessions, for budgets and progress."""

    def __init__(self, spent: float = 0.0):
        self._start = time.monotonic() - spent

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start
