"""Samples beside the parent's (rollouts, edits, evaluations), and the history of probes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.report.findings import estimate_text
from assay.report.html import Html, badge, cut, folded, joined, lead, missing, remarks, section, table, tag
from assay.report.run_record import Lines, finite_number, read_json_or_remark, read_lines, verdicts_of
from assay.store.ledger import Event

_SHOWN, _SEEN = 12, 4  # examples of one source, and those of them that are not folded
TEXT_LIMIT = 1500  # characters of one text
SAID = ("completion", "text", "said", "output")  # keys under which samples are written
PROMPTED = ("prompt", "question", "id")


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


def samples_section(run: Path, parent: Path | None, evaluations: Sequence[EvaluationFolder]) -> tuple[Html, list[str]]:
    """The section, and what there is none of."""
    own = read_lines(run / "samples.jsonl")
    edits, wrong = read_json_or_remark(run / "edits.json")
    parts: list[Any] = [remarks([wrong])] if wrong else []
    if own.rows:
        parts.append(_rollouts(own, read_lines(parent / "samples.jsonl") if parent else Lines([], None, [])))
    if edits:
        parts.append(_edits(edits))
    parts += _evaluations(evaluations)
    if not parts:
        hint = "no samples: none were recorded; assay eval of this run's model and of its parent, then assay report --evals, shows both"
        return section("samples", "Samples", missing("No samples are on record in this run, and no evaluation was given.")), [hint]
    return section("samples", "Samples", parts), []


def probes_section(run: Path, events: Sequence[Mapping[str, Any]]) -> tuple[Html | None, list[str]]:
    """What the proofs found in the texts of each checkpoint, and what `assay probe --history RUN --json > RUN/probe.json` did."""
    found, wrong = read_json_or_remark(run / "probe.json")
    proofs = _probed_by_proofs(events)
    if found is None and not proofs:
        return None, [wrong or "no probe history: no proof sampled texts (--probe-samples 0, or an earlier version); assay probe --history "
                      "RUN --json > RUN/probe.json records one"]
    probed = _dict(found or {}, "probed") or ({"": found.get("health")} if found else {})
    rows = [[tag("code", str(name or health.get("name"))), "assay probe", *_health(health), cut(str(health.get("sentence")), 400)]
            for name, health in probed.items() if isinstance(health, dict)]
    said = tag("p", str(found["sentence"])) if found and found.get("sentence") else None
    return section("probes", "Probe history", said, remarks([wrong]) if wrong else None,
                   table(["artifact", "by", "malformed", "rate", "causes", "in words"], [*proofs, *rows])), []


def _probed_by_proofs(events: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """One line for each artifact whose proof sampled texts, in the order of the proofs."""
    rows = []
    for event in events:
        for verdict in verdicts_of(event) if event.get("kind") in (Event.PROOF, Event.HAND_OVER) else ():
            if verdict.check == "health" and finite_number(verdict.evidence.get("n")):
                of = str(event.get("checkpoint")) + ("" if event["kind"] == Event.PROOF else ", handed over")
                rows.append([tag("code", of), "its proof", *_health(verdict.evidence), joined(badge(str(verdict.outcome)), " ",
                                                                                              cut(verdict.reason, 400))])
    return rows


def _health(found: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{found.get('bad')} of {found.get('n')}", _interval(found), _causes(found)


# ---------------------------------------------------------------- rollouts


def _rollouts(own: Lines, parents: Lines) -> Html:
    """The newest samples, each beside the parent run's newest of the same prompt."""
    before = {_prompt(row): row for row in parents.rows}
    newest = sorted(own.rows, key=lambda row: finite_number(row.get("step")) or 0.0, reverse=True)
    paired = [row for row in newest if _prompt(row) in before]
    shown = (paired or newest)[:_SHOWN]
    words = (f"The newest of {len(own.rows):,} recorded samples" + (", beside the parent run's of the same prompt." if paired else "."
             if not parents.rows else "; the parent run recorded none of the same prompts."))
    return joined(tag("h3", "Rollouts"), lead(words), remarks(own.remarks),
                  _examples([_example(_prompt(row), [_side("parent", before[_prompt(row)])] if paired else [], _side("this run", row))
                             for row in shown]))


def _side(who: str, row: Mapping[str, Any]) -> tuple[str, str, str]:
    return who, _said(row), _facts(row)


def _prompt(row: Mapping[str, Any]) -> str:
    return next((_text(row[key]) for key in PROMPTED if key in row), "")


def _said(row: Mapping[str, Any]) -> str:
    return next((_text(row[key]) for key in SAID if key in row), "no text is on record")


def _facts(row: Mapping[str, Any]) -> str:
    """Everything short that was recorded with a sample."""
    kept = {key: value for key, value in row.items() if key not in (*SAID, *PROMPTED) and not isinstance(value, list)}
    return cut(", ".join(f"{key} {_short(value)}" for key, value in kept.items()), 300)


# ---------------------------------------------------------------- edits


def _edits(found: Mapping[str, Any]) -> Html:
    replies = [reply for reply in _listed(found.get("replies")) if isinstance(reply.get("question"), dict)]
    changed = sorted(replies, key=lambda reply: _dict(reply, "before").get("said") == _dict(reply, "after").get("said"))
    return joined(tag("h3", "Edits"), lead(f"{len(replies)} questions, before and after the edit; those whose answer changed come first."),
                  _examples([_reply(reply["question"], _dict(reply, "before"), _dict(reply, "after")) for reply in changed[:_SHOWN]]))


def _reply(question: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> Html:
    asked = f"{question.get('kind')}; asked for {question.get('answer')}"
    return _example(str(question.get("prompt")), [("parent", _said(before), "")], ("edited", _said(after), asked))


# ---------------------------------------------------------------- evaluations


def _evaluations(evaluations: Sequence[EvaluationFolder]) -> list[Html]:
    """Those of one task and dataset stand side by side, in the order in which they were given."""
    groups: dict[tuple[str, str], list[EvaluationFolder]] = {}
    for one in evaluations:
        groups.setdefault(one.task, []).append(one)
    return [_group(task, members) for (task, _), members in groups.items()]


def _group(task: str, members: Sequence[EvaluationFolder]) -> Html:
    metrics = list(dict.fromkeys(name for one in members for name in _dict(one.summary, "estimates")))
    head = ["metric", *(f"{one.name} ({str(one.summary.get('checkpoint'))[:12]})" for one in members)]
    rows = [[name, *(estimate_text(_dict(one.summary, "estimates").get(name)) for one in members)] for name in metrics]
    verdicts = [tag("p", f"{one.name}: ", badge(str(v.get("outcome"))), f" {v.get('check')}: {cut(str(v.get('reason')), 400)}")
                for one in members for v in _listed(one.summary.get("verdicts")) if v.get("outcome") != "PROVEN"]
    by_id = [{str(row.get("id")): row for row in one.lines.rows} for one in members]
    shared = [key for key in by_id[-1] if all(key in rows for rows in by_id)]
    told = sorted(shared, key=lambda key: len({_score(rows[key]) for rows in by_id}) == 1)  # where they differ, first
    examples = [_example(_prompt(by_id[-1][key]), [(one.name, _answer(rows[key]), f"score {_score(rows[key])}") for one, rows in
                                                   zip(members[:-1], by_id[:-1], strict=True)],
                         (members[-1].name, _answer(by_id[-1][key]), f"score {_score(by_id[-1][key])}")) for key in told[:_SHOWN]]
    told_of = remarks(f"{one.name}: {sentence}" for one in members for sentence in one.lines.remarks)
    return joined(tag("h3", f"Evaluation: {task}"), told_of, table(head, rows), verdicts,
                  lead(f"{len(examples)} of {len(shared)} examples; those whose scores differ come first."), _examples(examples))


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


# ---------------------------------------------------------------- on the page


def _examples(examples: Sequence[Html]) -> Html:
    """A few to see, the others folded."""
    more = list(examples[_SEEN:])
    return joined(list(examples[:_SEEN]), folded(f"{len(more)} more", more) if more else None)


def _example(prompt: str, before: Sequence[tuple[str, str, str]], after: tuple[str, str, str]) -> Html:
    sides = [tag("div", tag("h4", who, tag("small", facts) if facts else None), tag("pre", cut(text, TEXT_LIMIT) or "(nothing)"))
             for who, text, facts in [*before, after]]
    asked = tag("div", tag("h4", "prompt"), tag("pre", cut(prompt, TEXT_LIMIT)), class_="prompt")
    return tag("article", asked, tag("div", sides, class_="sides"), class_="example")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _interval(health: Mapping[str, Any]) -> str:
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
