"""Findings: results, verdicts with their evidence (refuted first), proofs of checkpoints, and what was not checked."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.report.html import Html, badge, cut, folded, lead, missing, section, table, tag
from assay.report.run_record import MARKS, RunRecord, SavedCheckpoint, finite_number, required_verdicts, verdicts_of
from assay.report.run_status import RESULT_EVENTS
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict, overall

EVIDENCE_LIMIT = 3000  # characters of one verdict's evidence; the ledger has all of it
WARNINGS, MOST_WARNINGS = (Event.WARNING, Event.ALSO_FOUND, Event.PASSED_OVER), 20
_RANK = {Outcome.REFUTED: 0, Outcome.UNPROVEN: 1, Outcome.PROVEN: 2}
_STAGES = {"preflight": "before step 1", "resumed": "after a resume", "account": "at every checkpoint", "fork": "at the fork",
          "batch": "of sampled batches", "hand over": "of what was handed over", "artifact": "of the bytes-limited artifact",
          "edits": "of the edits", "proof": "in a fresh process"}


@dataclass(frozen=True)
class Finding:
    """One check of one stage, however often it ran. `verdict` is the worst, and the latest of those."""

    stage: str
    verdict: Verdict
    line: int  # of the ledger
    times: Mapping[Outcome, int]


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


def verdicts_section(record: RunRecord) -> Html:
    found = findings(record.events)
    if not found:
        return section("verdicts", "Verdicts", missing("No verdict is on record: nothing was checked, or the ledger is not here."))
    open_ = sorted((one for one in found if one.verdict.outcome is not Outcome.PROVEN), key=lambda one: _RANK[one.verdict.outcome])
    first = [lead("What went against the run, or did not decide:"), _table(open_)] if open_ else [lead("Nothing went against the run.")]
    stages = list(dict.fromkeys(one.stage for one in found))
    words = "All checks, stage by stage. One that ran more than once shows its worst outcome."
    return section("verdicts", "Verdicts", tag("p", _counts(found), class_="counts"), first, _warnings(record), lead(words),
                   [_stage(stage, [one for one in found if one.stage == stage]) for stage in stages])


def proofs_section(record: RunRecord, saved: Sequence[SavedCheckpoint]) -> Html:
    """A row per checkpoint that was saved or proven, whether or not it is still here."""
    here = {one.name: one for one in saved}
    names = list(dict.fromkeys(str(event.get("checkpoint")) for event in record.of_kind(Event.SAVE, Event.PROOF)))
    if not names:
        return section("proofs", "Proofs of checkpoints", missing("No save and no proof is on record."))
    proofs = {str(event.get("checkpoint")): verdicts_of(event) for event in record.of_kind(Event.PROOF)}  # the latest of each
    rows = [_proof_row(name, proofs.get(name, []), here.get(name), _place(record, name, here.get(name))) for name in names]
    words = "A fresh process opened the bytes on disk and ran every check on them."
    return section("proofs", "Proofs of checkpoints", lead(words),
                   table(["checkpoint", "outcome", "checks", "generations", "on disk"], rows))


def not_checked(record: RunRecord, saved: Sequence[SavedCheckpoint], missing: Sequence[str]) -> Html:
    """What a reader might take for granted: checks that did not run or did not decide, and parts that are not on record."""
    open_ = [one for one in findings(record.events) if one.verdict.outcome is Outcome.UNPROVEN]
    proven = {event.get("checkpoint") for event in record.of_kind(Event.PROOF)} | {one.name for one in saved if one.mark != "unproven"}
    unproven = [str(event.get("checkpoint")) for event in record.of_kind(Event.SAVE) if event.get("checkpoint") not in proven]
    said = [tag("li", tag("b", one.verdict.check), f" ({one.stage}): {cut(one.verdict.reason, 600)}") for one in open_]
    if unproven:
        said.append(tag("li", tag("b", "no proof"), f": {', '.join(dict.fromkeys(unproven))} "
                                                    f"{'was' if len(set(unproven)) == 1 else 'were'} saved, and no proof is on record"))
    said += [tag("li", tag("b", one.name), f": {one.problem}") for one in saved if one.problem]
    said += [tag("li", sentence) for sentence in missing]
    if not said:
        return section("unchecked", "Not checked", tag("p", "Every check on record ran and decided."))
    words = "UNPROVEN is never success. These did not run, did not decide, or are not on record."
    return section("unchecked", "Not checked", lead(words), tag("ul", said))


# ---------------------------------------------------------------- rows


def _warnings(record: RunRecord) -> Html | None:
    """What the run said on its way without stopping."""
    said = Counter(f"{event['kind']}: {event.get('reason')}" for event in record.of_kind(*WARNINGS))
    rows = [tag("li", cut(words, 400), f" ({times} times)" if times > 1 else None) for words, times in said.most_common(MOST_WARNINGS)]
    return folded(f"{said.total()} warnings on the way", tag("ul", rows), open_=True) if rows else None


def _stage(stage: str, found: Sequence[Finding]) -> Html:
    title = [tag("b", stage), " ", tag("small", _STAGES.get(stage, "")), " ", _counts(found)]
    return folded(title, _table(sorted(found, key=lambda one: _RANK[one.verdict.outcome])))


def _counts(found: Sequence[Finding]) -> list[Html]:
    counts = {outcome: sum(one.verdict.outcome is outcome for one in found) for outcome in Outcome}
    return [tag("span", f"{count} ", badge(str(outcome)), class_="count") for outcome, count in counts.items() if count]


def _table(found: Sequence[Finding]) -> Html:
    return table(["outcome", "stage", "check", "what it found", "evidence"], [_row(one) for one in found], class_="verdicts")


def _row(one: Finding) -> list[Any]:
    ran = ", ".join(f"{count} × {outcome}" for outcome, count in one.times.items())
    evidence = [tag("small", f"ledger line {one.line}; {ran}"), tag("pre", evidence_text(one.verdict.evidence))]
    return [badge(str(one.verdict.outcome)), one.stage, tag("code", one.verdict.check), cut(one.verdict.reason, 1200),
            folded(_summary(one), evidence)]


def _summary(one: Finding) -> str:
    facts, times = len(one.verdict.evidence), sum(one.times.values())
    return f"{facts} fact{'' if facts == 1 else 's'}" + (f", ran {times} times" if times > 1 else "")


def evidence_text(evidence: Mapping[str, Any]) -> str:
    return cut(json.dumps(evidence, indent=1, sort_keys=True, ensure_ascii=False), EVIDENCE_LIMIT) if evidence else "none recorded"


def _proof_row(name: str, verdicts: Sequence[Verdict], saved: SavedCheckpoint | None, place: str) -> list[Any]:
    """A run that was stopped may leave a mark on the disk that its ledger does not tell of."""
    if not verdicts:
        marked = saved is not None and saved.mark != "unproven"
        said = "by its mark on the disk; the ledger does not tell of it" if marked else "no proof is on record"
        return [tag("code", name), badge(MARKS[saved.mark] if saved else "UNPROVEN"), said, "unknown", place]
    outcome = overall(required_verdicts(verdicts))
    passed = sum(verdict.outcome is Outcome.PROVEN for verdict in verdicts)
    each = [tag("li", badge(str(v.outcome)), " ", tag("b", v.check), f": {cut(v.reason, 600)}") for v in verdicts]
    said = next((cut(v.reason, 300) for v in verdicts if v.check == "generations"), "not looked at")
    checks = folded(f"{passed} of {len(verdicts)} proven", tag("ul", each, class_="checks"))
    return [tag("code", name), badge(str(outcome)), checks, said, place]


def _place(record: RunRecord, name: str, saved: SavedCheckpoint | None) -> str:
    if saved is not None:
        return saved.mark + (f"; {saved.problem}" if saved.problem else "")
    return "retired" if any(event.get("checkpoint") == name for event in record.of_kind(Event.RETIRE)) else "not here"


def results_section(record: RunRecord) -> Html | None:
    """Of each kind of result the latest; a bare number that was recorded without an interval says so."""
    latest = {event["kind"]: event for event in record.of_kind(*RESULT_EVENTS)}
    rows = [[tag("code", kind), name, value] for kind, event in latest.items() for name, value in reported_estimates(event)]
    if not rows:
        return None
    return section("results", "Results", lead("As the ledger has them. What each is worth, the verdicts say."),
                   table(["event", "what", "estimate"], rows, class_="wraps"))


def reported_estimates(event: Mapping[str, Any]) -> list[tuple[str, str]]:
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
