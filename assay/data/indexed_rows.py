"""Indexed rows: where each row of a file lies, so that rows are read in any order while memory holds 20 bytes of each.

A first pass notes of each row its place, its length and a hash. Rows are then read one at a time, and one that is not what the first pass
saw is refused: else what something writes meanwhile would be in the output unread. Lines of a .jsonl file are read from where they stand.
Files of other kinds (.jsonl.gz, .parquet, .csv, .tsv, folders) cannot be read at any place: their rows go, as lines of JSON, into a
temporary file beside the output. It takes as much disk as they do unpacked, has no name, and is gone with the process.
"""

import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np

from assay.data.data_files import TextSource, open_source
from assay.data.order import permuted_places
from assay.errors import DataError, GuardStop
from assay.seeds import derive
from assay.store.durable import nameless_file

_PLACES = 1 << 14  # of an order that are computed at a time


class IndexedRows:
    """Rows of one file by number, each read when it is asked for."""

    def __init__(self, name: str, file: int):
        self.name, self.file = name, file
        self.starts, self.lengths, self.hashes = array("q"), array("I"), array("q")

    def __len__(self) -> int:
        return len(self.starts)

    def note(self, start: int, line: bytes) -> None:
        """Remember a row that lies at `start`."""
        self.starts.append(start)
        self.lengths.append(len(line))
        self.hashes.append(hash(line))

    def row(self, number: int) -> bytes:
        """A row with a line's end, which the last one of a file may lack."""
        try:
            line = os.pread(self.file, self.lengths[number], self.starts[number])
        except OSError as error:
            raise DataError(f"{self.name}: {error.strerror or error}") from None
        if hash(line) != self.hashes[number]:
            raise changed_row(self.name, number)
        return line if line.endswith(b"\n") else line + b"\n"

    def in_order(self, seed: int) -> Iterator[bytes]:
        """Rows without end, epoch after epoch, each in an order of its own, of which a few thousand places are computed at a time."""
        for epoch in count():
            key = derive(seed, "order", epoch)
            for first in range(0, len(self), _PLACES):
                places = np.arange(first, min(first + _PLACES, len(self)))
                yield from map(self.row, permuted_places(places, len(self), key).tolist())


def changed_row(name: str, number: int) -> GuardStop:
    return GuardStop(f"{name}: row {number + 1:,} is not what it was when the file was first read, moments ago, so nothing is written; let "
                     "nothing change the file meanwhile, and run it again")


@contextmanager
def held_file(source: TextSource) -> Iterator[int]:
    """A file that stays open, whatever becomes of its name."""
    with open_source(source) as file:
        held = os.dup(file.fileno())
    try:
        yield held
    finally:
        os.close(held)


@contextmanager
def indexed_copy(name: str, lines: Iterable[bytes], out: Path) -> Iterator[IndexedRows]:
    """Rows in a temporary file beside `out`."""
    with nameless_file(out) as file:
        index, start = IndexedRows(name, file.fileno()), 0
        for line in lines:
            index.note(start, line)
            start += len(line)
            file.write(line)
        file.flush()
        yield index
