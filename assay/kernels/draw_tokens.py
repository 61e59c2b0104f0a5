"""Token sampling on the device: truncate, draw by inverse CDF from a counter-based hash, report the log-probability.

Which tokens stay is a law of values, not of ranks, so that ties are never broken by the order in which a sort finds them:
with scaled logits l = logits / temperature, token i stays if and only if fewer than top_k tokens lie strictly above it,
those strictly above it hold less than top_p of the mass that top_k left, and l_i ≥ max l + log min_p.
The draw takes the first id, in order of ids, at which the cumulative mass of the kept tokens exceeds u · total.

The plain PyTorch twin sorts and runs wherever CUDA does not. Of Triton kernels there are two, and as a rule they read the logits
once: the first notes the maximum of every group of neighbours and the mass of every part of a row; the second sees from the maxima
which few groups can hold a kept token, reads those again and finds the thresholds among them, or, where nothing is cut off, reads
the one part in which the draw falls. Where too many groups remain it passes over the whole row, as often as a search needs.
Kernels and twin differ by rounding, at the edges of a threshold or of a draw.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl  # at run time _kernel() binds it: where no GPU is, Triton need not be installed

PART = 2048  # logits that a program holds at a time
_GROUP = 32  # neighbours of which the survey keeps the maximum: one cache line
TILE = 128  # groups that are held at once; top_k up to this many needs no pass over the row, unless maxima are tied
WAYS = 4  # points at which one pass of a search over the row counts
SURVEY_WARPS, FINISH_WARPS = 4, 8
GOLDEN, _FIRST, _SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # SplitMix64's


class SamplingRule(NamedTuple):
    """Sampling parameters, one entry a row. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 cut nothing off."""

    temperature: Tensor  # (N,) float32
    top_k: Tensor  # (N,) int64
    top_p: Tensor  # (N,) float32
    min_p: Tensor  # (N,) float32


# ── the main verb ─────────────────────────────────────────────────────────────────────────────────────────────────────

def draw_tokens(logits_NV: Tensor, rule: SamplingRule, key_N: Tensor, counter_N: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_N int64, logprobs_N float32): one draw a row, a function of (logits, rule, key, counter) of that row alone."""
    return (fused_draw_tokens if logits_NV.is_cuda else plain_draw_tokens)(logits_NV, rule, key_N, counter_N)


# ── the plain twin ────────────────────────────────────────────────────────────────────────────────────────────────────

def plain_draw_tokens(logits_NV: Tensor, rule: SamplingRule, key_N: Tensor, counter_N: Tensor) -> tuple[Tensor, Tensor]:
    logprobs_NV = truncated_logprobs(logits_NV, rule)
    cumulative = logprobs_NV.double().exp().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, uniforms(key_N, counter_N)[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)  # where u · total rounds up to the total, nothing lies beyond it
    chosen = torch.minimum(chosen, last).clamp(max=logits_NV.shape[-1] - 1)
    return chosen.squeeze(-1), logprobs_NV.gather(-1, chosen).squeeze(-1)


def truncated_logprobs(logits_NV: Tensor, rule: SamplingRule) -> Tensor:
    """Log-probabilities after temperature and truncation; greedy is the distribution that has one outcome, the lowest id's."""
    greedy_N1 = (rule.temperature == 0)[:, None]
    scaled_NV = logits_NV / torch.where(greedy_N1, 1.0, rule.temperature[:, None])
    kept_NV = scaled_NV >= least_kept(scaled_NV, rule)[:, None]
    logprobs_NV = scaled_NV.masked_fill(~kept_NV, float("-inf")).log_softmax(-1)
    if not greedy_N1.any():
        return logprobs_NV
    certain_NV = torch.full_like(logits_NV, float("-inf")).scatter(-1, logits_NV.argmax(-1, keepdim=True), 0.0)
    return torch.where(greedy_N1, certain_NV, logprobs_NV)


def least_kept(scaled_NV: Tensor, rule: SamplingRule) -> Tensor:
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
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: int64 has only the arithmetic one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# ── the fused path ────────────────────────────────────────────────────────────────────────────────────────────────────

def fused_draw_tokens(logits_NV: Tensor, rule: SamplingRule, key_N: Tensor, counter_N: Tensor) -> tuple[Tensor, Tensor]:
    """`draw_tokens` on CUDA (or in Triton's interpreter). Nothing waits for the GPU: a row that holds no number gives a NaN, not an
    error."""
    N, V = logits_NV.shape
    assert logits_NV.dtype == torch.float32
    assert logits_NV.stride(1) == 1
    parts, device = -(-V // PART), logits_NV.device
    maxima, peaks, masses = (torch.empty(N, width, device=device) for width in (parts * (PART // _GROUP), parts, parts))
    survivors = torch.empty(N, TILE, dtype=torch.int32, device=device)
    ids_N, logprobs_N = torch.empty(N, dtype=torch.int64, device=device), torch.empty(N, device=device)
    survey, finish = _kernels()
    survey[(N, parts)](logits_NV, rule.temperature, maxima, peaks, masses, logits_NV.stride(0),
                       V=V, PART=PART, GROUP=_GROUP, num_warps=SURVEY_WARPS)
    finish[(N,)](logits_NV, *rule, key_N, counter_N, maxima, peaks, masses, survivors, ids_N, logprobs_N, logits_NV.stride(0),
                 V=V, PART=PART, GROUP=_GROUP, PARTS=_power_of_two(parts), GROUPS=_power_of_two(parts * (PART // _GROUP)), TILE=TILE,
                 WAYS=WAYS, num_warps=FINISH_WARPS)
    return ids_N, logprobs_N


def _power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


@functools.cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language

    called = (_survivors, _largest, _from_tile, _by_passes, _search, _masses, _from_parts, _place, _uniform)
    globals().update(tl=triton.language, **{function.__name__: triton.jit(function) for function in called})
    return triton.jit(_survey), triton.jit(_finish)


def _survey(logits_ptr, temperature_ptr, maxima_ptr, peaks_ptr, masses_ptr, width,
            V: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr):
    """Triton: of one part of a row the maximum of every group, the largest of them, and the mass relative to that one.

    The mass is NaN where a logit is NaN or +inf.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    inverse = 1.0 / tl.where(temperature == 0, 1.0, temperature)
    group = part * (PART // GROUP) + tl.arange(0, PART // GROUP)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = tl.load(logits_ptr + row * width + cols, mask=cols < V, other=float("-inf"))
    maxima = tl.max(logit, 1)
    peak = tl.maximum(tl.max(maxima, 0), -3e38)  # finite, so that -inf has no mass even where nothing else is
    mass = tl.sum(tl.sum(tl.exp((logit - peak) * inverse), 1), 0)
    parts = tl.num_programs(1)
    tl.store(maxima_ptr + row * (parts * (PART // GROUP)) + group, maxima)
    tl.store(peaks_ptr + row * parts + part, peak)
    tl.store(masses_ptr + row * parts + part, mass)


def _finish(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, key_ptr, counter_ptr, maxima_ptr, peaks_ptr, masses_ptr,
            survivors_ptr, ids_ptr, logprobs_ptr, width, V: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr,
            PARTS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr):
    """Triton: one row's draw from what the survey found. `low` bounds what is kept from below, ever more tightly."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    inverse = 1.0 / temperature
    top_k, top_p = tl.where(greedy, 0, tl.load(top_k_ptr + row)), tl.where(greedy, 1.0, tl.load(top_p_ptr + row))
    top_k = tl.where(top_k < V, top_k, 0)
    min_p = tl.where(greedy, 1.0, tl.load(min_p_ptr + row))  # greedy: nothing below the best
    u = tl.where(greedy, 0.0, _uniform(tl.load(key_ptr + row), tl.load(counter_ptr + row)))

    parts: tl.constexpr = (V + PART - 1) // PART
    part = tl.arange(0, PARTS)
    peaks = tl.load(peaks_ptr + row * parts + part, mask=part < parts, other=-3e38)
    masses = tl.load(masses_ptr + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(peaks, 0)
    whole = tl.sum(masses * tl.exp((peaks - top) * inverse), 0)
    floor = top - 110 * temperature  # what lies lower has no mass in float32
    edge = tl.where(min_p > 0, tl.maximum(floor, top + temperature * tl.log(min_p)), floor)

    low = tl.where(top_p < 1, floor, edge)
    survivors = TILE + 1
    cut = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if cut:
        low, survivors = _survivors(maxima_ptr + row * (parts * (PART // GROUP)), survivors_ptr + row * TILE, low, top, top_k,
                                    top_p * whole, inverse, parts * (PART // GROUP), GROUPS, TILE)
    if survivors <= TILE:
        chosen, total = _from_tile(logits_ptr, survivors_ptr + row * TILE, survivors, low, edge, top, top_k, top_p, whole, inverse, u,
                                   V, GROUP, TILE)
    else:
        if cut:
            low = _by_passes(logits_ptr, low, edge, top, top_k, top_p, whole, temperature, V, PART, WAYS)
            masses = _masses(logits_ptr, peaks, low, inverse, V, PART, PARTS)
        chosen, total = _from_parts(logits_ptr, peaks, masses, low, top, inverse, u, V, PART, PARTS)
    logit = tl.load(logits_ptr + chosen)
    logprob = tl.where(greedy & (logit == top), 0.0, (logit - top) / temperature - tl.log(total))
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(whole == whole, logprob, float("nan")))


def _survivors(maxima_ptr, survivors_ptr, low, top, top_k, goal, inverse, groups, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Triton: a lower bound of what is kept, and how many groups reach it; where no more than TILE do they are written down in order.

    Groups whose maxima number top_k (or else weigh `goal`) hold at least as many tokens (or as much mass): their least maximum
    lies no higher than the least token kept.
    """
    group = tl.arange(0, GROUPS)
    maxima = tl.load(maxima_ptr + group, mask=group < groups, other=float("-inf"))
    amounts = tl.where(top_k > 0, 1.0, tl.exp((maxima - top) * inverse))
    low = _largest(maxima, amounts, low, top, tl.where(top_k > 0, top_k.to(tl.float32), goal), TILE)
    survives = (maxima >= low).to(tl.int32)
    place = tl.cumsum(survives, 0) - 1
    tl.store(survivors_ptr + place, group, mask=(survives > 0) & (place < TILE))
    tl.debug_barrier()  # other threads read them
    return low, tl.sum(survives, 0)


def _largest(values, amounts, low, high, goal, FEW: tl.constexpr):
    """Triton: the largest value in [low, high] such that the amounts of those at or above it sum to `goal` at least; `low` if none is.

    Bisection that snaps to the values, and so ends exactly. It ends early where no more than FEW values lie at or above `low`.
    """
    above = values >= low
    searching = (low < high) & (tl.sum(tl.where(above, amounts, 0.0), 0) >= goal) & (tl.sum(above.to(tl.int32), 0) > FEW)
    while searching:
        middle = low + (high - low) / 2
        middle = tl.where(middle > low, middle, high)
        above = values >= middle
        if tl.sum(tl.where(above, amounts, 0.0), 0) >= goal:
            low = tl.min(tl.where(above, values, high), 0)
            searching = low < high
            if FEW > 0:
                searching = searching & (tl.sum(above.to(tl.int32), 0) > FEW)
        else:
            high = tl.max(tl.where(above, float("-inf"), values), 0)
            searching = low < high
    return low


def _from_tile(logits_ptr, survivors_ptr, survivors, low, edge, top, top_k, top_p, whole, inverse, u,
               V: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Triton: (id, mass of the kept tokens) where all of those lie in the groups written down."""
    slot = tl.arange(0, TILE)
    group = tl.load(survivors_ptr + slot, mask=slot < survivors, other=0)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = tl.load(logits_ptr + cols, mask=(slot < survivors)[:, None] & (cols < V), other=float("-inf"))
    cols, logit = tl.reshape(cols, (TILE * GROUP,)), tl.reshape(logit, (TILE * GROUP,))
    mass = tl.exp((logit - top) * inverse)
    if top_k > 0:
        low = _largest(logit, tl.full((TILE * GROUP,), 1.0, tl.float32), low, top, top_k.to(tl.float32), 0)
        whole = tl.sum(tl.where(logit >= low, mass, 0.0), 0)
    if top_p < 1:
        low = _largest(logit, mass, low, top, top_p * whole, 0)
    mass = tl.where(logit >= tl.maximum(low, edge), mass, 0.0)
    total = tl.sum(mass, 0)
    place = _place(mass, (u * total.to(tl.float64)).to(tl.float32), TILE * GROUP)
    return tl.sum(tl.where(tl.arange(0, TILE * GROUP) == place, cols, 0), 0), total


def _by_passes(logits_ptr, low, edge, top, top_k, top_p, whole, temperature, V: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Triton: the least logit kept, by passes over the whole row: where ties, a flat row or a large top_k leave too many groups."""
    inverse = 1.0 / temperature
    if top_k > 0:
        low = _search(logits_ptr, low, top, top_k.to(tl.float32), inverse, V, BLOCK, WAYS, False)
    if top_p < 1:
        if top_k > 0:
            masses = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, V, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                logit = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf"))
                masses += tl.where(logit >= low, tl.exp((logit - top) * inverse), 0.0)
            whole = tl.sum(masses, 0)
        spare = top + temperature * tl.log((1 - top_p) * whole / V)  # V tokens below this weigh less than what top_p leaves out
        low = _search(logits_ptr, tl.maximum(low, tl.minimum(spare, top)), top, top_p * whole, inverse, V, BLOCK, WAYS, True)
    return tl.maximum(low, edge)


def _search(logits_ptr, low, top, goal, inverse, V: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr, MASS: tl.constexpr):
    """Triton: the largest t in [low, top] such that the logits at or above t number (MASS: weigh) at least `goal`.

    Every pass counts at WAYS points between the two ends and keeps the part in which the answer lies. It ends where no float
    lies between, which is exact, or where no two tokens do, beyond which the set does not change.
    """
    cuts = (tl.arange(0, WAYS) + 1).to(tl.float32) / (WAYS + 1)
    high = top + tl.maximum(tl.abs(top), 1.0) * 1e-6
    at_low, at_high = float("inf"), 0.0
    searching = low < high
    while searching:
        marks = low + (high - low) * cuts
        sums = tl.zeros((BLOCK, WAYS), tl.float32)
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            logit = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf"))
            amount = tl.exp((logit - top) * inverse) if MASS else tl.full((BLOCK,), 1.0, tl.float32)
            sums += tl.where(logit[:, None] >= marks[None, :], amount[:, None], 0.0)
        found = tl.sum(sums, 0)
        enough = found >= goal
        new_low = tl.max(tl.where(enough, marks, low), 0)
        new_high = tl.min(tl.where(enough, high, marks), 0)
        at_low = tl.minimum(at_low, tl.min(tl.where(enough, found, float("inf")), 0))
        at_high = tl.maximum(at_high, tl.max(tl.where(enough, 0.0, found), 0))
        least = tl.exp((new_low - top) * inverse) if MASS else 1.0
        searching = ((new_low > low) | (new_high < high)) & (at_low - at_high > 1.5 * least)
        low, high = new_low, new_high
    return tl.minimum(low, top)


def _masses(logits_ptr, peaks, least, inverse, V: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """Triton: of every part the mass at or above `least`, relative to the part's peak."""
    part = tl.arange(0, PARTS)
    masses = tl.zeros((PARTS,), tl.float32)
    for start in range(0, V, PART):
        cols = start + tl.arange(0, PART)
        logit = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf"))
        here = part == start // PART
        peak = tl.sum(tl.where(here, peaks, 0.0), 0)
        masses = tl.where(here, tl.sum(tl.where(logit >= least, tl.exp((logit - peak) * inverse), 0.0), 0), masses)
    return masses


def _from_parts(logits_ptr, peaks, masses, least, top, inverse, u, V: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """Triton: (id, mass of the kept tokens): first the part in which the draw falls, then the token, relative to the part's peak."""
    part = tl.arange(0, PARTS)
    scales = tl.exp((peaks - top) * inverse)
    total = tl.sum(masses * scales, 0)
    target = (u * total.to(tl.float64)).to(tl.float32)
    chosen = _place(masses * scales, target, PARTS)
    peak, scale = tl.sum(tl.where(part == chosen, peaks, 0.0), 0), tl.sum(tl.where(part == chosen, scales, 0.0), 0)
    rest = (target - tl.sum(tl.where(part < chosen, masses * scales, 0.0), 0)) / scale
    cols = chosen * PART + tl.arange(0, PART)
    logit = tl.load(logits_ptr + cols, mask=cols < V, other=float("-inf"))
    mass = tl.where(logit >= least, tl.exp((logit - peak) * inverse), 0.0)
    return chosen * PART + _place(mass, rest, PART), total


def _place(mass, target, SIZE: tl.constexpr):
    """Triton: the first place at which the cumulative mass exceeds the target; where rounding leaves none, the last with any mass."""
    place = tl.arange(0, SIZE)
    first = tl.min(tl.where((tl.cumsum(mass, 0) > target) & (mass > 0), place, SIZE), 0)
    return tl.where(first < SIZE, first, tl.max(tl.where(mass > 0, place, 0), 0))


def _uniform(key, counter):
    """Triton: `uniforms` for one row."""
    x = key + (counter + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
