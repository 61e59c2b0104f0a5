"""TTT witness: beginnings of documents read again one by one, with the factors in plain matrices and AdamW as its paper writes it.

It shares the model, the first factors and the settings with what it watches: no slots, no padding, no batched layers.
"""

from collections.abc import Sequence
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

CHUNKS_AGAIN, TOKENS_READ_AGAIN = 4, 2048  # at most, but for two chunks of each document that one adapter reads
# Of the mean of what the tokens cost: the farthest token, and the root mean square of all. In half precision factors added to a matrix and
# factors beside it round apart, by 0.06 for one token of 4,096 on a GPU and by 0.005 on the whole on a CPU, in sound readings.
SAME_COST = {torch.float32: (2e-3, 2e-3), torch.bfloat16: (2e-1, 3e-2)}

CostsByDocument = Sequence[NDArray[np.float32]]  # by document
_Window = tuple[Tensor, int]  # tokens of a chunk after those that stand before it, and how many are the chunk's


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


def check_reading(model: Transformer, documents: Sequence[Sequence[int]], costs: tuple[CostsByDocument, CostsByDocument], patch: Patch,
                  how: TttSettings, *, slots: int = 1) -> Verdict:
    """Read the beginning of one document again, or of those that one adapter reads first, `slots` side by side. `costs` are what the
    documents' tokens after the first were recorded to cost, without and with the patch."""
    if how.warm:
        return unproven("reading", "a document that begins with the factors of another is not read again alone", optional=True)
    farthest, typical = SAME_COST.get(model.compute_dtype or model.embed.weight.dtype, SAME_COST[torch.bfloat16])
    rounds = max(1 if slots == 1 else 2, min(CHUNKS_AGAIN, TOKENS_READ_AGAIN // (how.chunk * slots)))
    alone, learned = (_read_again(model, documents, patch, how, rounds, slots, learn=learn) for learn in (False, True))
    sides = [(np.concatenate(due), np.concatenate([cost[: len(some)] for some, cost in zip(due, recorded, strict=True)]))
             for due, recorded in zip((alone, learned), costs, strict=True)]
    apart = [np.abs(due - recorded) / max(1.0, float(due.mean())) for due, recorded in sides]
    most, usual = (max(float(how_far(each)) for each in apart) for how_far in (np.max, _root_mean_square))
    read = sum(map(bool, alone))
    words = (f"{len(sides[0][0])} tokens of {'one document' if read == 1 else f'{read} documents'}, read again alone, cost what was "
             f"recorded but for {most:.1e} of their mean (bound {farthest:g}), {usual:.1e} on the whole (bound {typical:g}): "
             f"{sides[0][0].mean():.4f} nats each without the adapter, {sides[1][0].mean():.4f} with")
    return (proven if most <= farthest and usual <= typical else refuted)(
        "reading", words, without=float(apart[0].max()), with_=float(apart[1].max()), typical=usual)


def _root_mean_square(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _read_again(model: Transformer, documents: Sequence[Sequence[int]], patch: Patch, how: TttSettings, rounds: int, slots: int, *,
                learn: bool) -> list[list[float]]:
    """Cost of each document's first tokens. A round is the next chunk of `slots` documents: all are scored, then all learned from."""
    adapted, found = _Adapted(model, patch), [list[float]() for _ in documents]
    for number in range(rounds):
        unread = [place for place, tokens in enumerate(documents) if len(found[place]) < len(tokens) - 1]
        current = unread[:slots]  # documents begin in order, so that those begun come before the others
        windows = [_next_chunk(documents[place], len(found[place]), how, model.embed.weight.device) for place in current]
        for place, window in zip(current, windows, strict=True):
            found[place] += adapted.costs(window)
        for _ in range(how.steps if learn and windows and number < rounds - 1 else 0):
            adapted.step(windows, how)
    return found


def _next_chunk(tokens: Sequence[int], read: int, how: TttSettings, device: torch.device) -> _Window:
    stop = min(1 + read + how.chunk, len(tokens))
    return torch.tensor([list(tokens[max(0, stop - how.context) : stop])], device=device), stop - 1 - read


class _Adapted:
    """A model with a patch added to its weights: one copy of them, in the dtype computed in, written anew after every step."""

    def __init__(self, model: Transformer, patch: Patch):
        device, self.parameters = model.embed.weight.device, dict(model.named_parameters())
        self.states, self.config, self.taken = _States(model), model.config, 0
        self.head = "embed.weight" if model.head is None else "head.weight"  # a tied model's head is adapted as a head alone
        self.sites = [(name, part.start, part.stop, part.scale) for name, parts in patch.low_rank.items() for part in parts]
        self.factors = [tuple(factor.detach().float().to(device).clone() for factor in (part.left, part.right))
                        for parts in patch.low_rank.values() for part in parts]
        self.moments = [[(torch.zeros_like(factor), torch.zeros_like(factor)) for factor in pair] for pair in self.factors]
        self.weights = {name: torch.empty_like(self.parameters[name], dtype=model.compute_dtype or self.parameters[name].dtype,
                                               requires_grad=True) for name in patch.low_rank}
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Weights are the model's plus the products of the factors, tensor by tensor."""
        for name, into in self.weights.items():
            weight = self.parameters[name].detach().clone()
            for (of, start, stop, scale), (left, right) in zip(self.sites, self.factors, strict=True):
                if of == name:
                    weight[start:stop] += scale * (left @ right).to(weight)
            into.copy_(weight)

    @torch.no_grad()
    def costs(self, window: _Window) -> list[float]:
        return self.losses(window).tolist()

    def losses(self, window: _Window) -> Tensor:
        tokens, chunk = window
        replaced = {f"model.{name}": weight for name, weight in self.weights.items() if name != self.head}
        states = torch.func.functional_call(self.states, replaced, (tokens,))[0, -chunk - 1 : -1]
        head = self.weights[self.head] if self.head in self.weights else self.parameters[self.head].detach()
        logits = F.linear(states, head.to(states.dtype))
        logits = logits if self.config.softcap is None else softcap(logits, self.config.softcap)
        return F.cross_entropy(logits.float(), tokens[0, -chunk:], reduction="none")

    def step(self, windows: Sequence[_Window], how: TttSettings) -> None:
        """AdamW on the mean over all tokens of the windows."""
        gradients = self.gradients(windows)
        self.taken += 1
        for pair, due, moments in zip(self.factors, gradients, self.moments, strict=True):
            for factor, gradient, (first, second) in zip(pair, due, moments, strict=True):
                _adamw(factor, gradient, first, second, self.taken, how)
        self.write()

    @torch.enable_grad()
    def gradients(self, windows: Sequence[_Window]) -> list[tuple[Tensor, Tensor]]:
        """Gradients of the factors. A weight's own gradient is turned into those of its factors as soon as it is there, and freed: autograd
        would hold those of all weights at once."""
        found = [(torch.zeros_like(left), torch.zeros_like(right)) for left, right in self.factors]

        def to_factors(name: str, weight: Tensor) -> None:
            assert weight.grad is not None
            for (of, start, stop, scale), (left, right), (into_left, into_right) in zip(self.sites, self.factors, found, strict=True):
                if of == name:
                    due = scale * weight.grad[start:stop].float()
                    into_left += due @ right.T
                    into_right += left.T @ due
            weight.grad = None

        hooks = [weight.register_post_accumulate_grad_hook(partial(to_factors, name)) for name, weight in self.weights.items()]
        tokens = sum(chunk for _, chunk in windows)
        for window in windows:
            (self.losses(window).sum() / tokens).backward(inputs=list(self.weights.values()))
        for hook in hooks:
            hook.remove()
        return found


class _States(nn.Module):
    """The model up to its head."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.hidden(tokens)


@torch.no_grad()
def _adamw(factor: Tensor, gradient: Tensor, first: Tensor, second: Tensor, taken: int, how: TttSettings) -> None:
    beta1, beta2 = how.betas
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    step = (first / (1 - beta1**taken)) / ((second / (1 - beta2**taken)).sqrt() + how.eps)
    factor.mul_(1 - how.lr * how.weight_decay).sub_(how.lr * step)
