"""The places of a forward pass where one can look, in the order in which they are computed, and the weights behind each."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from assay.model.families import shapes
from assay.model.transformer import ModelConfig, qkv_rows

# In a layer. `query` and `key` are what attention is given, after norms of heads and rotation; `scores` are two numbers a
# query and head, the log-sum and the entropy of what it looks at; `middle` is the residual stream between the two halves;
# `value` is what attention is given where the first layer's values are mixed in, `head gate` what a gate's sigmoid is taken of.
IN_LAYER = ("attn norm", "q", "k", "v", "value", "query", "key", "scores", "head gate", "attended", "attn out", "middle",
            "mlp norm", "gate", "up", "act", "product", "down", "residual")
ROTATED = ("query", "key")
EMBEDDING, FINAL_NORM, LOGITS = "embedding", "final norm", "logits"


class Site(NamedTuple):
    layer: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


class Behind(NamedTuple):
    """Rows of a parameter of ours that a site is computed with."""

    parameter: str
    start: int
    stop: int

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[self.parameter][self.start : self.stop]


def sites(config: ModelConfig) -> Iterator[Site]:
    """Every site of such a model, in the order of computation."""
    yield Site(None, EMBEDDING)
    for layer in range(config.depth):
        absent = _absent(config, layer)
        yield from (Site(layer, name) for name in IN_LAYER if name not in absent)
    yield from (Site(None, FINAL_NORM), Site(None, LOGITS))


def _absent(config: ModelConfig, layer: int) -> set[str]:
    """The sites that this layer has not."""
    here = {"gate": config.gated, "product": config.gated, "value": config.value_residual and layer > 0,
            "head gate": config.attention_gate}
    return {name for name, found in here.items() if not found}


def weights_behind(site: Site, config: ModelConfig) -> list[Behind]:
    """The parameters that enter the computation between this site and those before it."""
    wanted, known = _modules(site, config), shapes(config)
    found = []
    for module, rows in wanted:
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in known:
                start, stop = rows or (0, known[name][0])
                found.append(Behind(name, start, stop))
    return found


def _modules(site: Site, config: ModelConfig) -> list[tuple[str, tuple[int, int] | None]]:
    """Modules and, where a site is a part of a fused matrix, its rows."""
    if site.layer is None:
        names = {EMBEDDING: ("embed", "position"), FINAL_NORM: ("norm",), LOGITS: ("embed" if config.tied else "head",)}[site.name]
        return [(name, None) for name in names]
    block, (q, k, v), hidden = f"blocks.{site.layer}", qkv_rows(config), config.hidden
    up = (hidden, 2 * hidden) if config.gated else (0, hidden)
    fused = {"q": ("attn.qkv", (0, q)), "k": ("attn.qkv", (q, q + k)), "v": ("attn.qkv", (q + k, q + k + v)),
             "gate": ("mlp.up", (0, hidden)), "up": ("mlp.up", up)}
    whole = {"attn norm": "attn_norm", "value": "attn.mix", "query": "attn.q_norm", "key": "attn.k_norm", "head gate": "attn.gate",
             "attn out": "attn.out", "mlp norm": "mlp_norm", "down": "mlp.down"}
    if site.name in fused:
        module, rows = fused[site.name]
        return [(f"{block}.{module}", rows)]
    return [(f"{block}.{whole[site.name]}", None)] if site.name in whole else []
