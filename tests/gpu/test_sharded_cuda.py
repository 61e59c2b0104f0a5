"""Two processes that share one GPU, where gloo carries what they send through the host, compute what one process computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assay.store.checkpoint import open_checkpoint, step_folders
from assay.store.digests import recorded_digest
from assay.store.ledger import read_chain
from assay.testing.tiny_models import save_model, tiny_model
from tests.recipes import sums

pytestmark = pytest.mark.gpu
CLOSE = 0.2  # of how far five steps of AdamW in bf16 go: where a gradient is next to nothing, rounding decides its sign, and so the step's


def trained(home: Path, out: Path, *options: str, model: str = "base") -> Path:
    words = ["sft", "--model", str(home / model), "--data", str(home / "learned.jsonl"), "--max-length", "32", "--batch-tokens", "256",
             "--num-train-epochs", "2", "--max-steps", "5", "--held-out", "0.1", "--learning-rate", "1e-3", "--device", "cuda",
             "--micro-batch-tokens", "64", "--save-steps", "3", "--probe-samples", "0", "--out", str(out), *options]
    found = subprocess.run([sys.executable, "-m", "assay", *words], capture_output=True, text=True, env=os.environ, timeout=400)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
    return step_folders(out / "checkpoints")[-1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared-gpu")
    save_model(folder / "base", tiny_model("llama"))
    save_model(folder / "wide", tiny_model("llama", hidden=8192))  # matrices of 4 MB: process 0 fetches them for every product
    sums.write(folder / "learned.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)])
    return folder


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_replicated_processes_on_one_gpu_write_the_bits_of_one(dtype: str, home: Path, tmp_path: Path):
    one, two = (trained(home, tmp_path / name, "--shards", "2", "--dtype", dtype, *more)
                for name, more in (("one", ()), ("two", ("--gpus", "2"))))
    assert recorded_digest(open_checkpoint(two).manifest) == recorded_digest(open_checkpoint(one).manifest)


@pytest.mark.parametrize(("lora", "model"), [((), "base"), ((), "wide"), (("--lora-r", "4"), "wide")])
def test_sharded_processes_on_one_gpu_are_near_one(lora: tuple[str, ...], model: str, home: Path, tmp_path: Path):
    one = open_checkpoint(trained(home, tmp_path / "one", "--fsdp", *lora, model=model)).weights()
    two = open_checkpoint(trained(home, tmp_path / "two", "--fsdp", "--gpus", "2", *lora, model=model)).weights()
    assert one.keys() == two.keys()
    began = {} if lora else open_checkpoint(home / model).weights()
    moved = [name for name in one if not lora or "lora_B" in name]  # which begins at 0
    apart, far = (sum(float((one[name] - other.get(name, torch.zeros(()))).square().sum()) for name in moved) ** 0.5
                  for other in (two, began))
    assert far > 0
    assert apart < CLOSE * far
    parity = [verdict for event in read_chain(tmp_path / "two" / "ledger.jsonl").events if event["kind"] == "preflight"
              for verdict in event["verdicts"] if verdict["check"] == "world_parity"]
    assert parity[0]["outcome"] == "PROVEN"
