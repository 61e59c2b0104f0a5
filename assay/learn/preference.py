"""Preference objectives: DPO and its relatives, of pairs of completions to one prompt, the chosen and the rejected.

A pair stands in one row as two neighbouring documents, the chosen at an even number, the rejected at the odd one after it; a row
holds any number of pairs. So rows stay independent of each other, as micro-batches and shards need them. `reference` holds the
reference's log-probability of each token, the batch's divisor is the number of pairs in the step, and the objective stays a sum.

Shapes: B rows, T time, P places for pairs in a row, of which `counts` says which hold one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import DataError, UsageError
from assay.learn.objectives import TOKENS, Loss, Objective
from assay.learn.policy import token_logprobs
from assay.model.transformer import Transformer

PreferenceLoss = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "simpo", "orpo"]
WITHOUT_REFERENCE = {"simpo", "orpo"}
SMOOTHED = {"sigmoid", "sigmoid_norm", "robust", "simpo"}  # losses that label smoothing is a part of
_SURE = -1e-7  # a mean log-probability that counts as certain: the odds of what is certain are infinite


@dataclass(frozen=True)
class PreferenceSettings:
    """Settings of a preference objective; the guards write the same loss out from this record alone.

    `label_smoothing` is the share of labels held to be wrong: conservative DPO's in "sigmoid", and unbiased in "robust". "sigmoid_norm"
    and "ipo" compare means over tokens, so that length is worth nothing. `gamma` is SimPO's margin, in units of the reward.
    """

    loss: PreferenceLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5

    def __post_init__(self) -> None:
        if self.loss not in get_args(PreferenceLoss):
            raise UsageError(f"preference loss {self.loss!r}; expected one of {', '.join(get_args(PreferenceLoss))}")
        if not (self.beta > 0 and 0 <= self.label_smoothing < 0.5 and self.gamma >= 0):
            raise UsageError(f"beta {self.beta}, label smoothing {self.label_smoothing}, gamma {self.gamma}; expected beta above 0, a "
                             "share of wrong labels from 0 to below 0.5, and a margin from 0")
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise UsageError(f"label smoothing {self.label_smoothing} with the loss {self.loss}, which has none; leave it at 0, or choose "
                             f"one of {', '.join(sorted(SMOOTHED))}")

    @property
    def needs_reference(self) -> bool:
        return self.loss not in WITHOUT_REFERENCE

    @property
    def at_reference(self) -> float | None:
        """The loss of a policy that is its reference, whatever the data; None where there is no reference."""
        return {"hinge": 1.0, "ipo": 1 / (4 * self.beta**2)}.get(self.loss, math.log(2)) if self.needs_reference else None


class PairScores(NamedTuple):
    """Scores of each place for a pair, (B, P) in fp64: log-probabilities summed over the tokens of a completion, and how many those are."""

    chosen: Tensor
    rejected: Tensor
    chosen_reference: Tensor  # 0 where there is no reference
    rejected_reference: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    counts: Tensor  # bool: there is a pair in this place

    @property
    def chosen_ratio(self) -> Tensor:
        """log π − log reference of the completion."""
        return self.chosen - self.chosen_reference

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.rejected_reference


def preference(settings: PreferenceSettings) -> Objective:
    def objective(model: Transformer, batch: Batch) -> Loss:
        scores = pair_scores(model, batch, settings)
        losses_BP = torch.where(scores.counts, PAIR_LOSSES[settings.loss](settings, scores), 0.0)
        return Loss(losses_BP.sum().float(), scores.counts.sum().float(), metrics=measured_pairs(settings, scores))

    return objective


def pair_scores(model: Transformer, batch: Batch, settings: PreferenceSettings) -> PairScores:
    """A pair counts where both of its completions have tokens that count; what stands in other places means nothing."""
    if batch.documents is None or (settings.needs_reference and batch.reference is None):
        raise DataError("a preference objective needs pairs as packed documents, and the reference's log-probabilities of them; this "
                        f"batch has {', '.join(batch.streams())}")
    logp_BT, _ = token_logprobs(model, batch)
    reference_BT = batch.reference if settings.needs_reference and batch.reference is not None else torch.zeros_like(logp_BT)
    learned_BT = batch.weight != 0
    policy, reference, tokens = (document_sums(torch.where(learned_BT, batch.weight * values, 0.0), batch.documents)
                                 for values in (logp_BT, reference_BT, torch.ones_like(logp_BT)))
    counts = (tokens[:, 0::2] > 0) & (tokens[:, 1::2] > 0)
    places = [torch.where(counts, sums[:, side::2], empty) for sums, empty in ((policy, -1.0), (reference, 0.0), (tokens, 1.0))
              for side in (0, 1)]
    return PairScores._make([*places, counts])


def document_sums(values_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """Sums by document number, (B, an even number of places). In fp64, in which the order of adding leaves fp32 as it is."""
    B, T = values_BT.shape
    sums = torch.zeros(B, T + T % 2, dtype=torch.float64, device=values_BT.device)
    return sums.scatter_add(1, documents_BT.long().clamp(min=0), values_BT.double())  # padding has no weight: it adds 0

# ---------------------------------------------------------------- losses, one value a pair


def sigmoid_loss(settings: PreferenceSettings, scores: PairScores) -> Tensor:
    return smoothed_logistic(settings, settings.beta * (scores.chosen_ratio - scores.rejected_ratio))


def sigmoid_norm_loss(settings: PreferenceSettings, scores: PairScores) -> Tensor:
    return smoothed_logistic(settings, settings.beta * mean_margin(scores))


def ipo_loss(settings: PreferenceSettings, scores: PairScores) -> Tensor:
    return (mean_margin(scores) - 1 / (2 * settings.beta)).square()


def hinge_loss(settings: PreferenceSettings, scores: PairScores) -> Tensor:
    return (1 - settings.beta * (scores.chosen_ratio - scores.rejected_ratio)).relu()


def robust_loss(settings: PreferenceSettings, scores: PairScores) -> Tensor:
    """Unbiased where this share of labels is flipped: of mean the clean labels' loss."""
    margin, flipped = settings.beta * (scores.chosen_ratio - scores.rejected_ratio), settings.label_smoothing
    return (flipped * F.logsigmoid(-margin) - (1 - flipped) * F.logsigmoid(margin)) / (1 - 2 * flipped)


def simpo_loss(settings: PreferenceSettings, scores: PairScores) -> Tensor:
    return smoothed_logistic(settings, settings.beta * mean_margin(scores) - settings.gamma)


def orpo_loss(settings: PreferenceSettings, scores: PairScores) -> Tensor:
    """Cross-entropy of the chosen completion, and the log-odds of chosen over rejected; both of means over tokens."""
    chosen, rejected = (scores.chosen / scores.chosen_tokens).clamp(max=_SURE), (scores.rejected / scores.rejected_tokens).clamp(max=_SURE)
    odds = chosen - rejected - (_log_one_less(chosen) - _log_one_less(rejected))
    return -chosen - settings.beta * F.logsigmoid(odds)


PAIR_LOSSES: dict[str, Callable[[PreferenceSettings, PairScores], Tensor]] = {
    "sigmoid": sigmoid_loss, "sigmoid_norm": sigmoid_norm_loss, "ipo": ipo_loss, "hinge": hinge_loss, "robust": robust_loss,
    "simpo": simpo_loss, "orpo": orpo_loss}


def smoothed_logistic(settings: PreferenceSettings, margin: Tensor) -> Tensor:
    """Conservative DPO's: with this share of labels the other way round."""
    wrong = settings.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)


def mean_margin(scores: PairScores) -> Tensor:
    """Margin of chosen over rejected, both as means over their tokens."""
    return scores.chosen_ratio / scores.chosen_tokens - scores.rejected_ratio / scores.rejected_tokens


def _log_one_less(logp: Tensor) -> Tensor:
    """log(1 − exp(logp))."""
    return torch.log(-torch.expm1(logp))

# ---------------------------------------------------------------- what is measured on the way


def pair_rewards(settings: PreferenceSettings, scores: PairScores) -> tuple[Tensor, Tensor]:
    """Implicit rewards of chosen and rejected: β times the log-ratio, or, without a reference, β times the mean log-probability."""
    if settings.needs_reference:
        return settings.beta * scores.chosen_ratio, settings.beta * scores.rejected_ratio
    return settings.beta * scores.chosen / scores.chosen_tokens, settings.beta * scores.rejected / scores.rejected_tokens


@torch.no_grad()
def measured_pairs(settings: PreferenceSettings, scores: PairScores) -> dict[str, Tensor]:
    """Preference metrics under TRL's names, as sums. What is divided by is the number of pairs."""
    chosen, rejected = pair_rewards(settings, scores)
    found = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/accuracies": chosen > rejected,
             "rewards/margins": chosen - rejected, "logps/chosen": scores.chosen, "logps/rejected": scores.rejected}
    sums = {name: torch.where(scores.counts, values.double(), 0.0).sum().float() for name, values in found.items()}
    return {TOKENS: scores.counts.sum().float(), **sums}
