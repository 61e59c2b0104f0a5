"""Provenance: the lineage of a run's weights, its data and options, its events in order, and what makes it again."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from assay.report.run_record import MARKS, RunRecord, SavedCheckpoint, verdicts_of
from assay.report.templates import cut
from assay.store.ledger import Event

ENVELOPE = {"seq", "time", "kind", "previous", "verdicts", "config"}  # of an event; the rest are its facts
DATA_EVENTS = (Event.DATA, Event.TEACHER, Event.REFERENCE)  # they name by digest what was read
REPEATABLE = {"pretrain", "sft", "dpo", "kto", "reward_model", "grpo", "distill", "edit", "ttt"}
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 196, 66, 72, 18, 12  # of the boxes in the lineage's picture
THIS_RUN, HANDED_OVER = "this run", ("model", "adapter")
MOST_NODES = 24  # a run that kept more shows its newest


@dataclass(frozen=True)
class Node:
    """Weights in the lineage. `role` says whose they are: this run's, its parent run's, or known by their digest alone."""

    name: str
    weights: str
    role: str
    outcome: str  # by its mark; empty where nobody looked
    about: str = ""


@dataclass(frozen=True)
class Edge:
    above: int
    below: int
    kind: str  # parent, base


def provenance_section(record: RunRecord, saved: Sequence[SavedCheckpoint]) -> dict[str, Any]:
    """Data by their digests, events, the command, the environment, and every digest."""
    latest = {event["kind"]: event for event in record.of_kind(*DATA_EVENTS, Event.CONSUMED)}  # a resumed run reads the same, or is stopped
    facts = saved[-1].facts if saved else {}
    environment = facts["environment"] if isinstance(facts.get("environment"), dict) else {}
    return {"data": [(kind, name, value) for kind in (*DATA_EVENTS, Event.CONSUMED) for name, value in _facts(latest.get(kind, {}))],
            "events": [{"line": event["seq"] + 1, "time": event.get("time"), "kind": event["kind"], "facts": _told(event)}
                       for event in record.events],
            "command": command(record), "promise": _promise(record), "environment": sorted(environment.items()),
            "digests": _digests(record, saved, facts)}


def command(record: RunRecord) -> str:
    """The options that were given lie in config.yaml, whole; another --out makes it another run."""
    if record.recipe not in REPEATABLE or record.config_text is None:
        return "# the recipe or its options are not on record"
    return f"assay {record.recipe} --config {shlex.quote(f'{record.name}/config.yaml')} --out {shlex.quote(f'{record.name}-again')}"


def _promise(record: RunRecord) -> str:
    changed = record.of_kind(Event.NOT_BIT_EXACT)
    if changed:
        return (f"The environment changed between sittings ({_text(changed[-1].get('changed'))}): this run is not bit for bit the "
                "uninterrupted one.")
    if record.config.get("minutes") is not None:
        return "Time was the budget, so how many steps fit depends on the machine; the data and their order follow from the options."
    return "On the same machine and environment the same command gives the same bits; elsewhere the last bits of sums may differ."


def _digests(record: RunRecord, saved: Sequence[SavedCheckpoint], facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [("ledger.jsonl (last event)", record.head)] if record.events else []
    found += [("metrics.jsonl", record.metrics.sha256)] if record.metrics.sha256 else []
    found += [(f"{name} (in {saved[-1].name})", str(facts[name])) for name in ("code", "tokenizer", "template") if facts.get(name)]
    return found + [(f"{one.name}: weights", one.weights) for one in saved]


def _told(event: Mapping[str, Any]) -> str:
    verdicts = verdicts_of(event)
    counts = [f"{len(verdicts)} verdicts: " + ", ".join(sorted({str(v.outcome) for v in verdicts}))] if verdicts else []
    return "; ".join([*(f"{name} {value}" for name, value in _facts(event)), *counts])


def _facts(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _text(value)) for name, value in event.items() if name not in ENVELOPE]


def _text(value: Any) -> str:
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True), 300)


# ---------------------------------------------------------------- lineage


def lineage_section(saved: Sequence[SavedCheckpoint], parents: Sequence[SavedCheckpoint], parent_name: str | None,
                    wrong: Sequence[str]) -> dict[str, Any]:
    """The graph with every box and line in its place, in pixels; `wrong` are manifests that could not be read."""
    nodes, edges = graph(saved[-MOST_NODES:], parents, parent_name)
    at = _placed(nodes, edges) if nodes else []
    boxes = [{"node": node, "x": x, "y": y, "width": BOX_WIDTH, "height": BOX_HEIGHT,
              "label": node.name if len(node.name) <= 22 else f"{node.name[:21]}…"} for node, (x, y) in zip(nodes, at, strict=True)]
    return {"boxes": boxes, "lines": [_line(at[edge.above], at[edge.below], edge.kind) for edge in edges], "wrong": wrong,
            "width": MARGIN + max((x for x, _ in at), default=0) + BOX_WIDTH + MARGIN,
            "height": MARGIN + max((y for _, y in at), default=0) + BOX_HEIGHT + MARGIN}


def graph(saved: Sequence[SavedCheckpoint], parents: Sequence[SavedCheckpoint], parent_name: str | None) -> tuple[list[Node], list[Edge]]:
    """Own checkpoints and what they name; of the parent's run only what they descend from."""
    nodes = [Node(one.name, one.weights, THIS_RUN, MARKS[one.mark], _about(one)) for one in saved]
    edges: list[Edge] = []
    waiting = list(enumerate(saved))
    while waiting:
        place, one = waiting.pop(0)
        for kind in ("parent", "base"):
            ancestor = one.ancestor(kind)
            if ancestor is None:
                continue
            above = _known(nodes, one, ancestor["weights"])
            if above is None:
                above = len(nodes)
                theirs = next((other for other in parents if other.weights == ancestor["weights"]), None)
                nodes.append(_outside(ancestor) if theirs is None else _theirs(theirs, parent_name))
                waiting += [] if theirs is None else [(above, theirs)]
            if above != place and not any((edge.above, edge.below) == (above, place) for edge in edges):
                edges.append(Edge(above, place, kind))
    return nodes, edges


def _known(nodes: Sequence[Node], one: SavedCheckpoint, weights: str) -> int | None:
    """Index of weights among the nodes. The first checkpoint of a fork has its parent's digest and is not its own parent: of this run's
    own, only the base has descendants here, and for what was handed over every checkpoint may."""
    for place, node in enumerate(nodes):
        eligible = node.role != THIS_RUN or node.name == "base" or (one.name in HANDED_OVER and node.name not in HANDED_OVER)
        if eligible and node.weights == weights:
            return place
    return None


def _theirs(other: SavedCheckpoint, run: str | None) -> Node:
    return Node(other.name, other.weights, f"run {run}", MARKS[other.mark], _about(other))


def _outside(ancestor: dict[str, str]) -> Node:
    name = PurePath(ancestor["path"]).name or ancestor["path"]
    return Node(name, ancestor["weights"], "named by its digest", "", "not read: it lies outside of this run")


def _about(one: SavedCheckpoint) -> str:
    words = {"new": "it has no parent", "moved": "trained away from its parent", "same": "equal to its parent"}
    said = words.get(str(one.facts.get("change")), "how it stands to its parent is unknown")
    return f"{one.manifest['kind']}, {one.manifest['parameters']:,} parameters, {said}" + (f". {one.problem}" if one.problem else "")


def _placed(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[tuple[int, int]]:
    """A column to the right of all that a node came from; within a column in the order of the nodes, around the middle."""
    columns = [0] * len(nodes)
    for _ in nodes:  # a chain is as long as there are nodes at most
        for edge in edges:
            if columns[edge.below] <= columns[edge.above] < len(nodes):
                columns[edge.below] = columns[edge.above] + 1
    members = [[place for place, column in enumerate(columns) if column == each] for each in range(max(columns) + 1)]
    tallest = max(map(len, members))
    at = [(0, 0)] * len(nodes)
    for column, inside in enumerate(members):
        top = (tallest - len(inside)) * (BOX_HEIGHT + GAP_Y) // 2
        for row, place in enumerate(inside):
            at[place] = (MARGIN + column * (BOX_WIDTH + GAP_X), MARGIN + top + row * (BOX_HEIGHT + GAP_Y))
    return at


def _line(above: tuple[int, int], below: tuple[int, int], kind: str) -> dict[str, str]:
    x, y = above[0] + BOX_WIDTH, above[1] + BOX_HEIGHT // 2
    to_x, to_y = below[0], below[1] + BOX_HEIGHT // 2
    bend = (to_x - x) // 2
    return {"kind": kind, "curve": f"M{x},{y} C{x + bend},{y} {to_x - bend},{to_y} {to_x},{to_y}",
            "arrow": f"M{to_x - 7},{to_y - 4} L{to_x},{to_y} L{to_x - 7},{to_y + 4}"}
