"""KTO: completions that were called desirable or undesirable one by one, without a pair, each against what any completion gained.

An example stands in a row as two neighbouring documents: its own completion at an even number, and at the odd one after it a completion
that belongs to another prompt. `advantage` holds its label, 1 or −1. Over the whole step the mismatched completions estimate the KL of
the policy to its reference (`mismatch_kl`), which every row of the batch then carries in `baseline`: so the objective stays a sum over
rows, and neither micro-batches nor shards can change a step.

Shapes: B rows, T time, P places for examples in a row, of which `counts` says which hold one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import DataError, UsageError
from assay.learn.objectives import TOKENS, Loss, Objective
from assay.learn.preference import PairScores, PreferenceSettings, document_sums, pair_scores
from assay.model.transformer import Transformer

KtoLoss = Literal["kto", "apo_zero_unpaired"]
_AGAINST_REFERENCE = PreferenceSettings()


@dataclass(frozen=True)
class KtoSettings:
    """Settings of the KTO objective; the guards write the same loss out from this record alone. "apo_zero_unpaired" has no baseline."""

    loss: KtoLoss = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.loss not in get_args(KtoLoss):
            raise UsageError(f"KTO loss {self.loss!r}; expected one of {', '.join(get_args(KtoLoss))}")
        if not (self.beta > 0 and self.desirable_weight > 0 and self.undesirable_weight > 0):
            raise UsageError(f"beta {self.beta}, weights {self.desirable_weight} and {self.undesirable_weight}; expected all above 0")

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def has_baseline(self) -> bool:
        return self.loss == "kto"

    def weight_of(self, labels: Tensor) -> Tensor:
        return torch.where(labels > 0, self.desirable_weight, self.undesirable_weight)

    def at_reference(self, labels: Tensor) -> float:
        """The mean loss of a policy that is its reference, on examples of these labels (1 or −1): half of what each weighs."""
        return float(self.weight_of(labels).double().mean()) / 2


def kto_objective(settings: KtoSettings) -> Objective:
    def objective(model: Transformer, batch: Batch) -> Loss:
        scores, labels_BP = labelled_scores(model, batch)
        losses_BP = torch.where(scores.counts, kto_losses(settings, scores.chosen_ratio, labels_BP, baseline_of(settings, batch)), 0.0)
        return Loss(losses_BP.sum().float(), scores.counts.sum().float(), metrics=measured_feedback(settings, scores, labels_BP, batch))

    return objective


def kto_losses(settings: KtoSettings, ratio: Tensor, labels: Tensor, baseline: Tensor) -> Tensor:
    """λ (1 − σ(±β (log-ratio − baseline))), with + for what is desirable."""
    return settings.weight_of(labels) * torch.sigmoid(-labels * settings.beta * (ratio - baseline))


def labelled_scores(model: Transformer, batch: Batch) -> tuple[PairScores, Tensor]:
    """`chosen` of the scores is the example's own completion, `rejected` the mismatched one; and the labels (B, P), 1 or −1."""
    if batch.advantage is None:
        raise DataError("KTO needs the labels of its examples; this batch has " + ", ".join(batch.streams()))
    scores = pair_scores(model, batch, _AGAINST_REFERENCE)
    signs = document_sums(torch.where(batch.weight != 0, batch.advantage, 0.0), batch.documents)[:, 0::2]  # type: ignore[arg-type]
    return scores, torch.where(signs < 0, -1.0, 1.0)


def baseline_of(settings: KtoSettings, batch: Batch) -> Tensor:
    """(B, 1)."""
    if not settings.has_baseline:
        return torch.zeros_like(batch.weight[:, :1]).double()
    if batch.baseline is None:
        raise DataError("KTO needs the KL that mismatched completions estimate; this batch has " + ", ".join(batch.streams()))
    return batch.baseline[:, :1].double()


@torch.no_grad()
def mismatch_kl(model: Transformer, parts: Iterable[Batch]) -> float:
    """The mean log-ratio of the mismatched completions of all `parts` to the reference, and 0 where that is negative; as in TRL."""
    total, count, device = 0.0, 0, model.embed.weight.device
    for part in parts:
        scores = pair_scores(model, part.to(device), _AGAINST_REFERENCE)
        total += float(torch.where(scores.counts, scores.rejected_ratio, 0.0).sum())
        count += int(scores.counts.sum())
    return max(0.0, total / max(1, count))


def with_baseline(model: Transformer, batch: Batch, micro: int) -> Batch:
    """The batch with the KL of the policy as it is now, the same for all of its rows."""
    return replace(batch, baseline=torch.full_like(batch.weight, mismatch_kl(model, batch.split(micro))))


@torch.no_grad()
def measured_feedback(settings: KtoSettings, scores: PairScores, labels_BP: Tensor, batch: Batch) -> dict[str, Tensor]:
    """KTO metrics, as sums; what they are divided by is the number of examples. `rewards/signed` is the reward with the label's sign: it
    grows as is learned."""
    reward = settings.beta * scores.chosen_ratio
    found = {"rewards/signed": labels_BP * reward, "rewards/mean": reward, "desirable": labels_BP > 0, "logps/mean": scores.chosen,
             "kl": baseline_of(settings, batch).expand_as(reward)}
    sums = {name: torch.where(scores.counts, values.double(), 0.0).sum().float() for name, values in found.items()}
    return {TOKENS: scores.counts.sum().float(), **sums}
