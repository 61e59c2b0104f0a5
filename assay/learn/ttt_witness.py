"""TTT witness: the beginning of one document read again, alone, with its factors in plain matrices and AdamW as its paper writes it.

It shares the model, the first factors and the settings with what it watches: no slots, no padding, no batched layers.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from assay.learn.ttt_loop import TttSettings
from assay.model.patch import Patch
from assay.model.transformer import ModelConfig, Transformer, softcap
from assay.verdict import Verdict, proven, refuted, unproven

CHUNKS_AGAIN, TOKENS_READ_AGAIN = 4, 2048  # of a document, at most
SAME_COST = {torch.float32: 2e-3, torch.bfloat16: 5e-2}  # of the mean of what the tokens cost

_Factors = list[tuple[str, int, int, float, Tensor, Tensor]]  # parameter, rows from and to, scale, left, right


def check_sites(patch: Patch, config: ModelConfig, targets: Sequence[str]) -> Verdict:
    """Every layer's matrices that were asked for are adapted, by their rows."""
    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim, "v": config.kv_heads * config.head_dim,
            "o": config.width, "mlp": config.width + (2 if config.gated else 1) * config.hidden}
    due = config.depth * sum(rows[target] for target in targets if target in rows) + (config.vocab if "head" in targets else 0)
    found = sum(part.stop - part.start for parts in patch.low_rank.values() for part in parts)
    layers = {name.split(".")[1] for name in patch.low_rank if name.startswith("blocks.")}
    words = f"{found:,} rows of {len(layers)} layers have factors, {due:,} of {config.depth} were asked for ({' '.join(targets)})"
    whole = found == due and (len(layers) == config.depth or set(targets) <= {"head"})
    return (proven if whole else refuted)("sites", words)


def check_reading(model: Transformer, tokens: Sequence[int], costs: tuple[NDArray[np.float32], NDArray[np.float32]], patch: Patch,
                  how: TttSettings) -> Verdict:
    """`costs` are what the tokens after the first were recorded to cost, without and with the patch."""
    if how.warm:
        return unproven("reading", "a document that begins with the factors of another is not read again alone", optional=True)
    dtype = model.compute_dtype or model.embed.weight.dtype
    length = min(len(tokens), 1 + max(1, min(CHUNKS_AGAIN, TOKENS_READ_AGAIN // how.chunk)) * how.chunk)  # whole chunks
    alone, learned = (_read_again(model, tokens[:length], patch, how, learn=learn) for learn in (False, True))
    apart = [float(np.abs(np.array(due) - recorded[: length - 1]).max() / max(1.0, float(np.mean(due))))
             for due, recorded in zip((alone, learned), costs, strict=True)]
    words = (f"{length - 1} tokens of one document, read again alone, cost what was recorded but for {max(apart):.1e} of their mean "
             f"(bound {SAME_COST.get(dtype, 5e-2):g}): {math.fsum(alone) / len(alone):.4f} nats each without the adapter, "
             f"{math.fsum(learned) / len(learned):.4f} with")
    return (proven if max(apart) <= SAME_COST.get(dtype, 5e-2) else refuted)("reading", words, without=apart[0], with_=apart[1])


def _read_again(model: Transformer, tokens: Sequence[int], patch: Patch, how: TttSettings, *, learn: bool) -> list[float]:
    device, parameters = model.embed.weight.device, dict(model.named_parameters())
    factors: _Factors = [(name, part.start, part.stop, part.scale, part.left.detach().float().to(device).clone(),
                         part.right.detach().float().to(device).clone())
                        for name, parts in patch.low_rank.items() for part in parts]
    changed = {name: torch.empty_like(parameters[name], dtype=model.compute_dtype or parameters[name].dtype, requires_grad=learn)
               for name in patch.low_rank}  # one copy of the adapted weights, in the dtype computed in, written anew at every step
    learned = [factor for *_, left, right in factors for factor in (left, right)]
    moments = [(torch.zeros_like(factor), torch.zeros_like(factor)) for factor in learned]
    found, taken = list[float](), 0
    for start in range(1, len(tokens), how.chunk):
        stop = min(start + how.chunk, len(tokens))
        window = torch.tensor([list(tokens[max(0, stop - how.context):stop])], device=device)
        for again in range(steps := how.steps if learn and stop < len(tokens) else 0):
            _adapt(changed, parameters, factors)
            losses, gradients = _losses_and_gradients(model, window, stop - start, changed, factors)
            found += [] if again else losses
            taken += 1
            _adamw(learned, gradients, moments, taken, how)
        if not steps:
            _adapt(changed, parameters, factors)
            with torch.no_grad():
                found += _losses(model, window, stop - start, changed).tolist()
    return found


@torch.no_grad()
def _adapt(changed: Mapping[str, Tensor], parameters: Mapping[str, Tensor], factors: _Factors) -> None:
    """Write the model's weights plus the products of the factors into `changed`, tensor by tensor."""
    for name, into in changed.items():
        weight = parameters[name].detach().clone()
        for _, start, stop, scale, left, right in (factor for factor in factors if factor[0] == name):
            weight[start:stop] += scale * (left @ right).to(weight)
        into.copy_(weight)


def _losses_and_gradients(model: Transformer, window: Tensor, chunk: int, changed: Mapping[str, Tensor],
                          factors: _Factors) -> tuple[list[float], list[Tensor]]:
    """Losses of the chunk, and the factors' gradients of their mean. A weight's own gradient is turned into those of its factors as soon as
    it is there, and freed: autograd would hold the gradients of all weights at once."""
    gradients = dict[int, tuple[Tensor, Tensor]]()

    def to_factors(name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        for number, (of, start, stop, scale, left, right) in enumerate(factors):
            if of == name:
                due = scale * weight.grad[start:stop].float()
                gradients[number] = due @ right.T, left.T @ due
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(partial(to_factors, name)) for name, weight in changed.items()]
    with torch.enable_grad():
        losses = _losses(model, window, chunk, changed)
        losses.mean().backward(inputs=list(changed.values()))
    for hook in hooks:
        hook.remove()
    return losses.tolist(), [gradient for number in range(len(factors)) for gradient in gradients[number]]


def _losses(model: Transformer, window: Tensor, chunk: int, changed: Mapping[str, Tensor]) -> Tensor:
    name = "embed.weight" if model.head is None else "head.weight"  # a tied model's head is adapted as a head alone
    head = changed[name] if name in changed else model.head_weight().detach()
    replaced = {f"model.{each}": weight for each, weight in changed.items() if each != name}
    states = torch.func.functional_call(_States(model), replaced, (window,))[0, -chunk - 1 : -1]
    logits = F.linear(states, head.to(states.dtype))
    logits = logits if model.config.softcap is None else softcap(logits, model.config.softcap)
    return F.cross_entropy(logits.float(), window[0, -chunk:], reduction="none")


class _States(nn.Module):
    """The model up to its head."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.hidden(tokens)


@torch.no_grad()
def _adamw(learned: Sequence[Tensor], gradients: Sequence[Tensor], moments: Sequence[tuple[Tensor, Tensor]], taken: int,
           how: TttSettings) -> None:
    beta1, beta2 = how.betas
    for factor, gradient, (first, second) in zip(learned, gradients, moments, strict=True):
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = (first / (1 - beta1**taken)) / ((second / (1 - beta2**taken)).sqrt() + how.eps)
        factor.mul_(1 - how.lr * how.weight_decay).sub_(how.lr * step)
