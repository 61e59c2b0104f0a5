"""Held-out preference pairs, scored: each pair's loss, and what the model makes of its two sides, with intervals over pairs."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data.batch import Batch
from assay.evaluation.held_out_loss import HeldOut, noted_batches, with_padding_rows
from assay.learn.preference import PAIR_LOSSES, PreferenceSettings, pair_rewards, pair_scores
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.statistics.correlation import correlation
from assay.statistics.estimate import Estimate, proportion, ratio

Values = NDArray[np.float64]


@dataclass(frozen=True)
class ScoredPairs:
    """One value a pair, in the same order at every evaluation."""

    losses: Values
    margins: Values  # reward of the chosen less that of the rejected
    chosen: Values  # log-probability of the completion
    rejected: Values
    chosen_rewards: Values
    rejected_rewards: Values
    longer: Values  # by how many learned tokens the chosen completion is longer
    ids: tuple[str, ...]
    digest: str  # of what was scored

    @property
    def margin(self) -> Estimate:
        return mean_of(self.margins)

    @property
    def accuracy(self) -> Estimate:
        """How often the chosen answer has the higher reward."""
        return proportion(int((self.margins > 0).sum()), len(self.margins))

    @property
    def length_bias(self) -> Estimate | None:
        """Correlation of the margin with how much longer the chosen answer is; None where that cannot be said."""
        return correlation(self.margins, self.longer)

    @property
    def held_out(self) -> HeldOut:
        return HeldOut(mean_of(self.losses), "loss per pair", float(self.losses.mean()), self.losses, tokens=np.ones_like(self.losses),
                       digest=self.digest)


def mean_of(values: Values) -> Estimate:
    """Mean with its t-interval, also where all values are 0 or 1: a loss is no rate."""
    return ratio(values, np.ones_like(values))


@torch.no_grad()
def score_pairs(model: Transformer, batches: Iterable[Batch], settings: PreferenceSettings, *, rows: int) -> ScoredPairs:
    """Score all pairs of the batches, in rows of one shape."""
    read, found, ids = hashlib.sha256(), list[NDArray[np.float64]](), list[str]()
    training, device = model.training, model.embed.weight.device
    model.eval()
    try:
        for batch in noted_batches(batches, read):
            with uncompiled():
                scores = pair_scores(model, with_padding_rows(batch, rows).to(device), settings)
            rewards = pair_rewards(settings, scores)
            columns = (PAIR_LOSSES[settings.loss](settings, scores), rewards[0] - rewards[1], scores.chosen, scores.rejected, *rewards,
                       scores.chosen_tokens - scores.rejected_tokens)
            found.append(torch.stack([column[scores.counts] for column in columns]).double().cpu().numpy())
            ids += [str(id) for row in batch.ids for id in row]
    finally:
        model.train(training)
    values = np.concatenate(found, 1)
    assert values.shape[1] == len(ids), "every pair counts"
    losses, margins, chosen, rejected, chosen_rewards, rejected_rewards, longer = values
    return ScoredPairs(losses, margins, chosen, rejected, chosen_rewards, rejected_rewards, longer, tuple(ids), read.hexdigest())
