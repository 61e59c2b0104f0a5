"""Weights of a stale rollout: tokens that earlier weights sampled, weighed as the present ones would sample them, and truncated (TIS).

Shapes: B rows, T time.
"""

from dataclasses import replace

import torch
from torch import Tensor

from assay.data.batch import Batch


def truncated_weights(now_BT: Tensor, then_BT: Tensor, counts_BT: Tensor, cap: float) -> Tensor:
    """π now / π then of each token that counts, at most `cap`; 1 elsewhere."""
    return torch.where(counts_BT, (now_BT - then_BT).exp().clamp(max=cap), 1.0)


def importance_weighted(batch: Batch, now_BT: Tensor, weight_BT: Tensor) -> Batch:
    """The batch as the present policy's: ratios begin at 1, and each token's advantage counts by its importance weight.

    w · min(r·A, clip(r)·A) = min(r·wA, clip(r)·wA) for w > 0, so the objective stays as it is; KL and entropy are not weighed.
    """
    assert batch.advantage is not None
    counts_BT = batch.weight != 0
    return replace(batch, behaviour=torch.where(counts_BT, now_BT, 0.0), advantage=batch.advantage * weight_BT)


def effective_share(weights: Tensor) -> float:
    """Kish's effective sample size of the weights, as a share of how many there are; 1 where all are alike."""
    return float(weights.double().sum().square() / (len(weights) * weights.double().square().sum()))
