"""The twins of the sampler's kernels, without Triton."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_importing_and_using_the_twins_needs_no_triton():
    code = ("import sys; sys.modules['triton'] = None\n"
            "from assay.generate.engine import sample\n"
            "from assay.generate.generation_request import Sampling\n"
            "from assay.testing.tiny_models import tiny_config\n"
            "from assay.model.transformer import initialised\n"
            "sample(initialised(tiny_config(), 0), [[1, 2]], (), Sampling(max_new=2, top_k=3))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
