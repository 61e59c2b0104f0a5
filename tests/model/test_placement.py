"""Uncompiled means as written, and costs nothing where nothing is compiled."""

import subprocess
import sys

import torch

from assay.model.placement import uncompiled

IN_A_FRESH_PROCESS = """
import sys
from assay.model.placement import uncompiled
with uncompiled():
    pass
assert "torch._dynamo" not in sys.modules, "the compiler was loaded to say that nothing is compiled"
"""


def test_the_compiler_is_not_loaded_to_say_that_nothing_is_compiled():
    done = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_compiled_runs_as_it_is_written():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    doubled = torch.compile(lambda x: 2 * x, backend=backend)
    with uncompiled():
        doubled(torch.ones(2))
    assert compiled == []
    doubled(torch.ones(2))
    assert len(compiled) == 1
