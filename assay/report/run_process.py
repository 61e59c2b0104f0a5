"""Run process: which process of this machine writes a run, and how to ask it to save and stop."""

import os
import signal
from pathlib import Path

from assay.errors import UsageError
from assay.report.run_record import LEDGER

LOCKS = Path("/proc/locks")


def ledger_locks() -> dict[str, int]:
    """Locks held on files, device:inode → process id. Looked up, not tried: trying could get in a starting run's way."""
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:  # no such table on this system: then it is unknown, and not said
        return {}
    held = [line.split() for line in lines]
    return {words[5]: int(words[4]) for words in held if len(words) > 5 and words[1] == "FLOCK"}


def writer_of(run: Path, locks: dict[str, int]) -> int | None:
    """The process that holds the ledger's lock; None where none does."""
    try:
        status = os.stat(run / LEDGER)
    except OSError:
        return None
    return locks.get(f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}")


def stop_after_save(run: Path) -> int:
    """SIGTERM to the run's own process, which saves and leaves at its next step. It must have the ledger open: by a handle on the
    process that is taken before this is looked up, so that no other process can have got its number meanwhile."""
    process = writer_of(run, ledger_locks())
    if not process:
        raise UsageError(f"{run.name} is not running on this machine: nobody holds its {LEDGER}")
    try:
        handle = os.pidfd_open(process)
    except OSError as error:
        raise UsageError(f"process {process} of {run.name} cannot be reached: {error.strerror}") from None
    try:
        if not _has_open(process, run / LEDGER):
            raise UsageError(f"process {process} holds no {LEDGER} of {run.name}; it is left alone")
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except OSError as error:
        raise UsageError(f"process {process} of {run.name} cannot be asked to stop: {error.strerror}") from None
    finally:
        os.close(handle)
    return process


def _has_open(process: int, file: Path) -> bool:
    wanted = os.stat(file)
    for entry in os.scandir(f"/proc/{process}/fd"):
        try:
            found = os.stat(entry.path)
        except OSError:  # closed meanwhile
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
