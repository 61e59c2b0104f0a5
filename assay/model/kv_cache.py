"""KV cache of fixed slots, one tensor a layer: prompts are filled in, then every slot decodes one token at a time.

`model.hidden(tokens, cache=…)` takes one of three views. `PrefillView` stores a batch's tokens at given places and attends
as if there were no cache; `ExtendView` adds several tokens to what some slots hold, and attends to both; `DecodeView` gives every
slot one token more and attends to what the slot holds.
Shapes: S slots, L capacity, P = S · L places and more, B rows, T time, N tokens, H heads, K key/value heads, d head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from assay.kernels.cached_attention import Rotary, cached_attention
from assay.model.attention import (
    PADDING,
    PLAIN_RULE,
    AttentionMask,
    AttentionRule,
    TokenLayout,
    attend,
    document_causal_mask,
    positions_in_document,
    token_layout,
)


class SlotCache:
    """Fixed addresses for its whole life, so that a CUDA graph may hold them. Zeros, not garbage: 0 · NaN is NaN.

    A tensor per layer, not one for all: indexing a stacked tensor made compiled graphs copy all of it at every layer, and so did
    writing to a part of a larger storage. Hence DLPack, through which the same memory comes back as a storage of its own.
    Behind the last slot lies one that nobody reads: there goes what padding says.
    """

    def __init__(self, layers: int, slots: int, length: int, kv_heads: int, head_dim: int, *,
                 dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.slots, self.length, self.nowhere = slots, length, slots * length
        self.all = torch.zeros((2 * layers, slots + 1, length, kv_heads, head_dim), dtype=dtype, device=device)
        self.keys, self.values = ([torch.from_dlpack(self.all[2 * layer + part, :slots]) for layer in range(layers)]
                                  for part in (0, 1))

    def clear(self) -> None:
        self.all.zero_()

    def copy(self, sources: Tensor, targets: Tensor, width: int) -> None:
        """Copy the first `width` places of each source slot into the target beside it; all are read before any is written."""
        wide = self.all.flatten(-2)
        if wide.shape[-1] * wide.itemsize % torch.complex128.itemsize == 0:
            wide = wide.view(torch.complex128)  # bytes alone matter here, and indexing goes by elements: the wider, the fewer
        wide[:, targets, :width] = wide[:, sources, :width]

    def places(self, documents_BT: Tensor, slots: Tensor) -> Tensor:
        """(B, T) where the tokens of a batch stand, if row b goes into slot slots[b], from its place 0 on; padding goes nowhere."""
        places = slots[:, None] * self.length + positions_in_document(documents_BT)
        return torch.where(documents_BT == PADDING, self.nowhere, places)


class PrefillView(NamedTuple):
    """The view of a prefill: token (b, t) of the batch goes to place places[b, t] of all slots' places, counted through."""

    cache: SlotCache
    places_BT: Tensor

    def layout(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
               starts: Tensor | None) -> TokenLayout:
        layout, longest = token_layout(tokens_BT, documents, positions, windows, starts), min(tokens_BT.shape[1], self.cache.length)
        return layout._replace(masks={window: mask._replace(longest=longest) for window, mask in layout.masks.items()})

    def layer(self, index: int) -> "PrefillLayer":
        keys, values = self.cache.all[2 * index], self.cache.all[2 * index + 1]
        return PrefillLayer(keys.flatten(0, 1), values.flatten(0, 1), self.places_BT.flatten())


class PrefillLayer(NamedTuple):
    keys_PKd: Tensor
    values_PKd: Tensor
    places_N: Tensor

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask: AttentionMask, rule: AttentionRule = PLAIN_RULE) -> Tensor:
        self.keys_PKd.index_copy_(0, self.places_N, k_BTKd.flatten(0, 1))
        self.values_PKd.index_copy_(0, self.places_N, v_BTKd.flatten(0, 1))
        return attend(q_BTHd, k_BTKd, v_BTKd, mask, rule)


class ExtendView(NamedTuple):
    """The view of a continued prefill: row b goes on in slot slots_B[b], which holds held_B[b] tokens; its token t goes to
    places_BT[b, t] of all slots' places. No row reaches `horizon`."""

    cache: SlotCache
    slots_B: Tensor
    held_B: Tensor
    places_BT: Tensor
    horizon: int

    def layout(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
               starts: Tensor | None) -> TokenLayout:
        assert positions is None, "a slot's place is the cache's to say"
        (B, T), device = tokens_BT.shape, tokens_BT.device
        places = (self.held_B[:, None] + torch.arange(T, device=device)).clamp(max=self.horizon - 1)  # beyond it there is only padding
        keys = torch.arange(self.horizon, device=device).expand(B, self.horizon)
        one = torch.zeros_like(places), torch.zeros_like(keys)  # a slot holds one document
        return TokenLayout(one[0], places, {window: AttentionMask(document_causal_mask(one[0], places, one[1], keys, window))
                                            for window in windows})

    def layer(self, index: int) -> "ExtendLayer":
        cache = self.cache
        return ExtendLayer(cache.all[2 * index], cache.all[2 * index + 1], self.places_BT.flatten(), self.slots_B, self.horizon)


class ExtendLayer(NamedTuple):
    keys_SLKd: Tensor
    values_SLKd: Tensor
    places_N: Tensor
    slots_B: Tensor
    horizon: int

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask: AttentionMask, rule: AttentionRule = PLAIN_RULE) -> Tensor:
        self.keys_SLKd.flatten(0, 1).index_copy_(0, self.places_N, k_BTKd.flatten(0, 1))
        self.values_SLKd.flatten(0, 1).index_copy_(0, self.places_N, v_BTKd.flatten(0, 1))
        keys, values = (held[self.slots_B, : self.horizon] for held in (self.keys_SLKd, self.values_SLKd))
        return attend(q_BTHd, keys, values, mask, rule)


def attend_slots(layer: "DecodeLayer", q_S1Hd: Tensor, k_S1Kd: Tensor, v_S1Kd: Tensor, window: int | None,
                 rule: AttentionRule = PLAIN_RULE) -> Tensor:
    angles = None if layer.rotary is None else (layer.rotary[0][:, 0, 0], layer.rotary[1][:, 0, 0])
    return cached_attention(q_S1Hd[:, 0], k_S1Kd[:, 0], v_S1Kd[:, 0], layer.keys_SLKd, layer.values_SLKd, layer.positions,
                            window, layer.horizon, angles, *rule)[:, None]


class DecodeView(NamedTuple):
    """The view of one decoding step: slot s gets its token at `positions[s]`; none is at or beyond `horizon`. `attention` is
    `attend_slots` or wraps it."""

    cache: SlotCache
    positions: Tensor
    horizon: int
    attention: Callable[..., Tensor] = attend_slots

    def layout(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
               starts: Tensor | None) -> TokenLayout:
        assert documents is None, "a slot holds one document"
        assert positions is None, "a slot's place is the cache's to say"
        return TokenLayout(torch.zeros_like(tokens_BT), self.positions[:, None],
                           {window: AttentionMask(window=window) for window in windows})

    def layer(self, index: int) -> "DecodeLayer":
        return DecodeLayer(self.cache.keys[index], self.cache.values[index], self.positions, self.horizon, self.attention)


class DecodeLayer(NamedTuple):
    """KV cache of one layer while decoding. With `rotary` it rotates q and k itself, which saves a kernel a layer; without it they come
    rotated."""

    keys_SLKd: Tensor
    values_SLKd: Tensor
    positions: Tensor
    horizon: int
    attention: Callable[..., Tensor]
    rotary: Rotary | None = None  # cos and sin, (S, 1, 1, d / 2)

    def with_rotary(self, rotary: Rotary | None) -> "DecodeLayer":
        return DecodeLayer(self.keys_SLKd, self.values_SLKd, self.positions, self.horizon, self.attention, rotary)

    def attend(self, q_S1Hd: Tensor, k_S1Kd: Tensor, v_S1Kd: Tensor, mask: AttentionMask, rule: AttentionRule = PLAIN_RULE) -> Tensor:
        return self.attention(self, q_S1Hd, k_S1Kd, v_S1Kd, mask.window, rule)


CacheView = PrefillView | ExtendView | DecodeView
LayerCacheView = PrefillLayer | ExtendLayer | DecodeLayer
