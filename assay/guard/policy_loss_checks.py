"""Policy loss checks before the first update: advantages, loss and gradient directions, against what was asked for.

What was asked for is a `Surrogate`, a normalisation and the rewards. Everything here is written out from them anew, group by
group and sequence by sequence, so that what the run constructed is compared with what it was told to construct.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import DataError
from assay.guard.loss_preflight import PREFLIGHT_ROWS, Gradients, batch_logits, compare_gradients, loss_gradients, nudged_norms
from assay.learn.advantage import STD_FLOOR, Advantages, Normalise, RewardValue
from assay.learn.objectives import Objective
from assay.learn.policy import Surrogate
from assay.model.attention import PADDING
from assay.model.placement import fp32_uncompiled
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.verdict import Verdict, proven, refuted, unproven

NOISE = 0.3  # nats by which behaviour and reference are moved from the policy's own: some ratios leave the corridor on either side


def check_advantages(rewards_PG: Sequence[Sequence[RewardValue]], found: Advantages, scale: str,
                     estimator: str = "grpo") -> Verdict:
    """Each group by itself: of its known rewards the mean is taken, and where asked the deviation; what is unknown has no part.

    With REINFORCE++ the batch takes the place of the group.
    """
    batch = [r for group in rewards_PG for r in group if r is not None]
    for prompt, group in enumerate(rewards_PG):
        if [r is not None for r in group] != found.known_PG[prompt].tolist():
            return refuted("advantages", f"prompt {prompt}: {sum(r is None for r in group)} rewards are unknown, and "
                           f"{int((~found.known_PG[prompt]).sum())} completions are left out: an error counts as a reward", prompt=prompt)
        due = _naive_advantages(group, scale, estimator, batch)
        if not np.allclose(found.values_PG[prompt], due, rtol=1e-6, atol=1e-9):
            place = int(np.abs(found.values_PG[prompt] - due).argmax())
            return refuted("advantages", f"prompt {prompt}, completion {place}: the advantage is {found.values_PG[prompt][place]:.4g}, "
                           f"{'the batch' if estimator == 'reinforce_pp' else 'its group by itself'} gives {due[place]:.4g}: the baseline "
                           "is another group's, the batch's, or one rollout's")
    return proven("advantages", f"{len(rewards_PG)} groups: every advantage is its own group's", groups=len(rewards_PG))


def check_counted(counted_N: Sequence[bool], known_N: Sequence[bool], ended_N: Sequence[str], *, mask_truncated: bool) -> Verdict:
    """Check which completions are trained on: all whose reward is known and, where truncation is masked, that ended by themselves."""
    due = [known and not (mask_truncated and ended == "length") for known, ended in zip(known_N, ended_N, strict=True)]
    pairs = list(zip(due, counted_N, strict=True))
    lost, kept = pairs.count((True, False)), pairs.count((False, True))
    if lost or kept:
        return refuted("counted", f"of {len(due)} completions {lost} are left out that should count, and {kept} count that should not: "
                       "only an unknown reward or a masked truncation leaves one out", lost=lost, kept=kept)
    return proven("counted", f"{sum(due)} of {len(due)} completions count", counted=sum(due))


def check_policy_loss(model: Transformer, objective: Objective, batch: Batch, asked: Surrogate, normalise: Normalise,
                      cap: int) -> Verdict:
    """The objective, with the batch's weights and divisor, is the surrogate that was asked for, in value and in gradient.

    On the batch's own tokens, with made-up advantages and with behaviour and reference moved away from the policy, so that
    every term of the loss is there to be compared. In fp32: of a loss whose terms cancel, bf16 leaves little but rounding.
    """
    if not batch.weight.any():
        return unproven("policy_loss", "no token of the batch counts; give a batch with something to learn from")
    with fp32_uncompiled(model):
        shown = _shown(model, _few(batch), asked.temperature)
        weight = float(shown.weight.sum()) if shown.divisor is None else shown.divisor

        def ours(rows: Batch) -> Gradients:
            return loss_gradients(model, lambda: objective(model, rows).total / weight)

        def naive(rows: Batch) -> Gradients:
            return loss_gradients(model, lambda: naive_policy_loss(model, rows, asked, normalise, cap))

        def reordered(draw: int) -> tuple[Gradients, Gradients]:
            with nudged_norms(model, draw):
                return ours(_turned(shown)), naive(_turned(shown))

        return compare_gradients("policy_loss", "the objective and the surrogate that was asked for", ours(shown), naive(shown), model,
                                 reordered)


def _turned(shown: Batch) -> Batch:
    """The same rows from the last to the first: sums over them are taken in another order."""
    streams: dict[str, Any] = {name: stream.flip(0).cpu() for name, stream in shown.streams().items()}
    return replace(Batch(**streams).to(shown.tokens.device), divisor=shown.divisor)


def check_directions(model: Transformer, objective: Objective, batch: Batch, asked: Surrogate) -> Verdict:
    """A step raises what had an advantage, and where there is a KL term, that term alone lowers the KL: by the gradients' own signs.

    The objective without its entropy bonus, which pulls a third way.
    """
    if not batch.weight.any():
        return unproven("directions", "no token of the batch counts; give a batch with something to learn from")
    shown = _shown(model, _few(batch), asked.temperature)
    own = _logprobs(model, shown, asked.temperature).detach()
    advantage, _, reference = _needed(shown)
    pulls = [("what had an advantage does not become likelier", replace(shown, behaviour=own, reference=own), -advantage)]
    if asked.kl in ("k2", "k3"):  # k1's gradient is right on average only: on a few tokens its noise decides
        away = own - reference  # the slope of half its square: where a token is too likely, less of it
        pulls.append(("the KL term drives the policy away from its reference", replace(shown, behaviour=own, advantage=0 * own), away))
    cosines = []
    for fault, part, slope in pulls:
        cosines.append(_cosine(loss_gradients(model, partial(_total, model, objective, part))[1],
                               loss_gradients(model, partial(_pull, model, shown, slope, asked.temperature))[1]))
        if not cosines[-1] > 0:
            return refuted("directions", f"{fault}: its cosine with where it should go is {cosines[-1]:.2f}", cosine=str(cosines[-1]))
    return proven("directions", f"a step raises what had an advantage{' and lowers the KL' if len(pulls) > 1 else ''} "
                  f"(cosines {', '.join(f'{cosine:.2f}' for cosine in cosines)})", cosines=cosines)


def naive_policy_loss(model: Transformer, batch: Batch, asked: Surrogate, normalise: Normalise, cap: int) -> Tensor:
    """Sequence by sequence, whole logits, every formula in full; what counts is where a weight is not 0, and no more of the weights."""
    logprobs_BTV = (batch_logits(model, batch)[:, :-1] / asked.temperature).log_softmax(-1)
    losses, tokens = [], 0
    for row, where in _sequences(batch):
        at = logprobs_BTV[row, where - 1]
        losses.append(_naive_sequence(asked, at, at.gather(-1, batch.tokens[row, where, None]).squeeze(-1),
                                      *(stream[row, where] for stream in _needed(batch))))
        tokens += len(where)
    if normalise == "sequence":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.cat(losses).sum() / (tokens if normalise == "token" else len(losses) * cap)

# ----------------------------------------------------------------


def _naive_sequence(asked: Surrogate, logprobs_NV: Tensor, logp: Tensor, advantage: Tensor, behaviour: Tensor, reference: Tensor) -> Tensor:
    ratio = (logp - behaviour).exp() if asked.ratio != "sequence" else (logp - behaviour).mean().exp() * torch.ones_like(logp)
    high = 1 + (asked.epsilon if asked.epsilon_high is None else asked.epsilon_high)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - asked.epsilon, high) * advantage)
    if asked.ratio == "cispo":
        surrogate = ratio.clamp(max=high).detach() * advantage * logp
    d = logp - reference
    kl = {"none": torch.zeros_like(d), "k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[asked.kl]
    entropy = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return -surrogate + asked.kl_weight * kl * (ratio if asked.kl_by_ratio else 1.0) - asked.entropy_weight * entropy


def _naive_advantages(group: Sequence[RewardValue], scale: str, estimator: str, batch: list[float]) -> list[float]:
    if estimator == "reinforce_pp":
        known, scale = batch, "batch"
    else:
        known, scale = [r for r in group if r is not None], "none" if estimator == "rloo" else scale
    if len(known) < 2 or max(known) - min(known) <= 1e-8 * max(1.0, abs(max(known))):
        return [0.0] * len(group)
    deviation = {"group": lambda: float(np.std(known, ddof=1)) + STD_FLOOR, "batch": lambda: float(np.std(batch, ddof=1)) + STD_FLOOR,
                 "none": lambda: 1.0}[scale]()
    mean = sum(known) / len(known)
    baseline = lambda r: (sum(known) - r) / (len(known) - 1) if estimator == "rloo" else mean  # noqa: E731
    return [0.0 if r is None else (r - baseline(r)) / deviation for r in group]


def _few(batch: Batch) -> Batch:
    """Few rows of a batch, as different in what they count as there are: of equal ones, no normalisation could be told from another.

    With their share of the divisor: completions × cap is a count of sequences.
    """
    tokens = (batch.weight != 0).sum(1)
    ranked = [row for row in tokens.argsort().tolist() if tokens[row] > 0]
    spread = [round(place * (len(ranked) - 1) / (PREFLIGHT_ROWS - 1)) for place in range(PREFLIGHT_ROWS)]
    rows = ranked if len(ranked) <= PREFLIGHT_ROWS else [ranked[place] for place in spread]
    chosen: dict[str, Any] = {name: stream[rows].cpu() for name, stream in batch.streams().items()}
    part = Batch(**chosen).to(batch.tokens.device)
    return part if batch.divisor is None else replace(part, divisor=batch.divisor * len(_sequences(part)) / len(_sequences(batch)))


@torch.no_grad()
def _shown(model: Transformer, batch: Batch, temperature: float) -> Batch:
    """The same tokens and weights with streams in which everything happens: both signs of advantage, ratios beyond the clip."""
    chance, own = generator(0, "algebra"), _logprobs(model, batch, temperature)
    near = lambda: own + NOISE * torch.randn(own.shape, generator=chance).to(own.device)  # noqa: E731
    advantage = torch.zeros_like(own)
    for number, (row, where) in enumerate(_sequences(batch)):
        advantage[row, where] = (1 + 0.1 * number) * (-1) ** number
    return replace(batch, advantage=advantage, behaviour=near(), reference=near())


def _logprobs(model: Transformer, batch: Batch, temperature: float) -> Tensor:
    taken = (batch_logits(model, batch)[:, :-1] / temperature).log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(taken, (1, 0))


def _sequences(batch: Batch) -> list[tuple[int, Tensor]]:
    """(row, columns that count) of each document that has any."""
    documents = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    found = [(row, ((documents[row] == number) & (batch.weight[row] != 0)).nonzero().squeeze(-1))
             for row in range(len(batch)) for number in documents[row].unique().tolist() if number != PADDING]
    return [(row, where) for row, where in found if len(where)]


def _needed(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    if batch.advantage is None or batch.behaviour is None or batch.reference is None:
        raise DataError("a policy loss is checked on a batch with advantage, behaviour and reference")
    return batch.advantage, batch.behaviour, batch.reference


def _total(model: Transformer, objective: Objective, batch: Batch) -> Tensor:
    return objective(model, batch).total


def _pull(model: Transformer, batch: Batch, slope_BT: Tensor, temperature: float) -> Tensor:
    return (batch.weight * slope_BT * _logprobs(model, batch, temperature)).sum()


def _cosine(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    a, b = (torch.cat([part[name].float().flatten() for name in sorted(one.keys() & two.keys())]) for part in (one, two))
    return float(a @ b / (a.norm() * b.norm() + 1e-20))
