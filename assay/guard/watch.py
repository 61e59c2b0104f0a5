"""Guards in the loop: what the steps say is read back in batches, judged, and a REFUTED verdict stops the run with a sentence."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from assay.errors import GuardStop
from assay.guard import series
from assay.learn import loop
from assay.learn.loop import Step
from assay.learn.objectives import averages
from assay.verdict import Outcome, Verdict, proven, refuted

KEPT = 128  # losses, and readings of the clock, that are looked at together
EVERY = 16  # steps between readings: one wait for the GPU each, none in between


class Read(NamedTuple):
    step: Step
    loss: float
    grad_norm: float
    metrics: Mapping[str, float]  # averages over what counted


class Watch:
    """Feed it every step; `read` gives the values that have been read back since the last reading.

    `peaks` are the optimizer's peak rates, group by group, and `planned` the multiplier of all of them at a step. `consumed`
    judges what the steps say they have read. Where steps are not `steady`, as of rollouts, neither the course of their losses
    nor their times say anything, and each is read as it comes.
    """

    def __init__(self, peaks: Sequence[float], planned: Callable[[int], float], *, vocab: int | None = None,
                 parent_loss: float | None = None, consumed: Callable[[Sequence[Step]], Verdict] | None = None,
                 steady: bool = True):
        self.peaks, self.planned, self.consumed, self.steady = list(peaks), planned, consumed, steady
        self.vocab, self.parent_loss = vocab, parent_loss
        self.waiting: list[tuple[Step, list[float]]] = []
        self.losses: list[float] = []
        self.seconds: list[float] = []  # wall time a step, one mean a reading: between two of them a GPU's steps have no time of their own
        self.work: list[float] = []  # the same in seconds of this thread, which no other tenant of the machine stretches
        self.verdicts: list[Verdict] = []  # of the last reading
        self.change = series.ChangePoint()
        self._clock = _Clock()

    def begin(self) -> None:
        """A step begins now: what happened since the last one was none of its time."""
        self._clock.begin()

    def feed(self, step: Step, rates: Sequence[float]) -> list[Read]:
        """What was read now: nothing, most of the time."""
        self._clock.stop()
        self.waiting.append((step, list(rates)))
        return self.read() if len(self.waiting) >= (EVERY if self.steady else 1) else []

    def read(self) -> list[Read]:
        if not self.waiting:
            return []
        steps, rates = zip(*self.waiting, strict=True)
        values = torch.stack([torch.stack([step.loss, step.grad_norm.to(step.loss.dtype)]) for step in steps]).tolist()
        self._note_time(len(steps))
        self.waiting, first = [], not self.losses
        losses = [loss for loss, _ in values]
        self.losses = [*self.losses[-KEPT:], *losses]
        self.verdicts = [series.finite([v for pair in values for v in pair], "loss or gradient norm"),
                         *self._learning_rates(rates, steps[0].index)]
        if self.steady:
            self.verdicts += [series.constant_loss(self.losses), self._step_time(), self.change.feed(losses)]
        if self.consumed is not None:
            self.verdicts.append(self.consumed(steps))
        if first:
            self.verdicts += self._first_loss(steps[0], losses[0])
        stop_if_refuted(self.verdicts)
        return [Read(step, loss, norm, averages(step.metrics)) for step, (loss, norm) in zip(steps, values, strict=True)]

    def pace(self) -> float | None:
        """Seconds a step, as a rule; None before the first reading."""
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else None

    def _note_time(self, steps: int) -> None:
        self._clock.stop()  # after the wait for the GPU, which is the steps' time
        wall, work = self._clock.spent(steps)
        self.seconds, self.work = [*self.seconds[-KEPT:], wall], [*self.work[-KEPT:], work]

    def _step_time(self) -> Verdict:
        verdict = series.plausible_step_time(self.work)
        return replace(verdict, reason=f"in readings of {EVERY} steps: {verdict.reason}")

    def _learning_rates(self, rates: Sequence[Sequence[float]], start: int) -> list[Verdict]:
        if any(len(row) != len(self.peaks) for row in rates):
            return [refuted("learning_rate", f"the plan has {len(self.peaks)} groups of parameters, the optimizer {len(rates[0])}")]
        by_group = zip(self.peaks, zip(*rates, strict=True), strict=True)
        return [series.learning_rate(observed, lambda step, peak=peak: peak * self.planned(step), start=start)  # type: ignore[misc]
                for peak, observed in by_group]

    def _first_loss(self, step: Step, loss: float) -> list[Verdict]:
        if self.parent_loss is not None:
            return [series.inherited_loss(loss, self.parent_loss)]
        return [series.initial_loss(loss, self.vocab)] if self.vocab is not None and step.index == 0 else []


class _Clock:
    """Wall time and this thread's own time over stretches that begin and stop."""

    def __init__(self) -> None:
        self._wall = self._work = 0.0
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic(), time.thread_time()

    def stop(self) -> None:
        wall, work = self._began
        self.begin()
        self._wall, self._work = self._wall + self._began[0] - wall, self._work + self._began[1] - work

    def spent(self, steps: int) -> tuple[float, float]:
        """A step's share of both, and from here they count anew."""
        shares = self._wall / steps, self._work / steps
        self._wall = self._work = 0.0
        return shares


def check_detectors() -> Verdict:
    """The alarms of the loop and of its log are alive: each finds a planted value that is not finite, and only that."""
    found = series.self_test(series.finite)
    if found.outcome is Outcome.REFUTED:
        return found
    for loss, norm in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)):
        if not _alarmed(loss, norm):
            return refuted("self_test", f"a planted loss of {loss} with gradient norm {norm} went through: the loop would step on it")
    if _alarmed(1.0, 1.0):
        return refuted("self_test", "the loop's alarm refuses finite values, so that it means nothing")
    return proven("self_test", f"{found.reason}, and the loop refused to step on 4 more")


def _alarmed(loss: float, norm: float) -> bool:
    try:
        loop.Alarm(torch.device("cpu")).watch(0, torch.tensor(loss), torch.tensor(norm))
    except GuardStop:
        return True
    return False


def stop_if_refuted(verdicts: Sequence[Verdict]) -> None:
    against = [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]
    if against:
        raise GuardStop("; ".join(f"{verdict.check}: {verdict.reason}" for verdict in against))
