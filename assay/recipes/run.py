"""A run is a folder: config.yaml, ledger.jsonl, metrics.jsonl, checkpoints/. This is what every recipe writes into it.

Saving and proving happen beside training; a failed save or a refuted proof comes back at the next step.
"""

import contextlib
import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from assay.errors import GuardStop, UsageError
from assay.guard.proof import Prover, demanded
from assay.store.checkpoint import Checkpoint, Contents, latest, retain, step_folder, steps
from assay.store.ledger import Ledger
from assay.store.saver import BackgroundSaver
from assay.verdict import Outcome, Verdict, overall


TELL_EVERY = 5.0  # seconds


class Run:
    """One execution of a recipe. `kept` is how many checkpoints stay besides the best."""

    def __init__(self, folder: Path, config: Any, *, kept: int = 2, say: Callable[[str], None]):
        self.folder, self.config, self.kept, self.say = folder, config, kept, say
        self.checkpoints = folder / "checkpoints"
        self.interrupted: int | None = None
        self.going_on_from = 0
        self._told = 0.0
        self.needed: set[str] = set()  # digests that retention may not delete
        self._saver, self._prover = BackgroundSaver(), Prover()
        folder.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.resumed = _settle_config(folder / "config.yaml", config)
        self.metrics_file = folder / "metrics.jsonl"
        self.ledger.append("resume" if self.resumed else "start", recipe=type(config).__name__, config=plain(dataclasses.asdict(config)))

    def newest(self) -> Checkpoint | None:
        """Where to go on from: the newest checkpoint that verifies. What was passed over is said and written down."""
        found, passed_over = latest(self.checkpoints)
        for sentence in passed_over:
            self.say(f"passed over: {sentence}")
            self.ledger.append("passed over", reason=sentence)
        return found

    def rewind(self, step: int) -> None:
        """Metrics of steps that were taken after the checkpoint are about to be taken again."""
        self.going_on_from = step
        if self.metrics_file.exists():
            rows = [line for line in self.metrics_file.read_text().splitlines(keepends=True) if json.loads(line)["step"] < step]
            self.metrics_file.write_text("".join(rows))

    def record(self, step: int, **metrics: float | int | str | None) -> None:
        """One line of metrics.jsonl. A number that is not finite is written as a word, never as a missing value."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps({"step": step, **plain(metrics)}) + "\n")

    def save(self, step: int, contents: Callable[[], Contents], *, against: str | None = None) -> Path:
        """Snapshot now, write and prove beside the loop. Raises what an earlier save or proof found."""
        self.check()
        where = step_folder(self.checkpoints, step)
        self._saver.save(where, contents, after=lambda written: self._prover.start(written.folder, against=against))
        self.ledger.append("save", step=step, checkpoint=where.name)
        return where

    def check(self) -> None:
        """Surface what happened beside the loop. Never waits."""
        self._saver.check()
        self._judge(self._prover.finished())

    def finish(self) -> None:
        """Wait for the last save and its proof."""
        self._saver.close()
        self._judge(self._prover.close())

    def tidy(self, best: Path | None) -> None:
        """Retire old checkpoints, but none while a proof is still reading one."""
        if self._prover.busy:
            return
        for gone in retain(self.checkpoints, self.kept, best, self.needed):
            self.ledger.append("retire", checkpoint=gone.name)

    def _judge(self, proofs: list[tuple[Path, list[Verdict]]]) -> None:
        for folder, verdicts in proofs:
            outcome = overall(demanded(verdicts))
            self.ledger.append("proof", checkpoint=folder.name, outcome=str(outcome), verdicts=plain([v.to_json() for v in verdicts]))
            if outcome is Outcome.REFUTED:
                reasons = "; ".join(str(v) for v in verdicts if v.outcome is Outcome.REFUTED)
                raise GuardStop(f"{folder.name} was refuted by its proof and is quarantined: {reasons}. Earlier checkpoints stand")
            self.say(f"{folder.name}: {outcome}" + ("" if outcome is Outcome.PROVEN else " (" + "; ".join(
                str(v) for v in demanded(verdicts) if v.outcome is not Outcome.PROVEN) + ")"))

    def progress(self, done: int, of: int | None, what: str, seconds: float) -> None:
        """A line every few seconds."""
        if time.monotonic() - self._told >= TELL_EVERY or done == of:
            self._told = time.monotonic()
            self.say(f"step {done}{f' of {of}' if of else ''}  {what}  {seconds:.0f} s")

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C set `interrupted`; the recipe saves and leaves at the next step. A second one is obeyed at once."""
        def note(number: int, _: FrameType | None) -> None:
            if self.interrupted is not None:
                raise KeyboardInterrupt
            self.interrupted = number
            self.say(f"{signal.Signals(number).name}: saving, then stopping (again to stop at once)")

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def say_now(text: str) -> None:
    print(text, flush=True)


class Clock:
    """Wall time of a run over all its sittings, for budgets and progress."""

    def __init__(self, spent: float = 0.0):
        self._start = time.monotonic() - spent

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start


def plain(value: Any) -> Any:
    """Strict JSON: paths as text, tuples as lists, and what is not finite as the word for it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def last_step(folder: Path) -> int | None:
    found = steps(folder / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else None


def _settle_config(path: Path, config: Any) -> bool:
    """Write the configuration once; a later sitting must be the same run. Returns whether there was an earlier one."""
    import yaml

    values = plain(dataclasses.asdict(config))
    if not path.exists():
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return False
    earlier = yaml.safe_load(path.read_text())
    # How long to go on, and where, may change between sittings; what is learned, and from what, may not.
    free = {"minutes", "tokens", "device", "out", "json", "resume"}
    changed = [name for name in values if name not in free and earlier.get(name) != values[name]]
    if changed:
        said = ", ".join(f"{name} was {earlier.get(name)!r}, now {values[name]!r}" for name in changed)
        raise UsageError(f"{path.parent} is another run: {said}; give the same options, or another --out")
    return True
