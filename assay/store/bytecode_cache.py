"""Bytecode cache: compiled modules of libraries that lie where Python keeps none, so that no process compiles torch and transformers anew.

Some installations come without bytecode, in a folder that cannot be written to or with PYTHONDONTWRITEBYTECODE set: every process that
imports torch and transformers then compiles 3,000 files, which takes longer than all else that the imports do. Python can keep bytecode
elsewhere (`sys.pycache_prefix`), and holds it against the size and time of its source as always. Beside the sources nothing is written.
"""

import importlib.util
import os
import stat
import sys
from pathlib import Path

LARGEST = "torch"
PREFIX, NO_WRITING = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def keep_bytecode(library: str = LARGEST) -> Path | None:
    """Keep bytecode for this process and those that it starts, where `library` would be compiled in each of them. Returns where it is
    kept."""
    if sys.pycache_prefix is not None or not _compiled_every_time(library):
        return None
    from assay.store.model_cache import cache_folder  # few commands need it, and `assay --help` is instant

    folder = cache_folder() / "bytecode"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine = _ours_alone(folder)
    except OSError:
        return None  # it goes on as slowly as before
    if not mine:
        return None
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ[PREFIX] = str(folder)
    os.environ.pop(NO_WRITING, None)
    return folder


def _compiled_every_time(library: str) -> bool:
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return False
    kept = Path(importlib.util.cache_from_source(found.origin))
    return not kept.exists() and (sys.dont_write_bytecode or not os.access(Path(found.origin).parent, os.W_OK))


def _ours_alone(folder: Path) -> bool:
    """Bytecode is run as it is: what another user may write is not read."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
