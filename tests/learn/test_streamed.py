"""A streamed model computes what the whole one does, bit for bit, and holds none of its large matrices between two products."""

import math

import pytest
import torch
from torch import Tensor

from assay.learn import streamed
from assay.learn.streamed import LazyTensors, Streaming, streamed_names
from assay.model.transformer import Transformer
from assay.testing.tiny_models import tiny_model

TOKENS = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def tiny_matrices_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "HELD_BYTES", 0)


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_values_and_gradients_are_those_of_the_whole_model():
    model = tiny_model("mixed").requires_grad_(True)
    whole = weights_of(model)
    model(TOKENS).square().sum().backward()
    due = {name: parameter.grad for name, parameter in model.named_parameters()}
    due_logits = model(TOKENS).detach()

    taken: dict[str, Tensor] = {}
    streaming = Streaming(model, "cpu", whole.__getitem__, taken.__setitem__)
    logits = model(TOKENS)
    assert torch.equal(logits, due_logits)
    logits.square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(taken) == set(streaming.names) == {name for name, gradient in found.items() if gradient is None}, "what left is not kept"
    assert all(torch.equal(taken.get(name, found[name]), gradient) for name, gradient in due.items())


def test_between_two_products_a_matrix_is_no_number_and_afterwards_the_model_has_shapes_alone():
    model, fetched = tiny_model("mixed"), list[str]()
    whole = weights_of(model)
    assert not model.recompute
    streaming = Streaming(model, "cpu", lambda name: (fetched.append(name), whole[name])[1])
    assert set(fetched) == set(whole) - set(streaming.names), "what is small, or is no layer's matrix, is there from the beginning"
    assert model.recompute, "or every matrix would be kept for the way back"
    for _ in range(2):
        model(TOKENS)
        held = weights_of(model)
        assert all(bool(held[name].isnan().all()) for name in streaming.names)
        assert all(torch.equal(held[name], whole[name]) for name in set(whole) - set(streaming.names))
    assert [fetched.count(name) for name in streaming.names] == [2] * len(streaming.names), "fetched for each product"
    streaming.end()
    assert not model.recompute
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_matrix_is_let_go_where_its_layer_fails():
    model = tiny_model("llama")
    whole = weights_of(model)
    streaming = Streaming(model, "cpu", whole.__getitem__)
    layer, name = model.blocks[0].mlp.down, "blocks.0.mlp.down.weight"
    assert name in streaming.names
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.ones(1, 7))
    assert bool(layer.weight.isnan().all())


def test_what_a_preflight_writes_to_and_what_is_small_stay(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("mixed")
    assert not [name for name in streamed_names(model) if name.endswith("attn.gate.weight")]
    assert "blocks.0.mlp.down.weight" in streamed_names(model)
    monkeypatch.setattr(streamed, "HELD_BYTES", 1 << 20)
    assert streamed_names(model) == []


def test_lazy_tensors_are_made_when_asked_for_and_know_their_names():
    made = list[str]()
    lazy = LazyTensors(["a", "b"], lambda name: (made.append(name), torch.full((), math.pi))[1])
    assert (list(lazy), len(lazy), made) == (["a", "b"], 2, [])
    assert float(lazy["b"]) == pytest.approx(math.pi)
    assert made == ["b"]
    with pytest.raises(KeyError, match="c"):
        lazy["c"]
