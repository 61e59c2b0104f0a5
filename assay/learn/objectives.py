"""Objectives: (model, Batch) → Loss. Functions that return sums, so that micro-batches add up exactly."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.kernels.softcap_ce import linear_cross_entropy
from assay.model.transformer import Transformer


class Loss(NamedTuple):
    total: Tensor  # a SUM over weighted tokens; the loop divides once per step
    weight: Tensor  # the weight that this sum carries
    losses: Tensor | None = None  # (B, T) per token where the method has them, detached; column 0 is 0
    metrics: Mapping[str, Tensor] | None = None  # what else was measured, detached: sums, TOKENS among them, or maxima: NAME/max


Objective = Callable[[Transformer, Batch], Loss]
TOKENS = "tokens"  # the metric by which every other sum is divided


def next_token(model: Transformer, batch: Batch) -> Loss:
    """Pretraining and fine-tuning alike; only the weights differ. The logits never exist whole."""
    states = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions, starts=batch.starts)
    B, T, D = states.shape
    # Every state predicts its right neighbour; the last column has none and gets weight 0, which keeps shapes whole.
    targets, weight = batch.tokens.roll(-1, 1), batch.weight.roll(-1, 1)
    total, losses = linear_cross_entropy(states.reshape(B * T, D), model.head_weight(), targets.reshape(-1), weight.reshape(-1),
                                         softcap=model.config.softcap)
    return Loss(total, batch.weight.sum(), losses.view(B, T).roll(1, 1))

# ---------------------------------------------------------------- what is measured on the way


def combined(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics of two micro-batches together: the larger of what ends in /max, the sum of everything else."""
    both = {name: torch.maximum(one[name], other[name]) if name.endswith("/max") else one[name] + other[name]
            for name in one.keys() & other.keys()}
    return {**one, **other, **both}


def averages(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics divided once, by what counted; empty where nothing did. Waits for the device, once for all of them."""
    if not sums:
        return {}
    values = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
    tokens = values.pop(TOKENS)
    return {name: value if name.endswith("/max") else value / tokens for name, value in values.items()} if tokens else {}
