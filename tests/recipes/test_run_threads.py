"""Threads of a run: none that it began is left when it ends, whichever way."""

import contextlib
import threading
from pathlib import Path

import pytest

from assay.errors import GuardStop
from assay.recipes import grpo, witness_looks
from assay.recipes.trainer import Trainer
from assay.recipes.witness_records import pending_records
from assay.testing.tiny_training import RecordingProver
from tests.recipes.sums import options, unproven


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_ends_or_is_stopped_leaves_no_thread(knows_sums: Path, stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a rollout drawn ahead, steps that are kept for the witness, and saves."""
    unproven(monkeypatch, RecordingProver)
    monkeypatch.setattr(witness_looks, "ask_witness", lambda *_: [])  # a process of its own, which takes seconds to begin
    before, over = set(threading.enumerate()), Trainer.over

    def refuted(trainer: Trainer) -> bool:
        if stopped and trainer.done == 1:
            raise GuardStop("stopped by a guard, in this test")
        return over(trainer)

    monkeypatch.setattr(Trainer, "over", refuted)
    with pytest.raises(GuardStop) if stopped else contextlib.nullcontext():
        grpo.grpo(options(knows_sums, tmp_path / "run", max_steps=2, save_steps=1, max_staleness=1), lambda _: None)
    assert pending_records(tmp_path / "run")
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
