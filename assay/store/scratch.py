"""Scratch folders in the system's temporary folder: each is locked by the process that made it, and swept by a later one once that is dead.

A process that is killed removes nothing. The kernel frees its locks, whatever ended it: a folder whose lock can be had has no owner.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX, LOCK = "assay-scratch-", ".owner"
_BEING_MADE = 3600.0  # seconds that a folder may stand without a lock: its owner may be about to take it


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder, gone when the block ends; where the process was killed, when the next one asks for a folder or begins a command."""
    sweep_scratch()
    folder, lock = _made()
    empty = folder / "files"
    try:
        empty.mkdir()
        yield empty
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep_scratch() -> None:
    """Remove scratch folders of ours whose owners are dead. What cannot be removed is left to the next one."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if not (folder / LOCK).exists():
                if time.time() - folder.stat().st_mtime > _BEING_MADE:
                    shutil.rmtree(folder)
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, an OSError: its owner lives
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _made() -> tuple[Path, int]:
    """Make a scratch folder and lock it. Between opening a lock and having it another process may sweep the folder away: then another one
    is made."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(folder / LOCK), os.fstat(lock)):
                return folder, lock
        os.close(lock)
