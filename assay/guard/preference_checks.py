"""Preference checks: both sides of a pair answer one prompt, the reference is the parent and stays it, and what was preferred is learned.

`preflight_preference` runs before step 1; `check_pair_reference` again at hand-over, from the parent's bytes on disk.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import Batch
from assay.data.overlap import COPIES_REFUSED, COPIES_SAID
from assay.data.preferences import ENOUGH_PROMPTS, PreferencePair
from assay.evaluation.held_out_pairs import ScoredPairs, score_pairs
from assay.guard.loss_preflight import NaiveLoss, preflight_loss
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective, averages
from assay.learn.policy import token_logprobs
from assay.learn.preference import PreferenceSettings
from assay.model.placement import fp32_uncompiled
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.statistics.estimate import paired, proportion
from assay.verdict import Verdict, proven, refuted, unproven

# A loss at the reference, as a share of what it is there (of 1, where that is less): rounding of sums over a completion's tokens.
AT_REFERENCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
SAME_REFERENCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # nats a token, in the mean over what is learned
SAME_PAIR_FIGURE = 1e-3  # relative, and absolute below 1, in fp32
REFERENCE_MOVED = 0.3  # nats a token at the most, before step 1
STILL, STILL_STEPS = 1e-6, 16  # a loss that has not moved by more than rounding, over so many steps
DOUBT = 0.999  # level at which a model counts as having learned the opposite: it was trained on hundreds of pairs, and fails on these
BIASED = 0.3  # correlation of margin and length difference from which on it is said


def preflight_preference(model: Transformer, objective: Objective, batch: Batch, settings: PreferenceSettings,
                         accumulate: Accumulate | None = None) -> list[Verdict]:
    """Preference preflight: every check of guard/loss_preflight.py on pairs, the loss against its formula written out, off the
    reference."""
    shown = moved_reference(batch)
    return [*preflight_loss(model, objective, shown, accumulate, naive_preference(settings)),
            check_pair_figures(model, objective, shown, naive_pair_figures(model, shown, settings)),
            check_pair_scores(model, shown, settings)]


@torch.no_grad()
def check_pair_scores(model: Transformer, batch: Batch, settings: PreferenceSettings) -> Verdict:
    """An evaluation's losses and margins, pair by pair, are what the formulas give."""
    with fp32_uncompiled(model):
        found, sides = score_pairs(model, [batch.to("cpu")], settings, rows=len(batch)), _naive_sides(model, batch)
    pairs = list(zip(sides[0::2], sides[1::2], strict=True))
    reward = lambda logp, reference, tokens: settings.beta * float(  # noqa: E731
        logp - reference if settings.needs_reference else logp / tokens)
    return compare_scores({
        "losses": (found.losses, [float(_naive_pair(settings, *chosen, *rejected)) for chosen, rejected in pairs]),
        "margins": (found.margins, [reward(*chosen) - reward(*rejected) for chosen, rejected in pairs]),
        "chosen": (found.chosen, [float(chosen[0]) for chosen, _ in pairs]),
        "rejected": (found.rejected, [float(rejected[0]) for _, rejected in pairs])})


def compare_scores(scores: Mapping[str, tuple[NDArray[np.float64], Sequence[float]]]) -> Verdict:
    """Compare an evaluation's scores with what is due; by name, both of them."""
    wrong = [name for name, (found, due) in scores.items()
             if len(found) != len(due) or not np.allclose(found, due, rtol=SAME_PAIR_FIGURE, atol=SAME_PAIR_FIGURE)]
    if wrong:
        found, due = scores[wrong[0]]
        return refuted("scores", f"an evaluation's {', '.join(wrong)} are not what its texts give: {np.round(found[:3], 5).tolist()}, due "
                                 f"is {np.round(due[:3], 5).tolist()}", wrong=wrong)
    return proven("scores", f"an evaluation's {', '.join(scores)} are what its texts give, worked out one by one")


@torch.no_grad()
def check_pair_figures(model: Transformer, objective: Objective, batch: Batch, due: Mapping[str, float]) -> Verdict:
    """Check that what every step writes down beside its loss (rewards, margins, log-probabilities) is what the formulas give, each figure
    of it."""
    with fp32_uncompiled(model):
        found = averages(objective(model, batch).metrics or {})
    wrong = [f"{name} is {due.get(name)}, written {found.get(name)}" for name in sorted(due.keys() | found.keys())
             if name not in due or name not in found
             or not math.isclose(found[name], due[name], rel_tol=SAME_PAIR_FIGURE, abs_tol=SAME_PAIR_FIGURE)]
    if wrong:
        return refuted("figures", f"{len(wrong)} of {len(due)} figures of a step are not what its texts give: {'; '.join(wrong[:3])}",
                       wrong=wrong)
    return proven("figures", f"{len(due)} figures of a step are what its texts give, worked out one by one")


@torch.no_grad()
def naive_pair_figures(model: Transformer, batch: Batch, settings: PreferenceSettings) -> dict[str, float]:
    """Preference metrics under TRL's names, means over the pairs, computed plainly."""
    with fp32_uncompiled(model):
        sides = [[logp, reference, tokens] for logp, reference, tokens in _naive_sides(model, batch)]
    logps = [float(logp) for logp, _, _ in sides]
    rewards = [settings.beta * float(logp - reference if settings.needs_reference else logp / tokens) for logp, reference, tokens in sides]
    chosen, rejected = rewards[0::2], rewards[1::2]
    pairs = list(zip(chosen, rejected, strict=True))
    return {"rewards/chosen": fmean(chosen), "rewards/rejected": fmean(rejected), "logps/chosen": fmean(logps[0::2]),
            "logps/rejected": fmean(logps[1::2]), "rewards/margins": fmean(one - two for one, two in pairs),
            "rewards/accuracies": fmean(float(one > two) for one, two in pairs)}


def moved_reference(batch: Batch) -> Batch:
    """The batch against a reference that finds every token less likely, each by another share: a policy that is its reference has
    log-ratios of 0, of which no formula shows a wrong sign, scale or baseline. As it is where it has none."""
    if batch.reference is None:
        return batch
    apart = torch.rand(batch.weight.shape, generator=generator(0, "moved reference")).to(batch.reference)
    return replace(batch, reference=batch.reference - REFERENCE_MOVED * apart)


def check_pairs(pairs: Sequence[PreferencePair]) -> Verdict:
    """Check that both sides of a pair begin with the same prompt, token for token, say something after it, and not the same."""
    if not pairs:
        return refuted("pairs", "there are no pairs: none was read, or all were dropped")
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


def check_contradictions(judged: Sequence[tuple[Hashable, Hashable]], noun: str) -> Verdict:
    """`judged` is, of every row, what it prefers and what the opposite would be: a row whose opposite is there too teaches nothing with
    it. A few are annotators who disagree, many are a doubt, and where most are there the columns or labels of two files disagree."""
    said = {own for own, _ in judged}
    against = sum(opposite in said for _, opposite in judged)
    share = against / max(len(judged), 1)
    words = f"{against} of {len(judged):,} {noun}s ({share:.0%}) stand there the other way round too"
    if share >= COPIES_REFUSED:
        return refuted("contradictions", f"{words}: together they prefer nothing. Remove one of each two; or of two files one has its "
                                         "columns or labels swapped", against=against)
    if share >= COPIES_SAID:
        return unproven("contradictions", f"{words}, and together they prefer nothing; remove one of each two", against=against)
    return proven("contradictions", words, against=against)


def check_held_out_prompts(train: Sequence[PreferencePair], held_out: Sequence[PreferencePair], noun: str) -> Verdict:
    """Check that held-out pairs answer prompts that are not learned from: others would measure memory of the prompt too."""
    learned = {pair.prompt for pair in train}
    shared = [pair.id for pair in held_out if pair.chosen.asked and pair.prompt in learned]
    if not shared:
        return proven("held-out prompts", f"none of {len(held_out):,} held-out {noun}s is of a prompt that is learned from", shared=0)
    words = (f"{len(shared)} of {len(held_out):,} held-out {noun}s are of prompts that are learned from, first {shared[0]}: what is "
             "measured on them is not shown of other prompts")
    if len(learned) < ENOUGH_PROMPTS:
        return unproven("held-out prompts", f"{words}; there are only {len(learned)} to learn from", shared=len(shared), optional=True)
    advice = "hold out other prompts, or leave --held-out-data out: then a prompt is held out whole"
    if len(shared) >= COPIES_REFUSED * len(held_out):
        return refuted("held-out prompts", f"{words}; {advice}", shared=len(shared))
    return unproven("held-out prompts", f"{words}; {advice}", shared=len(shared))


def check_loss_at_reference(loss: float, settings: PreferenceSettings, compute: torch.dtype | None) -> Verdict:
    """Check before step 1, where the policy is its reference, that the loss is what the formula gives, whatever the pairs."""
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
    """Check the reference in the batch, token by token, against the parent's files on disk."""
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
    """Check that the margins of held-out pairs rose in training: where most fell, the model learned the opposite."""
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
    """Doubts about a preference run that a margin does not show. `before` is the parent on the same pairs; without it, the reference that
    the rewards are of."""
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
    return said if before is None else [*said, *explained_by_length(found)]


def explained_by_length(found: ScoredPairs) -> list[str]:
    """A sentence where a rule that looks at lengths alone tells the held-out pairs apart as well as the model does."""
    rules = {"longer": found.longer > 0, "shorter": found.longer < 0}
    name = max(rules, key=lambda rule: int(rules[rule].sum()))
    by_length = proportion(int(rules[name].sum()), len(found.longer))
    if by_length.low <= 0.5 or paired(found.margins > 0, rules[name]).low > 0:
        return []
    return [f"the {name} answer is the chosen one in {by_length} of the held-out pairs, and the model is right in {found.accuracy}: that "
            "it learned more than length is not shown"]

# ---------------------------------------------------------------- the formulas written out


def naive_preference(settings: PreferenceSettings) -> NaiveLoss:
    """Preference loss computed plainly from whole fp32 logits, document by document, as in the papers; divided by the batch's weight."""
    def loss(model: Transformer, batch: Batch) -> Tensor:
        sides, total = _naive_sides(model, batch), torch.zeros((), device=batch.tokens.device)
        for chosen, rejected in zip(sides[0::2], sides[1::2], strict=True):
            total = total + _naive_pair(settings, *chosen, *rejected)
        return total / batch.weight.sum()

    return loss


def _naive_sides(model: Transformer, batch: Batch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Scores of the sides, chosen and rejected in turn, of every pair both sides of which have a completion."""
    assert batch.documents is not None
    states, found = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions), []
    for row in range(len(batch)):
        logp = model.logits(states[row, :-1]).float().log_softmax(-1).gather(-1, batch.tokens[row, 1:, None]).squeeze(-1)
        for number in range(0, int(batch.documents[row].max()) + 1, 2):
            chosen, rejected = (_naive_side(batch, row, logp, side) for side in (number, number + 1))
            if chosen is not None and rejected is not None:
                found += [chosen, rejected]
    return found


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
