"""Held-out feedback, scored: each example's KTO loss and reward, and how far desirable and undesirable ones are apart."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data.batch import Batch
from assay.evaluation.held_out_loss import HeldOut, noted_batches, with_padding_rows
from assay.evaluation.held_out_pairs import Values, mean_of
from assay.learn.unpaired import KtoSettings, kto_losses, labelled_scores
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.statistics.correlation import correlation
from assay.statistics.effects import difference_of_means
from assay.statistics.estimate import Estimate, proportion


@dataclass(frozen=True)
class ScoredFeedback:
    """One value an example, in the same order at every evaluation. `kl` is the baseline that all of them were compared with."""

    losses: Values
    rewards: Values  # β times the log-ratio to the reference
    logps: Values
    tokens: Values
    desirable: NDArray[np.bool_]
    kl: float
    beta: float
    ids: tuple[str, ...]
    digest: str  # of what was scored

    @property
    def one_sided(self) -> bool:
        """Whether fewer than two examples have one of the labels: nothing can be said of how far the two are apart."""
        return min(int(self.desirable.sum()), int((~self.desirable).sum())) < 2

    def margin(self, level: float = 0.95) -> Estimate:
        """Reward of desirable examples less that of undesirable ones."""
        return difference_of_means(self.rewards[self.desirable], self.rewards[~self.desirable], level=level)

    @property
    def accuracy(self) -> Estimate:
        """How often a desirable example is above the baseline, or an undesirable one below it."""
        above = self.rewards > self.beta * self.kl
        return proportion(int((above == self.desirable).sum()), len(above))

    @property
    def length_bias(self) -> Estimate | None:
        return correlation(self.rewards, self.tokens)

    @property
    def held_out(self) -> HeldOut:
        return HeldOut(mean_of(self.losses), "loss per example", float(self.losses.mean()), self.losses,
                       tokens=np.ones_like(self.losses), digest=self.digest)


@torch.no_grad()
def score_feedback(model: Transformer, batches: Iterable[Batch], settings: KtoSettings, *, rows: int) -> ScoredFeedback:
    """Score all examples of the batches; the KL is estimated on all of their mismatched completions together."""
    read, found, ids = hashlib.sha256(), list[Values](), list[str]()
    training, device = model.training, model.embed.weight.device
    model.eval()
    try:
        for batch in noted_batches(batches, read):
            with uncompiled():
                scores, labels = labelled_scores(model, with_padding_rows(batch, rows).to(device))
            columns = (scores.chosen_ratio, scores.rejected_ratio, scores.chosen, scores.chosen_tokens, labels)
            found.append(torch.stack([column[scores.counts].double() for column in columns]).cpu().numpy())
            ids += [str(id) for row in batch.ids for id in row]
    finally:
        model.train(training)
    ratios, mismatched, logps, tokens, labels_N = np.concatenate(found, 1)
    assert len(ratios) == len(ids), "every example counts"
    kl = max(0.0, float(mismatched.mean())) if settings.has_baseline else 0.0
    losses = kto_losses(settings, torch.from_numpy(ratios), torch.from_numpy(labels_N), torch.tensor(kl).double()).numpy()
    return ScoredFeedback(losses, settings.beta * ratios, logps, tokens, labels_N > 0, kl, settings.beta, tuple(ids), read.hexdigest())
