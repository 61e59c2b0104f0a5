"""Policy-gradient objectives: GRPO and its family, which differ only in the ratio, the clip, the KL and the weights.

A batch says, token by token, what was sampled (`tokens`), how likely that was (`behaviour`), how much better than its
siblings it did (`advantage`), what the reference thinks of it (`reference`), and how much it counts (`weight`). How a batch
is normalised stands in its weights and its divisor alone (learn/advantage.py), so that the objective stays a sum: neither
micro-batches nor inner epochs can change a step.

Shapes: B rows, T time. A sequence is a document of a row, or the whole row where documents are not given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import DataError, UsageError
from assay.kernels.linear_entropy import linear_logprobs_entropy
from assay.kernels.softcap_ce import linear_logprobs
from assay.learn.objectives import TOKENS, Loss, Objective
from assay.model.transformer import Transformer

Ratio = Literal["token", "sequence", "cispo"]
Divergence = Literal["none", "k1", "k2", "k3"]


@dataclass(frozen=True, eq=False)
class Surrogate:
    """Settings of a policy-gradient objective; the guards write the same loss out from this record alone.

    `ratio`: "token" is PPO's; "sequence" is GSPO's, the geometric mean over the sequence; "cispo" lets every token learn,
    with its ratio, at most 1 + epsilon_high, as a constant factor. A weight may be a tensor that the caller refills between
    steps: that is how an entropy bonus decays. Without `kl_by_ratio` only k2's gradient is that of the divergence; k3's is
    another's, and k1's has mean 0.
    """

    ratio: Ratio = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon; larger is DAPO's clip-higher
    kl: Divergence = "none"
    kl_weight: float | Tensor = 0.0
    kl_by_ratio: bool = True  # each token's KL times its ratio, which makes the gradient that of KL(π ‖ reference)
    entropy_weight: float | Tensor = 0.0
    temperature: float = 1.0  # the one that was sampled with
    measure_entropy: bool = True  # where it is not in the loss, it costs a slower pass over the logits

    def __post_init__(self) -> None:
        if self.ratio not in get_args(Ratio) or self.kl not in get_args(Divergence):
            raise UsageError(f"policy gradient: ratio {self.ratio!r} and kl {self.kl!r}; expected one of {', '.join(get_args(Ratio))} "
                             f"and one of {', '.join(get_args(Divergence))}")
        if not (0 < self.epsilon < 1 and self.high > 0 and self.temperature > 0):
            raise UsageError(f"policy gradient: epsilon {self.epsilon}, epsilon_high {self.high}, temperature {self.temperature}; "
                             "expected 0 < epsilon < 1 and the others above 0")
        if self.kl == "none" and not _is_zero(self.kl_weight):
            raise UsageError(f"policy gradient: kl_weight is {self.kl_weight} but kl is 'none', so that nothing would be weighed; "
                             "choose k2 or k3, or set kl_weight to 0")

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def wants_entropy(self) -> bool:
        return self.measure_entropy or not _is_zero(self.entropy_weight)


def policy_gradient(asked: Surrogate) -> Objective:
    """Σ weight · (−surrogate + kl_weight · KL − entropy_weight · entropy), over the tokens that count."""
    def objective(model: Transformer, batch: Batch) -> Loss:
        logp_BT, entropy_BT = token_logprobs(model, batch, asked.temperature, entropy=asked.wants_entropy)
        counts_BT = batch.weight != 0
        # Where a token does not count the streams may hold anything, NaN too: it must not reach a product, nor its gradient.
        log_ratio_BT = torch.where(counts_BT, logp_BT - _stream(batch, "behaviour"), 0.0)
        advantage_BT = torch.where(counts_BT, _stream(batch, "advantage"), 0.0)
        ratio_BT = (sequence_mean(log_ratio_BT, counts_BT, batch.documents) if asked.ratio == "sequence" else log_ratio_BT).exp()
        surrogate_BT = cispo_capped(asked, ratio_BT, logp_BT, advantage_BT) if asked.ratio == "cispo" else ppo_clipped(asked, ratio_BT,
                                                                                                                       advantage_BT)
        loss_BT = -surrogate_BT
        if not _is_zero(asked.kl_weight):
            apart_BT = torch.where(counts_BT, logp_BT - _stream(batch, "reference"), 0.0)
            kl_BT = DIVERGENCES[asked.kl](apart_BT)
            loss_BT = loss_BT + asked.kl_weight * (kl_BT * ratio_BT if asked.kl_by_ratio else kl_BT)
        if entropy_BT is not None and not _is_zero(asked.entropy_weight):
            loss_BT = loss_BT - asked.entropy_weight * entropy_BT
        losses_BT = torch.where(counts_BT, loss_BT, 0.0)
        metrics = _measured(asked, batch, ratio_BT.detach(), log_ratio_BT.detach(), logp_BT.detach(), entropy_BT)
        return Loss((batch.weight * losses_BT).sum(), batch.weight.sum(), losses_BT.detach(), metrics)

    return objective


def token_logprobs(model: Transformer, batch: Batch, temperature: float = 1.0, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """log p of each token given those before it, and on request the entropy of what it was drawn from; column 0 is 0.

    The logits never exist whole. What the first token of a packed document holds means nothing: nothing predicts it.
    """
    states = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions, starts=batch.starts)
    B, T, D = states.shape
    flat = states.reshape(B * T, D), model.head_weight(), batch.tokens.roll(-1, 1).reshape(-1)
    if entropy:
        logp, spread = linear_logprobs_entropy(*flat, softcap=model.config.softcap, temperature=temperature)
        return _onto_targets(logp.view(B, T)), _onto_targets(spread.view(B, T))
    return _onto_targets(linear_logprobs(*flat, softcap=model.config.softcap, temperature=temperature).view(B, T)), None

# ---------------------------------------------------------------- surrogates


def ppo_clipped(asked: Surrogate, ratio_BT: Tensor, advantage_BT: Tensor) -> Tensor:
    """PPO's pessimistic choice: once a ratio has left the corridor the way its advantage wanted, there is nothing more to gain."""
    return torch.minimum(ratio_BT * advantage_BT, ratio_BT.clamp(1 - asked.epsilon, 1 + asked.high) * advantage_BT)


def cispo_capped(asked: Surrogate, ratio_BT: Tensor, logp_BT: Tensor, advantage_BT: Tensor) -> Tensor:
    """CISPO: the ratio weighs and is not learned from, so that no token's gradient is lost."""
    return ratio_BT.detach().clamp(max=1 + asked.high) * advantage_BT * logp_BT


def sequence_mean(values_BT: Tensor, counts_BT: Tensor, documents: Tensor | None) -> Tensor:
    """Mean of each sequence over its tokens that count, repeated at every one of its tokens."""
    begins = torch.zeros_like(values_BT, dtype=torch.long)
    if documents is not None:
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    sequence_BT = begins.cumsum(1)
    sums, tokens = (torch.zeros_like(values_BT).scatter_add(1, sequence_BT, part)
                    for part in (torch.where(counts_BT, values_BT, 0.0), counts_BT.to(values_BT.dtype)))
    return (sums / tokens.clamp(min=1)).gather(1, sequence_BT)

# ---------------------------------------------------------------- divergences, of d = log π − log reference at tokens drawn from π


def k1(d: Tensor) -> Tensor:
    return d


def k2(d: Tensor) -> Tensor:
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """k3 estimator of the KL: never negative, and of mean KL(π ‖ reference)."""
    return torch.expm1(-d) + d


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

# ---------------------------------------------------------------- what is measured on the way


@torch.no_grad()
def _measured(asked: Surrogate, batch: Batch, ratio_BT: Tensor, log_ratio_BT: Tensor, logp_BT: Tensor,
              entropy_BT: Tensor | None) -> dict[str, Tensor]:
    """The clip fractions count the tokens that the clip holds back; CISPO holds none back at the lower side."""
    counts_BT, advantage_BT = batch.weight != 0, _stream(batch, "advantage")
    of = lambda values: torch.where(counts_BT, values.float(), 0.0).sum()  # noqa: E731
    low = of((ratio_BT < 1 - asked.epsilon) & (advantage_BT < 0)) * (asked.ratio != "cispo")
    high = of((ratio_BT > 1 + asked.high) & (advantage_BT > 0))
    apart = log_ratio_BT.abs()
    found = {TOKENS: counts_BT.sum().float(), "clip_ratio/low_mean": low, "clip_ratio/high_mean": high,
             "clip_ratio/region_mean": low + high, "sampling/importance_sampling_ratio/mean": of(ratio_BT),
             "sampling/sampling_logp_difference/mean": of(apart), "sampling/sampling_logp_difference/max": apart.max()}
    if batch.reference is not None:
        found["kl"] = of(k3(logp_BT - batch.reference) * (ratio_BT if asked.kl_by_ratio else 1.0))
    if entropy_BT is not None:
        found["entropy"] = of(entropy_BT)
    return found

# ----------------------------------------------------------------


def _onto_targets(values_BT: Tensor) -> Tensor:
    """Values moved from the state that predicts a token to the token itself."""
    return torch.nn.functional.pad(values_BT[:, :-1], (1, 0))


def _stream(batch: Batch, name: str) -> Tensor:
    stream = getattr(batch, name)
    if stream is None:
        raise DataError(f"this batch has no stream {name!r}, which the policy gradient asked for needs; "
                        "it comes from the sampler (behaviour), the rewards (advantage) or the reference's weights (reference)")
    return stream


def _is_zero(weight: float | Tensor) -> bool:
    """A tensor is never known to be 0: asking would wait for its device."""
    return not isinstance(weight, Tensor) and weight == 0
