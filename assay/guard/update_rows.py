"""Update rows: what is written of a served policy's update, read back from the files, against the record of what was said and paid."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from assay.agents.episodes import SampledTurn
from assay.agents.trajectory import Trajectory
from assay.guard.served_conversations import HeardRequest
from assay.store.checkpoint import MANIFEST
from assay.verdict import Verdict, proven, refuted

WrittenRow = Mapping[str, Any]


@dataclass(frozen=True)
class SaidSoFar:
    """What was said in a trajectory, and what its client paid for it. `kind`: None where a turn is under way."""

    ids: tuple[int, ...]
    kind: str | None
    paid: float | None


def said_so_far(sampled: Sequence[SampledTurn], heard: Sequence[HeardRequest], paid: Sequence[float], *, speaking: bool) -> SaidSoFar:
    kind = "with tools" if any(calls_and_faults(heard)) else "without tools"
    ids = chain.from_iterable(turn.completion.ids for turn in sampled)
    return SaidSoFar((*ids,), None if speaking else kind, sum(paid) if paid else None)


def calls_and_faults(heard: Sequence[HeardRequest]) -> tuple[int, int]:
    """Calls of tools that were offered: those that could be read and those that could not, counted turn by turn."""
    turns = [request.turn for request in heard if request.turn is not None and request.tools]
    return sum(len(turn.get("tool_calls", ())) for turn in turns), sum(len(turn.get("faults", ())) for turn in turns)


def check_calls(trajectories: Sequence[Trajectory], heard: Sequence[Sequence[HeardRequest]]) -> Verdict:
    """Check the calls and faults of each trajectory, by which it counts as one with tools."""
    for trajectory, requests in zip(trajectories, heard, strict=True):
        due = calls_and_faults(requests)
        if (trajectory.calls, trajectory.faults) != due:
            return refuted("calls", f"trajectory {trajectory.episode} is said to hold {trajectory.calls} calls of tools and "
                           f"{trajectory.faults} that cannot be read; turn by turn there are {due[0]} and {due[1]}")
    return proven("calls", f"the calls of {len(trajectories)} trajectories are those of their turns")


def added_rows(path: Path, begin: int) -> list[WrittenRow]:
    """Rows of a file from this place on; none where nobody wrote it."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(begin)
        return [json.loads(line) for line in file]


def check_update_rows(told: WrittenRow, updates: Sequence[WrittenRow], rows: Sequence[WrittenRow], said: Mapping[str, SaidSoFar],
                      learned: Collection[str]) -> Verdict:
    """Check that an update is written down once, as it was told, and every trajectory of its weights once: as learned from, with the very
    ids that were sampled, or as dropped, and what it was paid."""
    wrong = next(_wrong_rows(told, updates, rows, said, learned), None)
    if wrong is not None:
        return refuted("update_rows", f"update {told['update']}: {wrong}")
    return proven("update_rows", f"update {told['update']} and {len(rows)} trajectories are written down, each once", rows=len(rows))


def check_saved(folder: Path, updates: int, save_steps: int) -> list[Verdict]:
    """Check that a checkpoint that is due after this many updates is there, whole; nothing where none is due."""
    if not save_steps or updates % save_steps:
        return []
    if not (folder / MANIFEST).is_file():
        return [refuted("saved", f"update {updates}: a checkpoint is due every {save_steps} updates, and {folder} is none")]
    return [proven("saved", f"the checkpoint that is due after {updates} updates is written")]


def _wrong_rows(told: WrittenRow, updates: Sequence[WrittenRow], rows: Sequence[WrittenRow], said: Mapping[str, SaidSoFar],
                learned: Collection[str]) -> Iterator[str]:
    if [*map(json.dumps, updates)] != [json.dumps(told)]:
        yield f"{len(updates)} rows are in updates.jsonl, where one is due, which says what the client is told"
    for name, count in Counter(row["id"] for row in rows).items():
        if count > 1:
            yield f"trajectory {name} stands {count} times in trajectories.jsonl"
    if lost := said.keys() - {row["id"] for row in rows}:
        yield f"{len(lost)} trajectories in which something was said, the first of them {min(lost)}, are not in trajectories.jsonl"
    if (dropped := sum("dropped" in row for row in rows)) != told["dropped"]:
        yield f"{told['dropped']} trajectories are said to be dropped, and {dropped} are written down"
    for row in rows:
        if row["id"] in said and (words := _wrong_row(row, said[row["id"]], row["id"] in learned)) is not None:
            yield f"trajectory {row['id']} is {words}"


def _wrong_row(row: WrittenRow, due: SaidSoFar, learned: bool) -> str | None:
    if learned == ("dropped" in row):
        return f"written down as {'dropped' if learned else 'learned from'}, and it was not"
    if row["reward"] != due.paid:
        return f"written down with the reward {row['reward']}, {due.paid} was given"
    if not learned:
        return None if due.kind in (None, row["kind"]) else f"written down as {row['kind']}, and it is {due.kind}"
    ids = tuple(id for one in row["sequences"] for id, sampled in zip(one["ids"], one["sampled"], strict=True) if sampled)
    return None if ids == due.ids else f"written down with {len(ids)} sampled ids, which are not the {len(due.ids)} that were sampled"
