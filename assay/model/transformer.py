"""Transformer: one decoder class for every family of families.py, which differ in their ModelConfig alone.

One forward path serves training, sampling, evaluation, tracing, editing and test-time training:
`hidden(tokens) → states`, `logits(states)`. Whoever wants a loss takes the states.

Shapes: B rows, T time, S keys a query may look at, D width, H heads, K key/value heads, d head size, V vocabulary; N tokens of a batch,
E experts, A experts that a token goes to.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from assay.kernels.gated_activation import gated
from assay.kernels.linear import linear
from assay.kernels.rms_norm import fused_stream_and_norm, rms_norm, uses_fused_norm
from assay.kernels.rotary import rotate, rotated
from assay.model.attention import AttentionMask, AttentionRule, TokenLayout, attend, gate_heads, mix_values, token_layout
from assay.model.kv_cache import CacheView, DecodeLayer, LayerCacheView
from assay.seeds import generator

RotaryTable = tuple[Tensor, Tensor]  # cos and sin of each token's angles


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `kind` decides which of the factors count; the others must stay None."""

    base: float
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_length: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None  # YaRN and LongRoPE: what cos and sin are multiplied by
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None  # LongRoPE: a divisor for each frequency, within the original length
    long_factor: tuple[float, ...] | None = None  # beyond it; used only where whoever runs the model says so
    longest: int | None = None  # what the long divisors reach to


@dataclass(frozen=True)
class Experts:
    """A mixture in the place of the MLP: each token goes to `active` of `count` MLPs, and its router weighs what they say."""

    count: int
    active: int
    hidden: int
    normalised: bool  # the chosen experts' shares add up to 1
    router_bias: bool
    bias: bool  # in the experts' own matrices
    shared_hidden: int | None  # of one more MLP that every token goes through, behind a gate of its own
    dense_layers: tuple[int, ...]  # layers with a plain MLP
    clamp: float | None  # gpt-oss: gate ≤ clamp and |up| ≤ clamp, then gate · σ(alpha · gate) · (up + 1)
    alpha: float | None
    balance: float  # how much the loss that keeps experts equally busy counts


@dataclass(frozen=True)
class ModelConfig:
    """The geometry of a decoder. What every decoder has is without a default: whoever builds one has read it somewhere.
    What few have is off unless it is said."""

    family: str
    vocab: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    max_length: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    rope: Rope | None  # None: learned positions
    activation: Literal["silu", "gelu_tanh", "relu2"]
    gated: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: how many tokens back it sees, itself included
    tied: bool
    softcap: float | None  # logits → cap · tanh(logits / cap)
    value_residual: bool  # every layer mixes the first layer's values into its own
    attention_gate: bool  # each head's output counts as much as the layer's input says
    rotary_dim: int | None = None  # how much of a head is turned; None: all of it
    local_rope: Rope | None = None  # of the layers with a window, where it is another
    unrotated: tuple[int, ...] = ()  # layers without positions (NoPE)
    pre_norms: bool = True  # attention and MLP read the stream through a norm
    post_norms: bool = False  # what they say goes through a norm before it is added
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    qk_norm_whole: bool = False  # the norm of q and k is over all heads together
    embedding_scale: float | None = None
    residual_scale: float | None = None  # of what attention and MLP add to the stream
    attention_scale: float | None = None  # of scores; None: 1 / √head_dim
    attention_softcap: float | None = None  # scores → cap · tanh(scores / cap)
    logit_scale: float | None = None
    sinks: bool = False  # each head has a score that takes a share of its attention and gives nothing
    experts: Experts | None = None

    def __post_init__(self) -> None:
        assert len(self.windows) == self.depth, "one window (or None) per layer"
        assert self.heads % self.kv_heads == 0, "query heads are shared out evenly over key/value heads"

    @property
    def fused_attention(self) -> bool:
        """Whether PyTorch's kernels compute this model's attention: they know neither soft caps nor sinks."""
        return self.attention_softcap is None and not self.sinks

    def mixture_at(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def layer_kind(self, layer: int) -> tuple[int | None, bool, bool]:
        """Kind of a layer: its window, whether it has rotary positions, whether it has experts."""
        return self.windows[layer], layer in self.unrotated, self.mixture_at(layer)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing: `initialised` or a file fills every parameter, and torch's initialisers are slow to import."""


class Linear(nn.Linear):
    """Computes in the dtype of its input, so that fp32 master weights serve a bf16 stream without autocast."""

    unlisted = 0  # weights beyond the entries of its parameters, where those are codes

    def reset_parameters(self) -> None:
        """Do nothing, as in Embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    initial = 1.0  # what its weight begins with, everywhere

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), self.initial))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class OffsetRmsNorm(nn.Module):
    """Gemma's: the weight is what the factor differs from 1 by, and the product is rounded once, behind it."""

    initial = 0.0

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), self.initial))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), 1 + self.weight.to(x.dtype).float(), self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    initial = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class ValueMix(nn.Module):
    """Value residual learning (Zhou et al., arXiv 2410.17897): both shares begin at a half."""

    initial = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), self.initial))

    def forward(self, v: Tensor, first: Tensor) -> Tensor:
        return mix_values(v, first, self.weight.to(v.dtype))


class Sinks(nn.Module):
    """A score a head, which takes a share of the head's attention and gives nothing."""

    initial = 0.0

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((heads,), self.initial))


class Attention(nn.Module):
    """q, k and v are rows of one matrix: one product instead of three. families.py splits it for the outside world."""

    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.head_dim, self.whole_head_turns = c.head_dim, c.rotary_dim is None
        self.scale, self.softcap, self.norms_all_heads = c.attention_scale, c.attention_softcap, c.qk_norm_whole
        self.rows = qkv_rows(c)
        self.qkv = Linear(c.width, sum(self.rows), bias=c.qkv_bias)
        self.out = Linear(self.rows[0], c.width, bias=c.out_bias)
        normed = (self.rows[0], self.rows[1]) if c.qk_norm_whole else (c.head_dim, c.head_dim)
        self.q_norm = make_norm(c, normed[0]) if c.qk_norm else None
        self.k_norm = make_norm(c, normed[1]) if c.qk_norm else None
        self.mix = ValueMix() if c.value_residual and layer > 0 else None
        self.gate = Linear(c.width, c.heads, bias=False) if c.attention_gate else None
        self.sinks = Sinks(c.heads) if c.sinks else None

    def forward(self, x_BTD: Tensor, rotary: RotaryTable | None, mask: AttentionMask, cache: LayerCacheView | None,
                values: list[Tensor] | None = None) -> Tensor:
        """`values` begins with those of the first layer, which puts them there; None where no layer asks for them."""
        B, T, _ = x_BTD.shape
        if isinstance(cache, DecodeLayer) and self.whole_head_turns:
            cache, rotary = cache.with_rotary(rotary), None
        q, k, v = self.split_heads(self.qkv(x_BTD), rotary)
        if self.mix is not None:
            v = self.mix(v, values[0])  # type: ignore[index]
        elif values is not None:
            values.append(v)
        rule = AttentionRule(self.scale, self.softcap, None if self.sinks is None else self.sinks.weight)
        attended = attend(q, k, v, mask, rule) if cache is None else cache.attend(q, k, v, mask, rule)
        if self.gate is not None:
            attended = gate_heads(attended, self.gate(x_BTD))
        return self.out(attended.reshape(B, T, -1))

    def split_heads(self, qkv_BTR: Tensor, rotary: RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by heads, q and k normed and turned to their positions where the model does that."""
        heads, kv_heads, _ = (rows // self.head_dim for rows in self.rows)
        if rotary is not None and self.q_norm is None and self.whole_head_turns:
            return rotated(qkv_BTR, *rotary, heads, kv_heads)
        q, k, v = qkv_BTR.unflatten(-1, (-1, self.head_dim)).split((heads, kv_heads, kv_heads), 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if rotary is not None:
            q, k = rotate(torch.cat([q, k], 2), *rotary).split((heads, kv_heads), 2)
        return q, k, v

    def _normed(self, x_BTHd: Tensor, norm: nn.Module) -> Tensor:
        return norm(x_BTHd.flatten(2)).view_as(x_BTHd) if self.norms_all_heads else norm(x_BTHd)


class Mlp(nn.Module):
    def __init__(self, c: ModelConfig, hidden: int | None = None):
        super().__init__()
        hidden = hidden or c.hidden
        self.gated, self.activation = c.gated, ACTIVATIONS[c.activation]
        self.up = Linear(c.width, (2 if c.gated else 1) * hidden, bias=c.mlp_bias)  # gate rows first, then up rows
        self.down = Linear(hidden, c.width, bias=c.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        inner = self.up(x_BTD)
        return self.down(gated(inner, self.activation) if self.gated else self.activation(inner))


class ExpertLinear(Linear):
    """Linear layer with one matrix an expert, all of them rows of one: expert e has the e-th stretch of rows, in files and adapters too."""

    def __init__(self, experts: int, inner: int, outer: int, bias: bool):
        super().__init__(inner, experts * outer, bias=bias)
        self.experts = experts

    def forward(self, x_ND: Tensor, counts: Sequence[int]) -> Tensor:  # type: ignore[override]
        """The first counts[0] rows through the first expert, and so on."""
        weights = self.weight.to(x_ND.dtype).chunk(self.experts)
        biases = [None] * self.experts if self.bias is None else self.bias.to(x_ND.dtype).chunk(self.experts)
        parts = zip(x_ND.split(list(counts)), weights, biases, strict=True)
        return torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])


class Mixture(nn.Module):
    """A mixture of experts. Which experts a token goes to is read on the host: no graph can hold it, and it is not compiled."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        assert c.experts is not None
        self.rule = e = c.experts
        self.activation = ACTIVATIONS[c.activation]
        self.router = Linear(c.width, e.count, bias=e.router_bias)
        self.up = ExpertLinear(e.count, c.width, 2 * e.hidden, e.bias)  # of each expert gate rows first, then up rows
        self.down = ExpertLinear(e.count, e.hidden, c.width, e.bias)
        self.shared = Mlp(c, e.shared_hidden) if e.shared_hidden else None
        self.shared_gate = Linear(c.width, 1, bias=False) if e.shared_hidden else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        shares_NA, chosen_NA = self.route(self.router(x_BTD).flatten(0, 1))
        out_BTD = self.mix(x_BTD.flatten(0, 1), shares_NA, chosen_NA).view_as(x_BTD)
        if self.shared is not None and self.shared_gate is not None:
            out_BTD = out_BTD + self.shared_gate(x_BTD).sigmoid() * self.shared(x_BTD)
        return out_BTD

    def route(self, logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and what they count: shares of a softmax over all, or over the chosen alone."""
        shares_NA, chosen_NA = logits_NE.float().softmax(-1).topk(self.rule.active, -1)
        if self.rule.normalised:
            shares_NA = shares_NA / shares_NA.sum(-1, keepdim=True)
        return shares_NA.to(logits_NE.dtype), chosen_NA

    def mix(self, x_ND: Tensor, shares_NA: Tensor, chosen_NA: Tensor) -> Tensor:
        """Tokens sorted by expert, each expert's in one product, and put back; no sum depends on the order of anything."""
        order = chosen_NA.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_NA.flatten(), minlength=self.rule.count).tolist()
        sent = x_ND.repeat_interleave(self.rule.active, 0)[order]
        said = self.down(self.gate(self.up(sent, counts)), counts)
        back = torch.empty_like(said).index_copy(0, order, said)
        return (back.view(*chosen_NA.shape, -1) * shares_NA[..., None]).sum(1)

    def gate(self, inner: Tensor) -> Tensor:
        if self.rule.clamp is None or self.rule.alpha is None:
            return gated(inner, self.activation)
        gate, up = inner.chunk(2, -1)
        gate, up = gate.clamp(max=self.rule.clamp), up.clamp(-self.rule.clamp, self.rule.clamp)
        return gate * torch.sigmoid(gate * self.rule.alpha) * (up + 1)


class Block(nn.Module):
    attn_norm: Any  # a norm, as `mlp_norm`; None where the model has none there
    mlp_norm: Any

    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.attn_norm, self.mlp_norm = (make_norm(c) if c.pre_norms else None for _ in range(2))
        self.attn_post_norm, self.mlp_post_norm = (make_norm(c) if c.post_norms else None for _ in range(2))
        self.attn, self.mlp = Attention(c, layer), Mixture(c) if c.mixture_at(layer) else Mlp(c)
        self.scale = c.residual_scale

    def forward(self, x_BTD: Tensor, rotary: RotaryTable | None, mask: AttentionMask, cache: LayerCacheView | None,
                *values: list[Tensor]) -> Tensor:
        x_BTD, normed = stream_and_norm(x_BTD, self.attn_norm)
        x_BTD = x_BTD + self.addend(self.attn(normed, rotary, mask, cache, *values), self.attn_post_norm)
        x_BTD, normed = stream_and_norm(x_BTD, self.mlp_norm)
        return x_BTD + self.addend(self.mlp(normed), self.mlp_post_norm)

    def addend(self, said_BTD: Tensor, post_norm: nn.Module | None) -> Tensor:
        """Output of attention or MLP as it is added to the residual stream: normed or scaled first, where the model does that."""
        said_BTD = said_BTD if post_norm is None else post_norm(said_BTD)
        return said_BTD if self.scale is None else said_BTD * self.scale


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.width)
        self.position = None if config.rope else Embedding(config.max_length, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        self.norm = make_norm(config)
        self.head = None if config.tied else Linear(config.width, config.vocab, bias=False)
        # On the CPU even where parameters are built on "meta": the table is a function of the config, never of a file.
        turned = config.rotary_dim or config.head_dim
        for name, rope in (("frequencies", config.rope), ("local_frequencies", config.local_rope)):
            self.register_buffer(name, inverse_frequencies(rope, turned) if rope else None, persistent=False)
        self.compute_dtype: torch.dtype | None = None  # None: the parameters' own
        self.recompute = False  # gradient checkpointing: trade a second forward for activation memory
        self.run, self.together = run_blocks, 1  # so many blocks at a time: a compiler fuses across the bounds of those it sees at once

    def hidden(self, tokens_BT: Tensor, *, documents: Tensor | None = None, positions: Tensor | None = None,
               cache: CacheView | None = None, starts: Tensor | None = None) -> Tensor:
        """States after the final norm, ready for the head. `documents` (B, T) keeps packed documents apart; -1 marks padding.

        Within a document positions count from 0, wherever it stands in its row, so left padding, right padding, packing
        and a cache all give a token the same state. `starts` repeats `documents` for kernels of variable length.
        """
        c, half = self.config, (self.compute_dtype or self.embed.weight.dtype) in (torch.bfloat16, torch.float16)
        layout_of = token_layout if cache is None else cache.layout
        kernel_takes = half and c.fused_attention  # the kernels of variable length
        layout = layout_of(tokens_BT, documents, positions, set(c.windows), starts if kernel_takes else None)
        x_BTD = F.embedding(tokens_BT, self.embed.weight)
        if self.position is not None:  # added up in the wider of both dtypes
            x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, self.compute_dtype or x_BTD.dtype))
            x_BTD = x_BTD + F.embedding(layout.positions, self.position.weight)
        x_BTD = x_BTD.to(self.compute_dtype or x_BTD.dtype)
        if c.embedding_scale is not None:
            x_BTD = x_BTD * rounded(c.embedding_scale, x_BTD.dtype)
        tables = self.rotary_tables(layout)
        values: tuple[list[Tensor], ...] = ([],) if c.value_residual else ()
        recompute = self.recompute and torch.is_grad_enabled()
        for first in range(0, c.depth, self.together):
            layers = [(self.blocks[layer], tables[layer], layout.masks[c.windows[layer]], None if cache is None else cache.layer(layer))
                      for layer in range(first, first + self.together)]
            x_BTD = self.run(layers, x_BTD, values, recompute)
        states = self.norm(x_BTD)
        return states if c.logit_scale is None else states * c.logit_scale  # here, so that no loss need know of it

    def rotary_tables(self, layout: TokenLayout) -> list[RotaryTable | None]:
        """Rotary table of each layer's queries and keys; None where it has none."""
        c, everywhere = self.config, self.rotary(layout)
        local = everywhere if c.local_rope is None else rotary_table(c.local_rope, self.local_frequencies, layout)
        return [None if layer in c.unrotated else everywhere if c.windows[layer] is None else local for layer in range(c.depth)]

    def rotary(self, layout: TokenLayout) -> RotaryTable | None:
        return None if self.config.rope is None else rotary_table(self.config.rope, self.frequencies, layout)

    def logits(self, states: Tensor) -> Tensor:
        """Logits through the head's one matrix, or through the layer that stands in its place: an adapted head has no one matrix."""
        plain = self.head is None or isinstance(self.head, nn.Linear)
        logits = F.linear(states, self.head_weight().to(states.dtype)) if plain else self.head(states)  # type: ignore[misc]
        return logits if self.config.softcap is None else softcap(logits, self.config.softcap)

    def head_weight(self) -> Tensor:
        """The (V, D) matrix that turns states into logits; a fused loss takes it together with the states."""
        return self.embed.weight if self.head is None else self.head.weight

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradient of every parameter that has one."""
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens_BT))


def run_blocks(layers: Sequence[tuple[nn.Module, RotaryTable | None, AttentionMask, LayerCacheView | None]], x_BTD: Tensor,
               values: tuple[list[Tensor], ...], recompute: bool) -> Tensor:
    for block, rotary, mask, cache in layers:
        arguments = (x_BTD, rotary, mask, cache, *values)
        # In a block nothing is random, and asking for the generator's state would end a graph's capture.
        x_BTD = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False) if recompute else block(*arguments)
    return x_BTD


def outlined(config: ModelConfig) -> Transformer:
    """A model without memory for its weights, for a process that is sent its part of them."""
    with torch.device("meta"):
        return Transformer(config)


class InitialSpread(NamedTuple):
    """Standard deviation of fresh matrices and tables; what a layer adds to the stream may be `divided` by √(2 · depth)."""

    wide: float = 0.02
    divided: bool = True

    def of(self, name: str, depth: int) -> float:
        if name.endswith("attn.gate.weight"):
            return 0.001  # nearly open; a matrix of zeros would look never filled
        adds = self.divided and name.endswith(("attn.out.weight", "mlp.down.weight"))
        return self.wide / math.sqrt(2 * depth) if adds else self.wide


def initialised(config: ModelConfig, seed: int, spread: InitialSpread = InitialSpread()) -> Transformer:  # noqa: B008 - it is frozen
    """A fresh model whose every weight has an address in `seed`; no ambient RNG is touched."""
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        parameter.data = initial_tensor(model, seed, spread, name)
    return model


def initial_tensor(outline: Transformer, seed: int, spread: InitialSpread, name: str) -> Tensor:
    """One weight of a fresh model, by itself: whoever asks, and in whatever order, gets the same bits. `outline` may have shapes alone."""
    path, _, leaf = name.rpartition(".")
    shape = outline.get_parameter(name).shape
    if len(shape) == 2:
        return torch.empty(shape).normal_(0.0, spread.of(name, outline.config.depth), generator=generator(seed, "init", name))
    return torch.full(shape, 0.0 if leaf == "bias" else float(outline.get_submodule(path).initial))  # type: ignore[arg-type]


def parameter_count(model: nn.Module) -> int:
    listed = sum(parameter.numel() for parameter in model.parameters())
    return listed + sum(module.unlisted for module in model.modules() if isinstance(module, Linear))


def qkv_rows(c: ModelConfig) -> tuple[int, int, int]:
    """How many rows of the fused matrix are q, k and v."""
    return c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim


def make_norm(c: ModelConfig, width: int | None = None) -> nn.Module:
    kind = LayerNorm if c.norm == "layer" else OffsetRmsNorm if c.norm_plus_one else RmsNorm
    return kind(width or c.width, c.norm_eps)


def stream_and_norm(x: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """x and its norm. An RMS norm in training on a GPU is a kernel's, which makes one gradient of both; no hook sees it at work."""
    if norm is None:
        return x, x
    if isinstance(norm, RmsNorm) and uses_fused_norm(x):
        return fused_stream_and_norm(x, norm.weight, norm.eps)
    return x, norm(x)


@functools.cache
def rounded(scale: float, dtype: torch.dtype) -> float:
    """A factor in the precision of what it multiplies: Gemma was trained with √3072 = 55.5, which is what bf16 makes of 55.43."""
    return float(torch.tensor(scale, dtype=dtype))


def rotary_table(rope: Rope, frequencies: Tensor | nn.Module, layout: TokenLayout) -> RotaryTable:
    """(1 or B, T, 1, d / 2) each."""
    assert isinstance(frequencies, Tensor)
    angles = layout.positions[..., None].float() * frequencies
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    return (cos, sin) if rope.attention_factor is None else (cos * rope.attention_factor, sin * rope.attention_factor)


def inverse_frequencies(rope: Rope, turned: int) -> Tensor:
    """An angle a position for each pair of the `turned` entries of a head."""
    frequencies = rope.base ** -(torch.arange(0, turned, 2, device="cpu").float() / turned)
    if rope.kind == "linear":
        assert rope.factor
        return frequencies / rope.factor
    if rope.kind == "longrope":
        assert rope.short_factor
        return frequencies / torch.tensor(rope.short_factor, device="cpu")
    scaled = {"llama3": llama3_frequencies, "yarn": yarn_frequencies}
    return scaled[rope.kind](rope, frequencies) if rope.kind in scaled else frequencies


def yarn_frequencies(rope: Rope, frequencies: Tensor) -> Tensor:
    """YaRN (Peng et al., arXiv 2309.00071): pairs that turn often are kept, those that turn rarely stretched, a ramp between."""
    assert rope.factor
    assert rope.original_length
    assert rope.beta_fast
    assert rope.beta_slow
    turned = 2 * len(frequencies)
    ends = [turned * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
            for turns in (rope.beta_fast, rope.beta_slow)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if rope.truncate else ends
    low, high = max(low, 0), min(high, turned - 1)
    high += 0.001 if low == high else 0.0
    stretched = ((torch.arange(len(frequencies), device="cpu").float() - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / rope.factor * stretched


def llama3_frequencies(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    assert rope.factor
    assert rope.low_freq_factor
    assert rope.high_freq_factor
    assert rope.original_length
    turns = rope.original_length * frequencies / (2 * math.pi)  # turns made within the original context
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return blend * frequencies + (1 - blend) * frequencies / rope.factor


def softcap(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh, "relu2": relu2}
