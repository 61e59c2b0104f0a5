"""Uncompiled means as written, and costs nothing where nothing is compiled."""

import subprocess
import sys
import threading

import pytest
import torch

from assay.model.placement import place_for_training, uncompiled
from assay.testing.tiny_models import tiny_model

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


def test_two_threads_that_are_uncompiled_at_once_leave_the_compiler_as_it_was():
    """The one that began first ends first: what the other had found when it began was no compiler's usual stance."""
    compiled, other_began, first_ended = [], threading.Event(), threading.Event()

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    def other():
        with uncompiled():
            other_began.set()
            first_ended.wait(10)

    thread = threading.Thread(target=other)
    with uncompiled():
        thread.start()
        other_began.wait(10)
    first_ended.set()
    thread.join()
    torch.compile(lambda x: 3 * x, backend=backend)(torch.ones(2))
    assert len(compiled) == 1


@pytest.mark.parametrize(("compute", "told"), [(torch.float32, {"deterministic": True}), (torch.bfloat16, None)])
def test_in_fp32_the_compiler_may_not_choose_its_sums_by_a_stopwatch(compute, told, monkeypatch):
    asked, compile_really = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: (asked.append(options), compile_really(*args, **options))[1])
    model = place_for_training(tiny_model("llama"), "cpu", compute=compute, compile=True)
    assert [options["options"] for options in asked] == [told] * len(model.blocks)
