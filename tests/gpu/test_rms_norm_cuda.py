"""RMS norm beside its stream on CUDA: gradients against float64, in compiled blocks, and in a graph of the whole step."""

from dataclasses import replace

import pytest
import torch

from assay.data.batch import Batch
from assay.kernels.gated_activation import plain_gated
from assay.kernels.rms_norm import fused_stream_and_norm, norm_backward, plain_stream_and_norm
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import accumulated
from assay.learn.objectives import next_token
from assay.model import transformer
from assay.model.placement import place_for_training
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config

pytestmark = pytest.mark.gpu
EPS = 1e-5


def apart(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def problem(*shape):
    g = torch.Generator("cuda").manual_seed(shape[-1])
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")
    return [draw(*shape).bfloat16() for _ in range(3)], draw(shape[-1])


def gradients(function, d_stream, d_normed, x, weight):
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    stream, normed = function(x, weight, EPS)
    torch.autograd.backward([stream * 1, normed], [d_stream, d_normed])
    return x.grad, weight.grad


@pytest.mark.parametrize("shape", [(16, 1024, 576), (3, 1000), (5000, 4096), (1, 64), (40, 8192)])
def test_gradients_are_off_by_one_rounding(shape):
    given, weight = problem(*shape)
    exact = gradients(plain_stream_and_norm, *(tensor.double() for tensor in given), weight.bfloat16().double())
    d_x, d_weight = gradients(fused_stream_and_norm, *given, weight)
    assert (d_x.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)
    assert apart(d_x, exact[0]) < 2.5e-3
    assert apart(d_weight, exact[1]) < 1e-5


def test_the_same_inputs_give_the_same_bits():
    given, weight = problem(4096, 576)
    one, other = (norm_backward(*given, weight, EPS) for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("shape", [
    {"rows": 2}, {"rows": 4, "stages": 2}, {"most": 264, "stages": 3}, {"warps": 1}, {"warps": 2, "rows": 2}])
def test_every_launch_shape_computes_the_same(shape):
    given, weight = problem(1003, 576)
    d_x, d_weight = norm_backward(*given, weight, EPS, **shape)
    due = norm_backward(*given, weight, EPS)
    assert apart(d_x, due[0]) < 1e-4
    assert apart(d_weight, due[1]) < 1e-5


def batch(rows=4, length=96):
    tokens = torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(0))
    weight = torch.ones(rows, length)
    weight[:, 0] = 0
    return Batch(tokens, weight)


def loss_and_gradients(accumulate, **placement):
    torch._dynamo.reset()
    config = replace(tiny_config(), head_dim=64, heads=2, kv_heads=1, width=128)
    model = place_for_training(initialised(config, 0), "cuda", **placement)
    one = batch()
    for _ in range(2):  # a graph's second replay is no warm-up
        model.zero_grad()
        loss = accumulate(model, next_token, one, len(one), float(one.weight.sum())).loss.item()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("accumulate", "placement"), [
    (accumulated, {"compile": False}), (accumulated, {"compile": True}), (accumulated, {"compile": True, "recompute": True}),
    (GraphedAccumulate(), {"compile": True})], ids=["eager", "compiled", "recomputed", "graphed"])
def test_a_model_trains_as_without_the_kernels(accumulate, placement, monkeypatch):
    """No further from fp32 than bf16 without a kernel is, but for chance."""
    found, gradients = loss_and_gradients(accumulate, **placement)
    exact, due = loss_and_gradients(accumulated, compile=False, compute=torch.float32)
    monkeypatch.setattr(transformer, "uses_fused_norm", lambda x: False)
    monkeypatch.setattr(transformer, "gated", lambda inner, activation: plain_gated(inner, activation))
    plain, usual = loss_and_gradients(accumulated, compile=False)
    assert abs(found - exact) < 2e-3
    assert abs(found - plain) < 2e-3
    for name, gradient in due.items():
        assert apart(gradients[name], gradient) < 1.3 * apart(usual[name], gradient) + 2e-3, name


def test_a_block_compiles_into_one_graph():
    torch._dynamo.reset()
    model = place_for_training(initialised(tiny_config(), 0), "cuda", compile=False)
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True)
    model(batch().tokens.cuda()).float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
