"""One torch thread: two threads on a contended two-core machine were 30 times slower and change the last bit.

What takes seconds to train and is never written to is trained once for all processes of a session.

What tests write lies in memory where there is room: a run waits for the disk at every line of its ledger, which was an eighth of the time.

After pytest's own last line another says in words which tests did not run, why, and what to install. Where files are shared out among
processes the slowest come first, so that none is left to run alone at the end.
"""

import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from assay.evaluation import eval_witness
from assay.guard.proving_process import PROVING_PROCESSES, ProvingProcess
from assay.testing import tiny_facts
from assay.witness.due_evaluation import judge_evaluation
from tests import arithmetics
from tests.skipped import skip_summary
from tests.trained_once import trained_once

arithmetics.switch_on()
_OF_THE_PARENT: list[ProvingProcess] = []
SLOWEST = ("tests/test_api.py", "tests/guard/test_proof.py", "tests/kernels/test_interpreted.py", "tests/recipes/", "tests/zoo/",
           "tests/laws/", "tests/witness/", "tests/test_notebooks.py", "tests/test_bad_input.py", "tests/store/", "tests/guard/",
           "tests/interop/", "tests/serving/", "tests/recipes_seeds/", "tests/generate/", "tests/data/", "tests/model/", "tests/test_")
IN_MEMORY, ROOM = Path("/dev/shm"), 4 << 30


@pytest.fixture(scope="session", autouse=True)
def kept_proofs() -> Iterator[None]:
    """Proofs of one test after another in one process, as those of a run: to start one takes longer than most proofs. Tests of the
    process itself begin with none, by `fresh_proofs`."""
    os.register_at_fork(after_in_child=_forget_processes)
    with PROVING_PROCESSES.keeping():
        yield


def _forget_processes() -> None:
    """Forget the proving processes in a fork, which a test may kill in the middle of a proof: on its parent's pipe an answer would be left
    for another request."""
    _OF_THE_PARENT.extend(PROVING_PROCESSES._idle)  # so that nothing is done at their end here
    PROVING_PROCESSES._idle = []


@pytest.fixture(scope="session", autouse=True)
def witness_in_this_process() -> Iterator[None]:
    """Run the witness of evaluations in this process, without the seconds that a process takes to import. Its process is that of
    tests/witness/test_evaluation_replay.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval_witness, "ask_eval_witness", judge_evaluation)
        yield


@pytest.fixture
def fresh_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is kept from the tests before, which may know another working directory or environment."""
    monkeypatch.setattr(PROVING_PROCESSES, "_idle", [])
    monkeypatch.setattr(PROVING_PROCESSES, "_keepers", 0)


@pytest.fixture(scope="session", autouse=True)
def known_facts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The weights of the model of known facts, for whoever asks first."""
    train = tiny_facts._weights.__wrapped__

    @functools.cache
    def weights() -> dict[str, torch.Tensor]:
        with trained_once("facts", tmp_path_factory) as (folder, unmade):
            if unmade:
                torch.save(train(), folder / "weights.pt")
            return torch.load(folder / "weights.pt")

    tiny_facts._weights = weights


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist would begin with the files of most tests, and end with those of one that takes a minute."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if config.option.basetemp is None and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > ROOM:
        for name in ("PYTEST_DEBUG_TEMPROOT", "TMPDIR"):  # of tests, and of what they call and start
            os.environ.setdefault(name, str(IN_MEMORY))
        tempfile.tempdir = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((place for place, name in enumerate(SLOWEST) if item.nodeid.startswith(name)), len(SLOWEST)))


def pytest_collection_finish() -> None:
    """Freeze what stands in memory now: modules, tests, libraries. Neither a search for garbage nor a fork need look through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The reports of all workers have arrived at the process that has a terminal; a worker has none."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(config, "workerinput"):
        return
    reports = [report for report in terminal.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    if told := skip_summary(report.longrepr[2] for report in reports):
        terminal.write_line(told)
