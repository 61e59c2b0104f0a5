"""Adapters: nothing at first, live equals merged, and the base gets its own bits back."""

import pytest
import torch

from assay.errors import ArtifactError, UsageError
from assay.model.lora import LoraLinear, attach, detach, fresh, plan
from assay.model.patch import LowRank, Patch, patched, patched_tensors
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config

TOKENS = torch.randint(0, 320, (2, 20), generator=torch.Generator().manual_seed(0))


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained(patch: Patch) -> Patch:
    g = torch.Generator().manual_seed(5)
    low_rank = {name: tuple(LowRank(p.start, p.stop, torch.randn(p.left.shape, generator=g) * 0.1, p.right, p.scale) for p in parts)
                for name, parts in patch.low_rank.items()}
    return Patch(patch.parent, low_rank, patch.replaced)


def adapter(config, targets=("q_proj", "v_proj", "down_proj", "gate_proj")) -> Patch:
    return fresh(config, plan(config, targets), rank=4, scale=2.0, seed=1, parent="base")


def test_a_fresh_adapter_equals_no_adapter():
    model = initialised(tiny_config(), 0)
    before = model(TOKENS)
    attach(model, adapter(model.config))
    assert torch.equal(model(TOKENS), before)


def test_live_equals_merged_and_detaching_restores_the_bits():
    model = initialised(tiny_config(), 0)
    before, patch = bits(model), trained(adapter(model.config))
    base = model(TOKENS).detach()
    attach(model, patch)
    live = model(TOKENS).detach()
    back = detach(model, "base")
    assert all(torch.equal(before[name], tensor) for name, tensor in bits(model).items())
    with patched(model, back):
        torch.testing.assert_close(model(TOKENS), live, atol=1e-5, rtol=1e-5)
        assert (live - base).abs().max() > 1e-2
    assert all(torch.equal(before[name], tensor) for name, tensor in bits(model).items())


def test_an_error_inside_the_block_restores_too():
    model = initialised(tiny_config(), 0).bfloat16()
    before = bits(model)
    with pytest.raises(KeyboardInterrupt), patched(model, trained(adapter(model.config))):
        raise KeyboardInterrupt
    assert all(torch.equal(before[name], tensor) for name, tensor in bits(model).items())


def test_only_the_adapter_is_trained():
    model = initialised(tiny_config(), 0)
    parameters = attach(model, trained(adapter(model.config)))
    model(TOKENS).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in parameters)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    layers = [m for m in model.modules() if isinstance(m, LoraLinear)]
    assert len(parameters) == 2 * sum(len(layer.ranges) for layer in layers) == 16


def test_a_target_that_matches_nothing_is_an_error():
    with pytest.raises(UsageError, match="in_proj match no layer"):
        plan(tiny_config(), ("q_proj", "in_proj"))


@pytest.mark.parametrize("half", ["gate_proj", "up_proj"])
def test_half_of_what_peft_holds_as_one_matrix_is_refused_before_it_is_trained(half):
    with pytest.raises(UsageError, match=f"LoRA target {half} of a qwen3_moe's experts without its other half"):
        plan(tiny_config("qwen3_moe"), ("q_proj", half))
    assert plan(tiny_config("qwen3_moe"), ("gate_proj", "up_proj"))
    assert plan(tiny_config(), (half,)), "where there are no experts each is a matrix"


def test_a_patch_fits_one_parent_only():
    model = initialised(tiny_config(), 0)
    tensors, patch = dict(model.named_parameters()), trained(adapter(model.config))
    merged = patched_tensors(tensors, patch, "base")
    assert not torch.equal(merged["blocks.0.mlp.down.weight"], tensors["blocks.0.mlp.down.weight"])
    with pytest.raises(ArtifactError, match="merged already"):
        patched_tensors(tensors | merged, patch, "merged")
    model2 = initialised(tiny_config(), 0)
    attach(model2, patch)
    with pytest.raises(UsageError, match="has an adapter already"):
        attach(model2, patch)
