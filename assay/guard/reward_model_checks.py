"""Reward-model checks: the loss is Bradley and Terry's, the score head is there and was learned, and held-out pairs are told apart."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.data.batch import Batch
from assay.evaluation.held_out_pairs import ScoredPairs
from assay.guard.loss_preflight import NaiveLoss, preflight_loss
from assay.guard.preference_checks import BIASED, DOUBT, explained_by_length
from assay.learn.bradley_terry import REWARD_TOKEN, RewardModelSettings
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective
from assay.model.tokenizer import Tokenizer, equal_but_for_blanks
from assay.model.transformer import Transformer
from assay.statistics.estimate import proportion
from assay.store.artifact import Artifact
from assay.verdict import Verdict, proven, refuted, unproven


def preflight_reward_model(model: Transformer, objective: Objective, batch: Batch, settings: RewardModelSettings,
                           accumulate: Accumulate | None = None) -> list[Verdict]:
    return preflight_loss(model, objective, batch, accumulate, naive_bradley_terry(settings))


def check_reward_head(artifact: Artifact, before: Tensor) -> Verdict:
    """The token of the score is one id of the tokenizer, has a row in the head, and that row is not the one that training began with."""
    id = None if artifact.tokenizer is None else artifact.tokenizer.ids.get(REWARD_TOKEN)
    rows = artifact.tensors.get("head.weight", artifact.tensors["embed.weight"])
    if id is None or id >= len(rows):
        return refuted("reward head", f"{artifact.path} has no token {REWARD_TOKEN}, or no row for it: no reward model. Make one with "
                                      "assay reward-model", path=str(artifact.path))
    moved = float((rows[id].float().cpu() - before.float().cpu()).norm() / before.float().norm().clamp_min(1e-12))
    words = f"{REWARD_TOKEN} is id {id}, and its row of the head moved by {moved:.1%} of its length"
    if not moved > 0:
        return refuted("reward head", f"{words}: the score head is the one that it began with, and rewards are noise", id=id)
    return proven("reward head", words, id=id, moved=moved)


def check_reward_words(path: str, reward: Tokenizer, policy: Tokenizer,
                       prompts: Sequence[tuple[Sequence[int], Sequence[int], str, str | None]]) -> Verdict:
    """A reward model reads prompts in its own words. `prompts`: the policy's ids, the reward model's, all that the row says, and what the
    reward model's template writes of it (None where it has none, or the row is plain text). Another tokenizer or template is said; what its
    template would not write, and the policy's own markers, which are noise to it, are refused."""
    markers = [policy.tokens[id] for id in sorted(policy.special_ids) if policy.tokens[id] not in reward.ids]
    strange = sorted({marker for _, read, told, _ in prompts for marker in markers if marker in reward.decode(read) and marker not in told})
    if strange:
        return refuted("reward words", f"the reward model {path} is asked in the policy's words: {strange[0]} stands in its prompts and is "
                                       "no token of its tokenizer; its rewards would be noise", markers=strange)
    for _, read, _, due in prompts:
        if due is not None and not equal_but_for_blanks(found := reward.decode(read), due):
            return refuted("reward words", f"the reward model {path} reads {found[-200:]!r} where its chat template writes {due[-200:]!r}: "
                                           "it was trained on texts of its template, and its rewards would be noise")
    apart = [(len(read), len(given)) for given, read, *_ in prompts if tuple(read) != tuple(given)]
    if not apart:
        return proven("reward words", f"the reward model {path} reads {len(prompts)} prompts as the policy does, id for id")
    return proven("reward words", f"the reward model {path} has another tokenizer or template than the policy: {len(apart)} of "
                                  f"{len(prompts)} prompts are written by its own template and tokenised by its own tokenizer, the first "
                                  f"of them as {apart[0][0]} tokens where the policy has {apart[0][1]}", others=len(apart))


def check_reward_accuracy(found: ScoredPairs) -> Verdict:
    """Check the accuracy on held-out pairs: how often the chosen answer scores higher; by chance that is half of them."""
    right = int((found.margins > 0).sum())
    share, doubt = proportion(right, len(found.margins)), proportion(right, len(found.margins), level=DOUBT)
    words = f"the chosen answer is worth more in {share} of the held-out pairs, by {found.margin} in the mean"
    if doubt.high < 0.5:
        return refuted("accuracy", f"{words}: it prefers what is rejected. Chosen and rejected are swapped in the data, or in what is held "
                                   "out", share=share.mean)
    if share.low <= 0.5:
        return unproven("accuracy", f"{words}: no better than a coin is shown; a reward that is noise must not be trained on",
                        share=share.mean)
    return proven("accuracy", words, share=share.mean, low=share.low)


def reward_doubts(found: ScoredPairs) -> list[str]:
    bias, explained = found.length_bias, explained_by_length(found)
    if bias is None or (bias.high > -BIASED and bias.low < BIASED):
        return explained
    return [*explained, f"the reward goes with length: the correlation of its margin with how much longer the chosen answer is, is {bias}; "
                        "whoever is trained on it will learn to be long or short"]


def naive_bradley_terry(settings: RewardModelSettings) -> NaiveLoss:
    """Bradley–Terry loss computed plainly from whole fp32 logits, document by document; divided by the batch's weight."""
    def loss(model: Transformer, batch: Batch) -> Tensor:
        assert batch.documents is not None
        states, total = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions), torch.zeros(
            (), device=batch.tokens.device)
        for row in range(len(batch)):
            ends = [int((batch.documents[row] == number).nonzero()[-1]) for number in range(int(batch.documents[row].max()) + 1)]
            rewards = [model.logits(states[row, end].float())[settings.token] for end in ends]
            learned = [bool(batch.weight[row][batch.documents[row] == number].any()) for number in range(len(ends))]
            for chosen, rejected, counts in zip(rewards[0::2], rewards[1::2], zip(learned[0::2], learned[1::2], strict=True), strict=True):
                if not all(counts):
                    continue
                total = total + F.softplus(rejected - chosen) + settings.center * (chosen + rejected) ** 2
        return total / batch.weight.sum()

    return loss
