"""Due rows: which data a step reads, recomputed from the documented order (docs/witness.md) and nothing else.

The same words as in the document: an address becomes a number by SHA-256, a number and a size name a permutation, an epoch shuffles
the examples, packs them into rows, shuffles the rows, and a step takes the next rows.
"""

import functools
import hashlib
import json
import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROUNDS = 6
PACKED_TOGETHER = 4096
MASK = (1 << 64) - 1


class DueText(NamedTuple):
    """One text that a step learns from, alone in its row. `weights[t]` is how much predicting token t counts."""

    name: str
    tokens: list[int]
    weights: list[float]
    part: str = ""  # which of the texts of one name, where there are several


def seed_at(seed: int, *address: str | int) -> int:
    """63 bits of the SHA-256 of the seed and its address, every part with its type, between unit separators."""
    words = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *address))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1


def shuffled_place(place: int, size: int, key: int) -> int:
    """Place of `place` in the permutation of `size` that `key` names: a Feistel network on a board hardly larger than `size`."""
    height = math.isqrt(size - 1) + 1
    width = -(-size // height)
    keys = round_keys(key)
    while True:
        y, x = divmod(place, width)
        for number in range(0, ROUNDS, 2):
            y = (y + mixed_bits(x, keys[number])) % height
            x = (x + mixed_bits(y, keys[number + 1])) % width
        place = y * width + x
        if place < size:
            return place


@functools.lru_cache(8)
def round_keys(key: int) -> list[int]:
    return [seed_at(key, "round", number) for number in range(ROUNDS)]


def mixed_bits(value: int, key: int) -> int:
    mixed = (value ^ key) * 0xBF58476D1CE4E5B9 & MASK
    return ((mixed ^ mixed >> 29) * 0x94D049BB133111EB & MASK) >> 32

# ---------------------------------------------------------------- conversations


def kept_contents(contents: Sequence[str], share: float, seed: int) -> set[str]:
    """The conversations that are trained on: those that the seed does not hold out, copies together."""
    ordered = sorted(set(contents), key=lambda content: seed_at(seed, "held-out", content))
    return set(ordered[round(share * len(ordered)):])


def epoch_rows(lengths: Sequence[int], room: int, seed: int, epoch: int, packing: bool) -> list[list[int]]:
    """The examples, by number, in each row of an epoch."""
    key, count = seed_at(seed, "order", epoch), len(lengths)
    order = [0] * count
    for example in range(count):
        order[shuffled_place(example, count, key)] = example
    if not packing:
        return [[example] for example in order]
    rows = [row for start in range(0, count, PACKED_TOGETHER) for row in filled(order[start:start + PACKED_TOGETHER], lengths, room)]
    return [rows[shuffled_place(place, len(rows), seed_at(key, "rows"))] for place in range(len(rows))]


def filled(order: Sequence[int], lengths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Rows, each begun with the longest example that is left; equal lengths in the order they came."""
    stock: dict[int, list[int]] = {}
    for example in order:
        stock.setdefault(lengths[example], []).append(example)
    while stock:
        row, free, length = list[int](), room, max(stock)
        while length:
            row.append(stock[length].pop(0))
            if not stock[length]:
                del stock[length]
            free -= length
            length = best_filling(stock, free)
        yield row


def best_filling(stock: dict[int, list[int]], free: int) -> int:
    """Length to pack next: one that fills the row, one that fills it with another, the longest after which another fits, the longest that
    fits; else 0."""
    fitting = sorted(length for length in stock if length <= free)
    if not fitting:
        return 0
    paired = [length for length in fitting if free - length in stock]
    roomy = [length for length in fitting if length <= free - fitting[0]]
    return free if free in stock else (paired or roomy or fitting)[-1]


class PackedPlan:
    """Every epoch's rows, as the options say."""

    def __init__(self, texts: Sequence[DueText], options: dict[str, Any]):
        self.texts, lengths = texts, [len(text.tokens) for text in texts]
        self.epochs = [epoch_rows(lengths, options["max_length"], options["seed"], epoch, options["packing"])
                       for epoch in range(options["num_train_epochs"])]
        self.rows = min(options["batch_tokens"] // options["max_length"], len(self.epochs[0]))

    @property
    def steps(self) -> int:
        return sum(map(len, self.epochs)) // self.rows

    def due(self, step: int) -> list[list[DueText]]:
        """Row by row, the texts of step `step`, counted from 0."""
        through = [row for epoch in self.epochs for row in epoch]
        return [[self.texts[example] for example in row] for row in through[step * self.rows:(step + 1) * self.rows]]


class MixedPlan:
    """Rows of several sources by their weights. A source's texts are those whose name begins with its file's."""

    def __init__(self, texts: Sequence[DueText], sources: Sequence[tuple[str, Fraction | None]], options: dict[str, Any]):
        self.texts, self.shares = texts, smallest_shares([weight for _, weight in sources if weight is not None])
        streams = [self.rows_of(number, f"{Path(path).name}:", options) for number, (path, _) in enumerate(sources)]
        rows, self.through = options["batch_tokens"] // options["max_length"], list[list[int]]()
        while options["max_steps"] is None or len(self.through) < options["max_steps"] * rows:
            row = next(streams[source_and_number(len(self.through), self.shares)[0]], None)
            if row is None:
                break
            self.through.append(row)
        self.rows = min(rows, len(self.through))
        self.steps = len(self.through) // self.rows

    def rows_of(self, number: int, prefix: str, options: dict[str, Any]) -> Iterator[list[int]]:
        mine = [place for place, text in enumerate(self.texts) if text.name.startswith(prefix)]
        lengths = [len(self.texts[place].tokens) for place in mine]
        for epoch in range(options["num_train_epochs"]):
            for row in epoch_rows(lengths, options["max_length"], seed_at(options["seed"], "source", number), epoch, options["packing"]):
                yield [mine[example] for example in row]

    def due(self, step: int) -> list[list[DueText]]:
        return [[self.texts[example] for example in row] for row in self.through[step * self.rows:(step + 1) * self.rows]]


def smallest_shares(weights: Sequence[Fraction]) -> list[int]:
    """Shares as whole numbers in the proportion of the weights, as small as they can be."""
    least = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * least) for weight in weights]
    return [share // math.gcd(*whole) for share in whole]


def source_and_number(row: int, shares: Sequence[int]) -> tuple[int, int]:
    """The source of row `row` of a run, and which of that source's rows it is."""
    cycles, place = divmod(row, sum(shares))
    turns = source_turns(tuple(shares))
    return turns[place], cycles * shares[turns[place]] + turns[:place].count(turns[place])


@functools.lru_cache(8)
def source_turns(shares: tuple[int, ...]) -> list[int]:
    """Sources of the rows of one cycle: every row belongs to the source that is furthest behind its share."""
    given, turns = [0] * len(shares), list[int]()
    for _ in range(sum(shares)):
        turns.append(min(range(len(shares)), key=lambda each: Fraction(2 * given[each] + 1, shares[each])))
        given[turns[-1]] += 1
    return turns

# ---------------------------------------------------------------- a corpus of token shards


class WindowPlan:
    """Windows of the training stream, in the order that the seed gives each epoch."""

    def __init__(self, folder: Path, options: dict[str, Any]):
        manifest = json.loads((folder / "manifest.json").read_text())
        self.length, self.seed = options["max_length"], options["seed"]
        self.rows, self.width = options["batch_tokens"] // self.length, int(manifest["dtype"].removeprefix("<u"))
        self.shards = sorted(folder.glob("train-[0-9]*.bin"))
        self.tokens = sum(shard.stat().st_size for shard in self.shards) // self.width
        self.begins = [record[1] for record in struct.iter_unpack("<QQIIQQi", (folder / "train-index.bin").read_bytes())]
        self.windows = -(-(self.tokens - 1) // (self.length - 1))
        self.steps = options["num_train_epochs"] * self.windows // self.rows

    def due(self, step: int) -> list[list[DueText]]:
        """Each window's pieces of documents, every one alone. Column 0 repeats the window before and is context only."""
        return [list(self.pieces(self.window(place))) for place in range(step * self.rows, (step + 1) * self.rows)]

    def window(self, place: int) -> int:
        epoch, within = divmod(place, self.windows)
        return shuffled_place(within, self.windows, seed_at(self.seed, "order", epoch))

    def pieces(self, window: int) -> Iterator[DueText]:
        start = window * (self.length - 1)
        stop = min(start + self.length, self.tokens)
        cuts = [start, *self.begins[bisect_right(self.begins, start):bisect_left(self.begins, stop)], stop]
        for begin, end in pairwise(cuts):
            yield DueText(str(window), self.read(begin, end), [0.0] + [1.0] * (end - begin - 1))

    def read(self, start: int, stop: int) -> list[int]:
        """Ids start..stop of the stream, across shards."""
        found, first = b"", 0
        for shard in self.shards:
            here = shard.stat().st_size // self.width
            if start < first + here and stop > first:
                with shard.open("rb") as file:
                    file.seek(max(0, start - first) * self.width)
                    found += file.read((min(stop, first + here) - max(start, first)) * self.width)
            first += here
        return [int.from_bytes(found[at:at + self.width], "little") for at in range(0, len(found), self.width)]


class MixedWindows:
    """Windows of several corpora by their shares: those of --corpus are numbered first, then those of --mix in their order."""

    def __init__(self, folders: Sequence[tuple[Path, Fraction]], options: dict[str, Any]):
        self.shares = smallest_shares([1 - sum((share for _, share in folders[1:]), Fraction(0)), *(share for _, share in folders[1:])])
        self.plans = [WindowPlan(folder, options | {"seed": seed_at(options["seed"], "source", number)})
                      for number, (folder, _) in enumerate(folders)]
        self.rows = self.plans[0].rows

    def due(self, step: int) -> list[list[DueText]]:
        found = []
        for row in range(step * self.rows, (step + 1) * self.rows):
            source, number = source_and_number(row, self.shares)
            window, first = self.plans[source].window(number), sum(plan.windows for plan in self.plans[:source])
            found.append([text._replace(name=str(first + window)) for text in self.plans[source].pieces(window)])
        return found
