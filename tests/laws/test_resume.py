"""A run that was struck down and resumed is, bit for bit, the run that was not: weights, moments, data, metrics."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.cli import run as assay
from assay.errors import GuardStop
from assay.recipes import pretrain, run
from assay.recipes.options import Pretrain
from assay.recipes.trainer import Trainer
from assay.store import durable
from assay.store.checkpoint import open_checkpoint, quarantine_checkpoint, step_folder
from assay.testing.tiny_training import NoProver
from assay.verdict import refuted
from tests.recipes.sittings import EVERY, STEPS, events, in_a_fork, left_by, options, saved_steps, sit

VARIANTS = {"muon": {}, "adamw, soft cap, average": {"optimizer": "adamw", "shape": "assay", "ema": 0.9, "lr_scheduler_type": "cosine"},
            "mixed values, gated heads": {"depth": 2, "shape": "assay", "value_residual": True, "attention_gate": True}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Output of each variant when nothing happens."""
    left = {}
    for name, changed in VARIANTS.items():
        config = options(tmp_path_factory.mktemp("runs") / "whole", **changed)
        sit(config)
        left[name] = left_by(config)
    return left


def kill(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(_: object) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("step", [1, EVERY + 1, pytest.param(20, marks=pytest.mark.slow), STEPS])
def test_terminated_after_a_step_and_resumed(step: int, tmp_path: Path, uninterrupted: dict):
    config = options(tmp_path / "run")
    assert sit(config, after={step: terminate}).interrupted == signal.SIGTERM
    assert saved_steps(config)[-1] == step
    sit(config)
    assert left_by(config) == uninterrupted["muon"]


def test_terminated_three_times_with_another_optimizer_and_an_average(tmp_path: Path, uninterrupted: dict):
    config = options(tmp_path / "run", **VARIANTS["adamw, soft cap, average"])
    for step in (4, 5, 17):
        assert sit(config, after={step: terminate}).interrupted == signal.SIGTERM
    sit(config)
    assert left_by(config) == uninterrupted["adamw, soft cap, average"]


def test_terminated_twice_with_mixed_values_and_gated_heads(tmp_path: Path, uninterrupted: dict):
    config = options(tmp_path / "run", **VARIANTS["mixed values, gated heads"])
    for step in (2, EVERY + 3):
        assert sit(config, after={step: terminate}).interrupted == signal.SIGTERM
    sit(config)
    assert left_by(config) == uninterrupted["mixed values, gated heads"]
    assert {"model.layers.1.self_attn.value_mix.weight", "model.layers.0.self_attn.head_gate.weight"} <= \
        uninterrupted["mixed values, gated heads"]["tensors"]["model.safetensors"].keys()


@pytest.mark.parametrize("step", [3, 2 * EVERY])
def test_killed_while_training_and_resumed(step: int, tmp_path: Path, uninterrupted: dict):
    config = options(tmp_path / "run")
    assert in_a_fork(lambda: sit(config, after={step: kill}) and 0) == -signal.SIGKILL
    sit(config)
    assert left_by(config) == uninterrupted["muon"]


@pytest.mark.parametrize(("step", "moment"), [
    (0, "before the manifest"), (2 * EVERY, "in the middle of a file"), (2 * EVERY, "after the rename"),
    *(pytest.param(step, moment, marks=pytest.mark.slow) for step, moment in ((0, "after the rename"), (2 * EVERY, "before the rename")))])
def test_killed_while_saving_and_resumed(step: int, moment: str, tmp_path: Path, uninterrupted: dict):
    config = options(tmp_path / "run")
    assert in_a_fork(lambda: sit_with_a_deadly_save(config, moment, step)) == -signal.SIGKILL
    assert saved_steps(config)[-1:] == ([step] if moment == "after the rename" else [EVERY] if step else [])
    sit(config)
    assert left_by(config) == uninterrupted["muon"]


def sit_with_a_deadly_save(config: Pretrain, moment: str, step: int) -> int:
    """Only ever in a fork: the disk is struck for good."""
    write, rename = durable.write_file, durable.disk.rename
    name = f"step-{step:06d}"

    def write_file(path: Path, chunks) -> str:
        if name in str(path) and moment == {"optimizer.safetensors": "in the middle of a file",
                                            "manifest.json": "before the manifest"}.get(path.name):
            path.write_bytes(b"".join(bytes(chunk) for chunk in chunks)[:100])
            kill(None)
        return write(path, chunks)

    def rename_folder(source: Path, target: Path) -> None:
        if Path(target).name == name and moment == "before the rename":
            kill(None)
        rename(source, target)
        if Path(target).name == name and moment == "after the rename":
            kill(None)

    durable.write_file, durable.disk.rename = write_file, rename_folder  # type: ignore[method-assign]
    sit(config)
    return 0


def test_a_line_torn_off_by_a_kill_is_dropped(tmp_path: Path, uninterrupted: dict):
    config = options(tmp_path / "run")
    in_a_fork(lambda: sit(config, after={EVERY + 2: kill}) and 0)
    for name in ("metrics.jsonl", "eval.jsonl"):
        with (Path(config.out) / name).open("a") as file:
            file.write('{"step": 9, "lo')
    sit(config)
    assert left_by(config) == uninterrupted["muon"]


@pytest.mark.parametrize("damage", ["a flipped byte", "quarantine"])
def test_a_damaged_checkpoint_is_passed_over_kept_and_made_again(damage: str, tmp_path: Path, uninterrupted: dict):
    config = options(tmp_path / "run")
    sit(config, after={2 * EVERY: terminate})
    newest = Path(config.out) / "checkpoints" / f"step-{2 * EVERY:06d}"
    if damage == "quarantine":
        quarantine_checkpoint(open_checkpoint(newest), [refuted("answers", "as a test")])
    else:
        weights = newest / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    said: list[str] = []
    sit(config, say=said.append)
    assert any(f"resuming from step {EVERY}" in line for line in said)
    assert "passed over" in "\n".join(said)
    assert (newest.parent / f"earlier-1-{newest.name}").is_dir()
    assert len(events(config, "passed over")) == 1
    assert left_by(config) == uninterrupted["muon"]


def test_a_run_that_a_guard_stopped_goes_on_from_its_good_checkpoint(
        tmp_path: Path, uninterrupted: dict, monkeypatch: pytest.MonkeyPatch):
    config = options(tmp_path / "run")
    whole, bad = pretrain.next_token, []

    def poisoned(model, batch):
        loss = whole(model, batch)
        return loss._replace(total=loss.total * bad.pop()) if bad else loss

    said: list[str] = []
    monkeypatch.setattr(pretrain, "next_token", poisoned)
    with pytest.raises(GuardStop, match=r"step 9: loss nan.*the step was not taken"):
        sit(config, after={9: lambda _: bad.append(float("nan"))}, say=said.append)
    stopped, = events(config, "stopped")
    assert (stopped["exit_code"], stopped["stands"]) == (4, f"step-{EVERY:06d}")
    assert said[-1] == f"stopped; step-{EVERY:06d} stands"
    sit(config)
    assert left_by(config) == uninterrupted["muon"]


def test_sigterm_saves_first_and_exits_143_then_the_run_goes_on(tmp_path: Path, uninterrupted: dict, capsys: pytest.CaptureFixture[str]):
    config = options(tmp_path / "run")
    flags = [word for name, value in vars(config).items() if value is not None and value is not False and value != ()
             for word in (f"--{name.replace('_', '-')}", str(value))]

    def sitting() -> int:
        over, struck = Trainer.over, []

        def strike(trainer: Trainer) -> bool:
            if trainer.done == 9 and not struck:
                struck.append(os.kill(os.getpid(), signal.SIGTERM))
            return over(trainer)

        Trainer.over, run.Prover = strike, NoProver  # type: ignore[method-assign, misc]
        return assay(["pretrain", *flags])

    assert in_a_fork(sitting) == 128 + signal.SIGTERM
    assert saved_steps(config)[-1] == 9
    sit(config)
    assert left_by(config) == uninterrupted["muon"]


def test_a_second_signal_is_obeyed_at_once(tmp_path: Path):
    config = options(tmp_path / "run")

    def twice(work) -> None:
        terminate(work)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("still here")

    assert in_a_fork(lambda: sit(config, after={2: twice}) and 0) == -signal.SIGTERM
    sit(config, after={3: terminate})  # and nothing is broken
    assert saved_steps(config)[-1] == 3


def test_another_environment_is_named_and_the_run_is_marked(tmp_path: Path):
    config = options(tmp_path / "run", tokens=10 * 256)
    sit(config, after={7: terminate})
    said = tmp_path / "said"

    def with_two_threads() -> int:
        torch.set_num_threads(2)
        with said.open("w") as file:
            sit(config, say=lambda line: file.write(line + "\n"))
        return 0

    assert in_a_fork(with_two_threads) == 0
    marked, = events(config, "not bit-exact")
    assert marked["changed"] == {"threads": "1 → 2"}
    assert "threads" in said.read_text()
    assert "not bit for bit" in said.read_text()


def test_the_same_environment_is_not_marked(tmp_path: Path):
    config = options(tmp_path / "run", tokens=10 * 256)
    sit(config, after={7: terminate})
    sit(config)
    assert events(config, "not bit-exact") == []


@pytest.mark.parametrize("named", [True, False])
def test_another_runs_checkpoint_of_the_same_step_is_refused(named: bool, tmp_path: Path, uninterrupted: dict):
    """With a digest in the ledger, and where the run was killed before it wrote one; once it is moved away, the run goes on as ever."""
    config, other = options(tmp_path / "run"), options(tmp_path / "other", **({} if named else {"tokens": 20 * 256}))
    sit(config, after={2 * EVERY: terminate}) if named else in_a_fork(lambda: sit_with_a_deadly_save(config, "after the rename", 2 * EVERY))
    sit(replace(other, seed=7) if named else other, after={2 * EVERY: terminate})
    name = f"step-{2 * EVERY:06d}"
    mine, theirs = (Path(each.out) / "checkpoints" / name for each in (config, other))
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    with pytest.raises(GuardStop, match=r"own: .*it is another run's|own: .*seed was 7, now 0"):
        sit(config)
    shutil.rmtree(mine)
    sit(config)
    assert left_by(config) == uninterrupted["muon"]


def test_another_run_of_the_same_options_is_told_by_its_digest(tmp_path: Path):
    config, other = options(tmp_path / "run"), options(tmp_path / "other", tokens=20 * 256)
    for each in (config, other):
        sit(each, after={2 * EVERY: terminate})
    name = f"checkpoints/step-{2 * EVERY:06d}"
    shutil.rmtree(Path(config.out) / name)
    shutil.copytree(Path(other.out) / name, Path(config.out) / name)
    with pytest.raises(GuardStop, match=r"and the ledger says that .* was saved: it is another run's, or was replaced"):
        sit(config)


def test_a_save_is_named_by_its_digest_and_a_checkpoint_the_ledger_never_began_is_refused(tmp_path: Path):
    config = options(tmp_path / "run")
    sit(config, after={EVERY + 1: terminate})
    saved = {event["checkpoint"]: event["digest"] for event in events(config, "saved")}
    folder = Path(config.out) / "checkpoints"
    assert [event["checkpoint"] for event in events(config, "save")] == list(saved)
    assert saved.items() >= {step_folder(folder, step).name: open_checkpoint(step_folder(folder, step)).digest
                             for step in saved_steps(config)}.items()
    longer = options(tmp_path / "longer")
    sit(longer, after={2 * EVERY: terminate})
    shutil.copytree(step_folder(Path(longer.out) / "checkpoints", 2 * EVERY), step_folder(folder, 2 * EVERY))
    with pytest.raises(GuardStop, match="the ledger names no save of step-000012"):
        sit(config)


def test_a_run_that_was_moved_goes_on(tmp_path: Path, uninterrupted: dict):
    config = options(tmp_path / "run")
    in_a_fork(lambda: sit_with_a_deadly_save(config, "after the rename", 2 * EVERY))
    Path(config.out).rename(tmp_path / "moved")
    moved = replace(config, out=str(tmp_path / "moved"))
    sit(moved)
    assert left_by(moved) == uninterrupted["muon"]
