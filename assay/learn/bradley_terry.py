"""Reward model: one number for a whole text, learned from pairs by Bradley and Terry's likelihood that the chosen one wins.

The number is the logit of one token of its own (`REWARD_TOKEN`) at the last token of the text: that token's row of the head is the
score head, and the token never stands in a text. So a reward model is a causal language model like any other, in every file and for
every tool: it is saved, proven, quantised and served as one.

A pair stands in a row as two neighbouring documents, as in learn/preference.py. Shapes: B rows, T time, P places for pairs in a row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import DataError, UsageError
from assay.learn.objectives import TOKENS, Loss, Objective
from assay.learn.preference import document_sums
from assay.model.transformer import Transformer, softcap

REWARD_TOKEN = "<|reward|>"


@dataclass(frozen=True)
class RewardModelSettings:
    """`token` is the id of REWARD_TOKEN; `center` weighs TRL's (chosen + rejected)², which keeps rewards about 0."""

    token: int
    center: float = 0.0

    def __post_init__(self) -> None:
        if self.center < 0:
            raise UsageError(f"the weight that centres rewards is {self.center}; expected 0 or more")

    @property
    def needs_reference(self) -> bool:
        return False


def reward_objective(settings: RewardModelSettings) -> Objective:
    def objective(model: Transformer, batch: Batch) -> Loss:
        chosen_BP, rejected_BP, counts_BP = pair_of_rewards(model, batch, settings.token)
        losses_BP = torch.where(counts_BP, reward_losses(settings, chosen_BP, rejected_BP), 0.0)
        found = {"rewards/chosen": chosen_BP, "rewards/rejected": rejected_BP, "rewards/accuracies": chosen_BP > rejected_BP,
                 "rewards/margins": chosen_BP - rejected_BP}
        sums = {name: torch.where(counts_BP, values.detach().double(), 0.0).sum().float() for name, values in found.items()}
        pairs = counts_BP.sum().float()
        return Loss(losses_BP.sum().float(), pairs, metrics={TOKENS: pairs, **sums})

    return objective


def reward_losses(settings: RewardModelSettings, chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(chosen - rejected) + settings.center * (chosen + rejected).square()


def pair_of_rewards(model: Transformer, batch: Batch, token: int) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen, rejected, which places hold a pair), each (B, P). A pair counts where both of its completions have tokens that count."""
    if batch.documents is None:
        raise DataError("a reward model needs pairs as packed documents; this batch has " + ", ".join(batch.streams()))
    last_BT = last_tokens(batch.documents)
    rewards, texts = (document_sums(values, batch.documents) for values in
                      (torch.where(last_BT, token_rewards(model, batch, token), 0.0), (batch.weight != 0).float()))
    return rewards[:, 0::2], rewards[:, 1::2], (texts[:, 0::2] > 0) & (texts[:, 1::2] > 0)


def token_rewards(model: Transformer, batch: Batch, token: int) -> Tensor:
    """(B, T) in fp32: what the text up to and with each token is worth."""
    states = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions, starts=batch.starts)
    rewards = (states.float() @ model.head_weight()[token].float())
    return rewards if model.config.softcap is None else softcap(rewards, model.config.softcap)


def last_tokens(documents_BT: Tensor) -> Tensor:
    """True at the last token of every document."""
    after = torch.cat([documents_BT[:, 1:], torch.full_like(documents_BT[:, :1], -1)], 1)
    return (documents_BT >= 0) & (documents_BT != after)
