"""Objectives: (model, Batch) → Loss. Functions that return sums, so that micro-batches add up exactly."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from assay.data.batch import Batch
from assay.kernels.softcap_ce import linear_cross_entropy
from assay.model.transformer import Transformer


class Loss(NamedTuple):
    total: Tensor  # a SUM over weighted tokens; the loop divides once per step
    weight: Tensor  # the weight that this sum carries
    losses: Tensor | None = None  # (B, T) per token where the method has them, detached; column 0 is 0
    metrics: Mapping[str, Tensor] | None = None  # what else was measured, on the device: sums, or maxima where a name ends in /max


Objective = Callable[[Transformer, Batch], Loss]


def next_token(model: Transformer, batch: Batch) -> Loss:
    """Pretraining and fine-tuning alike; only the weights differ. The logits never exist whole."""
    states = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions, starts=batch.starts)
    B, T, D = states.shape
    # Every state predicts its right neighbour; the last column has none and gets weight 0, which keeps shapes whole.
    targets, weight = batch.tokens.roll(-1, 1), batch.weight.roll(-1, 1)
    total, losses = linear_cross_entropy(states.reshape(B * T, D), model.head_weight(), targets.reshape(-1), weight.reshape(-1),
                                         softcap=model.config.softcap)
    return Loss(total, batch.weight.sum(), losses.view(B, T).roll(1, 1))
