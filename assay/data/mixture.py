"""Mixture of several sources by weight: which source each row of a run comes from, exactly; a pure function of (seed, step).

Weights are shares of the rows. They come to whole numbers (0.7 and 0.3: 7 and 3), and rows come in cycles of their sum, in which every
source has exactly its share. Within a cycle a row belongs to the source that is furthest behind: the one with the least
(2 · rows given + 1) / share, the first where two are equal. Each source has an order of its own, named by a seed of its own, and is read
whole before anything of it is read again. A run ends where the first source has been read --num-train-epochs times: nothing fills the
place of a source that ran out.
"""

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data.batch import Batch
from assay.data.order import Order, permuted_places, window_rows
from assay.data.packing import PackedExamples, RowPlan
from assay.data.token_corpus import Corpus
from assay.errors import DataError, UsageError
from assay.seeds import derive
from assay.store.remote import is_url

MOST_ROWS_A_CYCLE = 10_000
_WEIGHTED = re.compile(r"(.+):([0-9]*\.?[0-9]+)")


class WeightedSource(NamedTuple):
    """`weight` is None where none was given."""

    name: str
    weight: Fraction | None


def weighted_source(entry: str) -> WeightedSource:
    """PATH, or PATH:WEIGHT. A path that exists as it stands has no weight."""
    found = _WEIGHTED.fullmatch(str(entry))
    if found is None or Path(entry).exists():
        return WeightedSource(str(entry), None)
    return WeightedSource(found[1], Fraction(found[2]))


def weighted_sources(entries: Sequence[str], flag: str) -> list[WeightedSource]:
    """Sources of a mixture, all with a weight, or none."""
    found = [weighted_source(entry) for entry in entries]
    weights = [source.weight for source in found if source.weight is not None]
    if not weights:
        return found
    if len(weights) < len(found) or not all(weights) or len({_one_name(source.name) for source in found}) < len(found):
        raise UsageError(f"{flag} {' '.join(map(str, entries))}: expected a weight above 0 after each source, and each source once, as in "
                         "chats.jsonl:0.7 text.jsonl:0.3")
    return found


def _one_name(name: str) -> str:
    """The same for every way to write a path, and for links to one file."""
    return name if is_url(name) else str(Path(name).resolve())


def whole_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Weights as the smallest whole numbers in the same proportion."""
    unit = math.lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * unit) for weight in weights]
    least = math.gcd(*shares)
    if (rows := sum(shares) // least) > MOST_ROWS_A_CYCLE:
        raise UsageError(f"weights {', '.join(map(str, map(float, weights)))} come out exactly after {rows:,} rows, more than "
                         f"{MOST_ROWS_A_CYCLE:,}; give them with fewer digits")
    return tuple(share // least for share in shares)


@lru_cache(16)
def source_cycle(shares: tuple[int, ...]) -> tuple[int, ...]:
    """The source of each row of a cycle."""
    behind = [(Fraction(1, share), source, 0) for source, share in enumerate(shares)]
    heapq.heapify(behind)
    cycle = []
    for _ in range(sum(shares)):
        _, source, given = heapq.heappop(behind)
        cycle.append(source)
        heapq.heappush(behind, (Fraction(2 * given + 3, shares[source]), source, given + 1))
    return tuple(cycle)


class Placed(NamedTuple):
    """Place of one row of the run: its source, and which of the rows of that source it is."""

    source: int
    number: int


@lru_cache(16)
def places_in_cycle(shares: tuple[int, ...]) -> tuple[Placed, ...]:
    given, found = [0] * len(shares), []
    for source in source_cycle(shares):
        found.append(Placed(source, given[source]))
        given[source] += 1
    return tuple(found)


def placed_row(row: int, shares: tuple[int, ...]) -> Placed:
    cycle, place = divmod(row, sum(shares))
    source, number = places_in_cycle(shares)[place]
    return Placed(source, cycle * shares[source] + number)


def rows_given(rows: int, shares: tuple[int, ...]) -> list[int]:
    """How many of the first `rows` rows come from each source."""
    cycles, rest = divmod(rows, sum(shares))
    begun = Counter(source_cycle(shares)[:rest])
    return [cycles * share + begun[source] for source, share in enumerate(shares)]


def rows_until_empty(available: Sequence[int], shares: tuple[int, ...]) -> int:
    """How many rows there are before a source would have to give more than it has."""
    ends = []
    for source, (has, share) in enumerate(zip(available, shares, strict=True)):
        cycle, number = divmod(has, share)
        ends.append(cycle * sum(shares) + places_in_cycle(shares).index(Placed(source, number)))
    return min(ends)

# ---------------------------------------------------------------- conversations


class MixedPart(NamedTuple):
    """A source of a mixture: its examples are those from `first` on, `size` of them."""

    name: str
    share: int
    first: int
    size: int


def mixed_rows(streams: Sequence[Iterator[list[int]]], shares: tuple[int, ...]) -> Iterator[list[int]]:
    """Rows by turns, until the source whose turn it is has no more."""
    for place in count():
        row = next(streams[placed_row(place, shares).source], None)
        if row is None:
            return
        yield row


@dataclass(frozen=True)
class MixedExamples(PackedExamples):
    """Examples of several sources, each packed by itself. All rows of the run are one plan. `most` rows are planned at most."""

    sources: tuple[MixedPart, ...] = ()
    most: int | None = None

    @property
    def shares(self) -> tuple[int, ...]:
        return tuple(source.share for source in self.sources)

    @cached_property
    def plans(self) -> list[RowPlan]:
        rows = list(islice(mixed_rows([self.rows_of_source(number) for number in range(len(self.sources))], self.shares), self.most))
        if not rows:
            raise DataError(f"the mixture has no row: one of {', '.join(source.name for source in self.sources)} gives none")
        return [rows]

    def rows_of_source(self, number: int) -> Iterator[list[int]]:
        """A source's own rows, epoch after epoch."""
        source = self.sources[number]
        own = PackedExamples(self.examples[source.first : source.first + source.size], derive(self.seed, "source", number), 1, self.length,
                             1, self.packing)
        for epoch in range(self.epochs):
            yield from ([source.first + index for index in row] for row in own.epoch_plan(epoch))

    @property
    def padding(self) -> float:
        """Share of all planned tokens that is padding."""
        return 1 - float(sum(int(self.lengths[row].sum()) for row in self.plans[0])) / (len(self.plans[0]) * self.length)

    def epoch_of(self, step: int) -> int:
        """How often the source that was read most had been read whole before the step's first row."""
        return int(np.searchsorted(self._epoch_ends, step * self.rows * self.world, side="right"))

    @cached_property
    def _epoch_ends(self) -> list[int]:
        """The rows after which some source has been read whole once, twice, …"""
        read, ends = [0] * len(self.sources), list[int]()
        for place, row in enumerate(self.plans[0], 1):
            source = self.source_of(row[0])
            read[source] += len(row)
            if read[source] >= (len(ends) + 1) * self.sources[source].size:
                ends.append(place)
        return ends

    def source_of(self, index: int) -> int:
        """Number of the source that an example belongs to."""
        return int(np.searchsorted([source.first for source in self.sources], index, side="right")) - 1

    @cached_property
    def repeats_from_row(self) -> int:
        """The first row with an example that was read before."""
        read = set[int]()
        for place, row in enumerate(self.plans[0]):
            if not read.isdisjoint(row):
                return place
            read.update(row)
        return len(self.plans[0])

    def require(self, steps: int) -> None:
        if steps > self.steps:
            rows = len(self.plans[0])
            out = self.sources[placed_row(rows, self.shares).source].name
            raise DataError(f"step {steps - 1} needs {steps * self.rows * self.world:,} rows of {self.length} tokens, and after {rows:,} "
                            f"rows {out} has been read {self.epochs} time(s), as --num-train-epochs allows: the mixture ends after "
                            f"{self.steps:,} steps. Raise --num-train-epochs, lower its weight, or take fewer steps")

# ---------------------------------------------------------------- corpora


@dataclass(frozen=True)
class MixedOrder(Order):
    """Windows of several corpora of one tokenizer. The windows of `corpus` come first by number, then those of `others`."""

    others: tuple[Corpus, ...] = ()
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for other in self.others:
            if other.tokenizer_digest != self.corpus.tokenizer_digest or other.boundary != self.corpus.boundary:
                raise UsageError(f"{other.folder} was made with another tokenizer than {self.corpus.folder}, or other boundaries; make "
                                 "both with one: assay corpus --tokenizer")

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        return (self.corpus, *self.others)

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Order of each source alone, one row a step."""
        return tuple(Order(corpus, derive(self.seed, "source", number), 1, self.length, self.epochs)
                     for number, corpus in enumerate(self.corpora))

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The number of each source's first window."""
        return (0, *accumulate(order.windows for order in self.orders))[:-1]

    @property
    def windows(self) -> int:
        """Number of windows of all sources together."""
        return sum(order.windows for order in self.orders)

    @property
    def rows_in_all(self) -> int:
        return rows_until_empty([self.epochs * order.windows for order in self.orders], self.shares)

    @property
    def steps(self) -> int:
        return self.rows_in_all // (self.rows * self.world)

    @property
    def repeats_from_row(self) -> int:
        """The first row with a window that was read before."""
        return rows_until_empty([order.windows for order in self.orders], self.shares)

    def epoch_of(self, step: int) -> int:
        """How often the source that was read most had been read whole before the step's first row."""
        given = rows_given(step * self.rows * self.world, self.shares)
        return max(rows // order.windows for rows, order in zip(given, self.orders, strict=True))

    def placed(self, step: int) -> NDArray[np.int64]:
        """(source, window of that source) of each row that this rank reads at a step."""
        self.require(step + 1)
        first = (step * self.world + self.rank) * self.rows
        sources, numbers = np.array([placed_row(row, self.shares) for row in range(first, first + self.rows)], np.int64).T
        windows = np.empty(self.rows, np.int64)
        for source, order in enumerate(self.orders):
            for epoch in np.unique(numbers[sources == source] // order.windows).tolist():
                here = (sources == source) & (numbers // order.windows == epoch)
                windows[here] = permuted_places(numbers[here] % order.windows, order.windows, derive(order.seed, "order", epoch))
        return np.stack([sources, windows], 1)

    def consumed(self, step: int) -> NDArray[np.int64]:
        rows = self.placed(step)
        return np.array(self.firsts, np.int64)[rows[:, 0]] + rows[:, 1]

    def source_of(self, window: int) -> int:
        return int(np.searchsorted(self.firsts, window, side="right")) - 1

    def require(self, steps: int) -> None:
        if steps > self.steps:
            out = self.corpora[placed_row(self.rows_in_all, self.shares).source].folder
            raise DataError(f"step {steps - 1} needs {steps * self.rows * self.world:,} rows, and after {self.rows_in_all:,} rows {out} "
                            f"has been read {self.epochs} time(s), as --num-train-epochs allows: the mixture ends after {self.steps:,} "
                            "steps. Raise --num-train-epochs, lower its weight, or take fewer steps")

    def batch(self, step: int) -> Batch:
        rows, ids = self.placed(step), self.consumed(step)
        parts, places = list[dict[str, torch.Tensor]](), list[int]()
        for source, corpus in enumerate(self.corpora):
            here = np.flatnonzero(rows[:, 0] == source)
            if here.size:
                parts.append(window_rows(corpus.train, rows[here, 1] * (self.length - 1), self.length, corpus.boundary, ()).streams())
                places += here.tolist()
        back = torch.from_numpy(np.argsort(places))
        streams: dict[str, Any] = {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}
        return Batch(**streams, ids=tuple((int(id),) for id in ids))


def mixed_parts(sources: Sequence[WeightedSource], counts: Sequence[int]) -> tuple[MixedPart, ...]:
    """Parts of a mixture whose examples stand one source after the other."""
    shares = whole_shares([source.weight or Fraction(1) for source in sources])
    firsts = [0, *accumulate(counts)]
    return tuple(MixedPart(source.name, share, first, count)
                 for source, share, first, count in zip(sources, shares, firsts, counts, strict=False))


class NamedRow(Protocol):
    """Anything with the id file:row:content: a row, or what was made of it."""

    @property
    def id(self) -> str: ...


def row_name(id: str) -> str:
    """Name of a row, without what tells apart several examples from one row: file:row:content#chosen. A file's name may have a # too."""
    file_and_row, _, content = id.rpartition(":")
    return f"{file_and_row}:{content.partition('#')[0]}"


def parts_by_name(sources: Sequence[WeightedSource], read: Sequence[Sequence[NamedRow]], kept: Sequence[NamedRow]) -> tuple[MixedPart, ...]:
    """How much of what was kept is each source's, by file and row in the ids."""
    named = [{row_name(row.id) for row in rows} for rows in read]
    source_of = {name: number for number, names in enumerate(named) for name in names}
    if len(source_of) < sum(map(len, named)):
        raise UsageError(f"--data {' '.join(source.name for source in sources)}: two sources have the same file name, by which their rows "
                         "are known; rename one")
    counts = Counter(source_of[row_name(each.id)] for each in kept)
    parts = mixed_parts(sources, [counts[number] for number in range(len(sources))])
    if empty := [part.name for part in parts if not part.size]:
        raise DataError(f"{empty[0]}: nothing of it is left to learn from: all held out, or dropped as too long; see assay data check")
    return parts

# ---------------------------------------------------------------- prompts


@dataclass(frozen=True)
class MixedDraws:
    """Prompts that a rollout draws from several sources, by number: every place of it is a row of the mixture."""

    sources: tuple[MixedPart, ...]
    seed: int
    places: int  # a rollout
    epochs: int

    def __post_init__(self) -> None:
        for source in self.sources:
            if (asked := -(-self.places * source.share // sum(self.shares))) > source.size:
                raise UsageError(f"{source.name}: up to {asked} of {self.places} prompts a rollout come from it, and it has {source.size}: "
                                 "a rollout would ask the same twice; lower its weight or --prompts, or give it more prompts")

    @property
    def shares(self) -> tuple[int, ...]:
        return tuple(source.share for source in self.sources)

    @property
    def prompts_in_all(self) -> int:
        return rows_until_empty([self.epochs * source.size for source in self.sources], self.shares)

    def drawn(self, rollout: int) -> list[int]:
        return [self.prompt_at(place) for place in range(rollout * self.places, (rollout + 1) * self.places)]

    def prompt_at(self, place: int) -> int:
        number, its_prompt = placed_row(place, self.shares)
        source = self.sources[number]
        epoch, within = divmod(its_prompt, source.size)
        key = derive(derive(self.seed, "source", number), "prompts", epoch)
        return source.first + int(permuted_places(np.array([within]), source.size, key)[0])

    def source_of(self, prompt: int) -> int:
        return int(np.searchsorted([source.first for source in self.sources], prompt, side="right")) - 1

    def epoch_of(self, rollout: int) -> int:
        """How often the source that was drawn from most had been drawn whole before the rollout."""
        given = rows_given(rollout * self.places, self.shares)
        return max(prompts // source.size for prompts, source in zip(given, self.sources, strict=True))

    def times_drawn(self, rollouts: int) -> dict[int, int]:
        """{times: prompts}."""
        found = Counter[int]()
        for given, source in zip(rows_given(rollouts * self.places, self.shares), self.sources, strict=True):
            whole, more = divmod(given, source.size)
            found += Counter({whole: source.size - more}) + Counter({whole + 1: more})
        return dict(found)
