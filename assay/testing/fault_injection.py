"""Fault injection: a registry of silent failures, each with the job that shows it and the check that must catch it.

    @fault("flipped bit", rows=("C03",), stage="load", check="whole", job=prove_a_checkpoint)
    @contextmanager
    def flipped_bit(folder: Path) -> Iterator[None]:
        ...change something in the folder, or in the code, and restore it afterwards...

A job builds what it needs in an empty folder, enters `plant(folder)` where the fault would strike, and returns verdicts. The
clean twin is the same job with nothing planted: there, nothing may be refuted.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.verdict import Outcome, Verdict

Plant = Callable[[Path], AbstractContextManager[None]]
Job = Callable[[Path, Plant], list[Verdict]]


@dataclass(frozen=True)
class Fault:
    name: str
    rows: tuple[str, ...]  # of the catalogue of silent failures
    stage: str  # where it strikes: save, load, export, merge, data, loss, optimizer, resume, …
    check: str  # which check must refute it
    job: Job
    plant: Plant

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "rows": list(self.rows), "stage": self.stage, "check": self.check}


@dataclass(frozen=True)
class Sighting:
    """What happened when a fault was planted, and when it was not."""

    fault: Fault
    planted: list[Verdict]
    clean: list[Verdict]
    seconds: float

    @property
    def caught(self) -> bool:
        """By the check that exists for it; another check's alarm does not count."""
        return any(v.check == self.fault.check and v.outcome is Outcome.REFUTED for v in self.planted)

    @property
    def false_alarm(self) -> bool:
        """Something was refuted in the clean twin, or the check did not run there: silence must be earned."""
        ran = any(v.check == self.fault.check and v.outcome is Outcome.PROVEN for v in self.clean)
        return not ran or any(v.outcome is Outcome.REFUTED for v in self.clean)

    def facts(self) -> dict[str, Any]:
        found = [v for v in self.planted if v.check == self.fault.check]
        reasons = [v.reason for v in found if v.outcome is Outcome.REFUTED] or [v.reason for v in found]
        return self.fault.facts() | {"caught": self.caught, "false_alarm": self.false_alarm, "seconds": round(self.seconds, 3),
                                     "reason": reasons[0] if reasons else None,
                                     "clean": [str(v) for v in self.clean if v.outcome is Outcome.REFUTED]}


FAULTS: dict[str, Fault] = {}


def fault(name: str, *, rows: Iterable[str], stage: str, check: str, job: Job) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        assert name not in FAULTS, f"two faults are called {name!r}"
        FAULTS[name] = Fault(name, tuple(rows), stage, check, job, plant)
        return plant

    return register


def nothing(_: Path) -> AbstractContextManager[None]:
    """What the clean twin plants."""
    return contextlib.nullcontext()


def observe(fault: Fault) -> Sighting:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as planted, tempfile.TemporaryDirectory() as clean:
        verdicts = fault.job(Path(planted), fault.plant), fault.job(Path(clean), nothing)
    return Sighting(fault, *verdicts, time.perf_counter() - start)
