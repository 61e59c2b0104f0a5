"""Conclusion checks: early stopping on evidence, overfitting, reported losses, claimed gains and rising rewards."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from assay.comparison.pairwise import Claim, compare
from assay.comparison.read_results import Arm, Series
from assay.comparison.trend import trend
from assay.errors import DataError, UsageError
from assay.learn.lr_schedule import Schedule
from assay.statistics.early_stopping import paired_noise, plan_stopping, should_stop, widening_gap
from assay.statistics.estimate import paired
from assay.verdict import Verdict, proven, refuted, unproven

SAME_PRINTED = 1e-4  # of a printed loss: the same sum in another order and number format
NEAR_THE_FOOT = 0.1  # of the peak rate: where a schedule that time has ended should be


def check_same_held_out(before: str | None, now: str | None) -> Verdict:
    """Check that two evaluations, each with the digest of what it scored, are of the same set: else neither is better, and nothing has
    improved."""
    if before is None or now is None:
        return unproven("held_out_set", "an evaluation does not say what it scored", optional=True)
    words = f"the evaluation scored the set {now[:12]}, and the one before it {before[:12]}"
    if before != now:
        return refuted("held_out_set", f"{words}: other text or prompts, so the two do not compare; score the same set each time")
    return proven("held_out_set", words, digest=now)


def check_early_stopping(history: Sequence[ArrayLike], *, planned: int, min_improvement: float, patience: int) -> Verdict:
    """A run that ended before its planned evaluations did so on evidence. `history` holds the losses of the same sequences each time."""
    seen = len(history)
    if seen >= planned:
        return proven("stopping", f"the run had all {planned} evaluations")
    stopped = f"the run stopped after {seen} of {planned} evaluations"
    try:
        rule = plan_stopping(paired_noise(history[-2], history[-1]), min_improvement, patience=patience, evaluations=planned)
    except UsageError as error:
        return refuted("stopping", f"{stopped}, by a rule that could not know: {error}")
    decision = should_stop(history, rule)
    return (proven if decision.stop else refuted)("stopping", f"{stopped}: {decision.reason}")


def check_budget(schedule: Schedule, done: int, stopped_early: str | None = None) -> Verdict:
    """A run took the steps that were asked for; and where time has ended it, it was at the foot of its schedule: at a high rate a model
    is not yet what the schedule makes of it. A way down of a few steps ends at one step from the foot, and is all the way."""
    if stopped_early is not None:
        return proven("budget", f"{done} steps, then stopped early: {stopped_early}", steps=done)
    last = schedule.multiplier(done - 1) if done else 0.0
    words, asked = f"{done} step{'' if done == 1 else 's'} taken, the last at {last:.0%} of the peak learning rate", schedule.budget.steps
    if asked is not None and done < asked:
        return refuted("budget", f"{words}: the run ended by itself before the {asked} steps that it was to take", steps=done, share=last)
    went_down = schedule.stop_at is not None and (last <= NEAR_THE_FOOT or (done >= schedule.stop_at and last < 1))
    if schedule.budget.minutes is None or went_down:
        return proven("budget", words, steps=done, share=last)
    ran_out = "before the way down began" if schedule.stop_at is None else f"on the way down to step {schedule.stop_at}"
    return unproven("budget", f"{words}: --minutes {schedule.budget.minutes:g} ran out {ran_out}; give more minutes, or a budget of steps",
                    steps=done, share=last)


def check_best(step: int, printed: Mapping[int, float], unsaved: Mapping[int, str] | None = None) -> Verdict:
    """Check that the exported checkpoint, of `step`, has the lowest of all printed scores, so that "best" agrees with the figures a
    reader sees. Of steps that were `unsaved`, and why, there is no checkpoint: where one of them scored lower, that is said.
    """
    unsaved = unsaved or {}
    if step not in printed:
        return refuted("best", f"step {step} is called the best, and no score of it was printed")
    if step in unsaved:
        return refuted("best", f"step {step} is called the best, and it was not saved: {unsaved[step]}")
    words = f"step {step} is called the best at {printed[step]:.6g}"
    lower = [each for each in sorted(printed, key=lambda each: printed[each])
             if printed[step] - printed[each] > SAME_PRINTED * max(1.0, abs(printed[each]))]
    if kept := [each for each in lower if each not in unsaved]:
        return refuted("best", f"{words}, and {printed[kept[0]]:.6g} was printed of step {kept[0]}: it was chosen by another mean")
    if lower:
        return unproven("best", f"the best evaluation (step {lower[0]}, {printed[lower[0]]:.6g}) was not saved: {unsaved[lower[0]]}; the "
                                f"best of what was saved is step {step} ({printed[step]:.6g}), which is handed over", optional=True)
    return proven("best", f"{words}, the lowest of {len(printed)} that were printed")


def check_improvement(step: int, before: ArrayLike, after: ArrayLike) -> Verdict:
    """Compare the exported checkpoint, of `step`, with the starting model, document by document, by the printed score."""
    if step == 0:
        return unproven("improvement", "no checkpoint scores better than the model that the run began with, so that its own weights are "
                                       "handed over: training has made it worse on what is held out")
    change = paired(after, before)
    words = f"held-out loss {change} against step 0"
    if change.low > 0:
        return refuted("improvement", f"{words}: what is handed over is shown worse than what the run began with", change=change.mean)
    if change.high < 0:
        return proven("improvement", words, change=change.mean)
    return unproven("improvement", f"{words}: not shown better than what the run began with", optional=True, change=change.mean)


def check_generalisation_gap(train: ArrayLike, held_out: ArrayLike) -> Verdict:
    """Training and held-out loss stay together over the evaluations, as far as they can show.

    Training loss is a mean over past steps, so that it lies above held-out loss while both fall: that is no gap.
    """
    widened = widening_gap(np.minimum(train, held_out), held_out)
    if widened is not None:
        return refuted("gap", widened)
    return proven("gap", "the gap between train and held-out loss is not shown to widen")


def check_reported_loss(reported: float, losses: ArrayLike, tokens: ArrayLike) -> Verdict:
    """The loss that a run reports is the mean over every token of its held-out documents: not the last batch's, nor a running mean.

    `losses` are each document's mean over its `tokens`.
    """
    per_document, counts = np.asarray(losses, np.float64), np.asarray(tokens, np.float64)
    mean = float((per_document * counts).sum() / counts.sum())
    words = f"the reported loss is {reported:.6g}, that of all {per_document.size} held-out documents {mean:.6g}"
    if not abs(reported - mean) <= 1e-5 * abs(mean):
        return refuted("result", f"{words}: what is reported is another number, such as the last batch's", reported=str(reported),
                       mean=str(mean))
    return proven("result", words, reported=reported, mean=mean)


def check_claim(claimed: str, arms: Sequence[Arm], claims: Claim, *, level: float = 0.05) -> Verdict:
    """Check that a claim about the arm `claimed` against the first one is what the scores show, with every arm that was tried counted."""
    try:
        found = {one.after: one for one in compare(arms, level=level)}[claimed]
    except DataError as error:
        return refuted("claim", f"{claimed} is said to be {claims}, and nothing can be said: {error}")
    evidence = {"claimed": claims, "found": found.claim, "p": found.p, "needed": found.needed, "arms": len(arms)}
    if claims not in ("not shown", found.claim):
        return refuted("claim", f"said to be {claims}: {found.sentence}", **evidence)
    return proven("claim", f"said to be {claims}: {found.sentence}", **evidence)


def check_rise(series: Series, *, passed: bool, level: float = 0.05) -> Verdict:
    """A run that is declared a success on its reward has a reward that rose, or has not fallen as far as it shows."""
    found = trend(series, level=level)
    went_wrong = found.direction != "not shown" and not found.improves
    if passed and went_wrong:
        return refuted("rise", f"declared passed: {found.sentence}", **found.to_json())
    return proven("rise", f"declared {'passed' if passed else 'not passed'}: {found.sentence}", **found.to_json())
