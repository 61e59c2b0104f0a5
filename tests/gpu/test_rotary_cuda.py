"""The rotation's kernel on CUDA: gradients against float64, in compiled blocks, recomputed, and in a graph of the whole step."""

from dataclasses import replace

import pytest
import torch

from assay.data.batch import Batch
from assay.kernels.rotary import fused_rotated, plain_rotated, rotated, rotated_backward
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import accumulated
from assay.learn.objectives import next_token
from assay.model import transformer
from assay.model.placement import place_for_training
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config

pytestmark = pytest.mark.gpu


def apart(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def problem(B, T, H, K, d, batches=1):
    """A product and its angles, then gradients as attention hands them back: views of (B, heads, T, d)."""
    g = torch.Generator("cuda").manual_seed(d)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")
    angle = 3 * draw(batches, T, 1, d // 2)
    gradients = [draw(B, heads, T, d).bfloat16().transpose(1, 2) for heads in (H, K, K)]
    return (draw(B, T, (H + 2 * K) * d).bfloat16(), angle.cos(), angle.sin(), H, K), gradients


def turned_back(d_q, d_k, d_v, cos, sin):
    back = torch.complex(cos.double(), -sin.double())
    d_q, d_k = (torch.cat([(z := torch.complex(*d.double().chunk(2, -1)) * back).real, z.imag], -1) for d in (d_q, d_k))
    return torch.cat([d_q, d_k, d_v.double()], 2).flatten(2)


def gradient(function, given, gradients):
    qkv = given[0].detach().clone().requires_grad_()
    torch.autograd.backward(function(qkv, *given[1:]), gradients)
    return qkv.grad


@pytest.mark.parametrize("shape", [
    (16, 1024, 9, 3, 64), (3, 1001, 4, 2, 80, 3), (2, 77, 32, 8, 128, 2), (1, 1, 1, 1, 2), (5, 33, 3, 1, 24)])
def test_gradients_are_off_by_one_rounding(shape):
    given, gradients = problem(*shape)
    exact = turned_back(*gradients, *given[1:3])
    found = gradient(fused_rotated, given, gradients)
    assert found.dtype == torch.bfloat16
    assert apart(found, exact) < 2.5e-3
    assert apart(found, exact) <= 1.001 * apart(gradient(plain_rotated, given, gradients), exact) + 1e-6
    values = given[0].shape[-1] - gradients[2].shape[2] * gradients[2].shape[3]
    assert torch.equal(found[..., values:], gradients[2].flatten(2))


@pytest.mark.parametrize("launch", [{"rows": 1}, {"rows": 4}, {"rows": 2, "block": 128}, {"rows": 8, "block": 256}, {"warps": 8}])
def test_every_launch_shape_gives_the_same_bits(launch):
    given, gradients = problem(3, 333, 9, 3, 64)
    assert torch.equal(rotated_backward(*gradients, *given[1:3], **launch), rotated_backward(*gradients, *given[1:3]))


def test_compiled_in_one_graph_it_gives_the_same():
    torch._dynamo.reset()
    given, gradients = problem(4, 128, 9, 3, 64)
    eager = gradient(fused_rotated, given, gradients)
    assert torch.equal(gradient(torch.compile(rotated, fullgraph=True, dynamic=False), given, gradients), eager)


@pytest.mark.parametrize("shape", [
    (1, 32768, 9, 3, 64), (3, 1001, 4, 2, 80, 3), (2, 77, 32, 8, 128, 2), (1, 1, 1, 1, 2), (5, 33, 3, 1, 24)])
def test_where_nothing_trains_one_kernel_turns(shape):
    given, _ = problem(*shape)
    exact = plain_rotated(given[0].double(), given[1].double(), given[2].double(), *given[3:])
    with torch.no_grad():
        found, plain = rotated(*given), plain_rotated(*given)
    assert found[0]._base is found[1]._base  # q and k of one tensor that the kernel wrote
    for one, other, due in zip(found, plain, exact, strict=True):
        assert apart(one, due) <= 1.001 * apart(other, due) + 1e-6


def test_in_fp32_and_where_a_compiler_fuses_it_the_twin_answers():
    given, _ = problem(2, 5, 3, 1, 8)
    qkv = given[0].requires_grad_()
    assert rotated(qkv, *given[1:])[0].grad_fn.name() == "_RotatedBackward"
    assert rotated(qkv.float(), *given[1:])[0].grad_fn.name() == "SplitWithSizesBackward0"
    with torch.no_grad():
        compiled = torch.compile(rotated, fullgraph=True, dynamic=False)(qkv, *given[1:])
        assert all(apart(*both) < 4e-3 for both in zip(compiled, plain_rotated(qkv, *given[1:]), strict=True))


# ── in the model ──────────────────────────────────────────────────────────────────────────────────────────────────────

def batch(rows=4, length=96):
    tokens = torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(0))
    weight = torch.ones(rows, length)
    weight[:, 0] = 0
    return Batch(tokens, weight)


def loss_and_gradients(family, accumulate, **placement):
    torch._dynamo.reset()
    config = replace(tiny_config(family), head_dim=64, heads=3, kv_heads=1, width=192)
    model = place_for_training(initialised(config, 0), "cuda", **placement)
    one = batch()
    for _ in range(2):  # a graph's second replay is no warm-up
        model.zero_grad()
        loss = accumulate(model, next_token, one, len(one), float(one.weight.sum())).loss.item()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "mixed"])  # in "mixed" every layer mixes in the first layer's values
@pytest.mark.parametrize(("graphed", "placement"), [
    (False, {"compile": False}), (False, {"compile": True}), (False, {"compile": True, "recompute": True}), (True, {"compile": True}),
    (True, {"compile": True, "recompute": True})],
    ids=["eager", "compiled", "recomputed", "graphed", "graphed and recomputed"])
def test_a_model_trains_as_without_the_kernel(family, graphed, placement, monkeypatch):
    """No further from fp32 than bf16 without the kernel is, but for chance."""
    accumulate = GraphedAccumulate() if graphed else accumulated
    found, gradients = loss_and_gradients(family, accumulate, **placement)
    exact, due = loss_and_gradients(family, accumulated, compile=False, compute=torch.float32)
    monkeypatch.setattr(transformer, "rotated", plain_rotated)
    plain, usual = loss_and_gradients(family, accumulated, compile=False)
    assert abs(found - exact) < 2e-3
    assert abs(found - plain) < 2e-3
    for name, gradient in due.items():
        chance = 2e-3 if gradient.numel() > 16 else 2**-7  # one rounding of bf16, where there is nothing to average over
        assert apart(gradients[name], gradient) < 1.3 * apart(usual[name], gradient) + chance, name


@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_a_block_compiles_into_one_graph(family, monkeypatch):
    """A Block with the kernel compiles whole, and with the same values and gradients as without it."""
    def trained():
        torch._dynamo.reset()
        model = place_for_training(initialised(tiny_config(family), 0), "cuda", compile=False)
        for block in model.blocks:
            block.compile(dynamic=False, fullgraph=True)
        logits = model(batch().tokens.cuda())
        logits.float().square().sum().backward()
        return logits, {name: parameter.grad for name, parameter in model.named_parameters()}

    logits, gradients = trained()
    monkeypatch.setattr(transformer, "rotated", plain_rotated)
    due, usual = trained()
    assert apart(logits, due) < 1e-2
    for name, gradient in usual.items():
        assert apart(gradients[name], gradient) < 2e-2, name
