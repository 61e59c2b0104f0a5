"""The block's Triton kernels in Triton's interpreter, on the CPU. Run by test_interpreted.py.

Every comparison is with the plain twin in float64 on the same inputs.
"""

import pytest
import torch
import torch.nn.functional as F

from assay.kernels import gated_activation, rms_norm, rotary
from assay.kernels.gated_activation import fused_gated, gated_backward, gated_forward, plain_gated
from assay.kernels.rms_norm import fused_stream_and_norm, norm_backward, plain_stream_and_norm
from assay.kernels.rotary import fused_rotated, plain_rotated, rotated_backward, rotated_forward
from assay.kernels.unpack_codes import unpacked
from assay.model import quantised, transformer
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's exp, overflowing to inf as it should
BF16 = 2**-7  # a step of bf16, relative: the interpreter cuts off where a GPU rounds
EPS = 1e-5


def drawn(*shape, dtype=torch.float32, spread=1.0, seed=0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=g) * spread).to(dtype)


def doubled(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def apart(found, expected):
    """Largest difference, relative to the largest entry."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


# ── the gated activation ──────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize(("shape", "block"), [((3, 5, 96), 64), ((7, 2 * 37), 128), ((1, 2), 1024)])  # rows end inside a block
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, BF16)])
def test_gated_gradients(shape, block, dtype, bound):
    inner, d_out = drawn(*shape, dtype=dtype, spread=3.0), drawn(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)
    (inner64,) = doubled(inner)
    plain_gated(inner64, F.silu).backward(d_out.double())
    found = gated_backward(d_out, inner, block=block)
    assert found.dtype == dtype
    assert apart(found, inner64.grad) < bound


@pytest.mark.parametrize(("shape", "block"), [((3, 5, 96), 64), ((7, 2 * 37), 128), ((1, 2), 1024)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, BF16)])
def test_gated_where_nothing_trains(shape, block, dtype, bound):
    inner = drawn(*shape, dtype=dtype, spread=3.0)
    found = gated_forward(inner, block=block)
    assert found.dtype == dtype
    assert apart(found, plain_gated(inner.double(), F.silu)) < bound
    assert gated_forward(torch.tensor([[-200.0, 200.0, 3.0, 3.0]])).tolist() == [[0.0, 600.0]]


def test_gated_far_out_is_finite_and_zero_where_the_gate_is_shut():
    inner = torch.tensor([[-200.0, 200.0, 3.0, 3.0]])
    assert gated_backward(torch.ones(1, 2), inner).tolist() == [[0.0, 3.0, 0.0, 200.0]]


def test_gated_through_autograd_and_strided_gradients():
    inner = drawn(4, 6, 96).requires_grad_()
    weights = drawn(6, 4, 48, seed=2)
    (fused_gated(inner) * weights.transpose(0, 1)).sum().backward()
    (inner64,) = doubled(inner)
    (plain_gated(inner64, F.silu) * weights.transpose(0, 1)).sum().backward()
    assert torch.equal(fused_gated(inner), plain_gated(inner, F.silu))
    assert apart(inner.grad, inner64.grad) < 1e-6


# ── the norm ──────────────────────────────────────────────────────────────────────────────────────────────────────────

def exact(d_stream, d_normed, x, weight):
    x64, weight64 = doubled(x, weight)
    stream, normed = plain_stream_and_norm(x64, weight64, EPS)
    torch.autograd.backward([stream * 1.0, normed], [d_stream.double(), d_normed.double()])
    return x64.grad, weight64.grad


@pytest.mark.parametrize(("shape", "most", "rows"), [((37, 64), 8, 1), ((3, 5, 36), 4, 2), ((1, 576), 8, 1), ((9, 100), 2, 4)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, BF16)])
def test_norm_gradients(shape, most, rows, dtype, bound):
    """The programs share the rows unevenly; the weight keeps its own dtype, and so does its gradient."""
    d_stream, d_normed, x = (drawn(*shape, dtype=dtype, seed=seed) for seed in range(3))
    weight = drawn(shape[-1], dtype=torch.bfloat16, seed=3).float()  # its rounding to bf16 costs nothing
    d_x, d_weight = norm_backward(d_stream, d_normed, x, weight, EPS, most=most, rows=rows)
    d_x64, d_weight64 = exact(d_stream, d_normed, x, weight)
    assert (d_x.dtype, d_weight.dtype) == (dtype, torch.float32)
    assert apart(d_x, d_x64) < bound
    assert apart(d_weight, d_weight64) < 1e-6


def test_norm_gradients_of_rows_next_to_nothing_count_eps():
    d_stream, d_normed, x, weight = torch.zeros(4, 64), drawn(4, 64), drawn(4, 64, spread=1e-3, seed=1), drawn(64, seed=2)
    d_x, d_weight = norm_backward(d_stream, d_normed, x, weight, EPS)
    d_x64, d_weight64 = exact(d_stream, d_normed, x, weight)
    assert apart(d_x, d_x64) < 1e-6
    assert apart(d_weight, d_weight64) < 1e-6


def test_norm_through_autograd_rounds_the_weight_as_the_twin_does():
    x, weight = drawn(6, 64, dtype=torch.bfloat16).requires_grad_(), drawn(64, seed=1).requires_grad_()
    stream, normed = fused_stream_and_norm(x, weight, EPS)
    assert torch.equal(stream, x)
    assert torch.equal(normed, plain_stream_and_norm(x, weight, EPS)[1])
    d_stream, d_normed = (drawn(6, 64, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    torch.autograd.backward([stream, normed], [d_stream, d_normed])
    d_x64, d_weight64 = exact(d_stream, d_normed, x, weight.to(torch.bfloat16))
    assert apart(x.grad, d_x64) < 2 * BF16  # the weight is cut off too
    assert apart(weight.grad, d_weight64) < 1e-6


# ── the rotation ──────────────────────────────────────────────────────────────────────────────────────────────────────

def angles(batches, T, half):
    turn = drawn(batches, T, 1, half, spread=3.0, seed=9)
    return turn.cos(), turn.sin()


def turned_back(d_q, d_k, d_v, cos, sin):
    """Gradient of a rotation in float64, as complex numbers: the rotation back."""
    back = torch.complex(cos.double(), -sin.double())
    d_q, d_k = (torch.cat([(z := torch.complex(*d.double().chunk(2, -1)) * back).real, z.imag], -1) for d in (d_q, d_k))
    return torch.cat([d_q, d_k, d_v.double()], 2).flatten(2)


LAYOUTS = {  # of a (B, T, H, d) gradient in memory
    "by_token": lambda *shape, **how: drawn(*shape, **how),
    "by_head": lambda B, T, H, d, **how: drawn(B, H, T, d, **how).transpose(1, 2),
    "within_wider": lambda B, T, H, d, **how: drawn(B, T, H + 3, d + 2, **how)[:, :, 1:-2, 2:],
    "backwards": lambda B, T, H, d, **how: drawn(d, H, T, B, **how).permute(3, 2, 1, 0),
    "of_a_sum": lambda B, T, H, d, **how: drawn(1, 1, 1, 1, **how).expand(B, T, H, d),
}


ROTATIONS = [(*shape, torch.float32, 1e-6) for shape in (
    (2, 5, 3, 1, 16, 2, 512), (3, 7, 4, 2, 12, 4, 16), (1, 9, 2, 2, 10, 1, 32), (2, 3, 9, 3, 64, 2, 512), (1, 1, 1, 1, 2, 8, 512))]
ROTATIONS += [(2, 5, 3, 1, 16, 2, 512, torch.bfloat16, BF16)]


@pytest.mark.parametrize(("B", "T", "H", "K", "d", "rows", "block", "dtype", "bound"), ROTATIONS)
def test_rotated_gradients(B, T, H, K, d, rows, block, dtype, bound):
    """Tokens and pairs end inside a program; each row of the batch has angles of its own, or all have the same."""
    for batches in {1, B}:
        gradients = [LAYOUTS["by_head"](B, T, heads, d, dtype=dtype, seed=seed) for seed, heads in enumerate((H, K, K))]
        found = rotated_backward(*gradients, *angles(batches, T, d // 2), rows=rows, block=block)
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert apart(found, turned_back(*gradients, *angles(batches, T, d // 2))) < bound


@pytest.mark.parametrize(("B", "T", "H", "K", "d", "rows", "block", "dtype", "bound"), ROTATIONS)
def test_turned_where_nothing_trains(B, T, H, K, d, rows, block, dtype, bound):
    for batches in {1, B}:
        qkv, (cos, sin) = drawn(B, T, (H + 2 * K) * d, dtype=dtype), angles(batches, T, d // 2)
        found = rotated_forward(qkv, cos, sin, H, K, rows=rows, block=block)
        for part, due in zip(found, plain_rotated(qkv.double(), cos.double(), sin.double(), H, K), strict=True):
            assert part.shape == due.shape
            assert part.dtype == dtype
            assert apart(part, due) < bound
        assert torch.equal(found[2].flatten(2), qkv[..., (H + K) * d :])


@pytest.mark.parametrize("layouts", [("by_token",) * 3, ("by_head", "by_token", "within_wider"), ("backwards", "of_a_sum", "by_head"),
                                     ("within_wider", "backwards", "of_a_sum")], ids="-".join)
def test_rotated_gradients_are_read_where_they_lie(layouts):
    B, T, H, K, d = 2, 5, 4, 2, 16
    gradients = [LAYOUTS[layout](B, T, heads, d, seed=seed) for seed, (layout, heads) in enumerate(zip(layouts, (H, K, K), strict=True))]
    found = rotated_backward(*gradients, *angles(B, T, d // 2))
    assert apart(found, turned_back(*gradients, *angles(B, T, d // 2))) < 1e-6


def test_rotated_gradients_of_values_are_copied():
    d_q, d_k, d_v = (drawn(2, 3, heads, 8, dtype=torch.bfloat16, seed=heads) for heads in (4, 2, 2))
    assert torch.equal(rotated_backward(d_q, d_k, d_v, *angles(1, 3, 4))[..., 48:], d_v.flatten(2))


@pytest.mark.parametrize("used", [(1, 1, 1), (1, 0, 0), (0, 0, 1)])  # what nobody used has no gradient
def test_rotated_through_autograd(used):
    B, T, H, K, d = 2, 5, 3, 1, 8
    cos, sin = angles(1, T, d // 2)
    qkv = drawn(B, T, (H + 2 * K) * d).requires_grad_()
    outs = fused_rotated(qkv, cos, sin, H, K)
    assert all(torch.equal(out, due) for out, due in zip(outs, plain_rotated(qkv, cos, sin, H, K), strict=True))
    given = [LAYOUTS["by_head"](*out.shape, seed=seed) * use for seed, (out, use) in enumerate(zip(outs, used, strict=True))]
    chosen = [place for place, use in enumerate(used) if use]
    torch.autograd.backward([outs[place] for place in chosen], [given[place] for place in chosen])
    assert apart(qkv.grad, turned_back(*given, cos, sin)) < 1e-6


# ── in the model ──────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.fixture
def fused(monkeypatch):
    """Use the fused path, as on a GPU in bf16."""
    gated_activation.register_gated_backward()
    rms_norm.register_norm_backward()
    rotary.register_rotated_backward()
    monkeypatch.setattr(transformer, "uses_fused_norm", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(transformer, "gated", lambda inner, _: fused_gated(inner))
    monkeypatch.setattr(transformer, "rotated", fused_rotated)


def gradients(model, tokens):
    model.zero_grad()
    F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("family", "recompute"), [("llama", True), ("qwen3", False), ("mixed", False)])
def test_a_model_trains_with_the_same_gradients(family, recompute, request):
    model = initialised(tiny_config(family), 0)
    tokens = torch.randint(0, 320, (2, 9), generator=torch.Generator().manual_seed(0))
    due = gradients(model, tokens)
    request.getfixturevalue("fused")
    model.recompute = recompute
    found = gradients(model, tokens)
    for name, gradient in due.items():
        assert apart(found[name], gradient) < 1e-5, name


def test_a_compiled_backward_adds_nothing_to_the_stream_and_makes_nothing_again(request):
    """One graph. The kernel adds the residual's gradient, and what the linear layers need again was kept."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = []
    compiler = lambda graph, _: (graphs.append(graph), make_boxed_func(graph.forward))[1]
    model = initialised(tiny_config(), 0)
    tokens = torch.randint(0, 320, (2, 9), generator=torch.Generator().manual_seed(0))
    due = gradients(model, tokens)
    request.getfixturevalue("fused")
    model.blocks[0].compile(dynamic=False, fullgraph=True, backend=aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition))
    found = gradients(model, tokens)
    for name, gradient in due.items():
        assert apart(found[name], gradient) < 1e-5, name
    called = [node.target for node in graphs[1].graph.nodes if node.op == "call_function"]
    of_mlp, of_attn = (node for node in graphs[1].graph.nodes if node.target is torch.ops.assay.norm_backward.default)
    assert of_attn.args[0].args == (of_mlp, 0)  # the stream's gradient goes from kernel to kernel, and out
    assert (of_attn, 0) in [node.args for node in graphs[1].graph.output_node().args[0] if node is not None]
    assert called.count(torch.ops.assay.gated_backward.default) == 1
    assert called.count(torch.ops.assay.rotated_backward.default) == 1
    for made in (torch.ops.aten.silu.default, torch.ops.aten.rsqrt.default, torch.ops.aten.cat.default):
        assert made not in called, made


# ── quantised weights ─────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("columns", [128, 100])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_unpacked_codes(columns, kind):
    """The twin's bits, with programs that begin and end inside rows and blocks."""
    matrix = quantised.quantise(torch.randn(5, columns, generator=torch.Generator().manual_seed(2)), kind)
    levels = torch.tensor(quantised.NF4) if kind == "nf4" else None
    found = unpacked(*matrix, levels, quantised.BLOCK, entries=64)
    assert torch.equal(found, quantised.plain_dequantised(matrix))
