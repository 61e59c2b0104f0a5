"""Frozen weights on a GPU: once, in the file's dtype, for trainer, sampler and parent; the plan beside what is used."""

import gc
from pathlib import Path

import pytest
import torch

from assay.data.batch import Batch
from assay.generate.sampler_weights import SamplerWeights
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import train
from assay.learn.objectives import next_token
from assay.learn.optim import adamw
from assay.model.lora import attach, fresh, plan
from assay.model.placement import place_for_inference, place_for_training
from assay.recipes.memory_plan import NEAR, PlannedWork, plan_memory, planned_model
from assay.recipes.options import Sft
from assay.recipes.starting_model import StartingModel, load_start, reopen_parent
from assay.store.artifact import build_model, open_artifact
from assay.store.checkpoint import write_checkpoint
from assay.store.saving import Lineage, model_contents
from assay.testing.tiny_models import nudge, tiny_model, tokenizer_and_stops

pytestmark = pytest.mark.gpu
WIDE = {"vocab": 32768, "width": 1024, "depth": 4, "heads": 16, "kv_heads": 8, "head_dim": 64, "hidden": 4096, "max_length": 2048,
        "windows": (None,) * 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("frozen") / "base"
    model = nudge(tiny_model("qwen3", **WIDE), 0.01)
    write_checkpoint(where, model_contents(model, *tokenizer_and_stops(), Lineage("new"), dtype=torch.bfloat16))
    return where


def started(folder: Path, out: Path, **options: bool) -> StartingModel:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return load_start(Sft(model=str(folder), data=(), out=str(out), lora_r=16, **options), "cuda", lambda _: None)


def batch(vocab: int, rows: int = 4, length: int = 1024) -> Batch:
    tokens = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(3))
    weight = torch.ones(tokens.shape)
    weight[:, 0] = 0
    return Batch(tokens, weight)


def losses(model, given: Batch, steps: int = 4) -> list[float]:
    optimizer = adamw(model.named_parameters(), 1e-3)
    made = train(model, optimizer, [given] * steps, next_token, micro=len(given), accumulate=GraphedAccumulate())
    return [float(step.loss) for step in made]


def test_frozen_weights_are_on_the_device_once(folder: Path, tmp_path: Path):
    before = torch.cuda.memory_allocated()
    start = started(folder, tmp_path / "run")
    stored = planned_model(folder).stored
    trained = sum(4 * p.numel() for p in start.model.parameters() if p.requires_grad)
    assert torch.cuda.memory_allocated() - before < 1.05 * (stored + trained) + (8 << 20)
    held = torch.cuda.memory_allocated()
    sampler = SamplerWeights(start.model)
    parent = place_for_inference(build_model(reopen_parent(start), None), "cuda")
    assert torch.cuda.memory_allocated() - held < trained + (8 << 20), "sampler and parent share what is frozen"
    frozen = {p.data_ptr() for p in start.model.parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in parent.parameters()} <= frozen
    assert frozen <= {p.data_ptr() for p in sampler.model.parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_on_bf16_is_training_on_the_same_base_in_fp32(folder: Path, tmp_path: Path, checkpointing: bool):
    start = started(folder, tmp_path / "run", gradient_checkpointing=checkpointing)
    given = batch(start.model.config.vocab)
    found = losses(start.model, given)
    base = open_artifact(folder)
    wide = build_model(base)
    attach(wide, fresh(base.config, plan(base.config), 16, 2.0, 0, base.digest))
    due = losses(place_for_training(wide, "cuda", recompute=checkpointing).train(), given)
    assert found == pytest.approx(due, rel=1e-4)


def test_the_plan_is_near_what_a_step_takes(folder: Path, tmp_path: Path):
    gc.collect()  # the models of other tests
    before = torch.cuda.memory_allocated()
    start = started(folder, tmp_path / "run")
    losses(start.model, batch(start.model.config.vocab))
    parts = plan_memory(planned_model(folder), PlannedWork(4, 1024, lora_r=16))
    planned, used = parts.total - parts.parts["preflight"] - parts.parts["saving"], torch.cuda.max_memory_allocated() - before
    assert abs(planned / used - 1) < 2 * NEAR, f"planned {planned / 2**20:.0f} MiB, used {used / 2**20:.0f}"
