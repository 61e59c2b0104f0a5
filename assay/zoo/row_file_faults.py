"""Row file faults: rows that are mixed, split or deduplicated into files that look like any other."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data import near_duplicates, row_files
from assay.data.indexed_rows import IndexedRows
from assay.data.mixture import WeightedSource
from assay.data.near_duplicates import Duplicates
from assay.guard.row_file_checks import check_deduplicated, check_mixed, check_split
from assay.testing.fault_injection import Plant, fault, in_place_of
from assay.testing.tiny_training import check_accepted
from assay.verdict import Verdict


def remarks(folder: Path, numbers: Iterable[int], *, name: str) -> str:
    """Short rows, every fifth a copy of the one before."""
    numbers = [number - (number % 5 == 4) for number in numbers]
    rows = [{"prompt": f"what is {number} and {3 * number}?", "completion": f"it is {4 * number}"} for number in numbers]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def a_mixed_file(folder: Path, plant: Plant) -> list[Verdict]:
    sources = [WeightedSource(remarks(folder, range(60), name="many.jsonl"), Fraction(3, 4)),
               WeightedSource(remarks(folder, range(60, 90), name="few.jsonl"), Fraction(1, 4))]
    with plant(folder):
        told = row_files.mix_rows(sources, str(folder / "mixed.jsonl"), rows=40, epochs=1, seed=0)
    return [check_mixed(sources, told, rows=40, epochs=1)]


def a_split_file(folder: Path, plant: Plant) -> list[Verdict]:
    name = remarks(folder, range(60), name="rows.jsonl")
    with plant(folder):
        told = row_files.split_rows(name, str(folder / "parts"), held_out=0.25, seed=0)
    return [check_split(name, told, held_out=0.25)]


def a_deduplicated_file(folder: Path, plant: Plant) -> list[Verdict]:
    name = remarks(folder, range(60), name="rows.jsonl")
    with plant(folder):
        told = row_files.deduplicate([name], str(folder / "single.jsonl"), threshold=0.8, field=None, workers=1)
    return [check_deduplicated([name], told, threshold=0.8, field=None)]


def near_copies_looked_for(folder: Path, plant: Plant) -> list[Verdict]:
    name = remarks(folder, range(60), name="rows.jsonl")
    with plant(folder):
        return [check_accepted("near copies", lambda: row_files.deduplicate([name], str(folder / "single.jsonl"), threshold=0.8, field=None,
                                                                           workers=1))]


@fault("a mixture that gives the large source's share to the small one", rows=("N40",), stage="data", check="rows", job=a_mixed_file)
@in_place_of(row_files, "mixed_lines")
def shares_the_wrong_way_round(usual: Any, files: Sequence[IndexedRows], shares: tuple[int, ...], *how: Any) -> Iterator[bytes]:
    return usual(files, shares[::-1], *how)


@fault("a mixture that reads the beginning of its sources alone", rows=("N40",), stage="data", check="rows", job=a_mixed_file)
@in_place_of(IndexedRows, "in_order")
def the_beginning_alone(usual: Any, rows: IndexedRows, seed: int) -> Iterator[bytes]:
    """The order is drawn anew for every few rows, as when a worker begins again with each of its turns."""
    while True:
        first = usual(rows, seed)
        yield from (next(first) for _ in range(5))


@fault("copies on both sides of a split", rows=("D19",), stage="data", check="rows", job=a_split_file)
@in_place_of(row_files, "rows_apart")
def copies_on_both_sides(usual: Any, contents: Sequence[int], *how: Any) -> Any:
    """Who is held out is decided row by row, not by what a row says."""
    return usual(range(len(contents)), *how)


@fault("a split that holds nothing out", rows=("D19",), stage="data", check="rows", job=a_split_file)
@in_place_of(row_files, "rows_apart")
def nothing_held_out(usual: Any, *given: Any) -> Any:
    apart, different = usual(*given)
    return apart & False, different


@fault("rows left out that repeat none", rows=(), stage="data", check="rows", job=a_deduplicated_file)
@in_place_of(row_files, "find_duplicates")
def neighbours_taken_for_copies(usual: Any, *given: Any) -> Duplicates:
    """Rows of one bucket are taken for copies of each other, and never compared."""
    found: Duplicates = usual(*given)
    first = found.first.copy()
    others = np.flatnonzero(found.kept)[1::2]
    first[others] = first[others - 1]
    return replace(found, first=first, near=found.near + len(others))


@fault("short rows taken for near copies", rows=(), stage="data", check="near copies", job=near_copies_looked_for)
@in_place_of(near_duplicates, "likeness")
def empty_bins_alike(_: Any, one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """Bins that neither row has a run in are counted as what they have in common: of two rows of few words that is most."""
    return (one == other).mean(-1)
