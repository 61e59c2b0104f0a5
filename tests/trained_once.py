"""Trained once: what takes seconds to train, is read by many tests and written to by none, made once for all processes of a test run."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def trained_once(name: str, factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bool]]:
    """A folder that all processes of a test run share, and whether what belongs there is still to be made, while no other makes it."""
    base = factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / f"trained-{name}"  # pytest-xdist gives each process a folder
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, not (folder / "made").exists()
        (folder / "made").touch()
