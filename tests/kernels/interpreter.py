"""Triton's interpreter, in a process of its own: Triton reads TRITON_INTERPRET once, when it is first imported."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WHERE_TRITON_IS = pytest.mark.skipif(sys.platform != "linux", reason="Triton is published for Linux alone")


def passes(name: str) -> None:
    """All tests of a file in this folder: none fails, none is skipped, none is left out."""
    assert importlib.util.find_spec("triton"), "the development extra installs triton: pip install -e '.[dev]'"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^=*\s*\d+ passed in", done.stdout.splitlines()[-1]), done.stdout
