"""Findings: results, verdicts with their evidence (refuted first), proofs of checkpoints, and what was not checked."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.report.run_record import MARKS, RunRecord, SavedCheckpoint, finite_number, verdicts_of
from assay.report.run_status import RESULT_EVENTS
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict, overall, without_optional

WARNINGS, MOST_WARNINGS = (Event.WARNING, Event.ALSO_FOUND, Event.PASSED_OVER, Event.UNSAVED), 20
_RANK = {Outcome.REFUTED: 0, Outcome.UNPROVEN: 1, Outcome.PROVEN: 2}
STAGES = {"preflight": "before step 1", "resumed": "after a resume", "account": "at every checkpoint", "fork": "at the fork",
          "batch": "of sampled batches", "hand over": "of what was handed over", "artifact": "of the bytes-limited artifact",
          "edits": "of the edits", "proof": "in a fresh process"}


@dataclass(frozen=True)
class Finding:
    """One check of one stage, however often it ran. `verdict` is the worst, and the latest of those."""

    stage: str
    verdict: Verdict
    line: int  # of the ledger
    times: Mapping[Outcome, int]

    @property
    def ran(self) -> str:
        return ", ".join(f"{count} × {outcome}" for outcome, count in self.times.items())

    @property
    def summary(self) -> str:
        facts, times = len(self.verdict.evidence), sum(self.times.values())
        return f"{facts} fact{'' if facts == 1 else 's'}" + (f", ran {times} times" if times > 1 else "")

    @property
    def evidence(self) -> str:
        return json.dumps(self.verdict.evidence, indent=1, sort_keys=True, ensure_ascii=False) if self.verdict.evidence else "none recorded"


@dataclass(frozen=True)
class ProofRow:
    """A checkpoint that was saved or proven; `place` says what is on the disk."""

    checkpoint: str
    outcome: str
    said: str
    verdicts: Sequence[Verdict]
    generations: str
    place: str


def findings(events: Sequence[Mapping[str, Any]]) -> list[Finding]:
    grouped: dict[tuple[str, str, int], list[tuple[int, Verdict]]] = {}
    for event in events:
        named: Counter[str] = Counter()  # two checks of one name in one event are two checks
        for verdict in verdicts_of(event):
            named[verdict.check] += 1
            grouped.setdefault((str(event["kind"]), verdict.check, named[verdict.check]), []).append((event["seq"] + 1, verdict))
    found = []
    for (stage, *_), said in grouped.items():
        worst = min(_RANK[verdict.outcome] for _, verdict in said)
        line, verdict = [one for one in said if _RANK[one[1].outcome] == worst][-1]
        times = {outcome: count for outcome in Outcome if (count := sum(v.outcome is outcome for _, v in said))}
        found.append(Finding(stage, verdict, line, times))
    return found


def verdicts_section(record: RunRecord) -> dict[str, Any]:
    """Open findings first, warnings, and every stage with its checks."""
    found = findings(record.events)
    warnings = Counter(f"{event['kind']}: {event.get('reason')}" for event in record.of_kind(*WARNINGS))
    stages = {stage: _worst_first(one for one in found if one.stage == stage) for stage in dict.fromkeys(one.stage for one in found)}
    open_ = _worst_first(one for one in found if one.verdict.outcome is not Outcome.PROVEN)
    return {"found": found, "counts": _counts(found), "open": open_,
            "warned": warnings.total(), "warnings": warnings.most_common(MOST_WARNINGS),
            "stages": [{"name": stage, "words": STAGES.get(stage, ""), "counts": _counts(inside), "found": inside}
                       for stage, inside in stages.items()]}


def proofs_section(record: RunRecord, saved: Sequence[SavedCheckpoint]) -> list[ProofRow]:
    """A row per checkpoint that was saved or proven, whether or not it is still here."""
    here = {one.name: one for one in saved}
    names = list(dict.fromkeys(str(event.get("checkpoint")) for event in record.of_kind(Event.SAVE, Event.PROOF)))
    proofs = {str(event.get("checkpoint")): verdicts_of(event) for event in record.of_kind(Event.PROOF)}  # the latest of each
    return [_proof_row(name, proofs.get(name, []), here.get(name), _place(record, name, here.get(name))) for name in names]


def not_checked(record: RunRecord, saved: Sequence[SavedCheckpoint], missing: Sequence[str]) -> list[tuple[str, str]]:
    """Gaps that a reader might overlook: checks that did not run or did not decide, and parts that are not on record."""
    open_ = [one for one in findings(record.events) if one.verdict.outcome is Outcome.UNPROVEN]
    proven = {event.get("checkpoint") for event in record.of_kind(Event.PROOF)} | {one.name for one in saved if one.mark != "unproven"}
    unproven = list(dict.fromkeys(str(event.get("checkpoint")) for event in record.of_kind(Event.SAVE)
                                  if event.get("checkpoint") not in proven))
    said = [(one.verdict.check, f" ({one.stage}): {one.verdict.reason}") for one in open_]
    if unproven:
        said.append(("no proof", f": {', '.join(unproven)} {'was' if len(unproven) == 1 else 'were'} saved, and no proof is on record"))
    return [*said, *((one.name, f": {one.problem}") for one in saved if one.problem), *(("", sentence) for sentence in missing)]


def results_section(record: RunRecord) -> list[tuple[str, str, str]]:
    """Every estimate of a run's results, of each kind the latest: (event, what, estimate)."""
    latest = {event["kind"]: event for event in record.of_kind(*RESULT_EVENTS)}
    return [(kind, name, value) for kind, event in latest.items() for name, value in reported_estimates(event)]


def reported_estimates(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A bare number that was recorded without an interval says so."""
    found = []
    if isinstance(event.get("score"), dict):
        found.append((f"score ({event['unit']})" if event.get("unit") else "score", estimate_text(event["score"])))
    estimates = event.get("estimates")
    found += [(str(name), estimate_text(value)) for name, value in estimates.items()] if isinstance(estimates, dict) else []
    bare = {name: value for name in ("before", "after") if (value := finite_number(event.get(name))) is not None}
    metric = event.get("metric", "score")
    return found + [(f"{metric} {name}", f"{value:.4g} (its interval is in the verdicts)") for name, value in bare.items()]


def estimate_text(found: Any) -> str:
    """0.412 [0.386, 0.439] (n=1319), and `unknown` for what is not on record."""
    if not isinstance(found, dict) or finite_number(found.get("mean")) is None:
        return "unknown"
    low, high = finite_number(found.get("low")), finite_number(found.get("high"))
    interval = "[unknown]" if low is None or high is None else f"[{low:.4g}, {high:.4g}]"
    return f"{found['mean']:.4g} {interval} (n={found.get('n', 'unknown')})"


# ---------------------------------------------------------------- rows


def _worst_first(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda one: _RANK[one.verdict.outcome])


def _counts(found: Sequence[Finding]) -> list[tuple[Outcome, int]]:
    counts = Counter(one.verdict.outcome for one in found)
    return [(outcome, counts[outcome]) for outcome in Outcome if counts[outcome]]


def _proof_row(name: str, verdicts: Sequence[Verdict], saved: SavedCheckpoint | None, place: str) -> ProofRow:
    """A run that was stopped may leave a mark on the disk that its ledger does not tell of."""
    if not verdicts:
        marked = saved is not None and saved.mark != "unproven"
        said = "by its mark on the disk; the ledger does not tell of it" if marked else "no proof is on record"
        return ProofRow(name, MARKS[saved.mark] if saved else "UNPROVEN", said, (), "unknown", place)
    passed = sum(verdict.outcome is Outcome.PROVEN for verdict in verdicts)
    generations = next((verdict.reason for verdict in verdicts if verdict.check == "generations"), "not looked at")
    return ProofRow(name, overall(without_optional(verdicts)), f"{passed} of {len(verdicts)} proven", verdicts, generations, place)


def _place(record: RunRecord, name: str, saved: SavedCheckpoint | None) -> str:
    if saved is not None:
        return saved.mark + (f"; {saved.problem}" if saved.problem else "")
    return "retired" if any(event.get("checkpoint") == name for event in record.of_kind(Event.RETIRE)) else "not here"
