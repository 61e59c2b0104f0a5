"""Board: every run under a folder, and the status of each."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from assay.report.headline import headline
from assay.report.run_process import ledger_locks, writer_of
from assay.report.run_record import LEDGER, RunRecord, is_run, newest_manifest, read_run
from assay.report.run_status import held_out_summary, last_proven, run_status, steps_taken

_DEEPEST = 4  # folders below the one that was named
NOT_RUNS = {"checkpoints", "model", "adapter", "base"}


@dataclass(frozen=True)
class RunRow:
    """One run on the board. None is unknown, or not there yet; `reached` is the outcome of the run's purpose."""

    run: str
    recipe: str
    headline: str
    reached: str | None
    state: str
    reason: str
    steps: int | None
    held_out: str | None
    last_proven: str | None
    parent: str | None
    remarks: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def board(folder: Path) -> list[RunRow]:
    """Every run in `folder`, and `folder` itself where it is one; by path. One that cannot be read is a row that says so."""
    return [_row_of(path, folder) for path in sorted(find_runs(folder))]


def find_runs(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Find the runs in a folder, also inside of a run: `assay seeds` keeps a run per seed. Links are not followed."""
    if is_run(folder):
        yield folder
    if depth == _DEEPEST or not folder.is_dir():
        return
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False) and entry.name not in NOT_RUNS and not entry.name.startswith("."):
            yield from find_runs(Path(entry.path), depth + 1)


def _row_of(path: Path, folder: Path) -> RunRow:
    name = path.name if path == folder else str(path.relative_to(folder))
    try:
        return _read_row(path, name)
    except OSError as error:  # another user's run, or one that is being deleted: the others are still to be shown
        return unreadable_row(name, error)


def unreadable_row(name: str, error: OSError) -> RunRow:
    return RunRow(name, "unknown", "unreadable", None, "unreadable", str(error), None, None, None, None, [])


def _read_row(path: Path, name: str) -> RunRow:
    return run_row(read_run(path), name, running=written_now(path / LEDGER))


def run_row(record: RunRecord, name: str, *, running: bool) -> RunRow:
    now, told = run_status(record), headline(record)
    state = "running" if now.state == "no end on record" and running else now.state
    reason = "" if state in ("done and proven", "running") else now.sentence
    return RunRow(name, record.recipe, str(replace(told, artifact=state) if state == "running" else told),
                  None if told.purpose is None else str(told.purpose.outcome), state, reason, steps_taken(record), held_out_summary(record),
                  last_proven(record), parent_of(record), record.remarks)


def parent_of(record: RunRecord) -> str | None:
    """Parent of a run by the newest manifest, with the digest of its weights; before there is one, what the options name."""
    facts = newest_manifest(record.folder).get("facts", {})
    found = facts.get("parent") or facts.get("base")
    if isinstance(found, dict) and {"path", "weights"} <= found.keys():
        return f"{found['path']} ({str(found['weights'])[:12]})"
    named = record.config.get("from_") or record.config.get("model")
    return None if named is None else str(named)


def written_now(ledger: Path) -> bool:
    """Whether a process of this machine holds the ledger's lock."""
    return writer_of(ledger.parent, ledger_locks()) is not None
