"""Duplicates among documents: exact, by their bytes; and near, by MinHash of their runs of five words.

One-permutation MinHash (Li, Owen and Zhang, arXiv 1208.1259): every run of five words has one hash, the top bits of which name one of 128
bins; a document's signature is the least hash in each bin. Of the bins that are not empty in both, the share of equal entries estimates
the Jaccard similarity of two documents' runs, with a standard error of about 0.035 at 0.8, and less where both are short. Documents that
agree in all eight entries of one of 16 bands, in which empty bins borrow from the next one that is not (Shrivastava and Li, arXiv
1406.4784), are compared; of those that are alike the first in the order of the files stays. Documents of fewer than five words are
duplicates only where they are equal.

Memory: about 150 bytes a document, whatever its length; and 384 on the disk of the output while it is at work, where near copies are looked
for: signatures, and bands, of which one is in memory at a time.
"""

import hashlib
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from assay.data.data_files import row_object
from assay.data.overlap import Hashes, as_compared, hash_spans, mix_bits, word_places
from assay.errors import DataError, GuardStop
from assay.store.durable import nameless_file

PlacedLine = tuple[str, bytes]  # file:line, and a row as one line of JSON
RUN_WORDS = 5
NEAR_COPY = 0.8  # share of runs in common from which on a document is a near copy of another
BINS, BANDS = 128, 16
KNOWN_LIKENESS = 0.15  # four standard errors of a signature's estimate
BLOCK_BYTES = 1 << 20  # of rows that a worker is given at a time
_PAIRS = 1 << 15  # of signatures that are compared at a time
_BIN_SHIFT, _LOW = np.uint64(64 - 7), np.uint64((1 << 40) - 1)
_EMPTY = np.uint64((1 << 64) - 1)
_NO_RUN = (1 << 16) - 1  # in a signature: a bin that no run fell into
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)  # of the first so many bytes of eight


class Prints(NamedTuple):
    """Fingerprints of a block of documents: a digest of each one's bytes, its signature's low bits, its bands, and whether it has a
    signature."""

    exact: NDArray[np.uint64]  # (documents,)
    signature: NDArray[np.uint16]  # (documents, BINS)
    bands: NDArray[np.uint64]  # (documents, BANDS)
    signed: NDArray[np.bool_]  # (documents,)

    def band(self, number: int) -> NDArray[np.uint64]:
        return self.bands[:, number]

    def signatures(self, documents: NDArray[np.int64]) -> NDArray[np.uint16]:
        return self.signature[documents]


class StoredPrints(NamedTuple):
    """Fingerprints of many documents: `signature_file` and the `band_files` hold what `Prints` do, a document's after the one's before."""

    exact: NDArray[np.uint64]
    signed: NDArray[np.bool_]
    signature_file: IO[bytes]
    band_files: list[IO[bytes]]

    def band(self, number: int) -> NDArray[np.uint64]:
        self.band_files[number].seek(0)
        return np.fromfile(self.band_files[number], np.uint64, len(self.exact))

    def signatures(self, documents: NDArray[np.int64]) -> NDArray[np.uint16]:
        size, file = BINS * np.dtype(np.uint16).itemsize, self.signature_file.fileno()
        read = b"".join(os.pread(file, size, document * size) for document in documents.tolist())
        return np.frombuffer(read, np.uint16).reshape(len(documents), BINS)


@dataclass(frozen=True)
class Duplicates:
    """`first[i]` is the document that document i repeats: itself where it repeats none before it."""

    first: NDArray[np.int64]
    exact: int  # documents that are another's bytes
    near: int  # documents that are like another, and not its bytes

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.first == np.arange(len(self.first))


def find_duplicates(prints: Prints | StoredPrints, threshold: float | None) -> Duplicates:
    """Documents equal to an earlier one, and, with a threshold, those at least so similar to one."""
    first = np.arange(len(prints.exact))
    _, at, inverse = np.unique(prints.exact, return_index=True, return_inverse=True)
    first = at[inverse].astype(np.int64)
    exact = int((first != np.arange(len(first))).sum())
    if threshold is not None:
        first = _join_alike(prints, first, threshold)
    return Duplicates(first, exact, int((first != np.arange(len(first))).sum()) - exact)


def _join_alike(prints: Prints | StoredPrints, first: NDArray[np.int64], threshold: float) -> NDArray[np.int64]:
    """Documents of one bucket are compared with the bucket's earliest; what is alike is one group, known by its earliest."""
    group = first.copy()
    chosen = np.flatnonzero(prints.signed & (first == np.arange(len(first))))  # of exact copies the first speaks for all
    for band in range(BANDS):
        keys = prints.band(band)[chosen]
        by_key = np.argsort(keys, kind="stable")
        order, keys = chosen[by_key], keys[by_key]
        begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(order) else np.zeros(0, np.int64)
        leaders = np.repeat(order[begins], np.diff(np.append(begins, len(order))))
        pairs = group[leaders] != group[order]  # those of one group are joined already
        one, other = leaders[pairs], order[pairs]
        parts = [slice(at, at + _PAIRS) for at in range(0, len(one), _PAIRS)]
        alike = np.concatenate([likeness(prints.signatures(one[part]), prints.signatures(other[part])) >= threshold for part in parts]
                               or [np.zeros(0, np.bool_)])
        for leader, follower in zip(one[alike].tolist(), other[alike].tolist(), strict=True):
            a, b = _root(group, leader), _root(group, follower)
            group[max(a, b)] = min(a, b)
    while not np.array_equal(group, above := group[group]):
        group = above
    return group


def likeness(one: NDArray[np.uint16], other: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Share of the runs of two documents that both have, by their signatures: of the bins that one of them has a run in. Bins that neither
    has say nothing, and short documents have many."""
    there = (one != _NO_RUN) | (other != _NO_RUN)
    return ((one == other) & there).sum(-1) / np.maximum(1, there.sum(-1))


def refuse_wrong_likeness() -> None:
    """Check MinHash before rows are left out: of known documents, some with many empty bins, signatures say how alike they are, as sets of
    runs do."""
    words = [f"word{number * number % 251}" for number in range(400)]
    texts = [words[:80], [*words[:40], "other", *words[41:80]], words[200:280], words, [*words[:300], *words[:100]], words[:9]]
    runs = [{tuple(text[at : at + RUN_WORDS]) for at in range(len(text) - RUN_WORDS + 1)} for text in texts]
    signature = document_prints([" ".join(text).encode() for text in texts]).signature
    for one in range(len(texts)):
        for other in range(one):
            due = len(runs[one] & runs[other]) / len(runs[one] | runs[other])
            if abs(float(said := likeness(signature[one], signature[other])) - due) > KNOWN_LIKENESS:
                raise GuardStop(f"near copies: two known documents have {due:.2f} of their runs of words in common, and signatures say "
                                f"{said:.2f}: rows would be left out by mistake")


def _root(group: NDArray[np.int64], document: int) -> int:
    while group[document] != document:
        group[document] = group[group[document]]
        document = int(group[document])
    return document

# ---------------------------------------------------------------- signatures


def document_prints(texts: Sequence[bytes], *, whole: Sequence[bytes] | None = None, signed: bool = True) -> Prints:
    """Fingerprints of a block of documents, all of them at once; where they are not to be signed, only what tells copies: that they are
    equal as a `whole`, where that is more than the text."""
    exact = np.array([int.from_bytes(hashlib.blake2b(each, digest_size=8).digest(), "little") for each in whole or texts], np.uint64)
    if not signed:
        return Prints(exact, np.zeros((len(texts), 0), np.uint16), np.zeros((len(texts), 0), np.uint64), np.zeros(len(texts), np.bool_))
    least, each = _least_hashes(texts), BINS // BANDS
    filled, begins = _filled(least), np.arange(len(texts) * BANDS) * each
    bands = hash_spans(filled.reshape(-1), begins, begins + each).reshape(len(texts), BANDS)
    signature = np.where(least == _EMPTY, _NO_RUN, np.minimum(least & np.uint64(_NO_RUN), _NO_RUN - 1)).astype(np.uint16)
    return Prints(exact, signature, bands, filled[:, 0] != _EMPTY)


def _least_hashes(texts: Sequence[bytes]) -> Hashes:
    """(documents, BINS): the least hash of a run of words in each bin; _EMPTY where none fell into it."""
    found = np.full(len(texts) * BINS, _EMPTY, np.uint64)
    texts = [as_compared(text) for text in texts]
    words, starts = _words(b" ".join(texts))
    if len(words) >= RUN_WORDS:
        counts = np.diff(np.searchsorted(starts, np.cumsum([0, *(len(text) + 1 for text in texts)])))
        document = np.repeat(np.arange(len(texts)), counts)
        one = np.flatnonzero(document[: len(words) - RUN_WORDS + 1] == document[RUN_WORDS - 1 :])  # runs within one document
        hashes = _run_hashes(words)[one]
        place = document[one].astype(np.uint64) * np.uint64(BINS) + (hashes >> _BIN_SHIFT)
        joined = np.sort((place << np.uint64(40)) | (hashes & _LOW))  # by place, then by hash
        places = (joined >> np.uint64(40)).astype(np.int64)
        least = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]])) if len(places) else np.zeros(0, np.int64)
        found[places[least]] = joined[least] & _LOW
    return found.reshape(len(texts), BINS)


def _words(text: bytes) -> tuple[Hashes, NDArray[np.int64]]:
    """A hash of each word, from its bytes by eights, and where it begins: work for each word, where `word_hashes` has it for each byte."""
    codes, starts, stops = word_places(text + b" " * 8)
    eights = np.ndarray((max(0, len(codes) - 7),), np.uint64, codes, strides=(1,))
    left = stops - starts
    hashes = mix_bits((eights[starts] & _MASKS[np.minimum(left, 8)]) + left.astype(np.uint64) * _ODD)
    longer, at = np.flatnonzero(left > 8), 8
    while len(longer):
        more = eights[starts[longer] + at] & _MASKS[np.minimum(left[longer] - at, 8)]
        hashes[longer] = mix_bits(hashes[longer] * _ODD + more)
        at += 8
        longer = longer[left[longer] > at]
    return hashes, starts


def _run_hashes(words: Hashes) -> Hashes:
    """One hash for every run of five words."""
    count = len(words) - RUN_WORDS + 1
    runs = words[:count] * _ODD
    for place in range(1, RUN_WORDS - 1):
        runs = (runs + words[place : place + count]) * _ODD
    return mix_bits(runs + words[RUN_WORDS - 1 :])


def _filled(least: Hashes) -> Hashes:
    """Empty bins take the value of the next full one, changed by how far it is; a document without any stays empty."""
    full = least != _EMPTY
    there = full.any(1)
    place = np.where(np.concatenate([full, full], 1), np.arange(2 * BINS), 2 * BINS)
    following = np.minimum.accumulate(place[:, ::-1], axis=1)[:, ::-1][:, :BINS]
    distance = following - np.arange(BINS)
    values = np.take_along_axis(least, np.minimum(following, 2 * BINS - 1) % BINS, 1)
    filled = values + distance.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.where(there[:, None], filled, _EMPTY)

# ---------------------------------------------------------------- rows


def said_in_row(values: Any) -> str:
    """Every text, number and truth value of a row, in order."""
    if not isinstance(values, dict | list):
        return "" if values is None else str(values)
    return "\n".join(text for each in (values.values() if isinstance(values, dict) else values) if (text := said_in_row(each)))


def whole_row(values: Any) -> str:
    """Whole row as text: the same for rows that are equal, in whatever order their columns stand, and for no others: every text in it
    stands behind its length."""
    if isinstance(values, str):
        return f"{len(values)}:{values}"
    if isinstance(values, dict):
        return "{" + "".join(f"{len(key)}:{key}{whole_row(values[key])}" for key in sorted(values)) + "}"
    return "[" + "".join(map(whole_row, values)) + "]" if isinstance(values, list) else f"={values};"


def column_of(values: dict[str, Any], field: str, where: str) -> Any:
    if values.get(field) is None:
        raise DataError(f"{where}: there is nothing under {field!r}; its columns are {', '.join(values) or 'none'}. Rows without it would "
                        "all be copies of each other: give another --field, or leave it out")
    return values[field]


def lines_prints(lines: Sequence[PlacedLine], field: str | None, signed: bool) -> Prints:
    """Fingerprints of rows. Copies are rows of which everything is equal, or all of the one column."""
    rows: list[Any] = [row_object(line, where) for where, line in lines]
    if field is not None:
        rows = [column_of(row, field, where) for row, (where, _) in zip(rows, lines, strict=True)]
    return document_prints([said_in_row(row).encode() for row in rows], whole=[whole_row(row).encode() for row in rows], signed=signed)


def line_blocks(lines: Iterable[PlacedLine], size: int = BLOCK_BYTES) -> Iterator[list[PlacedLine]]:
    block, held = list[PlacedLine](), 0
    for placed in lines:
        block.append(placed)
        held += len(placed[1])
        if held >= size:
            yield block
            block, held = [], 0
    if block:
        yield block


def prints_of_lines(lines: Iterable[PlacedLine], *, field: str | None = None, workers: int = 1, signed: bool = True) -> Iterator[Prints]:
    """Fingerprints of JSON rows in their order, block after block, computed by `workers` processes; `signed` where near copies are looked
    for."""
    blocks = line_blocks(lines)
    if workers < 2:
        yield from (lines_prints(block, field, signed) for block in blocks)
        return
    waiting = deque[Future[Prints]]()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for block in blocks:
            waiting.append(pool.submit(lines_prints, block, field, signed))
            if len(waiting) > 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def stored_prints(blocks: Iterable[Prints], out: Path) -> Iterator[StoredPrints]:
    """Fingerprints of all blocks; what is long of them in temporary files beside `out`."""
    exact, signed = array("Q"), bytearray()
    with ExitStack() as opened:
        signature_file, *band_files = (opened.enter_context(nameless_file(out)) for _ in range(1 + BANDS))
        for block in blocks:
            exact.frombytes(block.exact.tobytes())
            signed += block.signed.tobytes()
            signature_file.write(block.signature.tobytes())
            for number, file in enumerate(band_files if block.bands.size else []):
                file.write(block.band(number).tobytes())
        for file in (signature_file, *band_files):
            file.flush()
        yield StoredPrints(np.frombuffer(exact, np.uint64), np.frombuffer(signed, np.bool_), signature_file, band_files)
