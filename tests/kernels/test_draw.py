"""The sampler's kernels in Triton's interpreter, and their twins without Triton."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def test_importing_and_using_the_twins_needs_no_triton():
    code = ("import sys; sys.modules['triton'] = None\n"
            "from assay.generate.sampler import Sampling, sample\n"
            "from assay.model.tiny import tiny_config\n"
            "from assay.model.transformer import initialised\n"
            "sample(initialised(tiny_config(), 0), [[1, 2]], (), Sampling(max_new=2, top_k=3))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is published for Linux alone")
def test_the_kernels_in_the_interpreter():
    """In its own process: Triton reads TRITON_INTERPRET once, when it is first imported."""
    assert importlib.util.find_spec("triton"), "the development extra installs triton: pip install -e '.[dev]'"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_sampling.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^=*\s*\d+ passed in", done.stdout.splitlines()[-1]), done.stdout  # none skipped, none left out
