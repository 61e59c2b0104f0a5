"""Keys and values of the tokens already seen, one tensor a layer, with who they belong to."""

from typing import NamedTuple

import torch
from torch import Tensor

from assay.errors import UsageError


class LayerCache(NamedTuple):
    """One layer's share, filled up to `used`."""

    keys_BSKd: Tensor
    values_BSKd: Tensor
    used: int

    def extend(self, k_BTKd: Tensor, v_BTKd: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values and return all of them, oldest first."""
        end, capacity = self.used + k_BTKd.shape[1], self.keys_BSKd.shape[1]
        if end > capacity:
            raise UsageError(f"the cache holds {capacity} tokens and {end} were asked for; make it larger")
        self.keys_BSKd[:, self.used:end], self.values_BSKd[:, self.used:end] = k_BTKd, v_BTKd
        return self.keys_BSKd[:, :end], self.values_BSKd[:, :end]


class Cache:
    """Fixed capacity. `used` slots are filled, in every row alike; `lengths` counts each row's real tokens.

    One tensor per layer, not one for all: indexing a stacked tensor made compiled graphs copy all of it at every layer.
    """

    def __init__(self, layers: int, rows: int, capacity: int, kv_heads: int, head_dim: int, *,
                 dtype: torch.dtype, device: torch.device | str = "cpu"):
        shape = (rows, capacity, kv_heads, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.documents = torch.full((rows, capacity), -1, device=device)
        self.positions = torch.zeros((rows, capacity), dtype=torch.long, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.used = 0

    def layer(self, index: int) -> "LayerCache":
        return LayerCache(self.keys[index], self.values[index], self.used)

    def with_new(self, documents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Documents and positions of every key that the coming tokens may look at, themselves included."""
        return (torch.cat([self.documents[:, : self.used], documents], 1),
                torch.cat([self.positions[:, : self.used], positions], 1))

    def advance(self, documents: Tensor, positions: Tensor) -> None:
        """All layers have stored their part: the new tokens count from now on."""
        end = self.used + documents.shape[1]
        self.documents[:, self.used:end], self.positions[:, self.used:end] = documents, positions
        self.lengths += (documents >= 0).sum(1)
        self.used = end
