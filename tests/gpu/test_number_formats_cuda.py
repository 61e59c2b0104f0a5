"""Number formats on a GPU: fp16 with a loss scale, and bf16 masters, follow the usual run; their draws are those of the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.learn.stochastic_rounding import stochastically_rounded
from assay.recipes.options import Sft
from assay.recipes.sft import sft
from assay.testing.tiny_models import save_model, tiny_model
from tests.recipes.sittings import rows

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    save_model(folder / "base", tiny_model("llama"))
    sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(12) for b in range(12)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return folder


def losses(home: Path, out: Path, **changed: Any) -> list[float]:
    usual: dict[str, Any] = {"model": str(home / "base"), "data": (str(home / "sums.jsonl"),), "out": str(out), "max_length": 32,
                             "batch_tokens": 256, "num_train_epochs": 6, "learning_rate": 1e-3, "micro_batch_tokens": 128, "save_steps": 20,
                             "held_out": 0.1, "max_steps": 20, "probe_samples": 0, "device": "cuda"}
    found = sft(Sft(**(usual | changed)), lambda _: None)
    assert found.exit_code == 0, str(found)
    return [row["loss"] for row in rows(out / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("changed", [{"dtype": "fp16"}, {"dtype": "fp16", "lora_r": 4}, {"master_dtype": "bf16"},
                                     {"master_dtype": "bf16", "optim": "adamw_8bit"}, {"dtype": "fp32"}])
def test_a_run_in_other_formats_follows_the_usual_one(changed: dict[str, Any], home: Path, tmp_path: Path):
    usual = losses(home, tmp_path / "usual", lora_r=changed.get("lora_r", 0))
    assert losses(home, tmp_path / "other", **changed) == pytest.approx(usual, rel=3e-2)


def test_draws_on_a_gpu_are_those_of_the_cpu():
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    here, there = (stochastically_rounded(values.to(device), 7, torch.tensor(5.0, device=device)).cpu() for device in ("cpu", "cuda"))
    assert torch.equal(here, there)
