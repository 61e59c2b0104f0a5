"""A run is a function of its options, its data and the number of shards; not of how many processes compute it."""

import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli import run as cli_run
from assay.errors import AssayError, GuardStop
from assay.learn import parallel
from assay.model.world import World
from assay.outcome import RunOutcome
from assay.recipes import distill, grpo, hand_over, processes, run, sft, starting_model
from assay.recipes.options import Distill, Sft
from assay.store.checkpoint import open_checkpoint, step_folders
from assay.store.ledger import read_chain
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import NoProver
from assay.verdict import proven
from tests.recipes import sums
from tests.recipes.sittings import options as pretrain_options
from tests.recipes.sittings import sit

SHARDS = 4
Recipe = Callable[[], RunOutcome]


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py and of the toy."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    monkeypatch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    sums.taught(folder, steps=40)
    save_model(folder / "student", tiny_model("llama", seed=1))
    return folder


def compute_together(recipe: Recipe, count: int) -> list[int]:
    """The recipe in so many processes of this machine; their exit codes, in order of rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            code = 99
            try:
                outcome = recipe()
                code = 0 if outcome.followed or outcome.verdicts or outcome.interrupted is None else 98
            except GuardStop as stop:
                print(stop)
                code = stop.exit_code
            except AssayError as error:
                print(error, file=sys.stderr, flush=True)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def digests(out: Path) -> tuple[Any, ...]:
    """Weights, moments and everything else that the last checkpoint holds."""
    last = open_checkpoint(step_folders(out / "checkpoints")[-1])
    return last.step, last.manifest["tensors"]


def recipes(home: Path, out: Path) -> dict[str, Recipe]:
    fit: dict[str, Any] = {"data": (str(home / "learned.jsonl"),), "max_length": 32, "batch_tokens": 256, "micro_batch_tokens": 64,
                           "num_train_epochs": 2, "max_steps": 5, "save_steps": 3, "held_out": 0.1, "learning_rate": 3e-3, "device": "cpu",
                           "shards": SHARDS, "out": str(out)}
    parent, taught = step_folders(home / "sft" / "checkpoints")[-1], home / "sft" / "model"
    return {
        "pretrain, Muon": lambda: sit(pretrain_options(out, shards=SHARDS, tokens=6 * 256)),
        "sft": lambda: sft.sft(Sft(model=str(home / "base"), **fit), lambda _: None),
        "sft, LoRA": lambda: sft.sft(Sft(model=str(home / "base"), lora_r=4, **fit), lambda _: None),
        "distill": lambda: distill.distill(Distill(model=str(home / "student"), teacher=str(taught), **fit), lambda _: None),
        "grpo": lambda: grpo.grpo(sums.options(parent, out, max_steps=2, shards=SHARDS, overlong_buffer=7), lambda _: None),
    }


NAMES = ["pretrain, Muon", "sft", "sft, LoRA", "distill", "grpo"]


@pytest.fixture(scope="module")
def alone(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fine-tuning with all shards by one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        sums.unproven(patch)
        recipes(home, out)["sft"]()
    return out


@pytest.mark.parametrize(("name", "counts"), [
    *((name, (2,)) for name in NAMES if not name.startswith("sft")),
    *(pytest.param(name, (2, 4), marks=pytest.mark.slow) for name in NAMES)])
def test_any_number_of_processes_gives_the_same_bits(name: str, counts: tuple[int, ...], home: Path, tmp_path: Path):
    recipes(home, tmp_path / "1")[name]()
    alone = digests(tmp_path / "1")
    for count in counts:
        assert compute_together(recipes(home, tmp_path / str(count))[name], count) == [0] * count
        assert digests(tmp_path / str(count)) == alone


def test_three_processes_give_the_bits_of_one(home: Path, alone: Path, tmp_path: Path):
    assert compute_together(recipes(home, tmp_path / "run")["sft"], 3) == [0, 0, 0]
    assert digests(tmp_path / "run") == digests(alone)


def test_begun_by_four_processes_and_finished_by_two(home: Path, alone: Path, tmp_path: Path):
    """The number of processes is no option that a resume must repeat."""
    out = tmp_path / "run"

    def stop_early() -> RunOutcome:
        over = sft.Trainer.over

        def interrupted(trainer: Any) -> bool:
            if trainer.done == 4:
                trainer.run.interrupted = 15
            return over(trainer)

        sft.Trainer.over = interrupted  # type: ignore[method-assign]
        return recipes(home, out)["sft"]()

    assert compute_together(stop_early, 4)[1:] == [0, 0, 0]
    assert digests(out)[0] == 4
    assert compute_together(recipes(home, out)["sft"], 2) == [0, 0]
    assert digests(out) == digests(alone)


def test_shards_are_an_option_of_the_result(home: Path, alone: Path, tmp_path: Path):
    """Another number of shards sums in another order: rounding differs, and nothing else."""
    config = Sft(model=str(home / "base"), data=(str(home / "learned.jsonl"),), max_length=32, batch_tokens=256, micro_batch_tokens=64,
                 num_train_epochs=2, max_steps=5, save_steps=3, held_out=0.1, learning_rate=3e-3, device="cpu", out=str(tmp_path / "1"))
    sft.sft(config, lambda _: None)
    four, one = (open_checkpoint(step_folders(out / "checkpoints")[-1]).weights() for out in (alone, tmp_path / "1"))
    assert all(torch.allclose(four[name], one[name], atol=2e-4) for name in one)


@pytest.mark.parametrize("fault", ["a row left out", "a row read twice", "another row"])
def test_a_process_that_reads_other_rows_is_stopped(fault: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = parallel.rows_of

    def wrong(batch: Any, shard: int, shards: int) -> Any:
        if shard != 3:
            return right(batch, shard, shards)
        return right(batch, 2, shards) if fault == "another row" else next(right(batch, shard, shards).split(1)) if (
            fault == "a row left out") else right(batch, shard - 2, shards - 2)

    monkeypatch.setattr(parallel, "rows_of", wrong)
    codes = compute_together(recipes(home, tmp_path / "run")["sft"], 2)
    assert codes[0] == GuardStop.exit_code


def test_one_process_and_one_shard_are_a_plain_accumulation():
    from assay.recipes.processes import accumulate_on, accumulate_together

    model = tiny_model("llama")
    assert accumulate_together(World(0, 1, "cpu"), 1, model, sft.next_token, "cpu") is accumulate_on("cpu")


def test_gradients_that_are_divided_twice_are_stopped_before_step_1(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = parallel.ShardSum.plus
    monkeypatch.setattr(parallel.ShardSum, "plus", lambda self, other: (both := right(self, other))._replace(gradients=both.gradients / 2))
    with pytest.raises(GuardStop, match="world_parity"):
        recipes(home, tmp_path / "run")["sft"]()


def test_a_process_with_other_frozen_weights_is_stopped(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = sft.load_start

    def load_another(*given: Any) -> Any:
        start = right(*given)
        if os.environ.get("RANK") == "1":
            with torch.no_grad():
                next(p for p in start.model.parameters() if not p.requires_grad).mul_(1.0001)
        return start

    monkeypatch.setattr(sft, "load_start", load_another)
    assert compute_together(recipes(home, tmp_path / "run")["sft, LoRA"], 2)[0] == GuardStop.exit_code


def test_a_process_whose_memory_changes_is_stopped_before_the_next_save(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One bit of a frozen tensor, in process 1, after its third step; every other step all say what they hold."""
    right, opened, calls = parallel.rows_of, sft.load_start, []
    held: list[torch.Tensor] = []

    def load(*given: Any) -> Any:
        start = opened(*given)
        held.extend(p for p in start.model.parameters() if not p.requires_grad)
        return start

    def flip(*given: Any) -> Any:
        calls.append(0)
        if os.environ.get("RANK") == "1" and len(calls) == 12:
            held[0].data.view(torch.int32).view(-1)[7] ^= 1
        return right(*given)

    monkeypatch.setattr(sft, "load_start", load)
    monkeypatch.setattr(parallel, "rows_of", flip)
    config = Sft(model=str(home / "base"), data=(str(home / "learned.jsonl"),), max_length=32, batch_tokens=256, micro_batch_tokens=64,
                 num_train_epochs=4, max_steps=12, save_steps=12, held_out=0.1, learning_rate=3e-3, device="cpu", shards=SHARDS, lora_r=4,
                 out=str(tmp_path / "run"), replica_steps=2)
    assert compute_together(lambda: sft.sft(config, lambda _: None), 2)[0] == GuardStop.exit_code
    stopped = [event for event in read_chain(tmp_path / "run" / "ledger.jsonl").events if event["kind"] == "step"][-1]
    assert "rank 1 holds other values than rank 0 in 1 of" in stopped["verdicts"][0]["reason"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) < 10


def test_a_process_that_dies_ends_the_run_in_a_sentence_and_nothing_is_lost(home: Path, alone: Path, tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch,
                                                                             capfd: pytest.CaptureFixture[str]):
    right = parallel.rows_of
    calls = []

    def die(*given: Any) -> Any:
        calls.append(0)
        if os.environ.get("RANK") == "1" and len(calls) > 8:
            os._exit(77)
        return right(*given)

    with monkeypatch.context() as patch:
        patch.setattr(parallel, "rows_of", die)
        codes = compute_together(recipes(home, tmp_path / "run")["sft"], 2)
    assert codes == [99, 77]  # 99: an error that is no guard's
    assert "another process died" in capfd.readouterr().err
    recipes(home, tmp_path / "run")["sft"]()
    assert digests(tmp_path / "run") == digests(alone)


@pytest.mark.slow
def test_a_term_to_the_command_of_two_processes_saves_ends_with_143_and_one_process_finishes(home: Path, tmp_path: Path):
    words = [sys.executable, "-m", "assay", "sft", "--model", str(home / "base"), "--data", str(home / "learned.jsonl"),
             "--max-length", "32", "--batch-tokens", "256", "--num-train-epochs", "200", "--max-steps", "400", "--held-out", "0.1",
             "--learning-rate", "3e-3", "--device", "cpu", "--micro-batch-tokens", "64", "--save-steps", "200", "--shards", "4",
             "--witness", "off", "--probe-samples", "0", "--out"]
    environment, out = os.environ | {"OMP_NUM_THREADS": "1"}, tmp_path / "run"
    command = subprocess.Popen([*words, str(out), "--gpus", "2"], stdout=subprocess.DEVNULL, env=environment)
    for _ in range(1200):
        time.sleep(0.1)
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) > 20:
            break
    command.terminate()
    assert command.wait(60) == 143
    assert 20 < digests(out)[0] < 400
    for place in (out, tmp_path / "alone"):
        subprocess.run([*words, str(place)], check=True, stdout=subprocess.DEVNULL, env=environment, timeout=300)
    assert digests(out) == digests(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("launch", [["-m", "assay"], ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "assay"]])
def test_the_command_starts_its_processes_or_is_started_by_torchrun(launch: list[str], home: Path, tmp_path: Path):
    words = ["sft", "--model", str(home / "base"), "--data", str(home / "learned.jsonl"), "--max-length", "32", "--batch-tokens", "256",
             "--num-train-epochs", "2", "--max-steps", "5", "--held-out", "0.1", "--learning-rate", "3e-3", "--device", "cpu",
             "--micro-batch-tokens", "64", "--save-steps", "3", "--shards", "4", "--out", str(tmp_path / "run")]
    gpus = ["--gpus", "2"] if launch == ["-m", "assay"] else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, *launch, *words, *gpus], capture_output=True, text=True, env=environment, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("2 processes compute 4 shards") == 1
    recipes(home, tmp_path / "alone")["sft"]()
    assert digests(tmp_path / "run") == digests(tmp_path / "alone")


@pytest.mark.parametrize(("asked", "given"), [
    (["--gpus", "2"], ["--shards", "8"]), (["--gpus", "16"], ["--shards", "16"]), (["--gpus", "2", "--shards", "4"], []),
    (["--gpus", "2", "--fsdp"], [])])
def test_gpus_alone_cut_a_step_so_that_fewer_may_go_on(asked, given, monkeypatch):
    launched = []
    monkeypatch.setattr(processes, "launch_processes", lambda words, count: launched.append((words, count)) or 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ["sft", "--model", "base", "--data", "rows.jsonl", "--out", "run", *asked]
    assert cli_run(words) == 0
    assert launched == [([*words, *given], int(asked[1]))]
