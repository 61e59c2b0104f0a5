"""ROME: one fact at a time as a rank-one change of one layer, with the key averaged alike wherever it is used."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from assay.edit.contexts import Contexts, averaged_keys
from assay.edit.facts import Fact
from assay.edit.memit import Edited, checked_layers
from assay.edit.sites import down_name
from assay.edit.solve import alone, as_low_rank
from assay.edit.targets import Aim, Target, find_targets
from assay.errors import UsageError
from assay.model.patch import LowRank, Patch, patched
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer


def rome(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], layers: Sequence[int], moments: Mapping[int, Tensor],
         surroundings: Contexts, aim: Aim, *, parent: str | None) -> Edited:
    """Each fact is solved on the model that has the ones before it; nothing protects those, which is ROME's known limit."""
    layers = checked_layers(model, layers)
    if len(layers) != 1:
        raise UsageError(f"ROME edits one layer, and {len(layers)} are named; name one, or use --method memit")
    layer, parts = layers[0], list[LowRank]()
    targets: list[Target] = []
    reached: list[float] = []
    for fact in facts:
        with patched(model, _patch(None, layer, parts)):
            target = find_targets(model, tokenizer, [fact], surroundings, layer, aim)[0]
            keys_Fn, _ = averaged_keys(model, [surroundings.spots(tokenizer, fact)], surroundings.weights(), layer, layer)
        factors = alone(target.delta, keys_Fn[:, 0], moments[layer])
        parts.append(as_low_rank(factors))
        targets.append(target)
        reached.append(1 - float((factors.delta() @ keys_Fn[:, 0] - target.delta).norm() / target.delta.norm().clamp(min=1e-12)))
    return Edited(_patch(parent, layer, parts), targets, {}, reached)


def _patch(parent: str | None, layer: int, parts: Sequence[LowRank]) -> Patch:
    return Patch(parent, {down_name(layer): tuple(parts)} if parts else {})
