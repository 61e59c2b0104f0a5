"""Drawing the next token on the device: truncate, draw by inverse CDF from a counter-based hash, report its log-probability.

Which tokens stay is a law of values, not of ranks, so that ties are never broken by the order in which a sort finds them:
with scaled logits l = logits / temperature, token i stays if and only if fewer than top_k tokens lie strictly above it,
those strictly above it hold less than top_p of the mass that top_k left, and l_i ≥ max l + log min_p.
The draw takes the first id, in order of ids, at which the cumulative mass of the kept tokens exceeds u · total.

The plain PyTorch twin sorts and runs wherever CUDA does not. The Triton kernel finds the two thresholds by search: one program a
row, a few passes over logits that are still in the cache. They differ by rounding, at the edges of a threshold or of a draw.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl  # at run time _kernel() binds it: where no GPU is, Triton need not be installed

MAX_BLOCK = 2048  # logits that a program holds at a time
WAYS = 4  # parts that an interval is cut into by one pass of a search; more would need more registers than two programs share
GOLDEN, FIRST, SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # SplitMix64's


class Rule(NamedTuple):
    """One entry a row. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 cut nothing off."""

    temperature: Tensor  # (N,) float32
    top_k: Tensor  # (N,) int64
    top_p: Tensor  # (N,) float32
    min_p: Tensor  # (N,) float32


# ── the main verb ─────────────────────────────────────────────────────────────────────────────────────────────────────

def draw(logits_NV: Tensor, rule: Rule, key_N: Tensor, counter_N: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_N int64, logprobs_N float32): one draw a row, a function of (logits, rule, key, counter) of that row alone."""
    return (fused_draw if logits_NV.is_cuda else plain_draw)(logits_NV, rule, key_N, counter_N)


# ── the plain twin ────────────────────────────────────────────────────────────────────────────────────────────────────

def plain_draw(logits_NV: Tensor, rule: Rule, key_N: Tensor, counter_N: Tensor) -> tuple[Tensor, Tensor]:
    logprobs_NV = distribution(logits_NV, rule)
    cumulative = logprobs_NV.double().exp().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, uniforms(key_N, counter_N)[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # where u · total rounds up to the total, nothing lies beyond it
    chosen = torch.minimum(chosen, last).clamp(max=logits_NV.shape[-1] - 1)
    return chosen.squeeze(-1), logprobs_NV.gather(-1, chosen).squeeze(-1)


def distribution(logits_NV: Tensor, rule: Rule) -> Tensor:
    """Log-probabilities after temperature and truncation; greedy is the distribution that has one outcome, the lowest id's."""
    greedy_N1 = (rule.temperature == 0)[:, None]
    scaled_NV = logits_NV / torch.where(greedy_N1, 1.0, rule.temperature[:, None])
    kept_NV = scaled_NV >= least_kept(scaled_NV, rule)[:, None]
    logprobs_NV = scaled_NV.masked_fill(~kept_NV, float("-inf")).log_softmax(-1)
    if not greedy_N1.any():
        return logprobs_NV
    certain_NV = torch.full_like(logits_NV, float("-inf")).scatter(-1, logits_NV.argmax(-1, keepdim=True), 0.0)
    return torch.where(greedy_N1, certain_NV, logprobs_NV)


def least_kept(scaled_NV: Tensor, rule: Rule) -> Tensor:
    """(N,): the smallest scaled logit that stays."""
    least_N = scaled_NV.amax(-1) + rule.min_p.log()
    V = scaled_NV.shape[-1]
    limited_N = (rule.top_k > 0) & (rule.top_k < V)
    if limited_N.any():
        widest = int(rule.top_k[limited_N].max())
        kth_N1 = scaled_NV.topk(widest, -1).values.gather(-1, rule.top_k.clamp(1, widest)[:, None] - 1)
        kth_N1 = kth_N1.masked_fill(~limited_N[:, None], float("-inf"))
        least_N = torch.maximum(least_N, kth_N1.squeeze(-1))
        scaled_NV = scaled_NV.masked_fill(scaled_NV < kth_N1, float("-inf"))
    if (rule.top_p < 1).any():
        ranked_NV, mass_NV = _ranked(scaled_NV)
        before_NV = mass_NV.cumsum(-1) - mass_NV
        last_N1 = (before_NV < rule.top_p[:, None].double()).sum(-1, keepdim=True).clamp(min=1) - 1
        edge_N = ranked_NV.gather(-1, last_N1).squeeze(-1)
        least_N = torch.where(rule.top_p < 1, torch.maximum(least_N, edge_N), least_N)
    return least_N


def _ranked(scaled_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Values from the largest down, and their shares of the mass."""
    ranked_NV = scaled_NV.sort(-1, descending=True).values
    return ranked_NV, ranked_NV.double().softmax(-1)


# ── randomness ────────────────────────────────────────────────────────────────────────────────────────────────────────

def uniforms(key_N: Tensor, counter_N: Tensor) -> Tensor:
    """(N,) float64 in [0, 1): SplitMix64's output number `counter` of the generator that stands at `key`; the same on every device."""
    x = key_N + (counter_N + 1) * GOLDEN  # int64 products wrap, as the law wants
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: int64 has only the arithmetic one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# ── the fused path ────────────────────────────────────────────────────────────────────────────────────────────────────

def fused_draw(logits_NV: Tensor, rule: Rule, key_N: Tensor, counter_N: Tensor) -> tuple[Tensor, Tensor]:
    """As `draw`, on CUDA (or in Triton's interpreter). Nothing waits for the GPU: logits that are no numbers give a NaN, not an error."""
    N, V = logits_NV.shape
    assert logits_NV.dtype == torch.float32
    assert logits_NV.stride(1) == 1
    ids_N = torch.empty(N, dtype=torch.int64, device=logits_NV.device)
    logprobs_N = torch.empty(N, device=logits_NV.device)
    block = min(MAX_BLOCK, max(16, 1 << (V - 1).bit_length()))
    _kernel()[(N,)](logits_NV, *rule, key_N, counter_N, ids_N, logprobs_N, logits_NV.stride(0),
                    V=V, BLOCK=block, WAYS=WAYS, num_warps=max(1, block // 128))
    return ids_N, logprobs_N


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language

    globals().update(tl=triton.language, _scaled=triton.jit(_scaled), _largest=triton.jit(_largest), _uniform=triton.jit(_uniform))
    return triton.jit(_draw_row)


def _draw_row(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, key_ptr, counter_ptr, ids_ptr, logprobs_ptr, width,
              V: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Triton: one row's draw. Sums over the vocabulary are kept apart in BLOCK lanes until a pass ends."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)

    highs = tl.full((BLOCK,), float("-inf"), tl.float32)
    lows = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        score = _scaled(logits_ptr, start, temperature, V, BLOCK)
        highs = tl.maximum(highs, score)
        lows = tl.minimum(lows, tl.where(start + tl.arange(0, BLOCK) < V, score, float("inf")))
    top = tl.max(highs, 0)
    low = tl.maximum(tl.min(lows, 0), top - 2000)  # what lies lower has no mass in any arithmetic
    beyond = top + tl.maximum(tl.abs(top), 1.0) * 1e-6

    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    least = low
    if (top_k > 0) & (top_k < V):
        least = _largest(logits_ptr, low, beyond, top_k.to(tl.float32), temperature, top, V, BLOCK, WAYS, False)
    if top_p < 1:
        masses = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            score = _scaled(logits_ptr, start, temperature, V, BLOCK)
            masses += tl.where(score >= least, tl.exp(score - top), 0.0)
        least = _largest(logits_ptr, least, beyond, top_p * tl.sum(masses, 0), temperature, top, V, BLOCK, WAYS, True)
    if min_p > 0:
        least = tl.maximum(least, top + tl.log(min_p))
    least = tl.where(greedy, top, least)

    masses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        score = _scaled(logits_ptr, start, temperature, V, BLOCK)
        masses += tl.where(score >= least, tl.exp(score - top), 0.0)
    total = tl.sum(masses, 0)
    u = _uniform(tl.load(key_ptr + row), tl.load(counter_ptr + row))
    target = (tl.where(greedy, 0.0, u) * total.to(tl.float64)).to(tl.float32)

    chosen = V
    last = 0
    before = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        score = _scaled(logits_ptr, start, temperature, V, BLOCK)
        mass = tl.where(score >= least, tl.exp(score - top), 0.0)
        reached = (before + tl.cumsum(mass, 0) > target) & (mass > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(reached, cols, V), 0))
        last = tl.maximum(last, tl.max(tl.where(mass > 0, cols, 0), 0))
        before += tl.sum(mass, 0)
    chosen = tl.where(chosen < V, chosen, last)  # where u · total rounds up to the total, nothing lies beyond it
    score = tl.load(logits_ptr + chosen) / temperature
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(greedy & (score == top), 0.0, score - top - tl.log(total)))


def _scaled(logits_ptr, start, temperature, V: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: a block of logits over the temperature; -inf beyond the vocabulary."""
    cols = start + tl.arange(0, BLOCK)
    return tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf")) / temperature


def _largest(logits_ptr, low, high, goal, temperature, top, V: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
             MASS: tl.constexpr):
    """Triton: the largest t in [low, high) such that the scores at or above t number (MASS: weigh) at least `goal`.

    Every pass counts at WAYS points between the two and keeps the part in which the answer lies. It ends where no float lies
    between, which is exact, or where the count is met exactly, beyond which the set does not change.
    """
    part = tl.arange(0, WAYS).to(tl.float32) / WAYS
    narrowing = low < high
    while narrowing:
        marks = low + (high - low) * part
        sums = tl.zeros((BLOCK, WAYS), tl.float32)
        for start in range(0, V, BLOCK):
            score = _scaled(logits_ptr, start, temperature, V, BLOCK)
            amount = tl.exp(score - top) if MASS else tl.where(score > float("-inf"), 1.0, 0.0)
            sums += tl.where(score[:, None] >= marks[None, :], amount[:, None], 0.0)
        counts = tl.sum(sums, 0)
        enough = counts >= goal
        new_low = tl.max(tl.where(enough, marks, low), 0)
        new_high = tl.min(tl.where(enough, high, marks), 0)
        narrowing = (new_low > low) | (new_high < high)
        if not MASS:
            narrowing = narrowing & (tl.max(tl.where(counts == goal, 1, 0), 0) == 0)
        low, high = new_low, new_high
    return low


def _uniform(key, counter):
    """Triton: `uniforms` for one row."""
    x = key + (counter + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
