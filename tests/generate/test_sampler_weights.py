"""The fingerprint sees every bit in its place; the served skeleton computes what the trainer's model computes."""

import pytest
import torch

from assay.errors import GuardStop
from assay.generate import sampler_weights
from assay.generate.sampler_weights import SamplerWeights, fingerprint
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config


def test_the_fingerprint_is_a_function_of_the_bits():
    one, two = initialised(tiny_config("llama"), 0), initialised(tiny_config("llama"), 0)
    assert fingerprint(one) == fingerprint(two)
    assert fingerprint(initialised(tiny_config("llama"), 1)) != fingerprint(one)


def test_one_bit_one_swap_and_one_name_change_it():
    model = initialised(tiny_config("llama"), 0)
    before, weight = fingerprint(model), model.blocks[1].mlp.down.weight
    with torch.no_grad():
        kept = weight.clone()
        weight.view(torch.int32)[3, 5] ^= 1
        assert fingerprint(model) != before
        weight.copy_(kept)
        assert fingerprint(model) == before
        weight[0, :2] = kept[0, :2].flip(0)
        assert fingerprint(model) != before
        weight.copy_(kept)
    swapped = initialised(tiny_config("llama"), 0)
    swapped.blocks[0], swapped.blocks[1] = swapped.blocks[1], swapped.blocks[0]
    assert fingerprint(swapped) != before


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32)], ids=str)
def test_it_does_not_matter_how_much_is_summed_at_once(dtypes, monkeypatch):
    """Pieces of tensors, tensors together, and two sizes of entries beside one another; against one sum over all bits."""
    model = initialised(tiny_config("llama"), 0)
    for place, block in enumerate(model.blocks):
        block.to(dtypes[place % len(dtypes)])
    found = set()
    for entries in (5, 100, 4099, 1 << 22):
        monkeypatch.setattr(sampler_weights, "_CHUNK", entries)
        found.add(fingerprint(model))
    assert len(found) == 1
    bits = [p.detach().flatten().view(torch.int32) for _, p in sorted(model.named_parameters()) if p.dtype == torch.float32]
    due = sum((2 * place + 1) * sampler_weights.ODD * bit for place, bit in enumerate(torch.cat(bits).tolist())) + sum(map(len, bits))
    monkeypatch.setattr(sampler_weights, "_CHUNK", 100)
    checked = sampler_weights._checksum([p for _, p in sorted(model.named_parameters()) if p.dtype == torch.float32])
    assert (int(checked) - due) % 2**64 == 0


def test_a_write_and_a_replacement_are_told_apart_from_nothing():
    model = initialised(tiny_config("llama"), 0)
    served = SamplerWeights(model)
    assert not served.written()
    assert not served.replaced()
    with torch.no_grad():
        model.norm.weight.add_(1)
    assert served.written()
    assert served.load() is False
    assert not served.written()
    model.norm.weight.data = model.norm.weight.data.clone()
    assert served.load() is True  # a graph would read the old address
    model.norm.weight = torch.nn.Parameter(model.norm.weight.detach().clone())
    assert served.replaced()


def test_parameters_in_the_compute_dtype_are_shared_not_copied():
    model = initialised(tiny_config("qwen3"), 0)
    served = SamplerWeights(model)
    assert [p.data_ptr() for p in served.model.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert served.model.blocks[0] is not model.blocks[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_casts_follow_the_source_and_change_no_number(family):
    """float64 masters computed in float32: the cast that each layer makes, made once. (bf16 on this CPU may be missing.)"""
    model = initialised(tiny_config(family), 0).double()
    model.compute_dtype = torch.float32
    served, tokens = SamplerWeights(model), torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(served.model(tokens), model(tokens))
        for parameter in model.parameters():
            parameter.mul_(1.5)
        assert not torch.equal(served.model(tokens), model(tokens))
        served.load()
        assert torch.equal(served.model(tokens), model(tokens))


def test_the_trainers_compiled_code_stays_with_the_trainer():
    model = initialised(tiny_config("llama"), 0)
    for block in model.blocks:
        block.compile(backend="eager")
    assert all(module._compiled_call_impl is None for module in SamplerWeights(model).model.modules())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_sampler_with_a_device_of_its_own_runs_on_copies_that_are_handed_over_by_digest(family):
    """On a CPU the second device is the first: a copy is a copy. GPT-2's tied head is one of them, in another dtype."""
    model = initialised(tiny_config(family), 0).double()
    model.compute_dtype = torch.float32
    served, tokens = SamplerWeights(model, "cpu"), torch.arange(20)[None]
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert not own & {parameter.data_ptr() for parameter in served.model.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.25)
        assert len(served.stale()) == len(list(served.model.parameters()))
        served.load()
        assert served.stale() == []
        assert torch.equal(served.model(tokens), model(tokens))


@pytest.mark.parametrize("planted", ["not renewed", "one bit", "another tensor's"])
def test_a_stale_copy_is_found_by_its_digest_before_anything_is_sampled(planted, monkeypatch):
    model = initialised(tiny_config("llama"), 0)
    served = SamplerWeights(model, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125)
    copy_all, victim = torch._foreach_copy_, served.model.blocks[1].mlp.down.weight

    def incompletely(targets, sources):
        before = victim.detach().clone()
        copy_all(targets, sources)
        if planted == "not renewed":
            victim.copy_(before)
        elif planted == "one bit":
            victim.view(torch.int32)[3, 5] ^= 1
        else:
            victim.copy_(served.model.blocks[0].mlp.down.weight)

    monkeypatch.setattr(torch, "_foreach_copy_", incompletely)
    with pytest.raises(GuardStop, match=r"1 tensors on cpu .*blocks.1.mlp.down.weight"):
        served.load()
    monkeypatch.undo()
    served.load()
