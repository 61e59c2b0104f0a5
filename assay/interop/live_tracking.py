"""Live tracking: a process beside a run reads its metrics as they are written and hands them to a tracker.

The run knows nothing of it: a tracker that fails, hangs or is not there costs a line at the end, which says how to hand them over.
"""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from assay.errors import AssayError, UsageError
from assay.interop.trackers import PROJECT, MetricsTracker, open_tracker
from assay.report.growing_metrics import GrowingLines
from assay.report.run_process import ledger_locks, writer_of
from assay.store import durable
from assay.store.checkpoint import HALLMARK

LOOK_EVERY = 1.0  # seconds
LAST_SECONDS = 20.0  # that a tracker has for what is left once the run is over
ARTIFACT_SECONDS = 600.0  # the same, where it is handed checkpoints


@contextlib.contextmanager
def tracking(run: Path, names: Sequence[str], *, checkpoints: bool = False) -> Iterator[None]:
    """Readers for these trackers, as long as the block takes; of several processes of a run the first has them."""
    if checkpoints and (not names or "tensorboard" in names):
        raise UsageError("--track-checkpoints is for --track wandb, trackio or mlflow, which keep artifacts; "
                         f"found --track {' '.join(names) or '(none)'}")
    if os.environ.get("RANK", "0") != "0":
        names = ()
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_reader(run, name, checkpoints))
        yield


@contextlib.contextmanager
def _reader(run: Path, name: str, checkpoints: bool) -> Iterator[None]:
    command = [sys.executable, "-m", "assay.interop.live_tracking", str(run), name, *(["checkpoints"] if checkpoints else [])]
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=words, stderr=words, start_new_session=True)
        try:
            yield
        finally:
            _end(process, run, name, words, ARTIFACT_SECONDS if checkpoints else LAST_SECONDS)


def _end(process: "subprocess.Popen[bytes]", run: Path, name: str, words: IO[bytes], seconds: float) -> None:
    """End a tracking process: its input ends, it hands over the rest and leaves. One that does not is killed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status = None
    words.seek(0)
    said = words.read().decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    if not (run / "metrics.jsonl").exists():  # refused before it began
        return
    if status == 0:
        print(said[0], file=sys.stderr, flush=True)
        return
    why = f"took more than {seconds:g} s" if status is None else said[0]
    print(f"{name} was not handed everything: {why}; the run is not touched by it: assay track {run} --to {name}", file=sys.stderr,
          flush=True)


def follow_run(run: Path, tracker: MetricsTracker, ended: Callable[[], bool], *, checkpoints: bool = False) -> str:
    """Follow a run: hand over every row once, and every proven checkpoint where asked, until it has ended; returns in words what was handed
    over."""
    rows, handed = GrowingRows(run / "metrics.jsonl"), set[Path]()
    while True:
        over = ended()
        for row in rows.unread():
            tracker.log(row)
        for folder in proven_checkpoints(run) if checkpoints else ():
            if folder not in handed:
                hand_over_whole(folder, tracker)
                handed.add(folder)
        if over:
            tracker.finish()
            return tracker.words()
        time.sleep(LOOK_EVERY)


def hand_over_whole(folder: Path, tracker: MetricsTracker) -> None:
    """Hand a checkpoint to the tracker, whole or not at all: the run may retire it while the tracker reads it. One that is gone already is
    not handed over."""
    with durable.held_folder(folder) as place:
        if place is not None and (place / HALLMARK).exists():
            tracker.hand_over(place)


def proven_checkpoints(run: Path) -> list[Path]:
    """Folders of a run that have a hallmark: its checkpoints in order, and what it hands over."""
    return [mark.parent for mark in [*sorted(run.glob(f"checkpoints/step-*/{HALLMARK}")), *sorted(run.glob(f"[ma]*/{HALLMARK}"))]]


def run_ended(run: Path) -> Callable[[], bool]:
    """Whether the process that wrote a run has been seen, and is gone."""
    seen = False

    def ended() -> bool:
        nonlocal seen
        writes = writer_of(run, ledger_locks()) is not None
        over, seen = seen and not writes, seen or writes
        return over

    return ended


def input_ended() -> bool:
    return bool(select.select([0], [], [], 0)[0])


class GrowingRows:
    """Rows of a file that grows. Where a run went back to a checkpoint, its file is written anew and the same steps come again: each
    row of a step is given once."""

    def __init__(self, file: Path) -> None:
        self._lines, self.handed, self._met = GrowingLines(file), Counter[int](), Counter[int]()

    def unread(self) -> Iterator[dict[str, Any]]:
        while True:
            more, void = self._lines.changed()
            if void:
                self._lines.begin_again()
                self._met.clear()
            before = self._lines.offset
            for row in self._lines.read() if more else ():
                if not isinstance(step := row.get("step"), int):
                    continue
                self._met[step] += 1
                if self._met[step] > self.handed[step]:
                    self.handed[step] += 1
                    yield row
            if self._lines.offset == before:
                return  # nothing more, or a line that is being written


def main() -> int:
    """Entry point of the tracking process beside a run, which holds the other end of the input: `python -m assay.interop.live_tracking RUN
    TRACKER [checkpoints]`."""
    run, name = Path(sys.argv[1]), sys.argv[2]
    try:
        print(follow_run(run, open_tracker(name, run, PROJECT), input_ended, checkpoints=sys.argv[3:] == ["checkpoints"]))
    except AssayError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
