"""Real processes, real signals, real proofs: minutes rather than seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.recipes.options import Pretrain
from assay.store.checkpoint import open_checkpoint, step_folders
from tests.recipes.sittings import EVERY, STEPS, events, left_by, options
from tests.recipes.test_pretrain import flags

pytestmark = pytest.mark.slow


def start(config: Pretrain) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "assay", "pretrain", *flags(config)], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for(config: Pretrain, step: int) -> None:
    """Until that many steps are on record."""
    deadline, metrics = time.monotonic() + 120, Path(config.out) / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and f'"step": {step - 1}, "eval_loss"' in metrics.read_text():
            return
        time.sleep(0.01)
    pytest.fail(f"step {step} never came")


def quarantined(config: Pretrain) -> list[str]:
    return [path.name for path in step_folders(Path(config.out) / "checkpoints") if open_checkpoint(path).quarantined]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    config = options(tmp_path_factory.mktemp("runs") / "whole")
    process = start(config)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return left_by(config)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_to_the_whole_group_and_then_the_rest_of_the_run(number: int, code: int, tmp_path: Path, uninterrupted: dict):
    """As a terminal's Ctrl-C and a batch system's kill come: to the proofs under way as well. They say nothing against a save."""
    config = options(tmp_path / "run")
    process = start(config)
    wait_for(config, EVERY)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    assert quarantined(config) == []
    again = start(config)
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert left_by(config) == uninterrupted
    assert events(config, "hand over")


def test_every_save_of_a_whole_run_is_proven(uninterrupted: dict, tmp_path: Path):
    config = options(tmp_path / "run", ema=0.9, shape="assay", optimizer="adamw")
    process = start(config)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert [event["outcome"] for event in events(config, "proof")] == ["PROVEN"] * 7
    assert STEPS == 26  # saved at 0, 1, 6, 12, 18, 24 and 26
