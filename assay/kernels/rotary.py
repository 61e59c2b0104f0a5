"""Rotary positions (RoPE) for q and k of one fused product; the backward pass writes the product's gradient in one go.

A compiler turns the gradients back in one kernel and concatenates them in another. Here one kernel reads each gradient where attention
left it, in whatever strides, and writes the product's. Where something trains the forward pass is left to PyTorch, and in compiled
blocks to its compiler; what is neither trained nor compiled, as prompts are, has a kernel of its own in place of PyTorch's nine.

Shapes: B rows, T time, H heads, K key/value heads, d head size, R = (H + 2 K) d; N = B T tokens. cos and sin are (1 or B, T, 1, d / 2).
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

_ROWS = 2     # tokens that a program takes
_BLOCK = 512  # pairs of each that it takes at most: all of them in small models, so that their heads share one reading of the angles
EACH = 8     # pairs a thread, so that every access to bf16 is 16 bytes wide


def rotated(qkv_BTR: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, T, H, d), k and v (B, T, K, d). In bf16 on a GPU fused; the plain twin anywhere else, and where a compiler fuses it."""
    half = qkv_BTR.is_cuda and qkv_BTR.dtype == torch.bfloat16
    if half and torch.is_grad_enabled():
        return fused_rotated(qkv_BTR, cos, sin, heads, kv_heads)
    if half and not torch.compiler.is_compiling():
        return rotated_forward(qkv_BTR, cos, sin, heads, kv_heads)
    return plain_rotated(qkv_BTR, cos, sin, heads, kv_heads)


# ── the plain twin ────────────────────────────────────────────────────────────────────────────────────────────────────

def plain_rotated(qkv_BTR: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    qk, v = qkv_BTR.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads + kv_heads, kv_heads), 2)
    q, k = rotate(qk, cos, sin).split((heads, kv_heads), 2)  # both at once: two short kernels take longer than one
    return q, k, v


def rotate(x_BTHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (x1, x2), the two halves of a head, by the position's angle; in fp32, since bf16 angles drift with length.
    Where there are fewer angles than pairs, what is left of the head stays as it is."""
    turned = 2 * cos.shape[-1]
    x1, x2 = x_BTHd[..., :turned].float().chunk(2, -1)
    halves = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x_BTHd.dtype)
    return halves if turned == x_BTHd.shape[-1] else torch.cat([halves, x_BTHd[..., turned:]], -1)


# ── the fused path ────────────────────────────────────────────────────────────────────────────────────────────────────

def fused_rotated(qkv_BTR: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`plain_rotated` on CUDA (or in Triton's interpreter); gradients are turned in fp32 and rounded once."""
    if not torch.compiler.is_compiling():  # a compiler cannot trace a registration: whoever compiles has registered before
        register_rotated_backward()
    return _Rotated.apply(qkv_BTR, cos, sin, heads, kv_heads)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_BTR: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return plain_rotated(qkv_BTR, cos, sin, heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, None, None, None, None]:
        return torch.ops.assay.rotated_backward(d_q, d_k, d_v, *ctx.saved_tensors), None, None, None, None


@functools.cache
def register_rotated_backward() -> None:
    """Register `torch.ops.assay.rotated_backward`, which compiled graphs call as it is."""
    operator = torch.library.custom_op("assay::rotated_backward", rotated_backward, mutates_args=(),
                                       schema="(Tensor d_q, Tensor d_k, Tensor d_v, Tensor cos, Tensor sin) -> Tensor")
    operator.register_fake(lambda d_q, d_k, d_v, cos, sin: _gradient_for(d_q, d_k))


def rotated_backward(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor, *,
                     rows: int = _ROWS, block: int = _BLOCK, warps: int | None = None) -> Tensor:
    """The gradient of the fused product (B, T, R), given those of q, k and v. A program takes `block` pairs of `rows` tokens."""
    (B, T, H, d), K = d_q.shape, d_k.shape[2]
    N, pairs = B * T, (H + 2 * K) * d // 2
    block = min(block, 1 << (pairs - 1).bit_length())
    d_qkv = _gradient_for(d_q, d_k)
    jitted(_turned_back)[(math.ceil(N / rows), math.ceil(pairs / block))](
        d_q, d_k, d_v, cos.contiguous(), sin.contiguous(), d_qkv, *d_q.stride(), *d_k.stride(), *d_v.stride(),
        0 if cos.shape[0] == 1 else T * d // 2, N, T,
        H=H, K=K, HALF=d // 2, ROWS=rows, BLOCK=block, num_warps=warps or max(1, rows * block // (32 * EACH)))
    return d_qkv


def rotated_forward(qkv_BTR: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, *,
           rows: int = _ROWS, block: int = _BLOCK, warps: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`plain_rotated` where nothing trains; a program takes `block` pairs of `rows` tokens. v stays where it is."""
    qkv = qkv_BTR.contiguous().unflatten(-1, (heads + 2 * kv_heads, -1))
    B, T, _, d = qkv.shape
    N, pairs = B * T, (heads + kv_heads) * d // 2
    block = min(block, 1 << (pairs - 1).bit_length())
    qk = qkv.new_empty((B, T, heads + kv_heads, d))
    jitted(_turned)[(math.ceil(N / rows), math.ceil(pairs / block))](
        qkv, cos.contiguous(), sin.contiguous(), qk, 0 if cos.shape[0] == 1 else T * d // 2, N, T,
        H=heads, K=kv_heads, HALF=d // 2, ROWS=rows, BLOCK=block, num_warps=warps or max(1, rows * block // (32 * EACH)))
    q, k = qk.split((heads, kv_heads), 2)
    return q, k, qkv[:, :, heads + kv_heads :]


def _gradient_for(d_q: Tensor, d_k: Tensor) -> Tensor:
    B, T, H, d = d_q.shape
    return d_q.new_empty((B, T, (H + 2 * d_k.shape[2]) * d))


def _turned(qkv_ptr, cos_ptr, sin_ptr, qk_ptr, angle_b, N, T,
            H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: BLOCK pairs (x1, x2) of q and k, of ROWS tokens."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    pair = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    real = (row < N) & (pair < (H + K) * HALF)
    row = row.to(tl.int64)
    head, i = pair // HALF, pair % HALF
    place = qkv_ptr + row * ((H + 2 * K) * 2 * HALF) + (head * (2 * HALF) + i)
    x1 = tl.load(place, mask=real, other=0.0).to(tl.float32)
    x2 = tl.load(place + HALF, mask=real, other=0.0).to(tl.float32)
    angle = (row // T) * angle_b + (row % T) * HALF + i
    cos = tl.load(cos_ptr + angle, mask=real, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=real, other=0.0)
    place = qk_ptr + row * ((H + K) * 2 * HALF) + (head * (2 * HALF) + i)
    tl.store(place, (x1 * cos - x2 * sin).to(qk_ptr.dtype.element_ty), mask=real)
    tl.store(place + HALF, (x2 * cos + x1 * sin).to(qk_ptr.dtype.element_ty), mask=real)


def _turned_back(d_q_ptr, d_k_ptr, d_v_ptr, cos_ptr, sin_ptr, d_qkv_ptr,
                 q_b, q_t, q_h, q_i, k_b, k_t, k_h, k_i, v_b, v_t, v_h, v_i, angle_b, N, T,
                 H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: BLOCK pairs (x1, x2) of ROWS tokens. Each is read from q, k or v, wherever its head is one of; v's angle is 0."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    pair = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    b, t = (row // T).to(tl.int64), (row % T).to(tl.int64)
    head, i = (pair // HALF).to(tl.int64), pair % HALF
    of_q = (row < N) & (head < H)
    of_k = (row < N) & (head >= H) & (head < H + K)
    of_v = (row < N) & (head >= H + K) & (head < H + 2 * K)
    q_ptr = d_q_ptr + (b * q_b + t * q_t) + (head * q_h + i * q_i)
    k_ptr = d_k_ptr + (b * k_b + t * k_t) + ((head - H) * k_h + i * k_i)
    v_ptr = d_v_ptr + (b * v_b + t * v_t) + ((head - H - K) * v_h + i * v_i)
    y1 = tl.load(q_ptr, mask=of_q, other=0.0).to(tl.float32)
    y1 += tl.load(k_ptr, mask=of_k, other=0.0).to(tl.float32)
    y1 += tl.load(v_ptr, mask=of_v, other=0.0).to(tl.float32)
    y2 = tl.load(q_ptr + HALF * q_i, mask=of_q, other=0.0).to(tl.float32)
    y2 += tl.load(k_ptr + HALF * k_i, mask=of_k, other=0.0).to(tl.float32)
    y2 += tl.load(v_ptr + HALF * v_i, mask=of_v, other=0.0).to(tl.float32)
    angle = b * angle_b + t * HALF + i
    cos = tl.load(cos_ptr + angle, mask=of_q | of_k, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=of_q | of_k, other=0.0)
    place = d_qkv_ptr + (b * T + t) * ((H + 2 * K) * 2 * HALF) + (head * (2 * HALF) + i)
    tl.store(place, (y1 * cos + y2 * sin).to(d_qkv_ptr.dtype.element_ty), mask=of_q | of_k | of_v)
    tl.store(place + HALF, (y2 * cos - y1 * sin).to(d_qkv_ptr.dtype.element_ty), mask=of_q | of_k | of_v)
