"""Guards in the loop: what the steps say is read back in batches, judged, and a REFUTED verdict stops the run with a sentence."""

from collections.abc import Callable

import torch

from assay.errors import GuardStop
from assay.guard import series
from assay.learn.loop import Step
from assay.verdict import Outcome, Verdict

KEPT = 128  # losses and step times that are looked at together
EVERY = 16  # steps between readings: one wait for the GPU each, none in between


class Watch:
    """Feed it every step; `read` gives the values that have been read back since the last reading."""

    def __init__(self, planned_lr: Callable[[int], float], *, vocab: int | None = None, parent_loss: float | None = None):
        self.planned_lr, self.vocab, self.parent_loss = planned_lr, vocab, parent_loss
        self.waiting: list[tuple[Step, float]] = []
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.change = series.ChangePoint()

    def feed(self, step: Step, lr: float, seconds: float) -> list[tuple[Step, float, float]]:
        """(step, loss, gradient norm) of the steps read now: none, most of the time."""
        self.waiting.append((step, lr))
        self.seconds = [*self.seconds[-KEPT:], seconds]
        return self.read() if len(self.waiting) >= EVERY else []

    def read(self) -> list[tuple[Step, float, float]]:
        if not self.waiting:
            return []
        steps = [step for step, _ in self.waiting]
        values = torch.stack([torch.stack([step.loss, step.grad_norm.to(step.loss.dtype)]) for step in steps]).tolist()
        rates, self.waiting, first = [lr for _, lr in self.waiting], [], not self.losses
        losses = [loss for loss, _ in values]
        self.losses = [*self.losses[-KEPT:], *losses]
        verdicts = [series.finite([v for pair in values for v in pair], "loss or gradient norm"), series.constant_loss(self.losses),
                    series.plausible_step_time(self.seconds),
                    series.learning_rate(rates, self.planned_lr, start=steps[0].index), self.change.feed(losses)]
        if first:
            verdicts += self._first_loss(steps[0], losses[0])
        stop_if_refuted(verdicts)
        return [(step, loss, norm) for step, (loss, norm) in zip(steps, values, strict=True)]

    def _first_loss(self, step: Step, loss: float) -> list[Verdict]:
        if self.parent_loss is not None:
            return [series.inherited_loss(loss, self.parent_loss)]
        return [series.initial_loss(loss, self.vocab)] if self.vocab is not None and step.index == 0 else []


def stop_if_refuted(verdicts: list[Verdict]) -> None:
    against = [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]
    if against:
        raise GuardStop("; ".join(f"{verdict.check}: {verdict.reason}" for verdict in against))
