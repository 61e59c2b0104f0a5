"""RMS norm at the head of a residual branch: the gradients of the stream and of its norm become one in a single pass.

`x → (x, norm(x))`: the stream goes on beside its norm, so that both gradients come back to the same place. One kernel reads each row
of both once, writes their joint gradient, and sums the weight's gradient by the way; a second one adds up those sums.
The forward pass is left to PyTorch, and in compiled blocks to its compiler, which fuses it with what stands before it.

Shapes: N rows, D width, P programs.
"""

from __future__ import annotations  # the kernels' `tl.constexpr` must not be looked up at import

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

WIDEST = 8192    # entries of a row that one program can hold
PROGRAMS = 1024  # that share the rows; fixed, so that the sums over rows are the same on every GPU
_STAGES = 3       # rows that a program has under way: of 1 to 3, and of 1 to 4 warps, the fastest on an H200 at 16,384 rows of 576
_COLUMNS = 16     # of the programs' sums that one program adds up


def uses_fused_norm(x: Tensor) -> bool:
    """Whether `fused_stream_and_norm` is for x: rows that train in bf16 on a GPU. The plain twin is for all others."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] <= WIDEST and torch.is_grad_enabled()


# ── the plain twin ────────────────────────────────────────────────────────────────────────────────────────────────────

def plain_stream_and_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x, RMS norm of x over its last dimension)."""
    return x, rms_norm(x, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in the dtype of x, to which the weight is rounded."""
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


# ── the fused path ────────────────────────────────────────────────────────────────────────────────────────────────────

def fused_stream_and_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`plain_stream_and_norm` on CUDA (or in Triton's interpreter); gradients are computed in fp32 and rounded once, each to the dtype of
    what it belongs to."""
    if not torch.compiler.is_compiling():  # a compiler cannot trace a registration: whoever compiles has registered before
        register_norm_backward()
    return _Beside.apply(x, weight, eps)


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor, d_normed: Tensor) -> tuple[Tensor, Tensor, None]:
        d_x, d_weight = torch.ops.assay.norm_backward(d_stream, d_normed, *ctx.saved_tensors, ctx.eps)
        return d_x, d_weight, None


@functools.cache
def register_norm_backward() -> None:
    """Register `torch.ops.assay.norm_backward`, which compiled graphs call as it is."""
    operator = torch.library.custom_op("assay::norm_backward", norm_backward, mutates_args=(), schema=(
        "(Tensor d_stream, Tensor d_normed, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)"))
    operator.register_fake(lambda d_stream, d_normed, x, weight, eps: (x.new_empty(x.shape), weight.new_empty(weight.shape)))


def norm_backward(d_stream: Tensor, d_normed: Tensor, x: Tensor, weight: Tensor, eps: float, *,
                  most: int = PROGRAMS, rows: int = 1, warps: int | None = None, stages: int = _STAGES) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight. `most` programs take `rows` rows at a time, `stages` loads ahead."""
    D = x.shape[-1]
    N, block = x.numel() // D, 1 << (D - 1).bit_length()
    d_stream, d_normed, x = d_stream.contiguous(), d_normed.contiguous(), x.contiguous()
    programs = max(1, min(most, math.ceil(N / rows)))
    d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
    sums_PD = x.new_empty((programs, D), dtype=torch.float32)
    jitted(_share_of_rows)[(programs,)](
        d_stream, d_normed, x, weight, d_x, sums_PD, N, eps,
        D=D, BLOCK=block, ROWS=rows, PROGRAMS=programs, STAGES=stages, num_warps=warps or max(1, block // 512))
    jitted(_sum_of_shares)[(math.ceil(D / _COLUMNS),)](
        sums_PD, d_weight, D=D, PROGRAMS=programs, BLOCK=1 << (programs - 1).bit_length(), COLUMNS=_COLUMNS, num_warps=8)
    return d_x, d_weight


def _share_of_rows(d_stream_ptr, d_normed_ptr, x_ptr, weight_ptr, d_x_ptr, sums_ptr, N, eps,
                   D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr):
    """Triton: every PROGRAMS-th tile of rows; the weight's gradient is summed over them.

    With u = x / rms(x) and g = d_normed · weight, the row's gradient is (g − u · mean(g · u)) / rms(x) + d_stream.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    within = column < D
    weight = tl.load(weight_ptr + column, mask=within, other=0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(program * ROWS, N, PROGRAMS * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        real = (row < N)[:, None] & within[None, :]
        place = row.to(tl.int64)[:, None] * D + column[None, :]
        x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + place, mask=real, other=0.0).to(tl.float32)
        d_stream = tl.load(d_stream_ptr + place, mask=real, other=0.0).to(tl.float32)
        d_unit = d_normed * weight[None, :]
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        along = tl.sum(d_unit * x, 1) / D * scale  # not of unit: so neither sum waits for the other
        unit = x * scale[:, None]
        sums += d_normed * unit
        d_x = (d_unit - unit * along[:, None]) * scale[:, None] + d_stream
        tl.store(d_x_ptr + place, d_x.to(d_x_ptr.dtype.element_ty), mask=real)
    tl.store(sums_ptr + program * D + column, tl.sum(sums, 0), mask=within)


def _sum_of_shares(sums_ptr, d_weight_ptr, D: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Triton: COLUMNS of the weight's gradient, from what all programs summed of them."""
    program = tl.arange(0, BLOCK)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = (program < PROGRAMS)[:, None] & (column < D)[None, :]
    sums = tl.load(sums_ptr + program[:, None] * D + column[None, :], mask=real, other=0.0)
    tl.store(d_weight_ptr + column, tl.sum(sums, 0).to(d_weight_ptr.dtype.element_ty), mask=column < D)
