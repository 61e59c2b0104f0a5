"""Decode attention over the KV cache: store each slot's new key and value, and attend to all that the slot holds.

Where positions are rotary, the new query and key are turned on the way. The Triton kernel reads of each slot only what that slot
holds, however long the others are, and so needs no host to know it: one CUDA graph serves every length. Its plain PyTorch twin
stands below and runs wherever CUDA does not.

Shapes: S slots, L capacity, H heads, K key/value heads, d head size.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.rotary import rotate
from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

_LEAST = 16  # rows and columns that a matrix instruction takes at least

Rotary = tuple[Tensor, Tensor]  # cos and sin of each slot's angles, (S, d / 2) in fp32


class Launch(NamedTuple):
    """How a program works through its slot's keys; results differ by rounding alone."""

    block: int  # keys that it holds at a time
    warps: int
    stages: int  # blocks that are on their way at once, and one
    registers: int | None = None  # that a thread may have at most: the more it takes, the fewer programs an SM holds at once


LAUNCH = Launch(block=64, warps=4, stages=2)
NARROW = LAUNCH._replace(registers=80)  # up to 64 entries a head, in 2 bytes each: left alone they take 96, and an SM holds 5 for 6


def cached_attention(q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, positions_S: Tensor,
                     window: int | None, horizon: int, rotary: Rotary | None = None, scale: float | None = None,
                     softcap: float | None = None, sinks_H: Tensor | None = None) -> Tensor:
    """(S, H, d). Row s is stored at positions[s]; it sees the keys at 0 … positions[s], the last `window` of them where given.

    With `rotary` q and k are turned by it first, and so stored. `scale` is 1 / √d unless given; `softcap` bends scores, and `sinks_H`
    take a share of each head's attention and give nothing, as in model/attention.py. No position is at or beyond `horizon`, which
    lets the plain twin read less; the kernel reads each slot's own length.
    """
    if torch.compiler.is_compiling():  # a compiler cannot trace a registration: whoever compiles has registered before
        cos, sin = (None, None) if rotary is None else rotary
        return torch.ops.assay.cached_attention(q_SHd, k_SKd, v_SKd, keys_SLKd, values_SLKd, positions_S, cos, sin, window, horizon,
                                                scale, softcap, sinks_H)
    attention = fused_cached_attention if q_SHd.is_cuda else plain_cached_attention
    return attention(q_SHd, k_SKd, v_SKd, keys_SLKd, values_SLKd, positions_S, window, horizon, rotary, scale, softcap, sinks_H)


@functools.cache
def register_cached_attention() -> None:
    """Register `torch.ops.assay.cached_attention`, which compiled graphs call as it is, knowing that it writes to the cache."""
    def attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, cos: Tensor | None,
                  sin: Tensor | None, window: int | None, horizon: int, scale: float | None, softcap: float | None,
                  sinks: Tensor | None) -> Tensor:
        rotary = None if cos is None or sin is None else (cos, sin)
        return cached_attention(q, k, v, keys, values, positions, window, horizon, rotary, scale, softcap, sinks)

    operator = torch.library.custom_op("assay::cached_attention", attention, mutates_args=("keys", "values"), schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor positions, Tensor? cos, Tensor? sin, "
        "int? window, int horizon, float? scale, float? softcap, Tensor? sinks) -> Tensor"))
    operator.register_fake(lambda q, *_: q.new_empty(q.shape))


# ── the plain twin ────────────────────────────────────────────────────────────────────────────────────────────────────

def plain_cached_attention(q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, positions_S: Tensor,
                           window: int | None, horizon: int, rotary: Rotary | None = None, scale: float | None = None,
                           softcap: float | None = None, sinks_H: Tensor | None = None) -> Tensor:
    """`cached_attention` in plain PyTorch. What a slot does not see must still be finite: 0 · NaN is NaN."""
    if rotary is not None:
        q_SHd, k_SKd = (rotate(x, *(part[:, None] for part in rotary)) for x in (q_SHd, k_SKd))
    slots = torch.arange(len(positions_S), device=positions_S.device)
    keys_SLKd[slots, positions_S], values_SLKd[slots, positions_S] = k_SKd, v_SKd
    keys, values = keys_SLKd[:, :horizon].transpose(1, 2), values_SLKd[:, :horizon].transpose(1, 2)
    distance_SL = positions_S[:, None] - torch.arange(horizon, device=positions_S.device)
    seen_SL = (distance_SL >= 0) if window is None else (distance_SL >= 0) & (distance_SL < window)
    if softcap is not None or sinks_H is not None:
        return _plain_scores(q_SHd, keys, values, seen_SL, scale or q_SHd.shape[-1] ** -0.5, softcap, sinks_H)
    out = F.scaled_dot_product_attention(q_SHd[:, :, None], keys, values, attn_mask=seen_SL[:, None, None], scale=scale,
                                         enable_gqa=q_SHd.shape[1] != keys.shape[1])
    return out[:, :, 0]


def _plain_scores(q_SHd: Tensor, keys_SKLd: Tensor, values_SKLd: Tensor, seen_SL: Tensor, scale: float, softcap: float | None,
                  sinks_H: Tensor | None) -> Tensor:
    """Attention with what PyTorch's fused attention does not know: soft-capped scores, and sinks beside them."""
    (S, H, d), K = q_SHd.shape, keys_SKLd.shape[1]
    scores = (q_SHd.view(S, K, H // K, d) @ keys_SKLd.mT).view(S, H, -1).float() * scale
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)).masked_fill(~seen_SL[:, None], -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.float()[None, :, None].expand(S, H, 1)], -1)
    shares = scores.softmax(-1)[..., : keys_SKLd.shape[2]].to(values_SKLd.dtype)
    return (shares.view(S, K, H // K, -1) @ values_SKLd).view(S, H, d)


# ── the fused path ────────────────────────────────────────────────────────────────────────────────────────────────────

def fused_cached_attention(q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, positions_S: Tensor,
                           window: int | None, horizon: int, rotary: Rotary | None = None, scale: float | None = None,
                           softcap: float | None = None, sinks_H: Tensor | None = None, *, launch: Launch | None = None) -> Tensor:
    """`cached_attention` on CUDA (or in Triton's interpreter): one program for each slot and key/value head.

    Programs of one slot stand side by side, since their keys do: a key's heads are one stretch of memory.
    """
    (S, H, d), (_, L, K, _) = q_SHd.shape, keys_SLKd.shape
    out_SHd = torch.empty((S, H, d), dtype=q_SHd.dtype, device=q_SHd.device)
    cos, sin = (None, None) if rotary is None else rotary
    launch = launch or (NARROW if d <= 64 and q_SHd.element_size() == 2 else LAUNCH)
    assert q_SHd.stride(2) == k_SKd.stride(2) == v_SKd.stride(2) == 1, "a head's entries lie side by side"
    assert keys_SLKd.is_contiguous() and values_SLKd.is_contiguous(), "the cache is one piece of memory a layer"  # noqa: PT018
    assert cos is None or sin is None or (cos.is_contiguous() and sin.is_contiguous()), "a slot's angles lie side by side"
    jitted(_attend)[(K, S)](
        q_SHd, k_SKd, v_SKd, cos, sin, None if sinks_H is None else sinks_H.contiguous(), keys_SLKd, values_SLKd, positions_S, out_SHd,
        *_as_powers_of_two(d**-0.5 if scale is None else scale, softcap),
        q_SHd.stride(0), q_SHd.stride(1), k_SKd.stride(0), k_SKd.stride(1), v_SKd.stride(0), v_SKd.stride(1),
        L=L, K=K, D=d, PER=H // K, WINDOW=0 if window is None else window, CAPPED=softcap is not None,
        GROUP=max(_LEAST, _power_of_two(H // K)), DIM=max(_LEAST, _power_of_two(d)), BLOCK=launch.block,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers)
    return out_SHd


def _as_powers_of_two(scale: float, softcap: float | None) -> tuple[float, float]:
    """Factor of the products, and the cap: scores become powers of 2, by the one or, where there is a cap, by the other."""
    return (scale * math.log2(math.e), 1.0) if softcap is None else (2 * scale / softcap, softcap * math.log2(math.e))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _attend(q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, sinks_ptr, keys_ptr, values_ptr, positions_ptr, out_ptr, scale, cap,
            q_slot, q_head, k_slot, k_head, v_slot, v_head,
            L: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PER: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
            GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: the query heads that share one key/value head of one slot, with a running softmax over blocks of keys.

    The new key and value never come back from memory: the loop reads what was there before, and they close the softmax. Nothing
    waits for them until then, so that the first blocks are on their way early. `scale` makes scores powers of 2, or `cap` does, with
    tanh(x) as 2 σ(2 x) − 1. A sink is where the softmax begins: a score whose value is nothing.
    """
    shared, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions_ptr + slot).to(tl.int32)
    head, dim = tl.arange(0, GROUP), tl.arange(0, DIM)
    real = dim < D
    both = (head < PER)[:, None] & real[None, :]
    q_ptr += slot * q_slot + (shared * PER + head)[:, None] * q_head
    k_ptr += slot * k_slot + shared * k_head
    q = tl.load(q_ptr + dim[None, :], mask=both, other=0.0)
    k = tl.load(k_ptr + dim, mask=real, other=0.0)
    v = tl.load(v_ptr + slot * v_slot + shared * v_head + dim, mask=real, other=0.0)
    if cos_ptr is not None:  # each entry and the one it is turned with, half a head away
        first_half = dim < D // 2
        mate = tl.where(first_half, dim + D // 2, dim - D // 2)
        angle = slot * (D // 2) + tl.where(first_half, dim, dim - D // 2)
        cos = tl.load(cos_ptr + angle, mask=real, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=real, other=0.0)
        sin = tl.where(first_half, -sin, sin)
        q_mate = tl.load(q_ptr + mate[None, :], mask=both, other=0.0)
        k_mate = tl.load(k_ptr + mate, mask=real, other=0.0)
        q = (q.to(tl.float32) * cos[None, :] + q_mate.to(tl.float32) * sin[None, :]).to(q.dtype)
        k = (k.to(tl.float32) * cos + k_mate.to(tl.float32) * sin).to(k.dtype)

    keys_ptr += slot * (L * K * D) + shared * D
    values_ptr += slot * (L * K * D) + shared * D
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + shared * PER + head, mask=head < PER, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
        total += 1.0
    out = tl.zeros((GROUP, DIM), tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    for start in range(first, position, BLOCK):
        place = start + tl.arange(0, BLOCK)
        old = place < position
        keys = tl.load(keys_ptr + place[None, :] * (K * D) + dim[:, None], mask=old[None, :] & real[:, None], other=0.0)
        values = tl.load(values_ptr + place[:, None] * (K * D) + dim[None, :], mask=old[:, None] & real[None, :], other=0.0)
        score = tl.dot(q, keys, input_precision="ieee") * scale
        if CAPPED:
            score = cap * (2 * tl.sigmoid(score) - 1)
        score = tl.where(old[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        share = tl.exp2(score - new_top[:, None])
        fade = tl.exp2(top - new_top)
        out = out * fade[:, None] + tl.dot(share.to(values.dtype), values, input_precision="ieee")
        total = total * fade + tl.sum(share, 1)
        top = new_top

    tl.store(keys_ptr + position * (K * D) + dim, k, mask=real)
    tl.store(values_ptr + position * (K * D) + dim, v, mask=real)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    if CAPPED:
        score = cap * (2 * tl.sigmoid(score) - 1)
    new_top = tl.maximum(top, score)
    share = tl.exp2(score - new_top)
    fade = tl.exp2(top - new_top)
    out = (out * fade[:, None] + share[:, None] * v.to(tl.float32)[None, :]) / (total * fade + share)[:, None]
    tl.store(out_ptr + slot * (K * PER * D) + (shared * PER + head)[:, None] * D + dim[None, :],
             out.to(out_ptr.dtype.element_ty), mask=both)
