"""Importance weights: what another engine drew, weighed as if the trainer had drawn it: min(π_trainer / π_sampler, cap) of each token.

Shapes: B rows, T time.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from assay.data.batch import Batch


class ImportanceWeights(NamedTuple):
    """`effective`: what the weighed tokens are worth, as a share of as many that the trainer drew itself (Kish)."""

    weights_BT: Tensor
    effective: float
    kl: float  # nats a token, of the sampler to the trainer, never negative (k3)
    truncated: float  # share of the tokens whose weight was cut to the cap
    tokens: int


def truncated_importance(trainer_BT: Tensor, sampler_BT: Tensor, counts_BT: Tensor, cap: float) -> ImportanceWeights:
    """Truncated importance weights, in fp64. A log-probability that is not a number makes everything measured NaN: nothing is hidden by the
    cap."""
    apart_BT = torch.where(counts_BT, trainer_BT.double() - sampler_BT.double(), 0.0)
    whole_BT = apart_BT.exp()
    weights_BT = whole_BT.clamp(max=cap)
    kept, tokens = weights_BT[counts_BT], int(counts_BT.sum())
    effective = float(kept.sum().square() / (tokens * kept.square().sum()))
    kl = float((torch.expm1(apart_BT) - apart_BT)[counts_BT].mean())
    return ImportanceWeights(weights_BT.to(trainer_BT.dtype), effective, kl, float((whole_BT > cap)[counts_BT].double().mean()), tokens)


def corrected(batch: Batch, trainer_BT: Tensor, cap: float) -> tuple[Batch, ImportanceWeights]:
    """The batch as the trainer sees it: a ratio is to the trainer's own log-probabilities, and the advantage of a token carries its
    weight, at most `cap`."""
    assert batch.behaviour is not None
    assert batch.advantage is not None
    found = truncated_importance(trainer_BT, batch.behaviour, batch.weight != 0, cap)
    return replace(batch, behaviour=trainer_BT, advantage=batch.advantage * found.weights_BT), found
