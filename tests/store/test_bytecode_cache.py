"""Libraries that have no bytecode, and would be compiled in every process, have it in Assay's cache; all others are left as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay.store.bytecode_cache import _compiled_every_time, _ours_alone

ASKED = """
import sys
from assay.cli import main
try:
    main(["--version"])
except SystemExit:
    pass
import subprocess, torch
subprocess.run([sys.executable, "-c", "import torch.other"], check=True)
print(sys.pycache_prefix)
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder of libraries with one that is called torch."""
    made = tmp_path / "libraries" / "torch"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text("")
    (made / "other.py").write_text("")
    return made


def command(library: Path, cache: Path, **environment: str) -> str:
    """Value of `sys.pycache_prefix` after a command; the command and a process that it starts have imported the library."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    path = f"{library.parent}:{Path(__file__).parents[2]}"
    said = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True,
                          env=kept | {"PYTHONPATH": path, "ASSAY_CACHE": str(cache)} | environment)
    return said.stdout.splitlines()[-1]


def compiled(folder: Path) -> list[str]:
    return sorted(file.name.partition(".")[0] for file in folder.rglob("*.pyc") if "torch" in file.parts)


def test_bytecode_that_no_process_would_keep_is_kept_in_the_cache(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert command(library, cache, PYTHONDONTWRITEBYTECODE="1") == str(cache / "bytecode")
    assert compiled(cache) == ["__init__", "other"]
    assert not compiled(library)


def test_bytecode_that_python_keeps_itself_is_left_to_it(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert command(library, cache) == "None"
    assert compiled(library) == ["__init__", "other"]
    assert command(library, cache, PYTHONDONTWRITEBYTECODE="1") == "None"  # it is there, and is read
    assert not cache.exists()


def test_a_folder_that_others_may_write_to_is_not_read(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "bytecode").mkdir(parents=True)
    (cache / "bytecode").chmod(0o777)
    assert command(library, cache, PYTHONDONTWRITEBYTECODE="1") == "None"
    assert not compiled(cache)


def test_where_the_user_keeps_bytecode_it_stays_and_a_cache_that_cannot_be_made_costs_nothing(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert command(library, cache, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert not cache.exists()
    cache.write_text("a file is in the way")
    assert command(library, cache, PYTHONDONTWRITEBYTECODE="1") == "None"


def test_a_folder_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert _ours_alone(tmp_path)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert not _ours_alone(tmp_path)


@pytest.mark.parametrize("writable", [True, False])
def test_a_library_where_python_may_not_write_is_compiled_every_time(writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "unheard_of.py").write_text("")
    (tmp_path / "folder_alone").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    assert _compiled_every_time("unheard_of") is not writable
    assert not any(map(_compiled_every_time, ("no_such_library", "folder_alone", "math"))), "nothing of them is compiled"
