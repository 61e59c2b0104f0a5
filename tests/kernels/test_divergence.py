"""The divergence kernel, in Triton's interpreter; tests/learn/test_distill.py has its plain twin, tests/gpu/test_distill.py the device."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_kernel_in_the_interpreter():
    """In its own process: Triton reads TRITON_INTERPRET once, when it is first imported."""
    assert importlib.util.find_spec("triton"), "the development extra installs triton: pip install -e '.[dev]'"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_divergence.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^\d+ passed in", done.stdout.splitlines()[-1]), done.stdout  # none skipped, none left out
