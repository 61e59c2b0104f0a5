"""Order of a corpus: which windows each step reads, a pure function of (seed, step), resuming needs the step alone.

The training stream is cut into windows of `length` tokens. A window repeats the last token of the one before as its
column 0, which is context only; so in an epoch every token is predicted exactly once, but for the boundary token that
begins a document, which nothing predicts. The last window of the stream is filled up with padding.

An epoch reads the windows in an order of its own: a permutation computed place by place (a Feistel network), so that
step one million costs what step one costs and no table is kept, the same on every machine. Global row g of the run is
place g mod windows of epoch g // windows; ranks take neighbouring rows, so they never share one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data.batch import PADDING, Batch, ExampleIds
from assay.data.token_corpus import Corpus, Split
from assay.errors import DataError, UsageError
from assay.seeds import derive

FEISTEL_ROUNDS = 6


class StepBatches(Protocol):
    """Anything that has a batch for every step."""

    def batch(self, step: int) -> Batch: ...


@dataclass(frozen=True)
class Order:
    """`rows` are those of one rank; a step of the run reads rows * world windows."""

    corpus: Corpus
    seed: int
    rows: int
    length: int
    epochs: int = 1
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1 or self.length < 2 or self.epochs < 1 or not 0 <= self.rank < self.world:
            raise UsageError(f"rows {self.rows}, length {self.length}, epochs {self.epochs}, rank {self.rank} of "
                             f"{self.world}: expected rows and epochs from 1, length from 2, rank below world")

    @property
    def windows(self) -> int:
        """Number of windows in one epoch."""
        return -(-(self.corpus.train.tokens - 1) // (self.length - 1))

    @property
    def steps(self) -> int:
        """Number of steps before the corpus is exhausted."""
        return self.epochs * self.windows // (self.rows * self.world)

    def epoch_of(self, step: int) -> int:
        """Epoch in which the step's first row stands, counted from 0."""
        return step * self.rows * self.world // self.windows

    def consumed(self, step: int) -> NDArray[np.int64]:
        """The windows that this rank reads at a step, in row order."""
        self.require(step + 1)
        first = (step * self.world + self.rank) * self.rows
        places = np.arange(first, first + self.rows)
        windows = np.empty(self.rows, np.int64)
        for epoch in range(int(places[0] // self.windows), int(places[-1] // self.windows) + 1):
            here = places // self.windows == epoch
            windows[here] = permuted_places(places[here] % self.windows, self.windows, derive(self.seed, "order", epoch))
        return windows

    @property
    def parts(self) -> int:
        return self.windows

    def ids(self, step: int) -> ExampleIds:
        """Ids of the rows of a step: each is one window."""
        return tuple((window,) for window in self.consumed(step).tolist())

    def require(self, steps: int) -> None:
        """Refuse, rather than run dry, where the corpus does not give so many steps."""
        if steps > self.steps:
            needed, held = steps * self.rows * self.world * (self.length - 1), self.corpus.train.tokens
            raise DataError(f"step {steps - 1} needs {needed:,} training tokens, {self.corpus.folder} has {held:,} "
                            f"and --num-train-epochs is {self.epochs}: the data ends after {self.steps:,} steps. Give more text, "
                            f"fewer steps, or --num-train-epochs {-(-steps * self.rows * self.world // self.windows)}")

    def batch(self, step: int) -> Batch:
        windows = self.consumed(step)
        starts = windows * (self.length - 1)
        return window_rows(self.corpus.train, starts, self.length, self.corpus.boundary, tuple((int(w),) for w in windows))


def corpus_batches(corpus: Corpus, *, seed: int, rows: int, length: int, epochs: int = 1, start: int = 0,
                   stop: int | None = None, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """Batches of steps start, start + 1, … With `stop` the corpus must suffice, and says so before the first batch."""
    order = Order(corpus, seed, rows, length, epochs, rank, world)
    order.require(stop if stop is not None else start + 1)
    return iterate_batches(order, start, stop)


def iterate_batches(order: StepBatches, step: int, stop: int | None) -> Iterator[Batch]:
    """Batches from `step` to `stop`. Without `stop` the iterator does not end: exhaustion raises, so that no loop can mistake it for the
    end of the work."""
    while stop is None or step < stop:
        yield order.batch(step)
        step += 1


def window_rows(split: Split, starts: NDArray[np.int64], length: int, fill: int, ids: tuple[tuple[int], ...]) -> Batch:
    """Windows of the stream as rows, documents kept apart. The stream's end is padding."""
    tokens = np.full((len(starts), length), fill, np.int64)
    begins = np.zeros(tokens.shape, np.bool_)  # where a document begins in its row
    padding = np.zeros(tokens.shape, np.bool_)
    firsts = np.searchsorted(split.offsets, starts, side="right") - 1  # the document that column 0 is in
    lasts = np.searchsorted(split.offsets, starts + length, side="left")
    for row, start in enumerate(starts):
        stop = min(int(start) + length, split.tokens)
        tokens[row, : stop - start] = split.read(int(start), stop)
        padding[row, stop - start :] = True
        begins[row, split.offsets[firsts[row] + 1 : lasts[row]] - start] = True
    columns = np.arange(length, dtype=np.int32)
    documents = np.cumsum(begins, axis=1, dtype=np.int32) + firsts[:, None].astype(np.int32)
    positions = columns - np.maximum.accumulate(np.where(begins, columns, np.int32(0)), axis=1)
    if padding.any():
        documents[padding], positions[padding] = PADDING, 0
    weight = (~(begins | padding)).astype(np.float32)
    weight[:, 0] = 0
    tokens_BT, weight_BT, documents_BT, positions_BT = map(torch.from_numpy, (tokens, weight, documents, positions))
    return Batch(tokens_BT, weight_BT, documents_BT, positions_BT, ids)


def permuted_places(places: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Places after a permutation of `size` named by `key`.

    A Feistel network permutes the fields of a board with at least `size` fields and hardly more; a place that lands on
    one of those beyond `size` goes through again until it falls inside, which keeps it a permutation.
    """
    height = math.isqrt(size - 1) + 1
    width = -(-size // height)
    keys = [np.uint64(derive(key, "round", i)) for i in range(FEISTEL_ROUNDS)]
    values = places.astype(np.uint64)
    outside = np.ones(len(values), np.bool_)
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(height), np.uint64(width), keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], height: np.uint64, width: np.uint64,
             keys: list[np.uint64]) -> NDArray[np.uint64]:
    """Each round moves one coordinate by a hash of the other, which the next round could undo: a permutation."""
    y, x = values // width, values % width
    for upward, sideways in zip(keys[::2], keys[1::2], strict=True):
        y = (y + _hash(x, upward)) % height
        x = (x + _hash(y, sideways)) % width
    return y * width + x


def _hash(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """32 well-mixed bits: small enough that adding a coordinate cannot overflow."""
    mixed = (values ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)
