"""Drawing the next token on the device: truncate, draw by inverse CDF from a counter-based hash, report its log-probability.

Which tokens stay is a law of values, not of ranks, so that ties are never broken by the order in which a sort finds them:
with scaled logits l = logits / temperature, token i stays if and only if fewer than top_k tokens lie strictly above it,
those strictly above it hold less than top_p of the mass that top_k left, and l_i ≥ max l + log min_p.
The draw takes the first id, in order of ids, at which the cumulative mass of the kept tokens exceeds u · total.

Shapes: N rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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
    return plain_draw(logits_NV, rule, key_N, counter_N)


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
