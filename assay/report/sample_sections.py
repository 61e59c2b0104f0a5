"""Samples beside the parent's (rollouts, edits, evaluations), and the history of probes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.report.findings import estimate_text
from assay.report.run_record import Lines, finite_number, read_json_or_remark, read_lines, verdicts_of
from assay.report.templates import cut
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict

SHOWN = 12  # examples of one source
SAID = ("completion", "text", "said", "output")  # keys under which samples are written
PROMPTED = ("prompt", "question", "id")


@dataclass(frozen=True)
class Side:
    """One text of an example: whose it is, and what was recorded with it."""

    who: str
    text: str
    facts: str = ""


@dataclass(frozen=True)
class Example:
    prompt: str
    sides: list[Side]


@dataclass(frozen=True)
class SampleGroup:
    """Examples of one source; `words` says which, `head` and `rows` are a table above them."""

    title: str
    words: str
    examples: list[Example]
    remarks: list[str] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    verdicts: list[tuple[str, Verdict]] = field(default_factory=list)


@dataclass(frozen=True)
class EvaluationFolder:
    """A folder of `assay eval`."""

    name: str
    summary: dict[str, Any]
    lines: Lines

    @property
    def task(self) -> tuple[str, str]:
        return str(self.summary.get("task")), str(self.summary.get("dataset"))


def read_evaluation(folder: Path) -> EvaluationFolder:
    asked, wrong = read_json_or_remark(folder / "request.json")
    if asked is None:
        raise UsageError(f"{folder}: {wrong or 'no request.json is here'}; give a folder that assay eval wrote")
    summary, wrong = read_json_or_remark(folder / "eval.json")
    lines = read_lines(folder / "scores.jsonl")
    remarks = [*lines.remarks, *([wrong] if wrong else []), *([] if summary or wrong else ["eval.json is not here: it did not end"])]
    return EvaluationFolder(folder.resolve().name, asked | (summary or {}), Lines(lines.rows, lines.sha256, remarks))


def samples_section(run: Path, parent: Path | None, evaluations: Sequence[EvaluationFolder]) -> tuple[dict[str, Any], list[str]]:
    """The section, and what there is none of."""
    own = read_lines(run / "samples.jsonl")
    edits, wrong = read_json_or_remark(run / "edits.json")
    groups = recorded_samples(own, read_lines(parent / "samples.jsonl").rows if parent else [], edits) + _evaluations(evaluations)
    hint = "no samples: none were recorded; assay eval of this run's model and of its parent, then assay report --evals, shows both"
    return {"groups": groups, "wrong": [wrong] if wrong else []}, [] if groups or wrong else [hint]


def recorded_samples(own: Lines, parents: Sequence[dict[str, Any]], edits: Mapping[str, Any] | None) -> list[SampleGroup]:
    """Rollouts beside the parent run's, and answers before and after an edit."""
    return [*([_rollouts(own, parents)] if own.rows else []), *([_edits(edits)] if edits else [])]


def probes_section(run: Path, events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, list[str]]:
    """Report section of generation probes: what the proofs found in the texts of each checkpoint, and what `assay probe --history RUN
    --json > RUN/probe.json` did."""
    found, wrong = read_json_or_remark(run / "probe.json")
    rows = _probed_by_proofs(events)
    if found is None and not rows:
        return None, [wrong or "no probe history: no proof sampled texts (--probe-samples 0, or an earlier version); assay probe --history "
                      "RUN --json > RUN/probe.json records one"]
    probed = _dict(found or {}, "probed") or ({"": found.get("health")} if found else {})
    rows += [_probe_row(str(name or health.get("name")), "assay probe", health, str(health.get("sentence")))
             for name, health in probed.items() if isinstance(health, dict)]
    return {"sentence": (found or {}).get("sentence"), "wrong": [wrong] if wrong else [], "rows": rows}, []


def _probed_by_proofs(events: Sequence[Mapping[str, Any]]) -> list[dict[str, str | None]]:
    """One line for each artifact whose proof sampled texts, in the order of the proofs."""
    rows = []
    for event in events:
        for verdict in verdicts_of(event) if event.get("kind") in (Event.PROOF, Event.HAND_OVER) else ():
            if verdict.check == "health" and finite_number(verdict.evidence.get("n")):
                artifact = str(event.get("checkpoint")) + ("" if event["kind"] == Event.PROOF else ", handed over")
                rows.append(_probe_row(artifact, "its proof", verdict.evidence, verdict.reason, verdict.outcome))
    return rows


def _probe_row(artifact: str, by: str, health: Mapping[str, Any], words: str, outcome: Outcome | None = None) -> dict[str, str | None]:
    return {"artifact": artifact, "by": by, "malformed": f"{health.get('bad')} of {health.get('n')}", "rate": _rate(health),
            "causes": _causes(health), "outcome": outcome, "words": words}


# ---------------------------------------------------------------- rollouts


def _rollouts(own: Lines, parents: Sequence[dict[str, Any]]) -> SampleGroup:
    """The newest samples, each beside the parent run's newest of the same prompt."""
    before = {_prompt(row): row for row in parents}
    newest = sorted(own.rows, key=lambda row: finite_number(row.get("step")) or 0.0, reverse=True)
    paired = [row for row in newest if _prompt(row) in before]
    how = ", beside the parent run's of the same prompt." if paired else "; the parent run recorded none of the same prompts."
    examples = [Example(_prompt(row), [*([_side("parent", before[_prompt(row)])] if paired else []), _side("this run", row)])
                for row in (paired or newest)[:SHOWN]]
    return SampleGroup("Rollouts", f"The newest of {len(own.rows):,} recorded samples{how if parents else '.'}", examples, own.remarks)


def _side(who: str, row: Mapping[str, Any]) -> Side:
    return Side(who, _said(row), _facts(row))


def _prompt(row: Mapping[str, Any]) -> str:
    return next((_text(row[key]) for key in PROMPTED if key in row), "")


def _said(row: Mapping[str, Any]) -> str:
    return next((_text(row[key]) for key in SAID if key in row), "no text is on record")


def _facts(row: Mapping[str, Any]) -> str:
    """Short facts that were recorded with a sample."""
    kept = {key: value for key, value in row.items() if key not in (*SAID, *PROMPTED) and not isinstance(value, list)}
    return cut(", ".join(f"{key} {_short(value)}" for key, value in kept.items()), 300)


# ---------------------------------------------------------------- edits


def _edits(found: Mapping[str, Any]) -> SampleGroup:
    replies = [reply for reply in _listed(found.get("replies")) if isinstance(reply.get("question"), dict)]
    changed = sorted(replies, key=lambda reply: _dict(reply, "before").get("said") == _dict(reply, "after").get("said"))
    return SampleGroup("Edits", f"{len(replies)} questions, before and after the edit; those whose answer changed come first.",
                       [_reply(reply["question"], _dict(reply, "before"), _dict(reply, "after")) for reply in changed[:SHOWN]])


def _reply(question: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> Example:
    asked = f"{question.get('kind')}; asked for {question.get('answer')}"
    return Example(str(question.get("prompt")), [Side("parent", _said(before)), Side("edited", _said(after), asked)])


# ---------------------------------------------------------------- evaluations


def _evaluations(evaluations: Sequence[EvaluationFolder]) -> list[SampleGroup]:
    """Evaluations grouped by task and dataset, side by side, in the order in which they were given."""
    groups: dict[tuple[str, str], list[EvaluationFolder]] = {}
    for one in evaluations:
        groups.setdefault(one.task, []).append(one)
    return [_group(task, members) for (task, _), members in groups.items()]


def _group(task: str, members: Sequence[EvaluationFolder]) -> SampleGroup:
    metrics = list(dict.fromkeys(name for one in members for name in _dict(one.summary, "estimates")))
    head = ["metric", *(f"{one.name} ({str(one.summary.get('checkpoint'))[:12]})" for one in members)]
    rows = [[name, *(estimate_text(_dict(one.summary, "estimates").get(name)) for one in members)] for name in metrics]
    verdicts = [(one.name, verdict) for one in members for verdict in verdicts_of(one.summary) if verdict.outcome is not Outcome.PROVEN]
    by_id = [{str(row.get("id")): row for row in one.lines.rows} for one in members]
    shared = [key for key in by_id[-1] if all(key in scored for scored in by_id)]
    shown = sorted(shared, key=lambda key: len({_score(scored[key]) for scored in by_id}) == 1)[:SHOWN]  # where they differ, first
    examples = [Example(_prompt(by_id[-1][key]), [Side(one.name, _answer(scored[key]), f"score {_score(scored[key])}")
                                                  for one, scored in zip(members, by_id, strict=True)]) for key in shown]
    return SampleGroup(f"Evaluation: {task}", f"{len(examples)} of {len(shared)} examples; those whose scores differ come first.", examples,
                       [f"{one.name}: {sentence}" for one in members for sentence in one.lines.remarks], head, rows, verdicts)


def _answer(row: Mapping[str, Any]) -> str:
    samples = _listed(row.get("samples"))
    if samples:
        return _said(samples[0])
    options, nats = row.get("options"), row.get("nats")
    if isinstance(options, list) and isinstance(nats, list) and nats and len(options) == len(nats):
        return "\n".join(f"{_short(likelihood)} nats  {option}" for option, likelihood in zip(options, nats, strict=True))
    return _said(row)


def _score(row: Mapping[str, Any]) -> str:
    """The share of its samples that are right, or what was scored otherwise."""
    scores = [score for sample in _listed(row.get("samples")) if (score := finite_number(sample.get("score"))) is not None]
    if scores:
        return f"{sum(scores) / len(scores):.3g} of {len(scores)} sample{'s' if len(scores) > 1 else ''}"
    return cut(_short(row.get("scores", row.get("nats"))), 120)


# ---------------------------------------------------------------- texts


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _rate(health: Mapping[str, Any]) -> str:
    bad, n, low, high = (finite_number(health.get(key)) for key in ("bad", "n", "low", "high"))
    if bad is None or not n or low is None or high is None:
        return "unknown"
    return f"{bad / n:.1%} [{low:.1%}, {high:.1%}]"


def _causes(health: Mapping[str, Any]) -> str:
    return ", ".join(f"{cause} × {count}" for cause, count in sorted(_dict(health, "causes").items())) or "none"


def _listed(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _dict(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}
