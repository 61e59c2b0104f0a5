"""Rollouts on CUDA: drawn one step ahead on a stream of their own, and by `assay serve --rollouts` in a process of its own.

Where there is no GPU, `pytest -m gpu` tries the same on the CPU.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.verdict import Outcome
from tests.recipes.sums import Believer, events, options, reinforced, steps_of, taught, unproven

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ECHO = {"environment": "assay.testing.echo_environment:Echo", "data": (), "reward": (), "tasks": 64, "max_turns": 3,
        "max_completion_length": 6, "max_episode_length": 200}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("whole"), steps=60)


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch, Believer)


@pytest.fixture(scope="module")
def server(whole: Path) -> Iterator[str]:
    """The verb itself, told to stop at the end."""
    command = [sys.executable, "-m", "assay", "serve", str(whole), "--rollouts", "--port", "0", "--device", DEVICE, "--slots", "32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        try:
            found = next((match for line in process.stdout if (match := re.search(r"serving at (\S+)/v1", line))), None)
            assert found is not None, "the server ended before it served"
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def ahead(parent: Path, out: Path, **changed: Any) -> Any:
    return options(parent, out, **({"device": DEVICE, "max_staleness": 1, "learning_rate": 2e-3, "refill": 1} | changed))


def said_of_rollouts(config: Any) -> dict[str, str]:
    return {verdict["check"]: verdict["outcome"] for event in events(config, "rollout") for verdict in event["verdicts"]}


def refuted(config: Any) -> set[str]:
    """But for what a few steps at this rate need not show, or may spoil."""
    return {verdict.check for verdict in reinforced(config) if verdict.outcome is Outcome.REFUTED} - {"gain", "endings"}


@pytest.mark.parametrize("more", [{}, ECHO], ids=["completions", "episodes"])
def test_a_rollout_drawn_ahead_is_one_off_and_corrected(more: dict[str, Any], whole: Path, tmp_path: Path):
    config = ahead(whole, tmp_path / "run", **({} if not more else {"refill": 0}), **more)
    assert not refuted(config)
    assert [row["sampling/staleness/max"] for row in steps_of(config)] == [0, 1, 1, 1]
    assert all(0.1 < row["sampling/effective_sample_size"] <= 1 for row in steps_of(config)[1:])
    assert {said_of_rollouts(config)[check] for check in ("staleness", "importance", "identity", "version")} == {"PROVEN"}


def test_the_same_seed_draws_the_same_prompts_and_completions(whole: Path, tmp_path: Path):
    drawn = []
    for name in ("one", "two"):
        config = ahead(whole, tmp_path / name)
        reinforced(config)
        drawn.append([(row["prompts_digest"], row["completions/mean_length"], row["reward"], row["loss"]) for row in steps_of(config)])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("more", [{}, {"lora_r": 4}, ECHO], ids=["whole model", "adapter", "episodes"])
def test_a_server_draws_what_the_trainer_would(more: dict[str, Any], whole: Path, server: str, tmp_path: Path):
    config = options(whole, tmp_path / "run", **({"model": str(whole)} | more), device=DEVICE, vllm_server_base_url=server, max_steps=3)
    assert not refuted(config)
    floor = next(verdict["reason"] for verdict in events(config, "preflight")[0]["verdicts"] if verdict["check"] == "engine_floor")
    rows = steps_of(config)
    print(floor, [row["sampling/effective_sample_size"] for row in rows], [row["sampling/kl"] for row in rows], sep="\n")
    assert {said_of_rollouts(config)[check] for check in ("canaries", "reply", "identity", "importance", "version")} == {"PROVEN"}
    assert all(0.9 < row["sampling/effective_sample_size"] <= 1 for row in rows)
