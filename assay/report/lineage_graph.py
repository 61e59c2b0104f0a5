"""Lineage graph as inline SVG: which weights came from which, by the digests that the manifests recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from assay.report.html import Html, lead, missing, remarks, section, table, tag
from assay.report.run_record import MARKS, SavedCheckpoint

_WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 196, 66, 72, 18, 12
_OWN, HANDED_OVER = "this run", ("model", "adapter")
MOST_NODES = 24  # a run that kept more shows its newest


@dataclass(frozen=True)
class Node:
    """`role` says whose it is: this run's, its parent run's, or known by its digest alone."""

    name: str
    weights: str
    role: str
    mark: str | None
    about: str = ""


@dataclass(frozen=True)
class Edge:
    above: int
    below: int
    kind: str  # parent, base


def lineage_section(saved: Sequence[SavedCheckpoint], parents: Sequence[SavedCheckpoint], parent_name: str | None,
                    wrong: Sequence[str]) -> Html:
    nodes, edges = graph(saved[-MOST_NODES:], parents, parent_name)
    if not nodes:
        return section("lineage", "Lineage", remarks(wrong), missing("No manifest is here to read: what this run came from is unknown."))
    rows = [[tag("code", node.name), tag("code", node.weights[:16]), node.role, MARKS.get(node.mark or "", "not read"), node.about]
            for node in nodes]
    words = ("Each box is a set of weights under its digest, as its manifest records it. A solid line leads from a parent to what was "
             "made of it, a dashed one from the base that an adapter rests on.")
    drawn = tag("div", lineage_svg(nodes, edges), class_="scroll picture", tabindex="0")
    return section("lineage", "Lineage", lead(words), remarks(wrong), drawn, table(["name", "weights", "whose", "mark", "is"], rows))


def graph(saved: Sequence[SavedCheckpoint], parents: Sequence[SavedCheckpoint], parent_name: str | None) -> tuple[list[Node], list[Edge]]:
    """Own checkpoints and what they name; of the parent's run only what they descend from."""
    nodes = [Node(one.name, one.weights, _OWN, one.mark, _about(one)) for one in saved]
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
    """Where weights stand among the nodes. The first checkpoint of a fork has its parent's digest and is not its own parent: of this
    run's own, only the base has descendants here, and for what was handed over every checkpoint may."""
    for place, node in enumerate(nodes):
        eligible = node.role != _OWN or node.name == "base" or (one.name in HANDED_OVER and node.name not in HANDED_OVER)
        if eligible and node.weights == weights:
            return place
    return None


def _theirs(other: SavedCheckpoint, run: str | None) -> Node:
    return Node(other.name, other.weights, f"run {run}", other.mark, _about(other))


def _outside(ancestor: dict[str, str]) -> Node:
    name = PurePath(ancestor["path"]).name or ancestor["path"]
    return Node(name, ancestor["weights"], "named by its digest", None, "not read: it lies outside of this run")


def _about(one: SavedCheckpoint) -> str:
    words = {"new": "nothing came before it", "moved": "trained away from its parent", "same": "equal to its parent"}
    said = words.get(str(one.facts.get("change")), "how it stands to its parent is unknown")
    return f"{one.manifest['kind']}, {one.manifest['parameters']:,} parameters, {said}" + (f". {one.problem}" if one.problem else "")


# ---------------------------------------------------------------- the picture


def lineage_svg(nodes: Sequence[Node], edges: Sequence[Edge]) -> Html:
    at = _placed(nodes, edges)
    width = MARGIN + max(x for x, _ in at) + _WIDTH + MARGIN
    height = MARGIN + max(y for _, y in at) + HEIGHT + MARGIN
    lines = [_line(at[edge.above], at[edge.below], edge.kind) for edge in edges]
    boxes = [_box(node, place) for node, place in zip(nodes, at, strict=True)]
    return tag("svg", tag("title", "Which weights came from which"), lines, boxes, viewBox=f"0 0 {width} {height}", width=width,
               height=height, role="img", class_="lineage")


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
        top = (tallest - len(inside)) * (HEIGHT + GAP_Y) // 2
        for row, place in enumerate(inside):
            at[place] = (MARGIN + column * (_WIDTH + GAP_X), MARGIN + top + row * (HEIGHT + GAP_Y))
    return at


def _line(above: tuple[int, int], below: tuple[int, int], kind: str) -> Html:
    x, y = above[0] + _WIDTH, above[1] + HEIGHT // 2
    to_x, to_y = below[0], below[1] + HEIGHT // 2
    bend = (to_x - x) // 2
    arrow = f"M{to_x - 7},{to_y - 4} L{to_x},{to_y} L{to_x - 7},{to_y + 4}"
    curve = f"M{x},{y} C{x + bend},{y} {to_x - bend},{to_y} {to_x},{to_y}"
    return tag("g", tag("path", d=curve), tag("path", d=arrow, class_="head"), class_=f"edge {kind}")


def _box(node: Node, place: tuple[int, int]) -> Html:
    x, y = place
    mark = MARKS.get(node.mark or "", "")
    name = node.name if len(node.name) <= 22 else f"{node.name[:21]}…"
    return tag("g", tag("title", f"{node.name}, weights {node.weights}, {node.role}"),
               tag("rect", x=x, y=y, width=_WIDTH, height=HEIGHT, rx=7),
               tag("text", name, x=x + 12, y=y + 22, class_="name"), tag("text", node.weights[:12], x=x + 12, y=y + 39, class_="digest"),
               tag("text", mark or node.role, x=x + 12, y=y + 56, class_=f"mark {mark.lower()}"),
               class_=f"node {mark.lower() or 'outside'}")
