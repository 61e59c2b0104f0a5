"""Frozen weights: in the dtype of their file, once, for trainer, sampler and reference; what is trained has fp32 masters."""

from pathlib import Path

import pytest
import torch

from assay.data.batch import Batch
from assay.generate.sampler_weights import SamplerWeights, tensor_checksums
from assay.guard.loss_preflight import preflight_loss
from assay.guard.training_guards import UpdateAccount
from assay.learn.loop import train
from assay.learn.objectives import next_token
from assay.learn.optim import adamw
from assay.model.lora import attach, fresh, plan
from assay.model.placement import frozen_tensors, place_for_inference, place_for_training
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, build_model, open_artifact
from assay.store.checkpoint import write_checkpoint
from assay.store.saving import Lineage, model_contents
from assay.testing.tiny_models import nudge, tiny_model, tokenizer_and_stops
from assay.verdict import Outcome

STEPS = 4


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model whose file is bf16."""
    folder = tmp_path_factory.mktemp("frozen") / request.param
    model = nudge(tiny_model(request.param), 0.05)
    write_checkpoint(folder, model_contents(model, *tokenizer_and_stops(), Lineage("new"), dtype=torch.bfloat16))
    return open_artifact(folder)


def adapted(base: Artifact, compute: torch.dtype, dtype: torch.dtype | None = None) -> Transformer:
    model = build_model(base, dtype)
    attach(model, fresh(base.config, plan(base.config), 4, 2.0, 0, base.digest))
    return place_for_training(model, "cpu", compute=compute).train()


def batch(vocab: int) -> Batch:
    tokens = torch.randint(0, vocab, (4, 24), generator=torch.Generator().manual_seed(3))
    weight = torch.ones(tokens.shape)
    weight[:, 0] = 0
    return Batch(tokens, weight)


def trained(model: Transformer) -> tuple[list[float], dict[str, torch.Tensor]]:
    given = batch(model.config.vocab)
    steps = train(model, adamw(model.named_parameters(), 1e-2), [given] * STEPS, next_token, micro=2)
    return [float(step.loss) for step in steps], {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_what_is_frozen_keeps_its_dtype_and_what_is_trained_is_fp32(base: Artifact):
    model = adapted(base, torch.bfloat16)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    wide = adapted(base, torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_trainer_and_sampler_hold_the_frozen_weights_once(base: Artifact):
    model = adapted(base, torch.bfloat16)
    sampler = SamplerWeights(model)
    frozen = {name: p.data_ptr() for name, p in model.named_parameters() if not p.requires_grad}
    assert {name: p.data_ptr() for name, p in sampler.model.named_parameters() if name in frozen} == frozen
    assert {name for name, _ in sampler.copies} == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not sampler.stale()
    tensors = frozen_tensors(model)
    assert tensors.keys() == base.tensors.keys()
    shared = [name for name, tensor in tensors.items() if tensor.data_ptr() == base.tensors[name].data_ptr()]
    assert len(shared) == len(tensors), "opened once, and held once"


def test_training_on_a_bf16_base_is_training_on_the_same_base_in_fp32(base: Artifact):
    """To the last bit, whatever the model computes in: widening is exact, and rounding back is too."""
    for compute in (torch.bfloat16, torch.float32):
        losses, adapters = trained(adapted(base, compute))
        wide_losses, wide_adapters = trained(adapted(base, compute, torch.float32))
        assert losses == wide_losses
        assert all(torch.equal(adapters[name], tensor) for name, tensor in wide_adapters.items())
        assert losses[-1] < losses[0]


def test_the_preflight_computes_in_fp32_on_a_bf16_base(base: Artifact):
    model = adapted(base, torch.bfloat16)
    before = tensor_checksums(dict(model.named_parameters()))
    verdicts = preflight_loss(model, next_token, batch(model.config.vocab))
    assert {v.outcome for v in verdicts} == {Outcome.PROVEN}, "\n".join(map(str, verdicts))
    assert tensor_checksums(dict(model.named_parameters())) == before


def test_a_frozen_bit_that_changed_is_found(base: Artifact):
    model = adapted(base, torch.bfloat16)
    account = UpdateAccount(model)
    assert account.check_frozen().outcome is Outcome.PROVEN
    with torch.no_grad():
        weight = model.embed.weight.data = model.embed.weight.data.clone()  # its own: the base is others' too
        weight.view(torch.int16)[3, 5] ^= 1
    assert account.check_frozen().outcome is Outcome.REFUTED


def test_what_is_only_read_stays_in_its_dtype_too(base: Artifact):
    model = place_for_inference(build_model(base, None), "cpu", compute=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    tokens = batch(model.config.vocab).tokens
    wide = place_for_inference(build_model(base), "cpu", compute=torch.bfloat16)
    assert torch.equal(model(tokens), wide(tokens))


def test_a_folder_in_bf16_opens_to_the_same_bits(base: Artifact, tmp_path: Path):
    assert {tensor.dtype for tensor in base.tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(p, base.tensors[name].float()) for name, p in build_model(base).named_parameters())
