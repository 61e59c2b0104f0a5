"""Quantised bases on a GPU: the CPU's bits, compiled and captured steps that equal dense ones, memory of codes alone, and the plan."""

from pathlib import Path

import pytest
import torch

from assay.data.batch import Batch
from assay.generate.engine import sample
from assay.generate.generation_request import Sampling
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import train
from assay.learn.low_bit_adamw import adamw_8bit
from assay.learn.objectives import next_token
from assay.learn.optim import adamw
from assay.model.lora import attach, fresh, plan
from assay.model.placement import place_for_inference, place_for_training
from assay.model.quantised import dequantised, quantise
from assay.recipes.memory_plan import NEAR, PlannedWork, plan_memory, planned_model
from assay.recipes.options import Sft
from assay.recipes.starting_model import StartingModel, load_start, reopen_parent
from assay.store.artifact import Artifact, Destination, build_model, open_artifact
from assay.store.checkpoint import write_checkpoint
from assay.store.saving import Lineage, model_contents
from assay.testing.tiny_models import nudge, tiny_model, tokenizer_and_stops

pytestmark = pytest.mark.gpu
KINDS = ("nf4", "int8")
SMALL = {"vocab": 2048, "width": 512, "depth": 2, "heads": 4, "kv_heads": 2, "head_dim": 128, "hidden": 1024, "max_length": 2048,
         "windows": (None,) * 2}
WIDE = {"vocab": 8192, "width": 2048, "depth": 6, "heads": 16, "kv_heads": 8, "head_dim": 128, "hidden": 8192, "max_length": 2048,
        "windows": (None,) * 6}


def written(where: Path, shape: dict) -> Path:
    model = nudge(tiny_model("qwen3", **shape), 0.01)
    write_checkpoint(where, model_contents(model, *tokenizer_and_stops(), Lineage("new"), dtype=torch.bfloat16))
    return where


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small enough for a CPU to make its codes too."""
    return written(tmp_path_factory.mktemp("quantised") / "small", SMALL)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that memory shows what is held."""
    return written(tmp_path_factory.mktemp("quantised") / "wide", WIDE)


def batch(vocab: int, rows: int = 2, length: int = 512) -> Batch:
    tokens = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(3))
    weight = torch.ones(tokens.shape)
    weight[:, 0] = 0
    return Batch(tokens, weight)


def losses(base: Artifact, optimizer=adamw, steps: int = 4, recompute: bool = False) -> list[float]:
    model = build_model(base, None)
    attach(model, fresh(base.config, plan(base.config), 16, 2.0, 0, base.digest))
    place_for_training(model, "cuda", recompute=recompute).train()
    made = train(model, optimizer(model.named_parameters(), 1e-3), [batch(base.config.vocab)] * steps, next_token, micro=1,
                 accumulate=GraphedAccumulate())
    return [float(step.loss) for step in made]


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_what_they_stand_for_are_the_cpu_s(kind):
    weight = torch.randn(257, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    here, there = quantise(weight, kind), quantise(weight.cuda(), kind)
    assert torch.equal(here.codes, there.codes.cpu())
    assert torch.equal(here.scale, there.scale.cpu())
    assert torch.equal(dequantised(here), dequantised(there).cpu())


def test_the_digest_is_the_cpu_s(small: Path):
    for kind in KINDS:
        assert open_artifact(small, to=Destination("cuda"), held=kind).digest == open_artifact(small, held=kind).digest


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_and_captured_steps_on_codes_are_those_on_dense_weights(small: Path, recompute: bool):
    codes = losses(open_artifact(small, to=Destination("cuda"), held="nf4"), recompute=recompute)
    dense = losses(open_artifact(small, held="nf4"), recompute=recompute)
    assert codes[-1] < codes[0]
    assert max(abs(a - b) / b for a, b in zip(codes, dense, strict=True)) < 2e-3


def test_the_compiled_backward_keeps_no_matrix(wide: Path):
    """Six layers of 67 million weights: what a compiler kept of them in bf16 would be 0.8 GB."""
    base = open_artifact(wide, to=Destination("cuda"), held="nf4")
    model = build_model(base, None)
    attach(model, fresh(base.config, plan(base.config), 4, 2.0, 0, base.digest))
    place_for_training(model, "cuda").train()
    part = batch(base.config.vocab, 1, 128).to("cuda")
    for _ in range(2):
        loss = next_token(model, part).total
        loss.backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = next_token(model, part).total
    assert torch.cuda.memory_allocated() - before < 400 << 20
    loss.backward()
    matrices = 2 * sum(t.numel() * (2 if t.dtype == torch.uint8 else 1) for n, t in model.named_parameters() if n.endswith(".codes"))
    assert torch.cuda.max_memory_allocated() - before < 0.75 * matrices


def started(folder: Path, out: Path, **options) -> StartingModel:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return load_start(Sft(model=str(folder), data=(), out=str(out), lora_r=16, **options), "cuda", lambda _: None)


def test_memory_is_what_was_planned_and_the_parent_is_shared(wide: Path, tmp_path: Path):
    before = torch.cuda.memory_allocated()
    start = started(wide, tmp_path / "run", base_dtype="nf4", gradient_checkpointing=True)
    held = torch.cuda.memory_allocated() - before
    work = PlannedWork(1, 1024, 16, checkpointing=True, base_dtype="nf4")
    planned = plan_memory(planned_model(wide), work)
    assert abs(held / (planned.parts["weights"] + planned.parts["masters"]) - 1) < NEAR
    assert reopen_parent(start).digest == start.parent.digest
    assert torch.cuda.memory_allocated() - before < held + (64 << 20)


def test_an_nf4_model_samples_what_the_dense_one_samples(small: Path):
    codes, dense = (place_for_inference(build_model(artifact, None), "cuda") for artifact in (
        open_artifact(small, to=Destination("cuda"), held="nf4"), open_artifact(small, held="nf4")))
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    said = [[c.ids for c in sample(model, prompts, (), Sampling(max_new=8, temperature=0.0))] for model in (codes, dense)]
    assert said[0] == said[1]


def test_moments_in_8_bits_learn_as_fp32_ones(small: Path):
    base = open_artifact(small, to=Destination("cuda"), held="int8")
    whole, few = losses(base, steps=6), losses(base, adamw_8bit, steps=6)
    assert few[-1] < few[0]
    assert abs(few[-1] - whole[-1]) / whole[-1] < 0.02
