"""What came before: keys and values of tokens that stay as they are, so that only those after them are computed again.

Two views that `model.hidden(tokens, cache=…)` takes. `Recording` keeps what each layer attends to; `Before` puts it in front
of new tokens, without writing into it, so that gradients may flow through the new ones.
Shapes: B rows, S tokens before, T tokens after, H heads, K key/value heads, d head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from assay.edit.sites import padded
from assay.model.attention import PADDING, Placement, Sight, attend, place, visible, within_document
from assay.model.transformer import Transformer


class Recording(NamedTuple):
    """The layers run in order, and each adds its own."""

    keys: list[Tensor]
    values: list[Tensor]

    def place(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
              starts: Tensor | None) -> Placement:
        return place(tokens_BT, documents, positions, windows, starts)

    def layer(self, index: int) -> "Recording":
        assert len(self.keys) == index, "layers run in order"
        return self

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, sight: Sight) -> Tensor:
        self.keys.append(k_BTKd)
        self.values.append(v_BTKd)
        return attend(q_BTHd, k_BTKd, v_BTKd, sight)


class BeforeLayer(NamedTuple):
    keys_BSKd: Tensor
    values_BSKd: Tensor

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, sight: Sight) -> Tensor:
        return attend(q_BTHd, torch.cat([self.keys_BSKd, k_BTKd], 1), torch.cat([self.values_BSKd, v_BTKd], 1), sight)


class Before(NamedTuple):
    """`documents` (B, S) says which of the tokens before are real; the new ones count on from there."""

    keys: list[Tensor]
    values: list[Tensor]
    documents: Tensor

    def place(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
              starts: Tensor | None) -> Placement:
        assert documents is not None, "rows end at different columns"
        lengths = (self.documents != PADDING).sum(1, keepdim=True)
        here = lengths + within_document(documents)
        seen = torch.cat([self.documents, documents], 1), torch.cat([within_document(self.documents), here], 1)
        return Placement(documents, here, {window: Sight(visible(documents, here, *seen, window)) for window in windows})

    def layer(self, index: int) -> BeforeLayer:
        return BeforeLayer(self.keys[index], self.values[index])

    def chosen(self, rows: Tensor) -> "Before":
        return Before([keys[rows] for keys in self.keys], [values[rows] for values in self.values], self.documents[rows])


@torch.no_grad()
def read_before(model: Transformer, rows: Sequence[Sequence[int]]) -> Before:
    """Rows end in the same column, so that what follows begins in the same one; a row may be empty."""
    tokens, documents = padded(rows, model.embed.weight.device, left=True)
    recording = Recording([], [])
    model.hidden(tokens, documents=documents, cache=recording)  # type: ignore[arg-type]  # a view like those of cache.py
    return Before(recording.keys, recording.values, documents)
