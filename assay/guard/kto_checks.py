"""KTO checks: completions beside their prompts and beside others', the KL that they estimate, and that what is desirable is learned."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.data.batch import Batch
from assay.data.feedback import LabelledPair
from assay.evaluation.held_out_feedback import ScoredFeedback, score_feedback
from assay.guard.loss_preflight import NaiveLoss, preflight_loss
from assay.guard.preference_checks import (
    AT_REFERENCE,
    BIASED,
    DOUBT,
    STILL,
    STILL_STEPS,
    check_pair_figures,
    compare_scores,
    moved_reference,
)
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective
from assay.learn.unpaired import KtoSettings
from assay.model.placement import fp32_uncompiled
from assay.model.transformer import Transformer
from assay.statistics.effects import difference_of_means
from assay.verdict import Verdict, proven, refuted, unproven

SAME_KL = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of the larger of 1 and what the formula gives
SHOWN_KL = 0.7  # that the loss is shown before step 1, where the policy's own is 0 and no sign or scale of it would be seen
_MATCHED = 0.5  # share of mismatched completions that may be the example's own: files with few different answers
BALANCE = 1 / 4, 4 * 4 / 3  # weight of the desirable over that of the undesirable; TRL advises 1 to 4/3, and four times off is said


def preflight_kto(model: Transformer, objective: Objective, batch: Batch, settings: KtoSettings,
                  accumulate: Accumulate | None = None) -> list[Verdict]:
    """KTO preflight: every check of guard/loss_preflight.py, the loss against its formula written out, off the reference and with a KL."""
    shown = replace(moved_reference(batch), baseline=torch.full_like(batch.weight, SHOWN_KL)) if settings.has_baseline else \
        moved_reference(batch)
    return [*preflight_loss(model, objective, shown, accumulate, naive_kto(settings)),
            check_pair_figures(model, objective, shown, naive_answer_figures(model, shown, settings)),
            check_answer_scores(model, shown, settings)]


@torch.no_grad()
def check_answer_scores(model: Transformer, batch: Batch, settings: KtoSettings) -> Verdict:
    """An evaluation's losses and rewards, example by example, and the KL that it estimates of its own batches."""
    with fp32_uncompiled(model):
        found = score_feedback(model, [batch.to("cpu")], settings, rows=len(batch))
        own, odd = ([(float(logp), float(reference)) for logp, reference in _completions(model, batch, side=side)] for side in (0, 1))
    kl = max(0.0, fmean(logp - reference for logp, reference in odd)) if settings.has_baseline else 0.0
    weights = {True: settings.desirable_weight, False: settings.undesirable_weight}
    losses = [weights[label > 0] / (1 + math.exp(label * settings.beta * (logp - reference - kl)))
              for (logp, reference), label in zip(own, _labels(batch), strict=True)]
    return compare_scores({"losses": (found.losses, losses), "rewards": (found.rewards, [settings.beta * (logp - of) for logp, of in own]),
                           "log-probabilities": (found.logps, [logp for logp, _ in own]), "KL": (np.array([found.kl]), [kl])})


@torch.no_grad()
def naive_answer_figures(model: Transformer, batch: Batch, settings: KtoSettings) -> dict[str, float]:
    """Means over the examples."""
    with fp32_uncompiled(model):
        own = [(float(logp), float(reference)) for logp, reference in _completions(model, batch, side=0)]
    rewards, labels = [settings.beta * (logp - reference) for logp, reference in own], _labels(batch)
    baseline = float(batch.baseline.flatten()[0]) if batch.baseline is not None and settings.has_baseline else 0.0
    return {"rewards/signed": fmean(label * reward for label, reward in zip(labels, rewards, strict=True)), "rewards/mean": fmean(rewards),
            "desirable": fmean(float(label > 0) for label in labels), "logps/mean": fmean(logp for logp, _ in own), "kl": baseline}


def check_feedback(pairs: Sequence[LabelledPair]) -> Verdict:
    """Check that beside every example stands its own prompt with a completion that is not its own, and that both labels occur."""
    matched = 0
    for pair in pairs:
        own, other = pair.sides
        if own.asked and not np.array_equal(own.tokens[: own.prompt], other.tokens[: own.prompt]):
            return refuted("feedback", f"{pair.id}: the completion of another example does not stand after this one's prompt: the KL "
                                       "would be that of another text", example=pair.id)
        if not (own.weight.any() and other.weight.any()):
            return refuted("feedback", f"{pair.id}: one of its two completions has nothing to learn from", example=pair.id)
        matched += np.array_equal(own.tokens, other.tokens)
    good = sum(pair.desirable for pair in pairs)
    words = f"{good:,} desirable and {len(pairs) - good:,} undesirable examples; {matched} stand beside their own completion"
    if matched > _MATCHED * len(pairs):
        return refuted("feedback", f"{words}, so that the KL is the reward itself and nothing is learned: completions are not mismatched, "
                                   "or nearly all of them are the same text", matched=matched)
    if not 0 < good < len(pairs):
        return refuted("feedback", f"{words}: with one label alone there is nothing to weigh against", desirable=good)
    return proven("feedback", words, desirable=good, examples=len(pairs))


def unbalanced(desirable: int, undesirable: int, settings: KtoSettings) -> str:
    """A sentence where one label outweighs the other by far; otherwise nothing."""
    share = settings.desirable_weight * desirable / max(settings.undesirable_weight * undesirable, 1e-12)
    if BALANCE[0] <= share <= BALANCE[1]:
        return ""
    return (f"desirable examples weigh {share:.3g} times as much as undesirable ones ({desirable:,} and {undesirable:,}); with 1 to 4/3 "
            "both count: set --desirable-weight or --undesirable-weight")


def check_kto_loss_at_reference(loss: float, labels: Tensor, settings: KtoSettings, compute: torch.dtype | None) -> Verdict:
    """Check before step 1, where the policy is its reference, that every log-ratio and the KL are 0 and an example costs half its weight.
    """
    due = settings.at_reference(labels)
    bound = AT_REFERENCE[compute or torch.float32] * max(1.0, due)
    words = f"the loss before step 1 is {loss:.6f}; of a policy that is its reference {settings.loss} gives {due:.6f}, bound {bound:.0e}"
    if not abs(loss - due) <= bound:
        return refuted("initial loss", f"{words}: the reference is not the model that is trained, or labels and weights are others",
                       loss=str(loss), due=due)
    return proven("initial loss", words, loss=loss, due=due)


@torch.no_grad()
def check_kl_estimate(model: Transformer, batch: Batch) -> Verdict:
    """The batch's baseline is the mean log-ratio of its mismatched completions, from whole logits, document by document; never below 0."""
    if batch.baseline is None:
        return refuted("kl", "the batch has no KL to compare with")
    found, ratios = batch.baseline.unique().tolist(), [odd - reference for odd, reference in _completions(model, batch, side=1)]
    if not ratios:
        return refuted("kl", "no mismatched completion of the batch counts, so that nothing gives the KL")
    due = max(0.0, float(torch.stack(ratios).mean()))
    bound = SAME_KL[model.compute_dtype or torch.float32] * max(1.0, due)
    words = f"the KL of the step is {found[0]:.6f}, and {len(ratios)} mismatched completions give {due:.6f}, bound {bound:.0e}"
    if len(found) > 1:
        return refuted("kl", f"{len(found)} different KLs in one step: a micro-batch would be compared with its own", found=found[:4])
    if not abs(found[0] - due) <= bound:
        return refuted("kl", f"{words}: it was estimated on other completions, or by another policy", found=found[0], due=due)
    return proven("kl", words, found=found[0], due=due)


def check_kto_moves(losses: Sequence[float], due: Sequence[float]) -> Verdict:
    """Losses of steps after the first beside what they are at the reference: a policy that moves leaves it."""
    if len(losses) < STILL_STEPS:
        return unproven("loss moves", f"{len(losses)} losses are too few to say", optional=True)
    apart = max(abs(loss - at) for loss, at in zip(losses, due, strict=True))
    words = f"over {len(losses)} steps the loss was up to {apart:.1e} from what a policy has that is its reference"
    if not apart > STILL:
        return refuted("loss moves", f"{words}: the weights move and the loss does not: the reference follows the policy, or every "
                                     "completion is compared with itself", apart=apart)
    return proven("loss moves", words, apart=apart)


def check_feedback_direction(before: ScoredFeedback, after: ScoredFeedback) -> Verdict:
    """How much more the desirable held-out examples gained than the undesirable ones, while the model learned."""
    assert before.ids == after.ids, "both read the same batches"
    if after.one_sided:
        return unproven("direction", "the held-out examples have one label alone, so that nothing says what was learned", optional=True)
    gained = after.rewards - before.rewards
    parts = gained[after.desirable], gained[~after.desirable]
    apart, doubt = (difference_of_means(*parts, level=level) for level in (0.95, DOUBT))
    words = f"training raised the reward of desirable held-out examples by {apart} more than that of undesirable ones"
    if doubt.high < 0:
        return refuted("direction", f"{words}: it learned the opposite. The labels are flipped in the data, or in what is held out",
                       apart=apart.mean)
    if apart.low <= 0:
        return unproven("direction", f"{words}: nothing shows that what is desirable was learned", optional=True)
    return proven("direction", words, apart=apart.mean)


def feedback_doubts(before: ScoredFeedback | None, found: ScoredFeedback) -> list[str]:
    """Doubts about a KTO run that a margin does not show. `before` is the parent on the same examples; without it, the reference that the
    rewards are of."""
    if found.one_sided:
        return []
    moved = found.rewards if before is None else found.logps - before.logps
    said = []
    if moved[found.desirable].mean() < 0 and moved[~found.desirable].mean() < 0:
        said.append("desirable and undesirable answers have both become less likely than they were for the parent: the margin grows by "
                    "forgetting both")
    if (bias := found.length_bias) is not None and (bias.low >= BIASED or bias.high <= -BIASED):
        said.append(f"the reward goes with length: its correlation with the number of tokens is {bias}")
    return said

# ---------------------------------------------------------------- the formula written out


def naive_kto(settings: KtoSettings) -> NaiveLoss:
    """KTO loss computed plainly from whole fp32 logits, document by document, as in the paper; divided by the batch's weight."""
    def loss(model: Transformer, batch: Batch) -> Tensor:
        assert batch.advantage is not None
        baseline = 0.0 if batch.baseline is None or not settings.has_baseline else float(batch.baseline.flatten()[0])
        total = torch.zeros((), device=batch.tokens.device)
        for (own, reference), label in zip(_completions(model, batch, side=0), _labels(batch), strict=True):
            value = settings.beta * (own - reference - baseline)
            total = total + (settings.desirable_weight * (1 - F.sigmoid(value)) if label > 0 else
                             settings.undesirable_weight * (1 - F.sigmoid(-value)))
        return total / batch.weight.sum()

    return loss


def _completions(model: Transformer, batch: Batch, *, side: int) -> list[tuple[Tensor, Tensor]]:
    """(log-probability, the reference's) of every example's own (0) or mismatched (1) completion."""
    assert batch.documents is not None
    assert batch.reference is not None
    states, found = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions), []
    for row in range(len(batch)):
        logp = model.logits(states[row, :-1]).float().log_softmax(-1).gather(-1, batch.tokens[row, 1:, None]).squeeze(-1)
        for number in range(0, int(batch.documents[row].max()) + 1, 2):
            weight = batch.weight[row, 1:] * (batch.documents[row, 1:] == number + side)
            if weight.any():
                found.append(((weight * logp).sum(), (weight * batch.reference[row, 1:]).sum()))
    return found


def _labels(batch: Batch) -> list[float]:
    """Labels of every example, in the order of its documents."""
    assert batch.documents is not None
    assert batch.advantage is not None
    return [float(batch.advantage[row][batch.documents[row] == number][0]) for row in range(len(batch))
            for number in range(0, int(batch.documents[row].max()) + 1, 2)]
