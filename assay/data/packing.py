"""Packing: examples in rows of fixed length, kept apart by documents and positions; a pure function of (seed, step).

In every epoch each example stands in exactly one row. An epoch shuffles the examples, takes them WINDOW at a time, fills rows
with them, long ones first, and shuffles the rows. What is left of a row is padding. Rows are counted through all epochs, as
windows of a corpus are in order.py; a step takes the next `rows` of them, on each rank, and a last step that the rows do not fill
is never taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data.batch import PADDING, Batch, ExampleIds
from assay.data.chat import TrainingExample
from assay.data.order import permuted_places
from assay.errors import DataError, UsageError
from assay.seeds import derive

_WINDOW = 4096  # examples packed together: enough to leave little padding, few enough that an epoch's rows are its own
RowPlan = list[list[int]]  # for each row, the examples in it


@dataclass(frozen=True)
class PackedExamples:
    """`rows` are those of one rank. Without `packing` a row holds one example and padding."""

    examples: Sequence[TrainingExample]
    seed: int
    rows: int
    length: int
    epochs: int = 1
    packing: bool = True
    fill: int = 0  # the token that stands in padding: never seen, never predicted
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1 or self.length < 2 or self.epochs < 1 or not 0 <= self.rank < self.world:
            raise UsageError(f"rows {self.rows}, length {self.length}, epochs {self.epochs}, rank {self.rank} of "
                             f"{self.world}: expected rows and epochs from 1, length from 2, rank below world")
        if not self.examples:
            raise DataError("there are no examples to train on: none was read, or all were dropped; see assay data check")
        if (longest := int(self.lengths.max())) > self.length:
            at = int(self.lengths.argmax())
            raise DataError(f"{self.examples[at].id}: {longest} tokens do not fit into rows of {self.length}; render with that length")

    @property
    def windows(self) -> int:
        """Rows in the first epoch; another epoch, packed anew, may take a few more or less."""
        return int(self.ends[0])

    @property
    def steps(self) -> int:
        """Number of steps before the examples are exhausted."""
        return int(self.ends[-1]) // (self.rows * self.world)

    @property
    def padding(self) -> float:
        """Share of the first epoch's tokens that is padding."""
        return 1 - float(self.lengths.sum()) / (self.windows * self.length)

    @property
    def examples_a_row(self) -> float:
        """Mean number of examples in a row, in the first epoch."""
        return sum(map(len, self.plans[0])) / len(self.plans[0])

    def epoch_of(self, step: int) -> int:
        """Epoch in which the step's first row stands, counted from 0."""
        return int(np.searchsorted(self.ends, step * self.rows * self.world, side="right"))

    def consumed(self, step: int) -> NDArray[np.object_]:
        """The ids of the examples that this rank reads at a step, row by row."""
        return np.array([self.examples[index].id for row in self.plan(step) for index in row], object)

    @property
    def parts(self) -> int:
        return len(self.examples)

    def ids(self, step: int) -> ExampleIds:
        """Ids of the examples in each row of a step."""
        return tuple(tuple(self.examples[index].id for index in row) for row in self.plan(step))

    def epoch_ids(self, epoch: int) -> list[str]:
        """The ids of all examples in the order in which an epoch reads them."""
        return [self.examples[index].id for row in self.plans[epoch] for index in row]

    def require(self, steps: int) -> None:
        """Refuse, rather than run dry, where the examples do not give so many steps."""
        if steps > self.steps:
            needed, held = steps * self.rows * self.world, int(self.ends[-1])
            raise DataError(f"step {steps - 1} needs {needed:,} rows of {self.length} tokens, {len(self.examples):,} examples fill "
                            f"{held:,} and --num-train-epochs is {self.epochs}: the data ends after {self.steps:,} steps. Give more "
                            f"examples, fewer steps, or --num-train-epochs {-(-needed * self.epochs // held)}")

    def batch(self, step: int) -> Batch:
        return packed_rows([[self.examples[index] for index in row] for row in self.plan(step)], self.length, self.fill)

    def plan(self, step: int) -> RowPlan:
        """Packing plan of a step: which examples stand in its rows."""
        self.require(step + 1)
        first = (step * self.world + self.rank) * self.rows
        places = np.arange(first, first + self.rows)
        epochs = np.searchsorted(self.ends, places, side="right")
        starts = np.concatenate(([0], self.ends))
        return [self.plans[epoch][place - starts[epoch]] for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True)]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(example) for example in self.examples], np.int64)

    @cached_property
    def plans(self) -> list[RowPlan]:
        """Packing plan of every epoch: a list of numbers, small beside the examples."""
        return [self.epoch_plan(epoch) for epoch in range(self.epochs)]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """How many rows there are up to the end of each epoch."""
        return np.cumsum([len(plan) for plan in self.plans])

    def epoch_plan(self, epoch: int) -> RowPlan:
        """The rows of one epoch."""
        key, count = derive(self.seed, "order", epoch), len(self.examples)
        order = np.empty(count, np.int64)
        order[permuted_places(np.arange(count), count, key)] = np.arange(count)
        if not self.packing:
            return [[index] for index in order.tolist()]
        rows = [row for start in range(0, count, _WINDOW) for row in fill_rows(order[start : start + _WINDOW], self.lengths, self.length)]
        places = permuted_places(np.arange(len(rows)), len(rows), derive(key, "rows"))
        return [rows[place] for place in places.tolist()]


class LengthStock:
    """Examples by their length, handed out in the order they came in."""

    def __init__(self, chosen: NDArray[np.int64], lengths: NDArray[np.int64], room: int):
        self.there = np.zeros(room + 1, np.bool_)  # by length
        self.there[lengths[chosen]] = True
        self.by_length: dict[int, list[int]] = {}
        for index in chosen[::-1].tolist():
            self.by_length.setdefault(int(lengths[index]), []).append(index)

    def lengths(self, room: int) -> NDArray[np.int64]:
        """Lengths in stock that fit into `room`, ascending."""
        return np.flatnonzero(self.there[: room + 1])

    def take(self, length: int) -> int:
        index = self.by_length[length].pop()
        self.there[length] = bool(self.by_length[length])
        return index


def fill_rows(chosen: NDArray[np.int64], lengths: NDArray[np.int64], room: int) -> RowPlan:
    """Rows, each begun with the longest example that is left and filled with what comes nearest to filling it exactly."""
    stock, rows = LengthStock(chosen, lengths, room), []
    while (fitting := stock.lengths(room)).size:
        row, free = [], room
        length = int(fitting[-1])
        while length:
            row.append(stock.take(length))
            free -= length
            length = next_length(stock, free)
        rows.append(row)
    return rows


def next_length(stock: LengthStock, free: int) -> int:
    """Length to pack next: one that fills the row, one that does with another, else the longest after which another fits; 0 where none
    fits."""
    fitting = stock.lengths(free)
    if not fitting.size:
        return 0
    if stock.there[free]:
        return free
    pairs = fitting[stock.there[free - fitting]]
    spacious = fitting[fitting <= free - fitting[0]]
    return int(next(lengths[-1] for lengths in (pairs, spacious, fitting) if lengths.size))


def packed_rows(rows: Sequence[Sequence[TrainingExample]], length: int, fill: int) -> Batch:
    """Rows of examples as a batch; each example is a document of its own, with positions from 0."""
    shape = (len(rows), length)
    tokens, weight = np.full(shape, fill, np.int64), np.zeros(shape, np.float32)
    documents, positions = np.full(shape, PADDING, np.int32), np.zeros(shape, np.int32)
    for row, examples in enumerate(rows):
        start = 0
        for number, example in enumerate(examples):
            here = slice(start, start + len(example))
            tokens[row, here], weight[row, here] = example.tokens, example.weight
            documents[row, here], positions[row, here] = number, np.arange(len(example))
            start = here.stop
    ids = tuple(tuple(example.id for example in examples) for examples in rows)
    tokens_BT, weight_BT, documents_BT, positions_BT = map(torch.from_numpy, (tokens, weight, documents, positions))
    return Batch(tokens_BT, weight_BT, documents_BT, positions_BT, ids)

# ---------------------------------------------------------------- held-out examples


class Identified(Protocol):
    @property
    def content(self) -> str: ...


Item = TypeVar("Item", bound=Identified)  # a conversation or an example


def hold_out(items: Sequence[Item], held_out: int | float, seed: int) -> tuple[list[Item], list[Item]]:
    """(train, held out). `held_out` is a number of different conversations, or a share of them.

    Who is held out depends on what is said and on the seed alone: not on the order of the file, its name, or how it is
    rendered. All copies of a conversation go to the same side.
    """
    said = [item.content for item in items]
    contents = sorted(set(said), key=lambda content: derive(seed, "held-out", content))
    count = held_out if isinstance(held_out, int) else round(held_out * len(contents))
    if count < 0 or (count >= len(contents) and count > 0) or (isinstance(held_out, float) and not 0 <= held_out < 1):
        raise UsageError(f"{held_out} cannot be held out of {len(contents)} different conversations; "
                         "expected a number below that, or a share from 0 to 1")
    chosen = set(contents[:count])
    both = list(zip(items, said, strict=True))
    return [item for item, content in both if content not in chosen], [item for item, content in both if content in chosen]
