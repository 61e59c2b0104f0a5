"""Preference checks: both sides of a pair answer one prompt, the reference is the parent and stays it, and what was preferred is learned.

`preflight_preference` runs before step 1; `check_pair_reference` again at hand-over, from the parent's bytes on disk.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.data.batch import Batch
from assay.data.preferences import PreferencePair
from assay.evaluation.held_out_pairs import ScoredPairs
from assay.guard.loss_preflight import NaiveLoss, preflight_loss
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective
from assay.learn.policy import token_logprobs
from assay.learn.preference import PreferenceSettings
from assay.model.transformer import Transformer
from assay.statistics.estimate import paired, proportion
from assay.verdict import Verdict, proven, refuted, unproven

# A loss at the reference, as a share of what it is there (of 1, where that is less): rounding of sums over a completion's tokens.
AT_REFERENCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
SAME_REFERENCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # nats a token, in the mean over what is learned
STILL, STILL_STEPS = 1e-6, 16  # a loss that has not moved by more than rounding, over so many steps
DOUBT = 0.999  # level at which a model counts as having learned the opposite: it was trained on hundreds of pairs, and fails on these
BIASED = 0.3  # correlation of margin and length difference from which on it is said


def preflight_preference(model: Transformer, objective: Objective, batch: Batch, settings: PreferenceSettings,
                         accumulate: Accumulate | None = None) -> list[Verdict]:
    """Every check of guard/loss_preflight.py on pairs, the loss against its formula written out."""
    return preflight_loss(model, objective, batch, accumulate, naive_preference(settings))


def check_pairs(pairs: Sequence[PreferencePair]) -> Verdict:
    """Both sides begin with the same prompt, token for token, say something after it, and not the same."""
    for pair in pairs:
        chosen, rejected = pair.sides
        if chosen.asked and not (chosen.prompt == rejected.prompt
                                 and np.array_equal(chosen.tokens[: chosen.prompt], rejected.tokens[: chosen.prompt])):
            return refuted("pairs", f"{pair.id}: the prompt has {chosen.prompt} tokens on the chosen side and {rejected.prompt} on the "
                                    "rejected one, or others: one side was cut or written differently, and the margin measures that",
                           pair=pair.id)
        if np.array_equal(chosen.tokens, rejected.tokens):
            return refuted("pairs", f"{pair.id}: chosen and rejected are the same tokens: there is nothing to prefer", pair=pair.id)
        if not (chosen.weight.any() and rejected.weight.any()):
            return refuted("pairs", f"{pair.id}: one side has nothing to learn from: the pair would count for nothing", pair=pair.id)
    longer = np.array([pair.longer for pair in pairs])
    return proven("pairs", f"{len(pairs):,} pairs, each of one prompt and two different answers; chosen is longer by {longer.mean():.1f} "
                           f"tokens in the mean, and in {float((longer > 0).mean()):.0%} of them", pairs=len(pairs),
                  longer=float(longer.mean()))


def check_loss_at_reference(loss: float, settings: PreferenceSettings, compute: torch.dtype | None) -> Verdict:
    """Before step 1 the policy is its reference: the loss is what the formula gives for that, whatever the pairs."""
    due = settings.at_reference
    if due is None:
        return unproven("initial loss", f"{settings.loss} has no reference, so that nothing says what its first loss of {loss:.4f} should "
                                        "be", optional=True)
    bound = AT_REFERENCE[compute or torch.float32] * max(1.0, due)
    words = f"the loss before step 1 is {loss:.6f}; of a policy that is its reference {settings.loss} gives {due:.6f}, bound {bound:.0e}"
    if not abs(loss - due) <= bound:
        return refuted("initial loss", f"{words}: the reference is not the model that is trained, or it was asked about another text",
                       loss=str(loss), due=due)
    return proven("initial loss", words, loss=loss, due=due)


@torch.no_grad()
def check_pair_reference(batch: Batch, parent: Transformer, weights: str) -> Verdict:
    """What the batch says of the reference is what the parent's bytes on disk say now, a token of each completion for a token."""
    assert batch.documents is not None
    if batch.reference is None:
        return refuted("reference", "the batch holds nothing of the reference")
    device = parent.embed.weight.device
    learned = (batch.weight != 0).cpu()
    said, due = batch.reference.cpu()[learned], token_logprobs(parent, batch.to(device))[0].cpu()[learned]
    apart = float((said - due).abs().mean())
    bound = SAME_REFERENCE[parent.compute_dtype or torch.float32]
    words = (f"{int(learned.sum())} tokens of {sum(map(len, batch.ids))} pairs: the log-probabilities that are learned against and those "
             f"of the parent {weights[:12]}, asked anew, are {apart:.1e} nats apart in the mean, bound {bound:.0e}")
    if not apart <= bound:
        return refuted("reference", f"{words}: the reference has moved, or is another model", apart=str(apart))
    return proven("reference", words, apart=apart)


def check_loss_moves(losses: Sequence[float], settings: PreferenceSettings) -> Verdict:
    """`losses` of steps after the first at which the rate was up: a policy that moves leaves the loss of its reference."""
    due = settings.at_reference
    if due is None or len(losses) < STILL_STEPS:
        return unproven("loss moves", f"{len(losses)} losses are too few to say" if due is not None else "there is no reference to leave",
                        optional=True)
    apart = max(abs(loss - due) for loss in losses) / max(1.0, due)
    words = f"over {len(losses)} steps the loss was up to {apart:.1e} (relative) from the {due:.6f} that a policy has that is its reference"
    if not apart > STILL:
        return refuted("loss moves", f"{words}: the weights move and the loss does not: the reference follows the policy, or both sides of "
                                     "every pair are read as the same text", apart=apart)
    return proven("loss moves", words, apart=apart)


def check_direction(before: ScoredPairs, after: ScoredPairs) -> Verdict:
    """Of held-out pairs, whose margins rose while the model learned: where most fell, it learned the opposite of what it is judged by."""
    assert before.ids == after.ids, "both read the same batches"
    rose, fell = int((after.margins > before.margins).sum()), int((after.margins < before.margins).sum())
    if not rose + fell:
        return unproven("direction", "no held-out margin is another than the parent's: nothing was learned")
    share, doubt = proportion(rose, rose + fell), proportion(rose, rose + fell, level=DOUBT)
    words = f"training raised the margin of {share} of the held-out pairs, by {paired(after.margins, before.margins)} in the mean"
    if doubt.high < 0.5:
        return refuted("direction", f"{words}: it learned to prefer what is rejected there. Chosen and rejected are swapped in the data "
                                    "or in what is held out", share=share.mean)
    if share.low <= 0.5:
        return unproven("direction", f"{words}: nothing shows that what is preferred was learned", optional=True)
    return proven("direction", words, share=share.mean)

# ---------------------------------------------------------------- what is said of an evaluation


def doubts(before: ScoredPairs | None, found: ScoredPairs) -> list[str]:
    """What a margin does not tell. `before` is the parent on the same pairs; without it, the reference that the rewards are of."""
    said = []
    chosen, rejected = ((found.chosen_rewards.mean(), found.rejected_rewards.mean()) if before is None else
                        ((found.chosen - before.chosen).mean(), (found.rejected - before.rejected).mean()))
    if chosen < 0 and rejected < 0:
        said.append("chosen and rejected answers have both become less likely than they were for the parent: the margin grows by "
                    "forgetting both")
    if (bias := found.length_bias) is not None and bias.low >= BIASED:
        said.append(f"the margin goes with length: its correlation with how much longer the chosen answer is, is {bias}; try "
                    "--loss-type sigmoid_norm or simpo")
    if bias is not None and bias.high <= -BIASED:
        said.append(f"the margin goes with brevity: its correlation with how much longer the chosen answer is, is {bias}")
    return said

# ---------------------------------------------------------------- the formulas written out


def naive_preference(settings: PreferenceSettings) -> NaiveLoss:
    """From whole fp32 logits, document by document, as the papers write it; over the batch's weight."""
    def loss(model: Transformer, batch: Batch) -> Tensor:
        assert batch.documents is not None
        states = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions)
        total = torch.zeros((), device=batch.tokens.device)
        for row in range(len(batch)):
            logp = model.logits(states[row, :-1]).float().log_softmax(-1).gather(-1, batch.tokens[row, 1:, None]).squeeze(-1)
            for number in range(0, int(batch.documents[row].max()) + 1, 2):
                chosen, rejected = (_naive_side(batch, row, logp, side) for side in (number, number + 1))
                if chosen is not None and rejected is not None:
                    total = total + _naive_pair(settings, *chosen, *rejected)
        return total / batch.weight.sum()

    return loss


def _naive_side(batch: Batch, row: int, logp: Tensor, document: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """(log-probability, the reference's, tokens) of a document's completion; None where it has none."""
    assert batch.documents is not None
    weight = batch.weight[row, 1:] * (batch.documents[row, 1:] == document)
    if not weight.any():
        return None
    reference = torch.zeros_like(logp) if batch.reference is None else batch.reference[row, 1:]
    return (weight * logp).sum(), (weight * reference).sum(), weight.sum()


def _naive_pair(settings: PreferenceSettings, chosen: Tensor, chosen_reference: Tensor, chosen_tokens: Tensor,
                rejected: Tensor, rejected_reference: Tensor, rejected_tokens: Tensor) -> Tensor:
    beta, wrong = settings.beta, settings.label_smoothing
    won, lost = chosen - chosen_reference, rejected - rejected_reference
    if settings.loss == "hinge":
        return torch.clamp(1 - beta * (won - lost), min=0)
    if settings.loss == "ipo":
        return (won / chosen_tokens - lost / rejected_tokens - 1 / (2 * beta)) ** 2
    if settings.loss == "orpo":
        p, q = (chosen / chosen_tokens).exp(), (rejected / rejected_tokens).exp()
        return -chosen / chosen_tokens + beta * F.softplus(-((p / (1 - p)).log() - (q / (1 - q)).log()))
    if settings.loss == "robust":
        return ((1 - wrong) * F.softplus(-beta * (won - lost)) - wrong * F.softplus(beta * (won - lost))) / (1 - 2 * wrong)
    margin = {"sigmoid": lambda: beta * (won - lost), "sigmoid_norm": lambda: beta * (won / chosen_tokens - lost / rejected_tokens),
              "simpo": lambda: beta * (chosen / chosen_tokens - rejected / rejected_tokens) - settings.gamma}[settings.loss]()
    return (1 - wrong) * F.softplus(-margin) + wrong * F.softplus(margin)
