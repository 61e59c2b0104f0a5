"""Tiny models for forward-pass traces, with nothing left at its start value, and tools to break one step of one.

A forward fault breaks a model in memory and says at which site a trace must find it. Those that the catalogue of failures knows
are faults of the zoo as well.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assay.editing.block_hooks import block
from assay.kernels.rotary import rotate
from assay.model.attention import AttentionMask, attend
from assay.model.kv_cache import DecodeLayer, LayerCacheView
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.testing import tiny_forward as here
from assay.testing.fault_injection import Plant, fault, swap
from assay.testing.tiny_models import tiny_config, tiny_model
from assay.tracing.first_divergence import ReferencePass, check_forward, compare_passes, run_reference, weight_changes
from assay.tracing.forward_modes import ForwardMode, batched_forward, cached_forward, plain_forward
from assay.verdict import Verdict

TRACE_DEPTH, _TOKENS, FILLED = 3, 40, 32  # more tokens than the tiny window holds; the last eight come out of the cache
Break = Callable[[Transformer, int], object]
RUNNERS: dict[str, Callable[[Transformer], ForwardMode]] = {
    "plainly": plain_forward, "in company": batched_forward, "from the cache": functools.partial(cached_forward, filled=FILLED)}


@dataclass(frozen=True)
class ForwardFault:
    name: str
    right: tuple[str, ...]  # the names of the sites that a trace may find it at
    breaks: Break
    family: str
    way: str
    rows: tuple[str, ...]  # of the catalogue of silent failures


FORWARD_FAULTS: dict[str, ForwardFault] = {}


def forward_fault(name: str, *right: str, family: str = "llama", way: str = "plainly", rows: tuple[str, ...] = ()) -> Callable[[Break],
                  Break]:
    def register(breaks: Break) -> Break:
        assert name not in FORWARD_FAULTS, f"two plantings are called {name!r}"
        FORWARD_FAULTS[name] = ForwardFault(name, right, breaks, family, way, rows)
        if rows:
            fault(name, rows=rows, stage="inference", check="forward", job=a_traced_pass(family, way))(breaking_layer(breaks))
        return breaks

    return register


def a_traced_pass(family: str, way: str) -> Callable[[Path, Plant], list[Verdict]]:
    """A model beside itself, run in one of the ways that must agree; struck while the second is built."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        known = reference_run(family)
        with plant(folder):
            model = here.model_under_test(family)
        found = compare_passes(known, RUNNERS[way](model), torch.float32)
        weights = dict(here.model_under_test(family).named_parameters()), dict(model.named_parameters())
        moved = None if found.first is None else weight_changes(found.first.site, model.config, *weights)
        return [check_forward(found, moved)]

    return job


def breaking_layer(breaks: Break, layer: int = 1) -> Plant:
    def plant(_: Path) -> AbstractContextManager[None]:
        return swap(here, "model_under_test", functools.partial(broken_model, breaks=breaks, layer=layer))

    return plant


def broken_model(family: str, *, breaks: Break, layer: int) -> Transformer:
    model = random_model(family)
    with torch.no_grad():
        breaks(model, layer)
    return model


def random_model(family: str) -> Transformer:
    """Three layers whose heads look somewhere, whose norms weigh and whose biases count: nothing hides in a fresh start."""
    windows = (tiny_config(family).windows * TRACE_DEPTH)[:TRACE_DEPTH]
    model = tiny_model(family, depth=TRACE_DEPTH, windows=windows)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator(0, "seasoned", name))
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / (1.0 if "embed" in name or "position" in name else parameter.shape[1] ** 0.5))
    return model.eval()


model_under_test = random_model  # what a planted fault puts another in the place of


def traced_tokens() -> Tensor:
    return torch.randint(0, 300, (2, _TOKENS), generator=generator(0, "traced"))


@functools.cache
def reference_run(family: str) -> ReferencePass:
    """Reference pass of a family; its twin in float64 shows what rounding does to this very model."""
    model = random_model(family)
    return run_reference(model.config, plain_forward(model), traced_tokens(), torch.float32, plain_forward(random_model(family).double()))

# ---------------------------------------------------------------- tools to plant with


def put_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """A forward of its own for one module; its hooks stay."""
    setattr(module, "forward", forward)  # noqa: B010 - it is a method to the type checker


def wrap_method(owner: Any, method: str, other: Callable[..., Any]) -> None:
    """`owner.method(…)` is now `other(the usual one, …)`."""
    setattr(owner, method, functools.partial(other, getattr(owner, method)))


def unchanged(*values: Any) -> Any:
    return values if len(values) > 1 else values[0]


def change_attention(model: Transformer, layer: int, *, heads: Callable = unchanged, turn: Callable = rotate,
                     turn_key: Callable | None = None,
                     look: Callable = attend, joined: Callable = torch.flatten, late_norm: bool = False, no_norm: bool = False) -> None:
    """The layer's attention, written out again with some of its steps exchanged."""
    one = block(model, layer).attn

    def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if one.q_norm is None or one.k_norm is None or no_norm else (one.q_norm(q), one.k_norm(k))

    def forward(x: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: AttentionMask, cache: LayerCacheView | None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = heads(*(part.view(B, T, -1, one.head_dim) for part in one.qkv(x).split(one.rows, -1)))
        q, k = (q, k) if late_norm else normed(q, k)
        if rotary is not None:
            q, k = turn(q, *rotary), (turn_key or turn)(k, *rotary)
        q, k = normed(q, k) if late_norm else (q, k)
        return one.out(joined(look(q, k, v, mask) if cache is None else cache.attend(q, k, v, mask), 2))

    put_forward(one, forward)


def change_mlp(model: Transformer, layer: int, *, halves: Callable = unchanged, product: Callable = torch.mul) -> None:
    one = block(model, layer).mlp

    def forward(x: Tensor) -> Tensor:
        gate, up = halves(*one.up(x).chunk(2, -1))
        return one.down(product(one.activation(gate), up))

    put_forward(one, forward)


def attention_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = True, **options: Any) -> Tensor:
    """Attention with another mask, another scale or other heads than the model asked for."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=True, **options).transpose(1, 2)


def sight_mask(T: int, nearest: int = 0, furthest: int | None = None) -> Tensor:
    """Keys at distances from `nearest` on, to before `furthest`; the first token always sees itself."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return ((distance >= nearest) & (distance < (furthest or T))) | ((distance == 0) & (torch.arange(T) == 0))


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax without a fused kernel, and without a window."""
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~sight_mask(q.shape[2]), -torch.inf)
    return (scores.to(dtype).softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def stale_cache_entry(name: str) -> Break:
    """Fault: a slot holds at place 5 what it holds at place 4."""
    def breaks(model: Transformer, layer: int) -> None:
        attend_whole = block(model, layer).attn.forward

        def forward(x: Tensor, rotary: Any, mask: AttentionMask, cache: LayerCacheView | None) -> Tensor:
            if isinstance(cache, DecodeLayer):
                held = cache.keys_SLKd if name == "keys" else cache.values_SLKd
                held[:, 5] = held[:, 4]
            return attend_whole(x, rotary, mask, cache)

        put_forward(block(model, layer).attn, forward)

    return breaks


def remove_norm(module: nn.Module) -> None:
    put_forward(module, lambda x: x)


def round_to_bf16(module: nn.Module) -> None:
    """Weights, input and output rounded to bf16; the product itself in fp32, since some CPUs have no bf16 of their own."""
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())
    wrap_method(module, "forward", lambda usual, x: usual(x.bfloat16().float()).bfloat16().float())
