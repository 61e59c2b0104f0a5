"""MEMIT: many facts at once, spread over a few layers' MLP down-projections; and AlphaEdit, its solve in text's null space.

The law of the original is kept: the model at the end of the call is the model at its start, bit for bit. What comes back
is a Patch; applying it is another function.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.edit.contexts import Contexts, averaged_keys
from assay.edit.facts import Fact
from assay.edit.sites import down_name
from assay.edit.solve import Factors, as_low_rank, jointly, moment_penalty, null_space, within
from assay.edit.targets import Aim, Target, find_targets
from assay.errors import UsageError
from assay.model.patch import LowRank, Patch, patched
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer

Solve = Callable[[int, Tensor, Tensor], Factors]  # (layer, residuals_Dn, keys_Fn)


@dataclass(frozen=True)
class Edited:
    """The patch and its evidence: each fact's target, the keys by layer, and how much of its way each state went."""

    patch: Patch
    targets: list[Target]
    keys: dict[int, Tensor] = field(default_factory=dict)  # layer → (F, n) float64: what later edits must leave alone
    reached: list[float] = field(default_factory=list)  # 1: the state is at its target; 0: where it was


def memit(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], layers: Sequence[int], solve: Solve,
          surroundings: Contexts, aim: Aim, *, parent: str | None) -> Edited:
    """Targets at the last layer, and then towards them."""
    layers = checked_layers(model, layers)
    targets = find_targets(model, tokenizer, facts, surroundings, layers[-1], aim)
    return towards(model, tokenizer, facts, targets, layers, solve, surroundings, parent=parent)


def towards(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], targets: list[Target], layers: Sequence[int], solve: Solve,
            surroundings: Contexts, *, parent: str | None) -> Edited:
    """First layer to last, each takes its share of what is missing now, after those before it. Targets are of the last layer."""
    layers = checked_layers(model, layers)
    top = layers[-1]
    spots = [surroundings.spots(tokenizer, fact) for fact in facts]
    parts: dict[str, tuple[LowRank, ...]] = {}
    kept: dict[int, Tensor] = {}
    for done, layer in enumerate(layers):
        with patched(model, Patch(None, parts)):
            kept[layer], states_Dn = averaged_keys(model, spots, surroundings.weights(), layer, top)
        missing_Dn = _columns(targets) - states_Dn
        parts[down_name(layer)] = (as_low_rank(solve(layer, missing_Dn / (len(layers) - done), kept[layer])),)
    with patched(model, Patch(None, parts)):
        _, states_Dn = averaged_keys(model, [of_fact[:1] for of_fact in spots], torch.ones(1, dtype=torch.float64), top, top)
    lacking = (_columns(targets) - states_Dn).norm(dim=0)
    reached = [1 - float(lack / target.delta.norm().clamp(min=1e-12)) for lack, target in zip(lacking, targets, strict=True)]
    return Edited(Patch(parent, parts), targets, kept, reached)


def by_moments(moments: Mapping[int, Tensor], weight: float, earlier: Mapping[int, Tensor] | None = None) -> Solve:
    """MEMIT's solve: Δ = R Kᵀ (λC + K Kᵀ)⁻¹. `earlier` are the keys of edits that the model already has."""
    def solve(layer: int, residuals_Dn: Tensor, keys_Fn: Tensor) -> Factors:
        penalty = moment_penalty(moments[layer], weight, (earlier or {}).get(layer))
        return jointly(residuals_Dn, keys_Fn, penalty)

    return solve


def by_null_space(moments: Mapping[int, Tensor], share: float, ridge: float, earlier: Mapping[int, Tensor] | None = None) -> Solve:
    """AlphaEdit's: inside the directions that hold at most `share` of the text's keys, the rest untouched."""
    projectors = {layer: null_space(moment, share) for layer, moment in moments.items()}

    def solve(layer: int, residuals_Dn: Tensor, keys_Fn: Tensor) -> Factors:
        return within(projectors[layer], residuals_Dn, keys_Fn, ridge, (earlier or {}).get(layer))

    return solve


def checked_layers(model: Transformer, layers: Sequence[int]) -> list[int]:
    ordered = sorted(set(layers))
    if not ordered or ordered[0] < 0 or ordered[-1] >= model.config.depth:
        raise UsageError(f"layers {list(layers)}: this model's are 0 to {model.config.depth - 1}; name at least one of them")
    if ordered[-1] == model.config.depth - 1 and model.config.depth > 1:
        raise UsageError(f"layer {ordered[-1]} is the last: nothing above it could read a fact from the subject's token; stay below it")
    return ordered


def _columns(targets: Sequence[Target]) -> Tensor:
    return torch.stack([target.state for target in targets], 1)
