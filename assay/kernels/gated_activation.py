"""Gated activation (SwiGLU): silu(gate) · up, whose backward pass writes the gradients of both halves in one go.

A compiler takes the gradient of a split for a concatenation and computes both halves for every entry: twice the memory's time.
Where something trains the forward pass is left to PyTorch, and in compiled blocks to its compiler, which is at the memory's limit
there; what is neither trained nor compiled, as prompts are, has a kernel of its own in place of PyTorch's two.

Shapes: N rows, H hidden; a row of `inner` holds H entries of gate, then H of up.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

_BLOCK = 1024  # entries of one half that a program takes: 8 a thread, so that every access is 16 bytes wide
_WARPS = 4


def gated(inner: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """(…, H): activation(gate) · up of (…, 2 H). In bf16 on a GPU silu's is fused; the plain twin anywhere else, and where a compiler
    fuses it."""
    half = activation is F.silu and inner.is_cuda and inner.dtype == torch.bfloat16
    if half and torch.is_grad_enabled():
        return fused_gated(inner)
    if half and not torch.compiler.is_compiling():
        return gated_forward(inner)
    return plain_gated(inner, activation)


# ── the plain twin ────────────────────────────────────────────────────────────────────────────────────────────────────

def plain_gated(inner: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = inner.chunk(2, -1)
    return activation(gate) * up


# ── the fused path ────────────────────────────────────────────────────────────────────────────────────────────────────

def fused_gated(inner: Tensor) -> Tensor:
    """`gated` for silu, on CUDA (or in Triton's interpreter); gradients are computed in fp32 and rounded once."""
    if not torch.compiler.is_compiling():  # a compiler cannot trace a registration: whoever compiles has registered before
        register_gated_backward()
    return _Gated.apply(inner)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        ctx.save_for_backward(inner)
        return plain_gated(inner, F.silu)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (inner,) = ctx.saved_tensors
        return torch.ops.assay.gated_backward(d_out, inner)


@functools.cache
def register_gated_backward() -> None:
    """Register `torch.ops.assay.gated_backward`, which compiled graphs call as it is."""
    operator = torch.library.custom_op("assay::gated_backward", gated_backward, mutates_args=(),
                                       schema="(Tensor d_out, Tensor inner) -> Tensor")
    operator.register_fake(lambda d_out, inner: inner.new_empty(inner.shape))


def gated_backward(d_out: Tensor, inner: Tensor, block: int = _BLOCK, warps: int = _WARPS) -> Tensor:
    """The gradient of `inner`, given that of silu(gate) · up."""
    d_out, inner = d_out.contiguous(), inner.contiguous()
    d_inner = torch.empty_like(inner)
    jitted(_both_halves)[(math.ceil(d_out.numel() / block),)](
        d_out, inner, d_inner, d_out.numel(), H=d_out.shape[-1], BLOCK=block, num_warps=warps)
    return d_inner


def gated_forward(inner: Tensor, block: int = _BLOCK, warps: int = _WARPS) -> Tensor:
    """silu(gate) · up where nothing trains, rounded once."""
    inner = inner.contiguous()
    H = inner.shape[-1] // 2
    out = inner.new_empty((*inner.shape[:-1], H))
    jitted(_product)[(math.ceil(out.numel() / block),)](inner, out, out.numel(), H=H, BLOCK=block, num_warps=warps)
    return out


def _product(inner_ptr, out_ptr, entries, H: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: BLOCK entries of the product, wherever rows begin; each one's gate and up lie H apart."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = entry < entries
    place = entry + entry // H * H
    gate = tl.load(inner_ptr + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(inner_ptr + place + H, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + entry, (gate / (1 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=real)


def _both_halves(d_out_ptr, inner_ptr, d_inner_ptr, entries, H: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: as in `_product`, both gradients of each entry."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = entry < entries
    place = entry + entry // H * H
    d_out = tl.load(d_out_ptr + entry, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(inner_ptr + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(inner_ptr + place + H, mask=real, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    d_gate = d_out * up * share * (1 + gate * (1 - share))
    tl.store(d_inner_ptr + place, d_gate.to(d_inner_ptr.dtype.element_ty), mask=real)
    tl.store(d_inner_ptr + place + H, (d_out * gate * share).to(d_inner_ptr.dtype.element_ty), mask=real)
