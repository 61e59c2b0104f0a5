"""Live runs: every run under some folders as it grows, read a little at a time by one thread, for the board."""

import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.report.board import RunRow, find_runs, run_row, unreadable_row
from assay.report.findings import findings
from assay.report.growing_metrics import GrowingMetrics
from assay.report.run_process import ledger_locks, stop_after_save, writer_of
from assay.report.run_record import LEDGER, Lines, RunRecord, finite_number, read_json_or_remark, read_run
from assay.report.sample_sections import recorded_samples
from assay.report.templates import cut, visible

ROUND_SECONDS = 1.0  # between two rounds through all runs
LOOK_AROUND = 5.0  # between two looks for runs that are new
SAMPLE_BYTES = 1 << 20  # of samples.jsonl, from its end
MOST_FINDINGS, MOST_TEXT = 200, 4000
GPU_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"


class LiveRun:
    """One run: its row, curves and what is left of its budget. `version` grows with whatever is shown of it."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.version = folder, name, 0
        self.id = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.metrics = GrowingMetrics(folder / "metrics.jsonl")
        self.record: RunRecord | None = None
        self.row: RunRow | None = None
        self._ledger: tuple[int, ...] = ()
        self._writer: int | None = None
        self.asked_to_stop: int | None = None  # the process that was asked

    def look(self, locks: dict[str, int]) -> None:
        """Read on; what has not changed is not read again."""
        grown, writer, stamp = self.metrics.read_on(), writer_of(self.folder, locks), _stamp(self.folder / LEDGER)
        if not grown and self.row is not None and (writer, stamp) == (self._writer, self._ledger):
            return
        try:
            if self.record is None or stamp != self._ledger:
                self.record = read_run(self.folder, self.metrics.known())
            else:
                self.record = replace(self.record, metrics=self.metrics.known())
            row = run_row(self.record, self.name, running=writer is not None)
        except (OSError, UsageError) as error:  # another user's, or deleted meanwhile
            row = unreadable_row(self.name, error if isinstance(error, OSError) else OSError(str(error)))
        if self._writer is not None and writer != self._writer:
            self.asked_to_stop = None
        self.row, self._writer, self._ledger = row, writer, stamp
        self.version += 1

    def to_json(self) -> dict[str, Any]:
        assert self.row is not None
        told = {key: _shown(value) for key, value in self.row.to_json().items()}
        return {"id": self.id, "version": self.version, "running": self._writer is not None, "stopping": self.asked_to_stop is not None,
                "left": self._left(), **told}

    def _left(self) -> list[str]:
        """Budget that is left; a run that is over has nothing left to spend."""
        going_on = self.row is not None and self.row.state in ("running", "no end on record", "interrupted")
        return budget_left(self.record.config, self.metrics.newest) if going_on and self.record is not None else []

    def stop(self) -> int:
        """Stop a run, once: a second signal would end it without a save."""
        if self.asked_to_stop is not None and self.asked_to_stop == writer_of(self.folder, ledger_locks()):
            raise UsageError(f"{self.name} was asked to stop already; it saves first")
        self.asked_to_stop = stop_after_save(self.folder)
        self.version += 1
        return self.asked_to_stop

    def details(self, parent: "LiveRun | None") -> dict[str, Any]:
        """Verdicts with their evidence, the newest first, and samples beside the parent's."""
        events = self.record.events if self.record else []
        found = sorted(findings(events), key=lambda one: -one.line)[:MOST_FINDINGS]
        verdicts = [{"stage": one.stage, "check": one.verdict.check, "outcome": str(one.verdict.outcome), "reason": one.verdict.reason,
                     "line": one.line, "ran": one.ran, "evidence": cut(one.evidence, MOST_TEXT)} for one in found]
        edits, _ = read_json_or_remark(self.folder / "edits.json")
        groups = recorded_samples(newest_lines(self.folder / "samples.jsonl"),
                                  newest_lines(parent.folder / "samples.jsonl").rows if parent else [], edits)
        samples = [{"title": group.title, "words": group.words, "examples": [asdict(one) for one in group.examples]} for group in groups]
        return _shown({**self.to_json(), "folder": str(self.folder), "verdicts": verdicts, "samples": samples,
                       "parent_run": parent.id if parent else None})


class LiveRuns:
    """Runs under the named folders, kept up to date by `watch` in a thread of its own."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = [folder.resolve() for folder in folders]
        self.runs: dict[str, LiveRun] = {}
        self.gpus: list[dict[str, Any]] | None = None
        self._looked = -LOOK_AROUND
        self._over = threading.Event()
        self._one_at_a_time = threading.Lock()

    def watch(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(ROUND_SECONDS)

    def close(self) -> None:
        self._over.set()

    @property
    def closed(self) -> bool:
        return self._over.is_set()

    def look(self) -> None:
        """Look once: runs that came or went, and what each has gained."""
        with self._one_at_a_time:
            if time.monotonic() - self._looked >= LOOK_AROUND:
                self._look_around()
                self.gpus, self._looked = gpu_readings(), time.monotonic()
            locks = ledger_locks()
            for run in list(self.runs.values()):
                run.look(locks)
                if self._over.is_set():
                    return

    def shown(self) -> list[LiveRun]:
        return sorted((run for run in list(self.runs.values()) if run.row is not None), key=lambda run: run.name)

    def run_of(self, id: str) -> LiveRun:
        if id not in self.runs or self.runs[id].row is None:
            raise KeyError(id)
        return self.runs[id]

    def parent_of(self, run: LiveRun) -> LiveRun | None:
        """The run on this board whose folder holds what this one began from."""
        began = run.row.parent if run.row is not None else None
        if began is None:
            return None
        place = Path(began.rsplit(" (", 1)[0])
        place = place if place.is_absolute() else Path.cwd() / place
        return next((other for other in list(self.runs.values()) if other is not run and other.folder in place.parents), None)

    def _look_around(self) -> None:
        found = {path: _name(path, folder, len(self.folders)) for folder in self.folders for path in find_runs(folder)}
        known = {run.folder: run for run in self.runs.values()}
        runs = [known.get(path) or LiveRun(path, name) for path, name in found.items()]
        self.runs = {run.id: run for run in runs}


# ---------------------------------------------------------------- what is left, and what the GPUs do


def budget_left(config: dict[str, Any], newest: dict[str, Any]) -> list[str]:
    """Steps, minutes and tokens that are left, where the options name a bound and a row says how far it is."""
    step, seconds, tokens = newest.get("step"), finite_number(newest.get("seconds")), finite_number(newest.get("num_tokens"))
    taken = {"max_steps": (None if not isinstance(step, int) else step + 1, "steps"),
             "minutes": (None if seconds is None else seconds / 60, "minutes"), "tokens": (tokens, "tokens")}
    left = []
    for option, (used, unit) in taken.items():
        bound = finite_number(config.get(option))
        if bound is not None:
            left.append(f"{bound:,.6g} {unit}, none on record yet" if used is None else
                        f"{max(bound - used, 0):,.4g} of {bound:,.6g} {unit} left")
    return left


def gpu_readings() -> list[dict[str, Any]] | None:
    """A row for each GPU as nvidia-smi tells; None where it is not there or does not answer."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    try:
        told = subprocess.run([program, f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = ("index", "name", "busy", "used", "total", "celsius", "watts")
    rows = [[word.strip() for word in line.split(",")] for line in told.stdout.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)] if told.returncode == 0 else None


# ---------------------------------------------------------------- files


def newest_lines(path: Path) -> Lines:
    """Last lines of a file, of a long one its last megabyte; the line that is cut in two is left out."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - SAMPLE_BYTES))
            data = file.read(SAMPLE_BYTES)
    except OSError:
        return Lines([], None, [])
    lines = data.split(b"\n")[int(size > SAMPLE_BYTES):-1]
    return Lines([row for line in lines if isinstance(row := _object(line), dict)], None, [])


def _object(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _name(path: Path, folder: Path, folders: int) -> str:
    inside = path.name if path == folder else str(path.relative_to(folder))
    return inside if folders == 1 or path == folder else f"{folder.name}/{inside}"


def _shown(value: Any) -> Any:
    """Texts of files with what cannot be seen in them written out, and of a length that a page can hold."""
    if isinstance(value, str):
        return cut(visible(value), MOST_TEXT)
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return {key: _shown(one) for key, one in value.items()} if isinstance(value, dict) else value
