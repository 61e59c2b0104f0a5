"""Headline of a run: first whether its purpose was reached (gain shown, loss lowered, facts said), then whether the artifact is proven."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.report.run_record import RunRecord, finite_number, read_lines, verdicts_of
from assay.report.run_status import RunStatus, ended_status, last_results, result_verdicts, run_status
from assay.verdict import Outcome, Verdict

_LEVEL = 0.95
ARTIFACT = {"done and proven": "artifact proven", "done, refuted": "artifact refuted", "done, not proven": "artifact not proven"}
GAIN = {Outcome.PROVEN: "gain shown", Outcome.UNPROVEN: "no gain shown", Outcome.REFUTED: "the score fell"}
FACTS = {Outcome.PROVEN: "facts said", Outcome.UNPROVEN: "not shown that the facts are said", Outcome.REFUTED: "facts not said"}
LOSS = {Outcome.PROVEN: "loss lowered", Outcome.UNPROVEN: "no lower loss shown", Outcome.REFUTED: "the loss rose"}
PREFERENCE = {Outcome.PROVEN: "preference learned", Outcome.UNPROVEN: "no preference shown", Outcome.REFUTED: "the rejected is preferred"}
RANKING = {Outcome.PROVEN: "ranks better than a coin", Outcome.UNPROVEN: "not shown better than a coin",
           Outcome.REFUTED: "ranks worse than a coin"}
TEACHER = {Outcome.PROVEN: "nearer to the teacher", Outcome.UNPROVEN: "not shown nearer to the teacher",
           Outcome.REFUTED: "farther from the teacher"}


@dataclass(frozen=True)
class Purpose:
    """Purpose of a run, and whether it was reached: PROVEN, REFUTED, or UNPROVEN (not shown)."""

    outcome: Outcome
    sentence: str
    check: str | None = None  # the verdict that says so; None where held-out losses do


@dataclass(frozen=True)
class Headline:
    """`purpose` is None before a result is on record: then only the status is known."""

    purpose: Purpose | None
    artifact: str

    def __str__(self) -> str:
        return self.artifact if self.purpose is None else f"{self.purpose.sentence}; {self.artifact}"


def headline(record: RunRecord) -> Headline:
    state = artifact_status(record).state
    return Headline(purpose_of(record), ARTIFACT.get(state, state))


def artifact_status(record: RunRecord) -> RunStatus:
    """Status of what was handed over. A purpose that was not shown is said first, and does not make the artifact unproven as well; one
    that is refuted does."""
    status, purpose = run_status(record), purpose_of(record)
    if status.state != "done, not proven" or purpose is None:
        return status
    return ended_status(verdict for verdict in result_verdicts(record) if verdict.check != purpose.check)


def purpose_of(record: RunRecord) -> Purpose | None:
    """Whether a run reached its purpose: by the verdict on its result where the recipe gives one, else by held-out losses, document by
    document."""
    results = last_results(record)
    verdicts = {verdict.check: verdict for event in results for verdict in verdicts_of(event)}
    if gain := verdicts.get("gain"):
        return Purpose(gain.outcome, f"{GAIN[gain.outcome]}: {_gain_text(gain, results[-1])}", gain.check)
    if said := verdicts.get("generated") or verdicts.get("efficacy"):
        return Purpose(said.outcome, f"{FACTS[said.outcome]}: {said.reason}", said.check)
    if "reward head" in verdicts and (ranks := verdicts.get("accuracy")):
        return Purpose(ranks.outcome, f"{RANKING[ranks.outcome]}: {ranks.reason}", ranks.check)
    if learned := verdicts.get("direction"):
        return Purpose(learned.outcome, f"{PREFERENCE[learned.outcome]}: {learned.reason}", learned.check)
    handed_over = next((event for event in reversed(results) if event.get("checkpoint")), None)
    if handed_over is not None and isinstance(fell := handed_over.get("kl_fell_by"), dict) and (nearer := _nearer(fell)):
        return nearer
    return None if handed_over is None else _loss(record, handed_over)


def _gain_text(gain: Verdict, event: Mapping[str, Any]) -> str:
    """+0.011 [−0.017, 0.038] answer (n=200): by the verdict's evidence, or else by the result's estimate of what was saved."""
    known = gain.evidence
    if change := _interval(known.get("change"), known.get("low"), known.get("high")):
        return f"{change} {event.get('metric', 'score')} (n={known.get('prompts', 'unknown')})"
    estimates = event.get("estimates")
    saved = estimates.get("bits per byte, saved") if isinstance(estimates, dict) else None
    if isinstance(saved, dict) and (change := _interval(saved.get("mean"), saved.get("low"), saved.get("high"))):
        return f"{change} bits per byte saved (n={saved.get('n', 'unknown')}){_against_interval(gain, saved['low'], saved['high'])}"
    return gain.reason


def _against_interval(gain: Verdict, low: float, high: float) -> str:
    """Why nothing is shown by an interval that leaves out 0: the exact test does not bear it out."""
    p = finite_number(gain.evidence.get("p"))
    return "" if gain.outcome is not Outcome.UNPROVEN or low <= 0 <= high or p is None else f", but p = {p:.2g} by the exact test"


def _nearer(fell: Mapping[str, Any]) -> Purpose | None:
    """Purpose of a distillation: by the share of its divergence from the teacher that the student lost; None where its interval is not on
    record."""
    low, high = finite_number(fell.get("low")), finite_number(fell.get("high"))
    if low is None or high is None or (change := _interval(fell.get("mean"), low, high)) is None:
        return None
    outcome = Outcome.PROVEN if low > 0 else Outcome.REFUTED if high < 0 else Outcome.UNPROVEN
    return Purpose(outcome, f"{TEACHER[outcome]}: the KL fell by {change} of what it was (n={fell.get('n', 'unknown')})")


def _loss(record: RunRecord, handed_over: Mapping[str, Any]) -> Purpose:
    """The handed-over checkpoint's held-out losses against the first on record; the best of k evaluations had k chances to look good."""
    from assay.statistics.estimate import paired

    rows = read_lines(record.folder / "eval.jsonl").rows
    losses = {row.get("step"): _weighed(row["per_document"], row.get("tokens")) for row in rows if _numbers(row.get("per_document"))}
    step = str(handed_over["checkpoint"]).removeprefix("step-")
    first = min((at for at in losses if isinstance(at, int)), default=None)
    before, after = losses.get(first), losses.get(int(step)) if step.isdecimal() else None
    if before is None or after is None or len(before) != len(after) or len(before) < 2:
        return Purpose(Outcome.UNPROVEN, f"{LOSS[Outcome.UNPROVEN]}: no held-out losses before and after are on record")
    if before is after:
        return Purpose(Outcome.UNPROVEN, f"{LOSS[Outcome.UNPROVEN]}: the first evaluation, at step {first}, is of what was handed over")
    change = paired(after, before, level=1 - (1 - _LEVEL) / (len(losses) - 1))
    outcome = Outcome.PROVEN if change.high < 0 else Outcome.REFUTED if change.low > 0 else Outcome.UNPROVEN
    return Purpose(outcome, f"{LOSS[outcome]}: {_interval(change.mean, change.low, change.high)} held-out loss (n={change.n})")


def _weighed(losses: Sequence[float], tokens: object) -> Sequence[float]:
    """Document losses weighted so that their mean is the loss over all tokens, which the run printed and chose by; as they are where no
    counts are on record."""
    if not isinstance(tokens, list) or not _numbers(tokens) or len(tokens) != len(losses) or not sum(tokens) > 0:
        return losses
    return [loss * count * len(tokens) / sum(tokens) for loss, count in zip(losses, tokens, strict=True)]


def _interval(mean: Any, low: Any, high: Any) -> str | None:
    """A change with its sign and interval, +0.011 [−0.017, 0.038]; None where one of the three is not on record."""
    if any(finite_number(value) is None for value in (mean, low, high)):
        return None
    return f"{mean:+.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")


def _numbers(values: object) -> bool:
    return isinstance(values, Sequence) and all(finite_number(value) is not None for value in values)
