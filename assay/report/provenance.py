"""Provenance: data, options, events in their order, and what it takes to make the run again."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from assay.report.html import Html, cut, folded, lead, missing, section, table, tag
from assay.report.run_record import RunRecord, SavedCheckpoint, verdicts_of
from assay.store.ledger import Event

_OWN = {"seq", "time", "kind", "previous", "verdicts", "config"}
DATA = (Event.DATA, Event.TEACHER, Event.REFERENCE)  # events that name by digest what was read
_RECIPES = {"pretrain", "sft", "grpo", "distill", "edit", "ttt"}


def data_section(record: RunRecord) -> Html:
    """What was read, by its digests, as the ledger and the options have it."""
    rows = [[tag("code", kind), name, value] for kind, facts in _data_facts(record) for name, value in facts]
    consumed = record.of_kind(Event.CONSUMED)
    if consumed:
        rows += [[tag("code", "consumed"), name, _plain(value)] for name, value in consumed[-1].items() if name not in _OWN]
    digests = table(["event", "fact", "value"], rows) if rows else missing("No event names the data that was read.")
    options = (missing("config.yaml is not here: the options are unknown.") if record.config_text is None else
               tag("pre", cut(record.config_text, 20_000)))
    return section("data", "Data and options", digests, folded("config.yaml", options, open_=True))


def events_section(record: RunRecord) -> Html | None:
    """The ledger in its order; verdicts stand in their own table."""
    if not record.events:
        return None
    rows = [[event["seq"] + 1, tag("small", str(event.get("time"))), tag("code", str(event["kind"])), _facts(event)]
            for event in record.events]
    words = lead(f"{len(record.events)} events, each bound to the one before; the last one's sha256 is ", tag("code", record.head), ".")
    return section("events", "Ledger", words, folded("All events", table(["line", "time", "event", "facts"], rows)))


def reproduce_section(record: RunRecord, saved: Sequence[SavedCheckpoint]) -> Html:
    newest = saved[-1] if saved else None
    facts = newest.facts if newest else {}
    environment = facts["environment"] if isinstance(facts.get("environment"), dict) else {}
    rows = [["ledger.jsonl (last event)", tag("code", record.head)]] if record.events else []
    rows += [["metrics.jsonl", tag("code", record.metrics.sha256)]] if record.metrics.sha256 else []
    rows += [[f"{name} (in {newest.name})", tag("code", str(facts[name]))] for name in ("code", "tokenizer", "template")
             if newest and facts.get(name)]
    rows += [[f"{one.name}: weights", tag("code", one.weights)] for one in saved]
    versions = [[name, str(value)] for name, value in sorted(environment.items())]
    was = (table(["environment", "was"], versions, class_="wraps") if versions else
           missing("No manifest is here, so the environment is unknown."))
    return section("reproduce", "Make it again", tag("pre", command(record), class_="command"), lead(_promise(record)), was,
                   table(["what", "sha256"], rows) if rows else None)


def command(record: RunRecord) -> str:
    """The options that were given lie in config.yaml, whole; another --out makes it another run."""
    if record.recipe not in _RECIPES or record.config_text is None:
        return "# the recipe or its options are not on record"
    return f"assay {record.recipe} --config {shlex.quote(f'{record.name}/config.yaml')} --out {shlex.quote(f'{record.name}-again')}"


def _promise(record: RunRecord) -> str:
    changed = record.of_kind(Event.NOT_BIT_EXACT)
    if changed:
        return (f"The environment changed between sittings ({_plain(changed[-1].get('changed'))}): this run is not bit for bit the "
                "uninterrupted one.")
    if record.config.get("minutes") is not None:
        return "Time was the budget, so how many steps fit depends on the machine; the data and their order follow from the options."
    return "On the same machine and environment the same command gives the same bits; elsewhere the last bits of sums may differ."


def _data_facts(record: RunRecord) -> list[tuple[str, list[tuple[str, str]]]]:
    """The latest of each kind: a resumed run reads the same data, or is stopped."""
    latest = {event["kind"]: event for event in record.of_kind(*DATA)}
    return [(kind, [(name, _plain(value)) for name, value in event.items() if name not in _OWN]) for kind, event in latest.items()]


def _facts(event: Mapping[str, Any]) -> str:
    said = [f"{name} {_plain(value)}" for name, value in event.items() if name not in _OWN]
    verdicts = verdicts_of(event)
    counts = [f"{len(verdicts)} verdicts: " + ", ".join(sorted({str(v.outcome) for v in verdicts}))] if verdicts else []
    return cut("; ".join([*said, *counts]), 600)


def _plain(value: Any) -> str:
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True), 300)
