"""MEMIT, AlphaEdit and ROME: facts solved into MLP down-projections; the result is a Patch.

MEMIT spreads many facts at once over a few layers; AlphaEdit is its solve in text's null space; ROME writes one fact at a time as
a rank-one change of one layer. The law of the original is kept: the model at the end of the call is the model at its start, bit for
bit. What comes back is a Patch; applying it is another function.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.editing.block_hooks import down_projection_name
from assay.editing.contexts import Contexts, averaged_keys, context_weights, weighed_keys
from assay.editing.facts import Fact
from assay.editing.solve import Factors, as_low_rank, moment_penalty, null_space_projector, solve_alphaedit, solve_memit, solve_rome
from assay.editing.targets import Target, TargetOptions, find_targets
from assay.errors import UsageError
from assay.model.patch import LowRank, Patch, patched
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Transformer

Solver = Callable[[int, Tensor, Tensor], Factors]  # (layer, residuals_Dn, keys_Fn)


@dataclass(frozen=True)
class EditResult:
    """The patch and its evidence: each fact's target, the keys by layer, and how much of its way each state went."""

    patch: Patch
    targets: list[Target]
    keys: dict[int, Tensor] = field(default_factory=dict)  # layer → (F, n) float64: what later edits must leave alone
    reached: list[float] = field(default_factory=list)  # 1: the state is at its target; 0: where it was


def memit(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], layers: Sequence[int], solve: Solver,
          contexts: Contexts, options: TargetOptions, *, parent: str | None) -> EditResult:
    """Targets at the last layer, and then towards them."""
    layers = checked_layers(model, layers)
    targets = find_targets(model, tokenizer, facts, contexts, layers[-1], options)
    return spread_over_layers(model, tokenizer, facts, targets, layers, solve, contexts, parent=parent)


def spread_over_layers(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], targets: list[Target], layers: Sequence[int],
                       solve: Solver,
                       contexts: Contexts, *, parent: str | None, each: bool = False) -> EditResult:
    """First layer to last, each takes its share of what is missing now, after those before it. Targets are of the last layer.

    `each`: the key of every context is a column of its own, and not their average: the update must say the same after all of them.
    """
    layers = checked_layers(model, layers)
    top = layers[-1]
    spans = [contexts.spans(tokenizer, fact) for fact in facts]
    parts: dict[str, tuple[LowRank, ...]] = {}
    kept: dict[int, Tensor] = {}
    for done, layer in enumerate(layers):
        with patched(model, Patch(None, parts)):
            kept[layer], states_Dn = (weighed_keys if each else averaged_keys)(model, spans, layer, top)
        missing_Dn = _columns(targets) - states_Dn
        if each:
            missing_Dn = repeated_residuals(missing_Dn, [len(of_fact) for of_fact in spans])
        parts[down_projection_name(layer)] = (as_low_rank(solve(layer, missing_Dn / (len(layers) - done), kept[layer])),)
    with patched(model, Patch(None, parts)):
        _, states_Dn = averaged_keys(model, [of_fact[:1] for of_fact in spans], top, top)
    lacking = (_columns(targets) - states_Dn).norm(dim=0)
    reached = [1 - float(lack / target.delta.norm().clamp(min=1e-12)) for lack, target in zip(lacking, targets, strict=True)]
    return EditResult(Patch(parent, parts), targets, kept, reached)


def repeated_residuals(missing_Dn: Tensor, contexts: Sequence[int]) -> Tensor:
    """(D, m) each fact's residual for each of its contexts, by the root of its weight."""
    roots = [context_weights(count).sqrt() for count in contexts]
    return torch.cat([missing_Dn[:, number, None] * of_fact for number, of_fact in enumerate(roots)], 1)


def memit_solver(moments: Mapping[int, Tensor], weight: float, earlier: Mapping[int, Tensor] | None = None) -> Solver:
    """MEMIT's solve: Δ = R Kᵀ (λC + K Kᵀ)⁻¹. `earlier` are the keys of edits that the model already has."""
    def solve(layer: int, residuals_Dn: Tensor, keys_Fn: Tensor) -> Factors:
        penalty = moment_penalty(moments[layer], weight, (earlier or {}).get(layer))
        return solve_memit(residuals_Dn, keys_Fn, penalty)

    return solve


def alphaedit_solver(moments: Mapping[int, Tensor], share: float, ridge: float, earlier: Mapping[int, Tensor] | None = None) -> Solver:
    """AlphaEdit's: inside the directions that hold at most `share` of the text's keys, the rest untouched."""
    projectors = {layer: null_space_projector(moment, share) for layer, moment in moments.items()}

    def solve(layer: int, residuals_Dn: Tensor, keys_Fn: Tensor) -> Factors:
        return solve_alphaedit(projectors[layer], residuals_Dn, keys_Fn, ridge, (earlier or {}).get(layer))

    return solve


def refuse_uneditable(config: ModelConfig) -> None:
    """An edit solves for what one matrix of a layer adds to the stream, which must be what the layer adds."""
    if config.experts is not None:
        raise UsageError(f"{config.family} has experts in the place of a layer's one MLP, and edits of those are not supported")
    if config.post_norms or config.residual_scale is not None:
        raise UsageError(f"{config.family} norms or scales what an MLP says before it is added, and edits solve for what is added as it "
                         "is; such a model is not edited")


def checked_layers(model: Transformer, layers: Sequence[int]) -> list[int]:
    refuse_uneditable(model.config)
    ordered = sorted(set(layers))
    if not ordered or ordered[0] < 0 or ordered[-1] >= model.config.depth:
        raise UsageError(f"layers {list(layers)}: this model's are 0 to {model.config.depth - 1}; name at least one of them")
    if ordered[-1] == model.config.depth - 1 and model.config.depth > 1:
        raise UsageError(f"layer {ordered[-1]} is the last: nothing above it could read a fact from the subject's token; stay below it")
    return ordered


def _columns(targets: Sequence[Target]) -> Tensor:
    return torch.stack([target.state for target in targets], 1)


def rome(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], layers: Sequence[int], moments: Mapping[int, Tensor],
         contexts: Contexts, options: TargetOptions, *, parent: str | None) -> EditResult:
    """Edit by ROME, fact by fact: each is solved on the model that has the ones before it; nothing protects those, which is ROME's known
    limit."""
    layers = checked_layers(model, layers)
    if len(layers) != 1:
        raise UsageError(f"ROME edits one layer, and {len(layers)} are named; name one, or use --method memit")
    layer, parts = layers[0], list[LowRank]()
    targets: list[Target] = []
    reached: list[float] = []
    for fact in facts:
        with patched(model, _patch(None, layer, parts)):
            target = find_targets(model, tokenizer, [fact], contexts, layer, options)[0]
            keys_Fn, _ = averaged_keys(model, [contexts.spans(tokenizer, fact)], layer, layer)
        factors = solve_rome(target.delta, keys_Fn[:, 0], moments[layer])
        parts.append(as_low_rank(factors))
        targets.append(target)
        reached.append(1 - float((factors.delta() @ keys_Fn[:, 0] - target.delta).norm() / target.delta.norm().clamp(min=1e-12)))
    return EditResult(_patch(parent, layer, parts), targets, {}, reached)


def _patch(parent: str | None, layer: int, parts: Sequence[LowRank]) -> Patch:
    return Patch(parent, {down_projection_name(layer): tuple(parts)} if parts else {})
