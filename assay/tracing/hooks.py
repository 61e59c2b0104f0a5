"""Hooks at every site of the forward pass, in the order in which they are computed, and the weights behind each site.

`observe_sites(model, see)` calls `see(site, value)` at every site; a tensor that it returns takes the value's place, so that the
rest of the pass goes on from there. Shapes: B rows, T time, S keys, H heads, K key/value heads, G heads that share a key, d head size.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from assay.editing.block_hooks import block, hooked
from assay.kernels.rotary import rotate
from assay.model.attention import AttentionRule, ruled_attention
from assay.model.families import parameter_shapes
from assay.model.kv_cache import DecodeLayer, attend_slots
from assay.model.transformer import ModelConfig, Transformer, qkv_rows

# In a layer. `query` and `key` are what attention is given, after norms of heads and rotation; `scores` are two numbers a
# query and head, the log-sum and the entropy of what it looks at; `middle` is the residual stream between the two halves;
# `value` is what attention is given where the first layer's values are mixed in, `head gate` what a gate's sigmoid is taken of;
# a mixture of experts has `router`, before any softmax, and `mixed`, what its experts say together, in the place of `gate` to `down`.
IN_LAYER = ("attn norm", "q", "k", "v", "value", "query", "key", "scores", "head gate", "attended", "attn out", "attn post norm", "middle",
            "mlp norm", "router", "gate", "up", "act", "product", "down", "mixed", "mlp post norm", "residual")
ROTATED = ("query", "key")
EMBEDDING, FINAL_NORM, LOGITS = "embedding", "final norm", "logits"


class Site(NamedTuple):
    layer: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


class WeightSlice(NamedTuple):
    """Rows of a parameter of ours that a site is computed with."""

    parameter: str
    start: int
    stop: int

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[self.parameter][self.start : self.stop]


def forward_sites(config: ModelConfig) -> Iterator[Site]:
    """Every site of such a model, in the order of computation."""
    yield Site(None, EMBEDDING)
    for layer in range(config.depth):
        absent = _absent(config, layer)
        yield from (Site(layer, name) for name in IN_LAYER if name not in absent)
    yield from (Site(None, FINAL_NORM), Site(None, LOGITS))


def _absent(config: ModelConfig, layer: int) -> set[str]:
    """The sites that this layer has not."""
    mixture = config.mixture_at(layer)
    here = {"value": config.value_residual and layer > 0, "head gate": config.attention_gate, "router": mixture, "mixed": mixture,
            **dict.fromkeys(("gate", "product"), config.gated and not mixture), **dict.fromkeys(("up", "act", "down"), not mixture),
            **dict.fromkeys(("attn norm", "mlp norm"), config.pre_norms),
            **dict.fromkeys(("attn post norm", "mlp post norm"), config.post_norms)}
    return {name for name, found in here.items() if not found}


def site_weights(site: Site, config: ModelConfig) -> list[WeightSlice]:
    """The parameters that enter the computation between this site and those before it."""
    wanted, known = _modules(site, config), parameter_shapes(config)
    found = []
    for module, rows in wanted:
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in known:
                start, stop = rows or (0, known[name][0])
                found.append(WeightSlice(name, start, stop))
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
             "attn out": "attn.out", "mlp norm": "mlp_norm", "down": "mlp.down", "scores": "attn.sinks", "router": "mlp.router",
             "attn post norm": "attn_post_norm", "mlp post norm": "mlp_post_norm"}
    if site.name == "mixed":
        return [(f"{block}.mlp.{part}", None) for part in ("up", "down", "shared.up", "shared.down", "shared_gate")]
    if site.name in fused:
        module, rows = fused[site.name]
        return [(f"{block}.{module}", rows)]
    return [(f"{block}.{whole[site.name]}", None)] if site.name in whole else []


SiteObserver = Callable[[Site, Tensor], Tensor | None]  # values are (B, T, …)
QUERIES = 64  # whose scores are held at a time
ENTROPY = 1  # which of the two numbers of `scores`
_UNSEEN = -1e30  # a score that no softmax notices
NO_CHANCE = -80.0  # below the largest score: a chance of 1e-35; where exp underflows it takes four times as long


class SiteModules(NamedTuple):
    """Modules at which a model has its sites. `>` before a module: what enters it; `fused`: modules whose output is several sites side by
    side."""

    layers: str
    norm: str
    attention: str  # in a layer, as all that follow
    sites: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]]


def assay_modules(config: ModelConfig) -> SiteModules:
    return SiteModules("blocks", "norm", "attn", {
        "attn norm": "attn_norm", "value": "attn.mix", "head gate": "attn.gate", "attended": ">attn.out", "attn out": "attn.out",
        "attn post norm": "attn_post_norm", "middle": ">mlp_norm" if config.pre_norms else ">mlp", "mlp norm": "mlp_norm",
        "router": "mlp.router", "product": ">mlp.down", "down": "mlp.down", "mixed": "mlp", "mlp post norm": "mlp_post_norm",
        "residual": ""}, {"attn.qkv": ("q", "k", "v"), "mlp.up": ("gate", "up")})


@contextlib.contextmanager
def observe_sites(model: Transformer, see: SiteObserver) -> Iterator["AttentionObserver"]:
    """Hooks are gone afterwards, whatever happened. The logits have no module: whoever runs the model shows them to `see`."""
    with observe_modules(model, model.config, assay_modules(model.config), see) as attention, _activations(model, see):
        yield attention


@contextlib.contextmanager
def observe_modules(model: nn.Module, config: ModelConfig, modules: SiteModules, see: SiteObserver) -> Iterator["AttentionObserver"]:
    """Observe any model whose sites are those of `modules`; what is no module is not seen, but for attention."""
    attention = AttentionObserver(see, config.kv_heads)
    layers = [model.get_submodule(f"{modules.layers}.{layer}") for layer in range(config.depth)]
    handles = [layers[0].register_forward_pre_hook(input_hook(see, Site(None, EMBEDDING))),
               model.get_submodule(modules.norm).register_forward_hook(output_hook(see, Site(None, FINAL_NORM)))]
    for number, layer in enumerate(layers):
        handles += _layer_hooks(layer, number, config, modules, see)
    with hooked(handles), observe_attention(attention, [layer.get_submodule(modules.attention) for layer in layers]):
        yield attention


class AttentionObserver(TorchFunctionMode):
    """Observer of the inputs of the attention kernel of the layer at work: after norms and rotation, with its mask and its scale."""

    def __init__(self, see: SiteObserver, kv_heads: int):
        super().__init__()
        self.see, self.kv_heads = see, kv_heads
        self.layer: int | None = None

    def run(self, layer: int, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """A layer's attention; only in there is every call to torch looked at."""
        self.layer = layer
        with self:
            return forward(*given, **named)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.layer is None or func not in (F.scaled_dot_product_attention, ruled_attention):
            return func(*args, **kwargs)
        return (self._attend_ruled if func is ruled_attention else self._attend)(func, *args, **kwargs)

    def _attend_ruled(self, func: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
        q, k = self._shown(q, k)
        self.see(Site(self.layer, "scores"), attention_statistics(q, k, mask, mask is None, rule))
        return func(q, k, v, mask, rule)

    def _attend(self, func: Callable, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
        q, k = self._shown(q, k)
        self.see(Site(self.layer, "scores"), attention_statistics(q, k, attn_mask, is_causal, AttentionRule(scale)))
        return func(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def _shown(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and keys to go on with."""
        if (other := self.see(Site(self.layer, "query"), q.transpose(1, 2))) is not None:
            q = other.transpose(1, 2)
        copies = k.shape[1] // self.kv_heads  # some callers repeat a key for each head that shares it
        if (other := self.see(Site(self.layer, "key"), k[:, ::copies].transpose(1, 2))) is not None:
            k = other.transpose(1, 2).repeat_interleave(copies, 1)
        return q, k

    def decoding(self, view: DecodeLayer, q: Tensor, k: Tensor, v: Tensor, window: int | None, rule: AttentionRule) -> Tensor:
        """Observed replacement of `attend_slots`: one more token a slot, against what the cache holds once it is stored."""
        layer, self.layer = self.layer, None  # what the plain kernel asks of torch is not seen a second time
        assert layer is not None
        q, k = (q, k) if view.rotary is None else (rotate(q, *view.rotary), rotate(k, *view.rotary))
        q, k = (x if (other := self.see(Site(layer, name), x)) is None else other for name, x in (("query", q), ("key", k)))
        out = attend_slots(view.with_rotary(None), q, k, v, window, rule)
        distance_SL = view.positions[:, None] - torch.arange(view.horizon, device=q.device)
        seen_SL = (distance_SL >= 0) & (distance_SL < (window or view.horizon))
        keys = view.keys_SLKd[:, : view.horizon].transpose(1, 2)
        self.see(Site(layer, "scores"), attention_statistics(q.transpose(1, 2), keys, seen_SL[:, None, None], False, rule))
        return out


@contextlib.contextmanager
def observe_attention(attention: AttentionObserver, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Observe each layer's attention by `attention` for the length of the block."""
    kept = [module.__dict__.get("forward") for module in modules]
    try:
        for layer, module in enumerate(modules):
            module.__dict__["forward"] = functools.partial(attention.run, layer, module.forward)
        yield
    finally:
        for module, own in zip(modules, kept, strict=True):
            module.__dict__.pop("forward")
            module.__dict__.update({} if own is None else {"forward": own})


def attention_statistics(q_BHTd: Tensor, k_BKSd: Tensor, mask: Tensor | None, causal: bool, rule: AttentionRule) -> Tensor:
    """(B, T, H, 2): the log-sum of a query's exponentiated scores, and the entropy of where it looks.

    By a product of its own, since kernels keep their scores to themselves; a few queries at a time, against the keys up to them.
    """
    (B, H, T, d), (K, S) = q_BHTd.shape, k_BKSd.shape[1:3]
    wide = torch.promote_types(q_BHTd.dtype, torch.float32)
    k_BKdS = k_BKSd.to(wide).transpose(2, 3)
    q_BKGTd = (q_BHTd.to(wide) * (rule.scale or d**-0.5)).reshape(B, K, H // K, T, d)
    hidden = None if mask is None else _hidden(mask).to(wide)
    triangle = _hidden(torch.ones(QUERIES, QUERIES, dtype=torch.bool, device=q_BHTd.device).tril_()).to(wide)
    found = q_BHTd.new_empty(B, T, H, 2, dtype=wide)
    for start in range(0, T, QUERIES):
        stop = min(start + QUERIES, T)
        keys, width = stop if causal else S, stop - start
        scores = (q_BKGTd[:, :, :, start:stop].flatten(2, 3) @ k_BKdS[..., :keys]).view(B, H, width, keys)
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        if causal:
            scores[..., start:].add_(triangle[:width, :width])  # all that came before these queries is seen
        if hidden is not None:
            scores.add_(hidden[..., start:stop, :keys] if hidden.shape[-2] == T else hidden[..., :keys])
        if rule.sinks_H is not None:
            scores = torch.cat([scores, rule.sinks_H.to(wide).view(1, H, 1, 1).expand(B, H, width, 1)], -1)
        found[:, start:stop] = _log_sum_and_entropy(scores).transpose(1, 2)
    return found


def _hidden(mask: Tensor) -> Tensor:
    """Additive mask that leaves only the scores that the mask allows: it may be given as bools, or as that already."""
    if mask.dtype != torch.bool:
        return mask.clamp(min=_UNSEEN)
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, _UNSEEN)


def _log_sum_and_entropy(scores: Tensor) -> Tensor:
    """Log-sum-exp and entropy over the last axis, stacked in a new last axis."""
    largest = scores.amax(-1, keepdim=True)
    below = scores.sub_(largest).clamp_(min=NO_CHANCE)
    chances = below.exp()
    total = chances.sum(-1)
    return torch.stack([largest[..., 0] + total.log(), total.log() - chances.mul_(below).sum(-1) / total], -1)

# ---------------------------------------------------------------- hooks


def output_hook(see: SiteObserver, site: Site) -> Callable[..., Any]:
    """A forward hook; some modules of other libraries return their value as the first of several."""
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return see(site, output)
        other = see(site, output[0])
        return None if other is None else (other, *output[1:])

    return hook


def input_hook(see: SiteObserver, site: Site) -> Callable[..., Any]:
    """A forward pre-hook on the first argument."""
    def hook(_: nn.Module, arguments: tuple) -> tuple | None:
        other = see(site, arguments[0])
        return None if other is None else (other, *arguments[1:])

    return hook


def split_output_hook(see: SiteObserver, parts: Sequence[Site], rows: Sequence[int]) -> Callable[..., Any]:
    """A forward hook on a fused matrix: each of its parts is a site."""
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        pieces = output.split(list(rows), -1)
        others = [see(site, piece) for site, piece in zip(parts, pieces, strict=True)]
        if all(other is None for other in others):
            return None
        return torch.cat([piece if other is None else other for piece, other in zip(pieces, others, strict=True)], -1)

    return hook


def _layer_hooks(layer: nn.Module, number: int, config: ModelConfig, modules: SiteModules, see: SiteObserver) -> list[RemovableHandle]:
    absent, handles = _absent(config, number), []
    for name, path in modules.sites.items():
        if name in absent:
            continue
        module, site = layer.get_submodule(path.removeprefix(">")), Site(number, name)
        handles.append(module.register_forward_pre_hook(input_hook(see, site)) if path.startswith(">") else
                       module.register_forward_hook(output_hook(see, site)))
    for path, names in modules.fused.items():
        parts = [Site(number, name) for name in names if name not in absent]
        if not parts:
            continue
        rows = qkv_rows(config) if "q" in names else [config.hidden] * len(parts)
        handles.append(layer.get_submodule(path).register_forward_hook(split_output_hook(see, parts, rows)))
    return handles


@contextlib.contextmanager
def _activations(model: Transformer, see: SiteObserver) -> Iterator[None]:
    """An activation is a function and has no hooks: each layer's is wrapped for the length of the block."""
    mlps = {layer: block(model, layer).mlp for layer in range(model.config.depth) if not model.config.mixture_at(layer)}
    kept = {layer: mlp.activation for layer, mlp in mlps.items()}

    def watched(site: Site, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def activation(x: Tensor) -> Tensor:
            value = function(x)
            other = see(site, value)
            return value if other is None else other

        return activation

    try:
        for layer, mlp in mlps.items():
            mlp.activation = watched(Site(layer, "act"), kept[layer])
        yield
    finally:
        for layer, mlp in mlps.items():
            mlp.activation = kept[layer]
