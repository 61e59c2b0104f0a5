"""Advantages and token weights from groups of rewards: pure functions; an unknown reward is left out and counted, never 0.

Shapes: P prompts, G completions of each, N completions, B rows, T time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from assay.errors import DataError, UsageError

_Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
RewardValue = float | None  # None: nobody knows, because the reward function failed or the judge could not say
Normalise = Literal["token", "sequence", "constant"]
Scale = Literal["group", "batch", "none"]
Estimator = Literal["grpo", "rloo", "reinforce_pp"]

STD_FLOOR = 1e-4  # added to a group's standard deviation, as TRL does
_EQUAL = 1e-8  # rewards closer than this are the same: a mean of floats must not make a signal


@dataclass(frozen=True)
class Advantages:
    values_PG: _Array  # 0 where the reward is unknown
    known_PG: Mask  # False: give every token of this completion weight 0
    silent_P: Mask  # the group's known rewards are all equal, or fewer than two: nothing to learn from

    @property
    def frac_zero_std(self) -> float:
        return float(self.silent_P.mean())


def estimated_advantages(rewards_PG: Sequence[Sequence[RewardValue]], estimator: Estimator, scale: Scale = "group") -> Advantages:
    """"grpo": against the group's mean, scaled as asked. "rloo": against the mean of the siblings alone, plain, whatever the scale.

    "reinforce_pp" (REINFORCE++): against the mean of all rewards of the batch, in their standard deviations: a group whose rewards are
    all equal still learns, where it did better or worse than the other prompts.
    """
    if estimator == "grpo":
        return group_advantages(rewards_PG, scale=scale)
    if estimator == "rloo":
        return group_advantages(rewards_PG, scale="none", leave_one_out=True)
    if estimator != "reinforce_pp":
        raise UsageError(f"advantages: the estimator is {estimator!r}; expected 'grpo', 'rloo' or 'reinforce_pp'")
    rewards = _as_array(rewards_PG)
    known = ~np.isnan(rewards)
    equal = not _spread(rewards.reshape(1, -1), known.reshape(1, -1))[0]
    mean = 0.0 if equal else float(rewards[known].mean())
    values = np.where(known & (not equal), (rewards - mean) / (reward_std(rewards_PG) + STD_FLOOR), 0.0)
    return Advantages(values, known, np.full(len(rewards), equal) | ~known.any(1))


def group_advantages(rewards_PG: Sequence[Sequence[RewardValue]], *, scale: Scale = "group",
                     leave_one_out: bool = False) -> Advantages:
    """How much better each completion was than its group's mean; in standard deviations of the group, or of the batch, or plain.

    An unknown reward takes no part in its group's mean. `leave_one_out` compares with the siblings alone, which makes the
    plain advantage larger by G / (G − 1) and its expectation exactly the gradient's.
    """
    rewards = _as_array(rewards_PG)
    known = ~np.isnan(rewards)
    count = known.sum(1, keepdims=True)
    filled = np.where(known, rewards, 0.0)
    mean = filled.sum(1, keepdims=True) / np.maximum(count, 1)
    apart = np.where(known, rewards - mean, 0.0)
    silent = ~_spread(rewards, known)
    apart[silent] = 0.0
    values = apart * np.where(count > 1, count / np.maximum(count - 1, 1), 0.0) if leave_one_out else apart
    if scale == "group":
        values = values / (np.sqrt((apart**2).sum(1, keepdims=True) / np.maximum(count - 1, 1)) + STD_FLOOR)
    elif scale == "batch":
        values = values / (reward_std(rewards_PG) + STD_FLOOR)
    elif scale != "none":
        raise UsageError(f"advantages: scale is {scale!r}; expected 'group', 'batch' or 'none'")
    return Advantages(values, known, silent)


def reward_std(rewards_PG: Sequence[Sequence[RewardValue]]) -> float:
    """Standard deviation of all known rewards together, with n − 1; 0 where fewer than two are known."""
    rewards = _as_array(rewards_PG)
    known = rewards[~np.isnan(rewards)]
    return float(known.std(ddof=1)) if known.size > 1 else 0.0

# ---------------------------------------------------------------- weights and divisor: how a batch is normalised


@dataclass(frozen=True)
class Counting:
    """The weight of each completion's tokens, and the batch's divisor where it is not the sum of all weights."""

    weight_N: _Array
    divisor: float | None


def token_weights(lengths_N: Sequence[int], counted_N: Sequence[bool], how: Normalise, cap: int | None = None) -> Counting:
    """"token": every token counts alike (DAPO, CISPO). "sequence": every completion counts alike (GRPO, GSPO).

    "constant" (Dr. GRPO): every token counts alike, divided by completions × `cap` whatever their lengths. What is not
    counted (an unknown reward, a masked truncation) has weight 0 and is in no divisor either.
    """
    lengths, counted = np.asarray(lengths_N, dtype=np.float64), np.asarray(counted_N, dtype=bool)
    if lengths.shape != counted.shape or (lengths < 1).any():
        raise DataError(f"completions of lengths {lengths.tolist()[:8]}… with {len(counted)} marks; "
                        "expected one mark for each and at least one token in each")
    if how not in ("token", "sequence", "constant"):
        raise UsageError(f"normalisation {how!r} is not known; expected 'token', 'sequence' or 'constant'")
    weight = np.where(counted, 1 / lengths if how == "sequence" else 1.0, 0.0)
    if how != "constant":
        return Counting(weight, None)
    if cap is None or cap < lengths.max():
        raise UsageError(f"normalising by a constant needs the cap on lengths, got {cap} for completions of up to {lengths.max():g}")
    return Counting(weight, float(counted.sum() * cap))


def untruncated(ended_N: Sequence[str]) -> Mask:
    """True where a completion ended by itself: with truncation masked, only these are learned from."""
    return np.array([ended != "length" for ended in ended_N], dtype=bool)


def overlong_penalty(lengths_N: Sequence[int], cap: int, buffer: int) -> _Array:
    """DAPO's soft punishment, to be added to the rewards: 0 up to cap − buffer tokens, then straight down to −1 at cap."""
    if not 0 < buffer <= cap:
        raise UsageError(f"over-long shaping over the last {buffer} of {cap} tokens; expected 0 < buffer ≤ cap")
    return -np.clip((np.asarray(lengths_N, dtype=np.float64) - (cap - buffer)) / buffer, 0.0, 1.0)

# ---------------------------------------------------------------- a KL penalty that only moves credit


def kl_shift(behaviour_BT: Tensor, reference_BT: Tensor, weight_BT: Tensor, coefficient: float) -> Tensor:
    """ART's KL penalty, to be added to the advantages: tokens that left the reference more than the average lose, the others gain.

    Its weighted mean is 0, so that the penalty cannot drown the reward. Computed once from the rollout's own log-probabilities,
    so that inner epochs and micro-batches do not change it.
    """
    counts = weight_BT != 0
    gap = (behaviour_BT - reference_BT).where(counts, behaviour_BT.new_zeros(()))
    mean = (weight_BT * gap).sum() / weight_BT.sum()
    return (coefficient * (mean - gap)).where(counts, behaviour_BT.new_zeros(()))

# ---------------------------------------------------------------- dynamic sampling


@dataclass(frozen=True)
class Refill:
    kept: tuple[int, ...]  # groups to learn from
    again: tuple[int, ...]  # groups without a signal, whose places are sampled anew
    given_up: tuple[int, ...]  # groups without a signal whose place was tried often enough: counted, not learned from


def refill(silent_P: Sequence[bool] | Mask, tried_P: Sequence[int], limit: int) -> Refill:
    """Decision for each place of a batch: keep it, sample another prompt, or give up. `tried_P` is how often it has been sampled, `limit`
    how often it may be.
    """
    if len(silent_P) != len(tried_P):
        raise DataError(f"{len(silent_P)} groups but {len(tried_P)} counts of tries; expected one each")
    places = range(len(tried_P))
    return Refill(kept=tuple(p for p in places if not silent_P[p]),
                  again=tuple(p for p in places if silent_P[p] and tried_P[p] < limit),
                  given_up=tuple(p for p in places if silent_P[p] and tried_P[p] >= limit))

# ----------------------------------------------------------------


def _as_array(rewards_PG: Sequence[Sequence[RewardValue]]) -> _Array:
    """NaN for unknown, and for nothing else."""
    sizes = {len(group) for group in rewards_PG}
    if len(sizes) != 1 or sizes == {0}:
        raise DataError(f"groups of {sorted(sizes) or 'no'} completions; expected at least one group, all of one size")
    for prompt, group in enumerate(rewards_PG):
        for place, reward in enumerate(group):
            if reward is not None and not np.isfinite(reward):
                raise DataError(f"prompt {prompt}, completion {place}: the reward is {reward}; expected a finite number, "
                                "or None where it is not known")
    return np.array([[np.nan if reward is None else reward for reward in group] for group in rewards_PG], dtype=np.float64)


def _spread(rewards: _Array, known: Mask) -> Mask:
    """Mask of the groups whose known rewards differ."""
    most, least = np.where(known, rewards, -np.inf).max(1), np.where(known, rewards, np.inf).min(1)
    return (known.sum(1) > 1) & (most - least > _EQUAL * np.maximum(1.0, np.abs(most)))
