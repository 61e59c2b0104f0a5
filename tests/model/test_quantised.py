"""Quantised bases: what the codes stand for, live layers that equal dense ones, what is held of them, and losses near the file's."""

from pathlib import Path

import numpy as np
import pytest
import torch

from assay.data.batch import Batch
from assay.errors import ArtifactError
from assay.generate.sampler_weights import SamplerWeights, fingerprint
from assay.guard.training_guards import UpdateAccount, check_weights
from assay.learn.loop import train
from assay.learn.objectives import next_token
from assay.learn.optim import adamw
from assay.model import quantised
from assay.model.lora import attach, fresh, plan
from assay.model.placement import frozen_tensors, place_for_training
from assay.model.quantised import BLOCK, NF4, QuantisedLinear, QuantisedMatrix, dequantised, quantise, quantised_linear, refuse_far_codes
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, Destination, build_model, open_artifact
from assay.testing.tiny_models import nudge, save_hf_folder, tiny_model
from assay.verdict import Outcome

KINDS = ("nf4", "int8")
LOSS_BOUND = {"nf4": 0.05, "int8": 0.005, "bf16": 0.005}  # relative, of four steps on a tiny model


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf_folder(tmp_path_factory.mktemp("base") / request.param, nudge(tiny_model(request.param), 0.05))


def draw(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def adapted(base: Artifact, compute: torch.dtype = torch.float32) -> Transformer:
    model = build_model(base, None)
    attach(model, fresh(base.config, plan(base.config), 4, 2.0, 0, base.digest))
    return place_for_training(model, "cpu", compute=compute).train()


def losses(model: Transformer) -> tuple[list[float], dict[str, torch.Tensor]]:
    tokens = torch.randint(0, model.config.vocab, (4, 24), generator=torch.Generator().manual_seed(3))
    weight = torch.ones(tokens.shape)
    weight[:, 0] = 0
    steps = train(model, adamw(model.named_parameters(), 1e-2), [Batch(tokens, weight)] * 4, next_token, micro=2)
    return [float(step.loss) for step in steps], {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("columns", [128, 100])
def test_each_weight_becomes_the_nearest_level_of_its_block(columns: int):
    """Against a plain loop over blocks, in numpy; the last block of a row may be a short one."""
    weight = draw(3, columns)
    weight[1, :BLOCK] = 0
    made = dequantised(quantise(weight, "nf4"))
    for row, of_row in zip(weight.numpy(), made, strict=True):
        for start in range(0, columns, BLOCK):
            block = row[start : start + BLOCK]
            largest = np.abs(block).max()
            levels = np.array(NF4, np.float32)
            nearest = levels[np.abs(block[:, None] / (largest or 1) - levels).argmin(1)]
            due = torch.from_numpy(nearest * largest).bfloat16()
            assert torch.equal(of_row[start : start + BLOCK], due)
    codes, scale = quantise(weight, "int8")
    assert codes.dtype == torch.int8
    assert int(codes.abs().max()) == 127
    assert torch.allclose(scale[0, 0] * 127, weight[0, :BLOCK].abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_codes_alone_and_together(kind: quantised.QuantisedKind):
    """q, k and v are rows of one matrix here and three tensors in the file."""
    weight = draw(6, 192)
    whole, parts = quantise(weight, kind), [quantise(part, kind) for part in weight.split(2)]
    assert all(torch.equal(torch.cat([getattr(p, leaf) for p in parts]), getattr(whole, leaf)) for leaf in ("codes", "scale"))


def test_values_are_those_of_the_libraries_that_are_installed():
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed: pip install bitsandbytes")
    weight = draw(8, 256)
    theirs = functional.dequantize_4bit(*functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4"))
    assert torch.equal(dequantised(quantise(weight, "nf4")), theirs.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_quantised_layer_is_the_dense_one_with_its_weights_and_saves_none_of_them(kind: quantised.QuantisedKind, biased: bool):
    matrix, bias = quantise(draw(48, 128), kind), draw(1, 48)[0] if biased else None
    x = draw(5, 128).requires_grad_()
    twin, kept = x.detach().clone().requires_grad_(), list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel() * tensor.element_size()) or tensor,
                                                  lambda tensor: tensor):
        found = quantised_linear(x, matrix, bias)
    due = torch.nn.functional.linear(twin, dequantised(matrix).float(), bias)
    assert torch.equal(found, due)
    found.square().sum().backward()
    due.square().sum().backward()
    assert torch.equal(x.grad, twin.grad)
    assert sum(kept) == sum(t.numel() * t.element_size() for t in matrix), "codes and scales, and nothing of full precision"


@pytest.mark.parametrize("held", ["nf4", "int8", "bf16"])
def test_training_on_codes_is_training_on_what_they_stand_for(folder: Path, held: str):
    """To the last bit, and within a stated bound of training on the file itself."""
    live, dense, file = open_artifact(folder, to=Destination("cpu"), held=held), open_artifact(folder, held=held), open_artifact(folder)
    assert live.digest == dense.digest != file.digest
    assert live.held == held
    assert 0 < live.rounding < {"nf4": 0.15, "int8": 0.01, "bf16": 0.003}[held]
    on_codes, on_dense, on_file = (losses(adapted(base)) for base in (live, dense, file))
    assert on_codes[0] == on_dense[0]
    assert all(torch.equal(tensor, on_dense[1][name]) for name, tensor in on_codes[1].items())
    worst = max(abs(a - b) / b for a, b in zip(on_codes[0], on_file[0], strict=True))
    assert 0 < worst < LOSS_BOUND[held]


def test_a_bf16_file_in_bf16_is_the_file(tmp_path: Path):
    model = tiny_model()
    folder = save_hf_folder(tmp_path / "bf16", model.to(torch.bfloat16))
    assert open_artifact(folder, held="bf16").digest == open_artifact(folder).digest
    assert open_artifact(folder, held="bf16").held is None


def test_codes_are_frozen_tensors_like_others(folder: Path):
    base = open_artifact(folder, to=Destination("cpu"), held="nf4")
    model = adapted(base)
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert layers
    assert {layer.codes.dtype for layer in layers} == {torch.uint8}
    sampler, account, mark = SamplerWeights(model), UpdateAccount(model), fingerprint(model)
    assert not sampler.stale()
    shared = {p.data_ptr() for p in sampler.model.parameters()}
    assert all(layer.codes.data_ptr() in shared for layer in layers)
    again = open_artifact(folder, to=Destination("cpu", frozen_tensors(model), base.digest), held="nf4")
    live = {p.data_ptr() for p in model.parameters()}
    assert all(tensor.data_ptr() in live for name, tensor in again.tensors.items() if name.endswith(".codes"))
    assert check_weights(model).outcome is Outcome.PROVEN
    layers[0].codes.data[0, 0] ^= 1
    assert account.check_frozen().outcome is Outcome.REFUTED
    assert fingerprint(model) != mark
    moved = open_artifact(folder, to=Destination("cpu", frozen_tensors(model), base.digest), held="nf4")
    assert moved.digest == base.digest, "what is not shared is hashed anew"


def test_a_scale_of_another_block_is_refused():
    weight = draw(4, 256)
    for kind in KINDS:
        codes, scale = quantise(weight, kind)
        refuse_far_codes("blocks.0.mlp.up.weight", weight, dequantised(QuantisedMatrix(codes, scale)), kind)
        with pytest.raises(ArtifactError, match="a scale or a code is another block's"):
            refuse_far_codes("blocks.0.mlp.up.weight", weight, dequantised(QuantisedMatrix(codes, scale.roll(1, 1))), kind)
