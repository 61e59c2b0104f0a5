"""A linear layer with fp32 weights in a bf16 stream: bit for bit the usual one on the CPU, and its wide gradient against float64."""

import pytest
import torch
import torch.nn.functional as F

from assay.kernels.linear import linear, plain_linear, register_weight_gradient, trains_wide, wide_linear


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch):
    """Switch oneDNN off: its bf16 products end some virtual machines' processes by an illegal instruction."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def problem(*shape, out=24):
    g = torch.Generator().manual_seed(len(shape))
    draw = lambda *shape: torch.randn(*shape, generator=g)
    return draw(*shape).bfloat16(), draw(out, shape[-1]), draw(*shape[:-1], out).bfloat16()


def gradients(function, x, weight, d_out):
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    out = function(x, weight)
    out.backward(d_out)
    return out, x.grad, weight.grad


def apart(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_cpu_it_is_the_usual_layer_bit_for_bit(biased, dtype):
    x, weight, d_out = problem(3, 5, 16)
    bias = torch.arange(24.0) if biased else None
    due = lambda x, weight: F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
    found = gradients(lambda x, weight: linear(x, weight, bias), x.to(dtype), weight, d_out.to(dtype))
    assert all(torch.equal(*both) for both in zip(found, gradients(due, x.to(dtype), weight, d_out.to(dtype)), strict=True))


@pytest.mark.parametrize("shape", [(64, 16), (3, 50, 16), (2, 3, 7, 10)])
def test_the_weights_gradient_is_not_rounded_to_bf16(shape):
    x, weight, d_out = problem(*shape)
    exact = gradients(F.linear, x.double(), weight.bfloat16().double(), d_out.double())
    out, d_x, d_weight = gradients(wide_linear, x, weight, d_out)
    usual = gradients(lambda x, weight: plain_linear(x, weight, None), x, weight, d_out)
    assert torch.equal(out, usual[0])
    assert torch.equal(d_x, usual[1])
    assert d_weight.dtype == torch.float32
    assert apart(d_weight, exact[2]) < 1e-6
    assert apart(usual[2], exact[2]) > 1e-3  # what is gained


def test_it_is_for_fp32_weights_that_train_in_bf16():
    x, weight, _ = problem(4, 16)
    weight.requires_grad_()
    assert trains_wide(x, weight)
    assert not trains_wide(x.float(), weight)
    assert not trains_wide(x, weight.bfloat16())
    assert not trains_wide(x, weight.detach())  # as under an adapter
    with torch.no_grad():
        assert not trains_wide(x, weight)


def test_compiled_it_is_one_graph_that_converts_no_gradient():
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    register_weight_gradient()
    graphs = []
    compiler = lambda graph, _: (graphs.append(graph), make_boxed_func(graph.forward))[1]
    compiled = torch.compile(wide_linear, dynamic=False, fullgraph=True, backend=aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition))
    x, weight, d_out = problem(3, 5, 16)
    found, due = gradients(compiled, x, weight, d_out), gradients(wide_linear, x, weight, d_out)
    assert all(torch.equal(*both) for both in zip(found, due, strict=True))
    called = [node.target for node in graphs[1].graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.assay.weight_gradient.default) == 1
    assert torch.ops.aten._to_copy.default not in called  # the rounded weight was kept, too
