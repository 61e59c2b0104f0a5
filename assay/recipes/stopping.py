"""Stopping early: a run ends before its time only where its looks show that it improves no more, and their noise lets that be seen."""

import numpy as np

from assay.errors import UsageError
from assay.guard.conclusion_checks import check_early_stopping
from assay.recipes.looks import Looks
from assay.recipes.run import Run
from assay.statistics.early_stopping import StoppingRule, paired_noise, plan_stopping, should_stop
from assay.store.ledger import Event
from assay.verdict import Outcome


def early_rule(patience: int, worth: float, *, schedule: str, steps: int | None, every: int) -> StoppingRule | None:
    """What was asked for, or a refusal before anything is spent; None where nothing was."""
    if not patience:
        return None
    if steps is None:
        raise UsageError("--patience shares its risk of a false stop among the looks to come, and --minutes does not say how many come; "
                         "bound the run by steps, tokens or epochs")
    if schedule == "wsd":
        raise UsageError("--patience with --schedule wsd: the loss falls most on the way down at the end, which a run that stops before it "
                         "never sees; give --schedule cosine")
    return StoppingRule(worth, patience, steps // every)


class Stopping:
    """Looks at multiples of `every` count, so that they lie evenly. The rule is held against their noise once, just before it may stop."""

    def __init__(self, run: Run, looks: Looks, rule: StoppingRule, every: int):
        self.run, self.looks, self.rule, self.every = run, looks, rule, every
        self.reason: str | None = None  # once it has stopped the run
        self._planned = False

    @property
    def history(self) -> list[np.ndarray]:
        return [losses for step, losses in zip(self.looks.steps, self.looks.losses, strict=True) if step and step % self.every == 0]

    def judge(self, step: int) -> None:
        """After every look, and after the looks of earlier sittings were recalled: a function of them alone."""
        history, rule = self.history, self.rule
        if self.reason is not None or len(history) < rule.before_first_look:
            return
        if not self._planned:
            self._refuse_noise(history[: rule.before_first_look])
        decision = should_stop(history, rule)
        verdict = check_early_stopping(history, planned=rule.evaluations, min_improvement=rule.min_improvement, patience=rule.patience)
        if decision.stop and verdict.outcome is Outcome.PROVEN:  # refuted where the noise has grown since: then the run goes on
            self.reason = decision.reason
            self.run.say(f"step {step}: stopping early: {decision.reason}")
            self.run.ledger.append(Event.EARLY_STOP, step=step, verdicts=[verdict.to_json()])

    def _refuse_noise(self, seen: list[np.ndarray]) -> None:
        rule = self.rule
        try:
            plan_stopping(paired_noise(seen[-1 - rule.patience], seen[-1]), rule.min_improvement, patience=rule.patience,
                          evaluations=rule.evaluations)
        except UsageError as error:
            raise UsageError(f"{error}. The run goes on from here with another --patience or --worth, or with --patience 0") from None
        self._planned = True
