"""How completions go through the model: a row each, or packed, so that a run has one shape whatever is said in it.

Shapes: B rows of one completion each, T time; R packed rows of width W.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.packing import fill_rows
from assay.model.attention import PADDING

_WIDTH, _TOKENS = 1024, 8192  # of packed rows, and of all that go through a GPU at a time: enough to keep it busy
NOWHERE = -1


@dataclass(frozen=True)
class Layout:
    """`rows` at a time, each of one completion, or packed into rows of `width`.

    Packed, one shape serves all rollouts, however long what was said is: it is compiled and captured once, and little of it is padding.
    """

    rows: int
    width: int | None = None

    def packed(self, batch: Batch) -> "Packed":
        assert batch.documents is not None
        if self.width is None:
            return Packed(batch, torch.arange(batch.tokens.numel()).view(batch.tokens.shape), batch)
        lengths = (batch.documents != PADDING).sum(1).numpy()
        plan = dealt(fill_rows(np.arange(len(batch)), lengths, self.width), self.rows)
        places, documents = np.full((len(plan), self.width), NOWHERE), np.full((len(plan), self.width), PADDING, np.int32)
        for row, members in enumerate(plan):
            for number, (member, end) in enumerate(zip(members, lengths[members].cumsum().tolist(), strict=True)):
                here = slice(end - lengths[member], end)
                places[row, here] = member * batch.tokens.shape[1] + np.arange(lengths[member])
                documents[row, here] = number
        places_RW = torch.from_numpy(places)
        streams: dict[str, Any] = {name: torch.where(places_RW == NOWHERE, 0, stream.flatten()[places_RW.clamp(min=0)])
                                   for name, stream in batch.streams().items()}
        ids = tuple(tuple(consumed for member in members for consumed in batch.ids[member]) for members in plan) if batch.ids else ()
        return Packed(replace(batch, **streams | {"documents": torch.from_numpy(documents)}, ids=ids), places_RW, batch)


class Packed(NamedTuple):
    batch: Batch
    places_RW: Tensor  # where each token stood in the rows, counted through
    source: Batch

    def unpacked(self, values_RW: Tensor) -> Tensor:
        """(B, T): values of the packed batch where their tokens stood before, 0 in padding."""
        values, places = values_RW.numpy(), self.places_RW.numpy()  # numpy's indexing is quicker for so few
        found, there = np.zeros(self.source.tokens.numel(), values.dtype), places != NOWHERE
        found[places[there]] = values[there]
        return torch.from_numpy(found).view(self.source.tokens.shape)


def layout_of(device: str, micro: int, longest: int, context: int) -> Layout:
    """`micro` completions of at most `longest` tokens may go through the model at a time."""
    if not device.startswith("cuda"):
        return Layout(micro)
    width = min(max(_WIDTH, longest), context)
    return Layout(max(1, min(micro * longest, _TOKENS) // width), width)


def dealt(plan: list[list[int]], hands: int) -> list[list[int]]:
    """The same rows and some that are empty, so that there are `hands` in each micro-batch, of much the same kind in all."""
    whole = plan + [[]] * (-len(plan) % hands)
    parts = len(whole) // hands
    return [row for part in range(parts) for row in whole[part::parts]]
