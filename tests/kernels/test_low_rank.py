"""A linear layer with low-rank adapters in its own output: against its plain twin and float64, in every layout of ranges, and compiled."""

import pytest
import torch

from assay.kernels.low_rank import adapted_linear, adapts_in_place, plain_adapted_linear, register_adapted_linear

LAYOUTS = {  # rows in all; of each adapter first row, last + 1, scale, rank
    "one": (24, [(0, 24, 2.0, 4)]),
    "q, k and v": (32, [(0, 16, 2.0, 3), (16, 24, 0.5, 3), (24, 32, -1.0, 3)]),
    "only v, after rows without": (32, [(24, 32, 1.5, 2)]),
    "a gap and an end without, of two ranks": (40, [(0, 8, 1.0, 5), (16, 32, 3.0, 1)]),
}


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch):
    """Switch oneDNN off: its bf16 products end some virtual machines' processes by an illegal instruction."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def problem(layout, *shape, dtype=torch.float32):
    width, parts = LAYOUTS[layout]
    g = torch.Generator().manual_seed(len(parts))
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype)
    lefts = [draw(stop - start, rank) for start, stop, _, rank in parts]
    rights = [draw(rank, shape[-1]) for *_, rank in parts]
    return draw(*shape), draw(width, shape[-1]), [part[:3] for part in parts], lefts, rights, draw(*shape[:-1], width)


def gradients(function, x, weight, ranges, lefts, rights, d_out):
    x, *factors = (tensor.detach().clone().requires_grad_() for tensor in (x, *lefts, *rights))
    out = function(x, weight, ranges, factors[: len(lefts)], factors[len(lefts) :])
    out.backward(d_out)
    return [out.detach(), x.grad, *(factor.grad for factor in factors)]


def apart(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 16), (3, 5, 16)])
def test_values_and_gradients_are_the_plain_twins(layout, shape):
    given = problem(layout, *shape, dtype=torch.float64)
    for found, due in zip(gradients(adapted_linear, *given), gradients(plain_adapted_linear, *given), strict=True):
        assert found.shape == due.shape
        assert apart(found, due) < 1e-6  # the factors' gradients are kept in fp32


def test_an_adapter_of_zeros_is_the_matrix_bit_for_bit():
    x, weight, ranges, lefts, rights, _ = problem("q, k and v", 3, 5, 16)
    out = adapted_linear(x, weight, ranges, [torch.zeros_like(left) for left in lefts], rights)
    assert torch.equal(out, torch.nn.functional.linear(x, weight))


def test_the_factors_gradients_are_not_rounded_to_bf16():
    x, weight, ranges, lefts, rights, d_out = problem("q, k and v", 3, 50, 16, dtype=torch.bfloat16)
    exact = gradients(plain_adapted_linear, *(t.double() for t in (x, weight)), ranges, [t.double() for t in lefts],
                      [t.double() for t in rights], d_out.double())
    wide = [factor.float() for factor in (*lefts, *rights)]  # fp32 masters
    found = gradients(adapted_linear, x, weight, ranges, wide[:3], wide[3:], d_out)
    usual = gradients(plain_adapted_linear, x, weight, ranges, wide[:3], wide[3:], d_out)
    for i in range(2, len(found)):
        assert not torch.equal(found[i], found[i].bfloat16().float())
        assert apart(found[i], exact[i]) <= apart(usual[i], exact[i])  # both read an inner product that is rounded
    assert apart(found[0], exact[0]) < 5e-3
    assert apart(found[1], exact[1]) < 5e-3


def test_compiled_it_is_one_graph_with_the_same_bits():
    torch._dynamo.reset()
    register_adapted_linear()
    given = problem("q, k and v", 3, 5, 16)
    compiled = torch.compile(adapted_linear, dynamic=False, fullgraph=True, backend="aot_eager")
    for found, due in zip(gradients(compiled, *given), gradients(adapted_linear, *given), strict=True):
        assert torch.equal(found, due)


def test_it_is_for_half_precision_on_a_gpu_alone():
    x, weight, *_ = problem("one", 3, 16, dtype=torch.bfloat16)
    assert not adapts_in_place(x, weight, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operators_declare_what_they_return(layout):
    x, weight, ranges, lefts, rights, d_out = problem(layout, 6, 16)
    register_adapted_linear()
    starts, scales = [start for start, *_ in ranges], [scale for *_, scale in ranges]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.assay.adapted_forward.default, (x, weight, torch.cat(rights), lefts, starts, scales), test_utils=checks)
    inner = x @ torch.cat(rights).T
    torch.library.opcheck(torch.ops.assay.adapted_backward.default,
                          (d_out, x, weight, inner, torch.cat(rights), lefts, starts, scales), test_utils=checks)
