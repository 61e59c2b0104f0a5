"""Run status: whether it ended and was proven, steps taken, held-out scores, the last proven checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assay.report.run_record import RunRecord, finite_number, found_since, verdicts_of
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict, overall, without_optional

State = Literal["done and proven", "done, refuted", "done, not proven", "stopped", "interrupted", "running", "no end on record",
                "ledger damaged", "no ledger"]
RESULT_EVENTS = (Event.HAND_OVER, Event.ARTIFACT, Event.EDITS, Event.TTT)  # they end a recipe, with the verdicts on what it hands over
NO_SCORES = {"eval_loss", "eval_low", "eval_high", "eval_documents", "eval_prompts"}
HIGHER = "eval_prompts"  # answers to prompts are scored: more is better. Of documents the loss is, and less is.


@dataclass(frozen=True)
class RunStatus:
    state: State
    sentence: str

    @property
    def outcome(self) -> Outcome:
        if self.state == "done and proven":
            return Outcome.PROVEN
        return Outcome.REFUTED if self.state in ("done, refuted", "stopped", "ledger damaged") else Outcome.UNPROVEN


@dataclass(frozen=True)
class HeldOutScore:
    """Score on held-out data after so many steps; an interval that was not recorded is unknown."""

    step: int
    name: str
    mean: float
    low: float | None
    high: float | None
    n: int | None
    higher_is_better: bool

    def __str__(self) -> str:
        interval = "[unknown]" if self.low is None or self.high is None else f"[{self.low:.4g}, {self.high:.4g}]"
        return f"{self.mean:.4g} {interval}{f' (n={self.n})' if self.n is not None else ''} {self.name}"


def run_status(record: RunRecord) -> RunStatus:
    """Status of a run from its ledger, in which what follows the last beginning says how that session ended, and from what has become of
    the model since."""
    if record.damage:
        return RunStatus("ledger damaged", record.damage)
    if not record.events:
        return RunStatus("no ledger", "no event is on record, so nothing can be said of how it went")
    if stopped := [event for event in _last_sitting(record) if event["kind"] == Event.STOPPED]:
        stands = stopped[-1].get("stands")
        return RunStatus("stopped", f"{stopped[-1].get('reason')}. {f'{stands} stands' if stands else 'No checkpoint stands'}.")
    if last_results(record):
        return ended_status(result_verdicts(record))
    if any(event["kind"] == Event.CONSUMED for event in _last_sitting(record)):
        return RunStatus("interrupted", "it ended after a save, before anything was handed over; the same command goes on from there")
    return RunStatus("no end on record", "the ledger has no end: it is running, or was killed; the same command goes on from the last save")


def last_results(record: RunRecord) -> list[dict[str, Any]]:
    """The events with which the last session handed something over; none of a ledger that is damaged."""
    return [] if record.damage else [event for event in _last_sitting(record) if event["kind"] in RESULT_EVENTS]


def result_verdicts(record: RunRecord) -> list[Verdict]:
    """Verdicts on what the last session handed over, with what speaks against it as it lies there now."""
    results = last_results(record)
    verdicts = [verdict for event in results for verdict in verdicts_of(event)]
    named = [place for verdict in verdicts if verdict.check == "handed over" for place in verdict.evidence.get("places", ())]
    named += ["model" for event in results if event["kind"] == Event.EDITS]
    known = [place for place in ("adapter", "model") if results and (record.folder / place / "manifest.json").is_file()]
    found = [found_since(record.folder / place) for place in dict.fromkeys([*map(str, named), *known])]
    return [*verdicts, *(verdict for verdict in found if verdict is not None)]


def _last_sitting(record: RunRecord) -> list[dict[str, Any]]:
    begun = max((i for i, event in enumerate(record.events) if event["kind"] in (Event.START, Event.RESUME)), default=0)
    return record.events[begun:]


def ended_status(given: Iterable[Verdict]) -> RunStatus:
    """Status of a run that handed something over, by the verdicts on it."""
    verdicts = without_optional(given)
    against = [verdict for verdict in verdicts if verdict.outcome is not Outcome.PROVEN]
    named = "; ".join(f"{verdict.check}: {verdict.reason}" for verdict in against)
    match overall(verdicts):
        case Outcome.PROVEN:
            return RunStatus("done and proven", f"all {len(verdicts)} checks of what was handed over prove it")
        case Outcome.REFUTED:
            return RunStatus("done, refuted", named)
        case _:
            return RunStatus("done, not proven", named or "no check of what was handed over is on record")


def steps_taken(record: RunRecord) -> int | None:
    """Number of steps taken, by the last row that tells of a step; None where no row does. An evaluation before step 1 stands at -1."""
    steps = [row["step"] + 1 for row in record.metrics.rows if isinstance(row.get("step"), int)]
    return max(steps, default=None)


def held_out_scores(rows: Sequence[Mapping[str, Any]]) -> list[HeldOutScore]:
    """The rows with an interval: it belongs to the first held-out number that lies in it."""
    found = []
    for row in rows:
        low, high = finite_number(row.get("eval_low")), finite_number(row.get("eval_high"))
        key = _scored(row, low, high)
        if key is None or not isinstance(row.get("step"), int):
            continue
        n = row.get("eval_prompts", row.get("eval_documents"))
        mean = finite_number(row[key])
        assert mean is not None, "`_scored` names a number"
        found.append(HeldOutScore(row["step"] + 1, key.removeprefix("eval_").replace("_", " "), mean, low, high,
                                  n if isinstance(n, int) else None, HIGHER in row))
    return found


def _scored(row: Mapping[str, Any], low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return None
    numbers = {key: found for key, value in row.items() if key.startswith("eval_") and (found := finite_number(value)) is not None}
    within = [key for key, found in numbers.items() if low <= found <= high]
    return next((key for key in within if key not in NO_SCORES), "eval_loss" if "eval_loss" in within else None)


def best_held_out(found: Sequence[HeldOutScore]) -> HeldOutScore | None:
    """The extreme one. Whether it is better than its neighbours by more than noise, its interval says."""
    if not found:
        return None
    return max(found, key=lambda one: one.mean) if found[-1].higher_is_better else min(found, key=lambda one: one.mean)


def held_out_summary(record: RunRecord) -> str | None:
    """Score of what was handed over, on all that is held out; before that, the best evaluation."""
    for event in reversed(record.of_kind(Event.ARTIFACT, Event.HAND_OVER, Event.TTT)):
        score = event.get("score")
        if isinstance(score, dict) and all(finite_number(score.get(key)) is not None for key in ("mean", "low", "high")):
            return (f"{score['mean']:.4g} [{score['low']:.4g}, {score['high']:.4g}] (n={score.get('n')}) "
                    f"{event.get('unit') or event.get('metric') or 'bits per byte'}")
    best = best_held_out(held_out_scores(record.metrics.rows))
    return None if best is None else f"{best} at step {best.step}"


def last_proven(record: RunRecord) -> str | None:
    """The newest checkpoint that a proof of this run proved and that was not retired since."""
    proven: list[str] = []
    for event in record.events:
        name = event.get("checkpoint")
        if event["kind"] == Event.PROOF and overall(without_optional(verdicts_of(event))) is Outcome.PROVEN:
            proven.append(str(name))
        elif event["kind"] in (Event.RETIRE, Event.SAVE) and name in proven:  # a later save of the same step is other bytes
            proven.remove(str(name))
    return proven[-1] if proven else None
