"""The gated activation's kernel on CUDA: gradients against float64 and against eager, and none of it where nothing trains."""

import pytest
import torch
import torch.nn.functional as F

from assay.kernels.gated_activation import fused_gated, gated, plain_gated

pytestmark = pytest.mark.gpu


def problem(*shape):
    g = torch.Generator("cuda").manual_seed(shape[-1])
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda").bfloat16()
    return (2 * draw(*shape)).requires_grad_(), draw(*shape[:-1], shape[-1] // 2)


def apart(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def gradient(function, inner, d_out):
    leaf = inner.detach().clone().requires_grad_()
    function(leaf).backward(d_out)
    return leaf.grad


@pytest.mark.parametrize("shape", [(16, 1024, 3072), (7, 2 * 1000), (3, 2 * 37), (1, 2)])
def test_gradients_are_off_by_one_rounding(shape):
    inner, d_out = problem(*shape)
    exact = gradient(lambda x: plain_gated(x, F.silu), inner.double(), d_out.double())
    found = gradient(fused_gated, inner, d_out)
    assert found.dtype == torch.bfloat16
    assert apart(found, exact) < 2.5e-3
    assert apart(found, exact) <= apart(gradient(lambda x: plain_gated(x, F.silu), inner, d_out), exact)


def test_compiled_in_one_graph_it_gives_the_same():
    inner, d_out = problem(64, 3072)
    eager = gradient(fused_gated, inner, d_out)
    compiled = gradient(torch.compile(lambda x: gated(x, F.silu), fullgraph=True, dynamic=False), inner, d_out)
    assert torch.equal(compiled, eager)


@pytest.mark.parametrize("shape", [(1, 32768, 3072), (7, 2 * 1000), (3, 2 * 37), (1, 2)])
def test_where_nothing_trains_one_kernel_rounds_once(shape):
    inner, _ = problem(*shape)
    exact = plain_gated(inner.detach().double(), F.silu)
    with torch.no_grad():
        found, plain = gated(inner, F.silu), plain_gated(inner, F.silu)
    assert found.dtype == torch.bfloat16
    assert apart(found, exact) < 2.5e-3
    assert apart(found, exact) <= apart(plain, exact)


def test_in_fp32_the_twin_answers():
    inner, _ = problem(5, 64)
    assert gated(inner, F.silu).grad_fn.name() == "_GatedBackward"
    assert gated(inner.float(), F.silu).grad_fn.name() == "MulBackward0"
