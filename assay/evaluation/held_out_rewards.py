"""Held-out pairs, scored by a reward model: each pair's loss, and how often and by how much the chosen answer is worth more."""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

from assay.data.batch import Batch
from assay.evaluation.held_out_loss import noted_batches, with_padding_rows
from assay.evaluation.held_out_pairs import ScoredPairs, Values
from assay.learn.bradley_terry import RewardModelSettings, pair_of_rewards, reward_losses
from assay.learn.preference import document_sums
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer


@torch.no_grad()
def score_rewards(model: Transformer, batches: Iterable[Batch], settings: RewardModelSettings, *, rows: int) -> ScoredPairs:
    """Score all pairs of the batches, in rows of one shape; a log-probability is not asked for, and stands as the reward."""
    read, found, ids = hashlib.sha256(), list[Values](), list[str]()
    training, device = model.training, model.embed.weight.device
    model.eval()
    try:
        for batch in noted_batches(batches, read):
            part = with_padding_rows(batch, rows).to(device)
            with uncompiled():
                chosen, rejected, counts = pair_of_rewards(model, part, settings.token)
            assert part.documents is not None
            tokens = document_sums((part.weight != 0).float(), part.documents)
            columns = reward_losses(settings, chosen, rejected), chosen, rejected, tokens[:, 0::2] - tokens[:, 1::2]
            found.append(torch.stack([column[counts].double() for column in columns]).cpu().numpy())
            ids += [str(id) for row in batch.ids for id in row]
    finally:
        model.train(training)
    losses, won, lost, longer = np.concatenate(found, 1)
    assert len(losses) == len(ids), "every pair counts"
    return ScoredPairs(losses, won - lost, won, lost, won, lost, longer, tuple(ids), read.hexdigest())
