"""Fault injection: a registry of silent failures, each with the job that shows it and the check that must catch it.

    @fault("answer read twice", rows=("E05",), stage="eval", check="gold answers", job=an_evaluation)
    @in_place_of(gsm8k, "read_answer")
    def answer_read_twice(usual: Any, text: str) -> str:
        return usual(usual(text))

    fault("flipped bit", rows=("C03",), stage="load", check="whole", job=a_checkpoint())(
        on_disk(lambda folder: flip_bit(folder / WEIGHTS_FILE, -1001)))

A job builds what it needs in an empty folder, enters `plant(folder)` where the fault would strike, and returns verdicts. The
clean twin is the same job with nothing planted: there, nothing may be refuted.
"""

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.store.scratch import scratch_folder
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
    """Result of planting a fault, and of the clean twin."""

    fault: Fault
    planted: list[Verdict]
    clean: list[Verdict]
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether the fault was caught by the check that exists for it; another check's alarm does not count."""
        return any(v.check == self.fault.check and v.outcome is Outcome.REFUTED for v in self.planted)

    @property
    def false_alarm(self) -> bool:
        """Whether something was refuted in the clean twin, or the check did not run there: silence must be earned."""
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
    """Plant of the clean twin: no fault."""
    return contextlib.nullcontext()


def run_clean(job: Job) -> list[Verdict]:
    """The clean twin of every fault of this job."""
    with scratch_folder() as folder:
        return job(folder, nothing)


def observe(fault: Fault, clean: Callable[[Job], list[Verdict]] = run_clean) -> Sighting:
    """The fault planted, then its clean twin."""
    start = time.perf_counter()
    with scratch_folder() as folder:
        planted = fault.job(folder, fault.plant)
    return Sighting(fault, planted, clean(fault.job), time.perf_counter() - start)

# ---------------------------------------------------------------- ways to plant


def fault_if_installed(package: str) -> Callable[..., Callable[[Plant], Plant]]:
    """`fault`, where the package is installed: what cannot be read on this machine cannot fail on it."""
    return fault if importlib.util.find_spec(package) else lambda name, **facts: lambda plant: plant


def on_disk(strike: Callable[[Path], object]) -> Plant:
    """A plant that changes bytes; the folder goes when the job is done, so nothing is put back."""
    @contextlib.contextmanager
    @functools.wraps(strike)
    def plant(folder: Path) -> Iterator[None]:
        strike(folder)
        yield
    return plant


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """A plant in which the decorated function takes the place of `owner.name`; its first argument is the usual one."""
    def decorate(other: Callable[..., Any]) -> Plant:
        @functools.wraps(other)
        def plant(_: Path) -> AbstractContextManager[None]:
            usual = getattr(owner, name)
            return swap(owner, name, lambda *given, **named: other(usual, *given, **named))
        return plant
    return decorate


@contextlib.contextmanager
def swap(owner: Any, name: str, other: Any) -> Iterator[None]:
    """`owner.name` is another for the length of the block."""
    kept = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextlib.contextmanager
def together(*managers: AbstractContextManager[Any]) -> Iterator[None]:
    """All of them at once."""
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield
