"""Keys and values of fixed slots, one tensor a layer: prompts are filled in, then every slot goes on by one token at a time.

`model.hidden(tokens, cache=…)` takes one of two views. `Filling` stores the rows of a batch in slots and attends as if there
were no cache; `Decoding` gives every slot one token more and attends to what the slot holds.
Shapes: S slots, L capacity, B rows, T time, H heads, K key/value heads, d head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from assay.kernels.cached_attention import cached_attention
from assay.model.attention import Placement, Sight, attend, place


class SlotCache:
    """Fixed addresses for its whole life, so that a CUDA graph may hold them. Zeros, not garbage: 0 · NaN is NaN.

    One tensor per layer, not one for all: indexing a stacked tensor made compiled graphs copy all of it at every layer.
    """

    def __init__(self, layers: int, slots: int, length: int, kv_heads: int, head_dim: int, *,
                 dtype: torch.dtype, device: torch.device | str = "cpu"):
        shape = (slots, length, kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.slots, self.length = slots, length

    def clear(self) -> None:
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def copy(self, sources: Tensor, targets: Tensor, width: int) -> None:
        """What each source slot holds in its first `width` places, into the target beside it; all are read before any is written."""
        for tensor in (*self.keys, *self.values):
            tensor[targets, :width] = tensor[sources, :width]


class Filling(NamedTuple):
    """Row `rows[i]` of the batch goes into slot `slots[i]`, from place 0 on; a row may go into several slots."""

    cache: SlotCache
    slots: Tensor
    rows: Tensor

    def place(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
              starts: Tensor | None) -> Placement:
        return place(tokens_BT, documents, positions, windows, starts)

    def layer(self, index: int) -> "FillingLayer":
        return FillingLayer(self.cache.keys[index], self.cache.values[index], self.slots, self.rows)


class FillingLayer(NamedTuple):
    keys_SLKd: Tensor
    values_SLKd: Tensor
    slots: Tensor
    rows: Tensor

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, sight: Sight) -> Tensor:
        T = k_BTKd.shape[1]
        self.keys_SLKd[self.slots, :T], self.values_SLKd[self.slots, :T] = k_BTKd[self.rows], v_BTKd[self.rows]
        return attend(q_BTHd, k_BTKd, v_BTKd, sight)


def attend_slots(layer: "DecodingLayer", q_S1Hd: Tensor, k_S1Kd: Tensor, v_S1Kd: Tensor, window: int | None) -> Tensor:
    return cached_attention(q_S1Hd[:, 0], k_S1Kd[:, 0], v_S1Kd[:, 0], layer.keys_SLKd, layer.values_SLKd, layer.positions,
                            window, layer.horizon)[:, None]


class Decoding(NamedTuple):
    """Slot s gets its token at `positions[s]`; none is at or beyond `horizon`. `attention` is `attend_slots` or wraps it."""

    cache: SlotCache
    positions: Tensor
    horizon: int
    attention: Callable[..., Tensor] = attend_slots

    def place(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
              starts: Tensor | None) -> Placement:
        assert documents is None, "a slot holds one document"
        assert positions is None, "a slot's place is the cache's to say"
        return Placement(torch.zeros_like(tokens_BT), self.positions[:, None], {window: Sight(window=window) for window in windows})

    def layer(self, index: int) -> "DecodingLayer":
        return DecodingLayer(self.cache.keys[index], self.cache.values[index], self.positions, self.horizon, self.attention)


class DecodingLayer(NamedTuple):
    keys_SLKd: Tensor
    values_SLKd: Tensor
    positions: Tensor
    horizon: int
    attention: Callable[..., Tensor]

    def attend(self, q_S1Hd: Tensor, k_S1Kd: Tensor, v_S1Kd: Tensor, sight: Sight) -> Tensor:
        return self.attention(self, q_S1Hd, k_S1Kd, v_S1Kd, sight.window)


View = Filling | Decoding
LayerView = FillingLayer | DecodingLayer
