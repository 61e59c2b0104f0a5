"""Transformer: one decoder class for GPT-2, Llama, Mistral, Qwen2 and Qwen3, which differ in their ModelConfig.

One forward path serves training, sampling, evaluation, tracing, editing and test-time training:
`hidden(tokens) → states`, `logits(states)`. Whoever wants a loss takes the states.

Shapes: B rows, T time, S keys a query may look at, D width, H heads, K key/value heads, d head size, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from assay.kernels.gated_activation import gated
from assay.kernels.linear import linear
from assay.kernels.rms_norm import fused_stream_and_norm, rms_norm, uses_fused_norm
from assay.kernels.rotary import rotate, rotated
from assay.model.attention import AttentionMask, TokenLayout, attend, gate_heads, mix_values, token_layout
from assay.model.kv_cache import CacheView, DecodeLayer, LayerCacheView
from assay.seeds import generator


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `kind` decides which of the factors count; the others must stay None."""

    base: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_length: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The geometry of a decoder. No field has a default: whoever builds one has read it somewhere."""

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

    def __post_init__(self) -> None:
        assert len(self.windows) == self.depth, "one window (or None) per layer"
        assert self.heads % self.kv_heads == 0, "query heads are shared out evenly over key/value heads"


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: `initialised` or a file fills every parameter, and torch's initialisers are slow to import."""


class Linear(nn.Linear):
    """Computes in the dtype of its input, so that fp32 master weights serve a bf16 stream without autocast."""

    def reset_parameters(self) -> None:
        """Nothing, as in Embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class ValueMix(nn.Module):
    """Value residual learning (Zhou et al., arXiv 2410.17897): both shares begin at a half."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, v: Tensor, first: Tensor) -> Tensor:
        return mix_values(v, first, self.weight.to(v.dtype))


class Attention(nn.Module):
    """q, k and v are rows of one matrix: one product instead of three. families.py splits it for the outside world."""

    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.head_dim = c.head_dim
        self.rows = qkv_rows(c)
        self.qkv = Linear(c.width, sum(self.rows), bias=c.qkv_bias)
        self.out = Linear(self.rows[0], c.width, bias=c.out_bias)
        self.q_norm = RmsNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RmsNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.mix = ValueMix() if c.value_residual and layer > 0 else None
        self.gate = Linear(c.width, c.heads, bias=False) if c.attention_gate else None

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: AttentionMask, cache: LayerCacheView | None,
                values: list[Tensor] | None = None) -> Tensor:
        """`values` begins with those of the first layer, which puts them there; None where no layer asks for them."""
        B, T, _ = x_BTD.shape
        if isinstance(cache, DecodeLayer):
            cache, rotary = cache.with_rotary(rotary), None
        q, k, v = self.split_heads(self.qkv(x_BTD), rotary)
        if self.mix is not None:
            v = self.mix(v, values[0])  # type: ignore[index]
        elif values is not None:
            values.append(v)
        attended = attend(q, k, v, mask) if cache is None else cache.attend(q, k, v, mask)
        if self.gate is not None:
            attended = gate_heads(attended, self.gate(x_BTD))
        return self.out(attended.reshape(B, T, -1))

    def split_heads(self, qkv_BTR: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by heads, q and k normed and turned to their positions where the model does that."""
        heads, kv_heads, _ = (rows // self.head_dim for rows in self.rows)
        if rotary is not None and self.q_norm is None:
            return rotated(qkv_BTR, *rotary, heads, kv_heads)
        q, k, v = qkv_BTR.unflatten(-1, (-1, self.head_dim)).split((heads, kv_heads, kv_heads), 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(torch.cat([q, k], 2), *rotary).split((heads, kv_heads), 2)
        return q, k, v


class Mlp(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gated, self.activation = c.gated, ACTIVATIONS[c.activation]
        self.up = Linear(c.width, (2 if c.gated else 1) * c.hidden, bias=c.mlp_bias)  # gate rows first, then up rows
        self.down = Linear(c.hidden, c.width, bias=c.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        inner = self.up(x_BTD)
        return self.down(gated(inner, self.activation) if self.gated else self.activation(inner))


class Block(nn.Module):
    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.attn_norm, self.mlp_norm = make_norm(c), make_norm(c)
        self.attn, self.mlp = Attention(c, layer), Mlp(c)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: AttentionMask, cache: LayerCacheView | None,
                *values: list[Tensor]) -> Tensor:
        x_BTD, normed = stream_and_norm(x_BTD, self.attn_norm)
        x_BTD = x_BTD + self.attn(normed, rotary, mask, cache, *values)
        x_BTD, normed = stream_and_norm(x_BTD, self.mlp_norm)
        return x_BTD + self.mlp(normed)


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
        table = inverse_frequencies(config.rope, config.head_dim) if config.rope else None
        self.register_buffer("frequencies", table, persistent=False)
        self.compute_dtype: torch.dtype | None = None  # None: the parameters' own
        self.recompute = False  # gradient checkpointing: trade a second forward for activation memory
        self.run, self.together = run_blocks, 1  # so many blocks at a time: a compiler fuses across the bounds of those it sees at once

    def hidden(self, tokens_BT: Tensor, *, documents: Tensor | None = None, positions: Tensor | None = None,
               cache: CacheView | None = None, starts: Tensor | None = None) -> Tensor:
        """States after the final norm. `documents` (B, T) keeps packed documents apart; -1 marks padding.

        Within a document positions count from 0, wherever it stands in its row, so left padding, right padding, packing
        and a cache all give a token the same state. `starts` repeats `documents` for kernels of variable length.
        """
        half = (self.compute_dtype or self.embed.weight.dtype) in (torch.bfloat16, torch.float16)  # all that the kernels take
        layout_of = token_layout if cache is None else cache.layout
        layout = layout_of(tokens_BT, documents, positions, set(self.config.windows), starts if half else None)
        x_BTD = F.embedding(tokens_BT, self.embed.weight)
        if self.position is not None:  # added up in the wider of both dtypes
            x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, self.compute_dtype or x_BTD.dtype))
            x_BTD = x_BTD + F.embedding(layout.positions, self.position.weight)
        x_BTD = x_BTD.to(self.compute_dtype or x_BTD.dtype)
        rotary = self.rotary(layout)
        values: tuple[list[Tensor], ...] = ([],) if self.config.value_residual else ()
        recompute = self.recompute and torch.is_grad_enabled()
        for first in range(0, self.config.depth, self.together):
            layers = [(self.blocks[layer], layout.masks[self.config.windows[layer]], None if cache is None else cache.layer(layer))
                      for layer in range(first, first + self.together)]
            x_BTD = self.run(layers, x_BTD, rotary, values, recompute)
        return self.norm(x_BTD)

    def rotary(self, layout: TokenLayout) -> tuple[Tensor, Tensor] | None:
        if self.frequencies is None:
            return None
        assert isinstance(self.frequencies, Tensor)
        angles = layout.positions[..., None].float() * self.frequencies
        return angles.cos()[:, :, None], angles.sin()[:, :, None]

    def logits(self, states: Tensor) -> Tensor:
        """Through the head's one matrix, or through the layer that stands in its place: an adapted head has no one matrix."""
        plain = self.head is None or isinstance(self.head, nn.Linear)
        logits = F.linear(states, self.head_weight().to(states.dtype)) if plain else self.head(states)  # type: ignore[misc]
        return logits if self.config.softcap is None else softcap(logits, self.config.softcap)

    def head_weight(self) -> Tensor:
        """The (V, D) matrix that turns states into logits; a fused loss takes it together with the states."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens_BT))


def run_blocks(layers: Sequence[tuple[nn.Module, AttentionMask, LayerCacheView | None]], x_BTD: Tensor,
               rotary: tuple[Tensor, Tensor] | None,
               values: tuple[list[Tensor], ...], recompute: bool) -> Tensor:
    for block, mask, cache in layers:
        arguments = (x_BTD, rotary, mask, cache, *values)
        # In a block nothing is drawn by lot, and asking for the generator's state would end a graph's capture.
        x_BTD = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False) if recompute else block(*arguments)
    return x_BTD


def initialised(config: ModelConfig, seed: int) -> Transformer:
    """A fresh model whose every weight has an address in `seed`; no ambient RNG is touched."""
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * config.depth) if residual else 0.02
            std = 0.001 if name.endswith("attn.gate.weight") else std  # nearly open; a matrix of zeros would look never filled
            with torch.no_grad():
                parameter.normal_(0.0, std, generator=generator(seed, "init", name))
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
    return model


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def qkv_rows(c: ModelConfig) -> tuple[int, int, int]:
    """How many rows of the fused matrix are q, k and v."""
    return c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim


def make_norm(c: ModelConfig) -> nn.Module:
    return RmsNorm(c.width, c.norm_eps) if c.norm == "rms" else LayerNorm(c.width, c.norm_eps)


def stream_and_norm(x: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x and its norm. An RMS norm in training on a GPU is a kernel's, which makes one gradient of both; no hook sees it at work."""
    if isinstance(norm, RmsNorm) and uses_fused_norm(x):
        return fused_stream_and_norm(x, norm.weight, norm.eps)
    return x, norm(x)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    frequencies = rope.base ** -(torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
    if rope.kind == "linear":
        assert rope.factor
        return frequencies / rope.factor
    return llama3_frequencies(rope, frequencies) if rope.kind == "llama3" else frequencies


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
