"""Overlap (contamination): how much of the held-out text also stands in the training text, by document and by 13-gram.

Words are what is left when text is lower-cased and punctuation becomes a space; a Chinese, Japanese or Korean character is a word of
its own. Spellings of one character (an accent as its own code point, ligatures, full-width letters) are one, and invisible characters
are none. Two documents with the same words are the same.
13 words is the length of GPT-3's contamination study (arXiv 2005.14165, appendix C).

The held-out side is read first and kept as 64-bit hashes, so the training side needs no memory: it is looked up. Above
CAPACITY only hashes below a falling limit are kept, on both sides: a random sample of the 13-grams, its share stated.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GRAM_WORDS = 13
GRAM_CAPACITY = 1 << 18  # held-out 13-grams looked for at most
COPIES_SAID, COPIES_REFUSED = 0.1, 0.5  # share of data that repeats other data: said from here, refused from here
_NAMED = 5  # worst documents named in an error or a manifest
Hashes = NDArray[np.uint64]

_LETTERS = bytes(ord(chr(c).lower()) if chr(c).isalnum() else 32 for c in range(128)) + bytes(range(128, 256))
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")  # soft hyphens, zero-width marks, directions
_PUNCTUATION = re.compile("[\u00a0-\u00bf\u2010-\u205e\u3000-\u303f]")
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_IDEOGRAPH = 0xE3  # first byte of a UTF-8 character at or after U+3000


@dataclass(frozen=True)
class Overlap:
    """Shares are of the held-out side. `worst` holds (document, share of its 13-grams in training, whole or not)."""

    documents: int
    exact: int  # held-out documents whose words are a training document's words
    grams: int  # held-out 13-grams looked for
    shared: int  # of these, found in training
    sampled: float  # share of all held-out 13-grams that were looked for
    worst: tuple[tuple[str, float, bool], ...]

    @property
    def share(self) -> float:
        """The larger of both: documents with a twin, 13-grams found."""
        return max(self.exact / max(self.documents, 1), self.shared / max(self.grams, 1))

    def to_json(self) -> dict[str, Any]:
        return {"words": GRAM_WORDS, "share": self.share, **asdict(self)}

    def __str__(self) -> str:
        return (f"{self.exact} of {self.documents} held-out documents stand whole in training, and "
                f"{self.shared} of {self.grams} of their {GRAM_WORDS}-grams ({self.shared / max(self.grams, 1):.2%})")


class HeldOutText:
    """Held-out side as hashes, and which of them training text has hit."""

    def __init__(self, capacity: int = GRAM_CAPACITY):
        self.capacity, self.limit = capacity, (1 << 64) - 1
        self.names: list[str] = []
        self.prints: list[int] = []
        self.grams: list[Hashes] = []  # of each document, ascending
        self.kept = 0
        self.hit_grams: list[Hashes] = []
        self.hit_prints: set[int] = set()
        self.noted = 0

    def add(self, name: str, raw: bytes) -> None:
        hashes = word_hashes(raw)
        grams = np.unique(ngram_hashes(hashes))
        self.names.append(name)
        self.prints.append(words_fingerprint(hashes, raw))
        self.grams.append(grams[grams <= self.limit])
        self.kept += len(self.grams[-1])
        while self.kept > self.capacity:
            self.limit >>= 1
            self.grams = [g[: np.searchsorted(g, self.limit, side="right")] for g in self.grams]
            self.kept = sum(map(len, self.grams))

    def save(self, folder: Path) -> None:
        """Save what a worker needs to look training text up."""
        np.save(folder / "grams.npy", np.unique(np.concatenate([*self.grams, _empty()])))
        np.save(folder / "prints.npy", np.unique(np.asarray(self.prints, np.uint64)))
        np.save(folder / "limit.npy", np.uint64(self.limit))

    def note(self, grams: Hashes, prints: Hashes) -> None:
        """Training text hit these."""
        self.hit_prints.update(prints.tolist())
        self.hit_grams.append(grams)
        self.noted += len(grams)
        if self.noted > self.capacity:  # the same ones come again and again: keep each once
            self.hit_grams, self.noted = [np.unique(np.concatenate(self.hit_grams))], 0

    def overlap(self) -> Overlap:
        """Overlap noted so far, counted over the held-out documents."""
        hit = np.unique(np.concatenate([_empty(), *self.hit_grams]))
        shared = [int(_isin(own, hit).sum()) for own in self.grams]
        twins = [own in self.hit_prints for own in self.prints]
        rows = [(name, count / max(len(own), 1), twin)
                for name, own, count, twin in zip(self.names, self.grams, shared, twins, strict=True) if count or twin]
        worst = sorted(rows, key=lambda row: (not row[2], -row[1], row[0]))[:_NAMED]
        return Overlap(len(self.names), sum(twins), self.kept, sum(shared), (self.limit + 1) / (1 << 64), tuple(worst))


class OverlapLookup:
    """Lookup of held-out hashes in training text; made in every worker from the files of `HeldOutText.save`."""

    def __init__(self, folder: Path):
        self.grams, self.prints, self.limit = (np.load(folder / f"{name}.npy") for name in ("grams", "prints", "limit"))
        self.maybe = np.zeros(1 << 22, np.bool_)  # by the hash's last bits: most text is answered here
        self.maybe[self.grams & np.uint64(len(self.maybe) - 1)] = True

    def hits(self, raw: bytes) -> tuple[Hashes, Hashes, int]:
        """(13-grams found, its fingerprint if that was found, its fingerprint)."""
        hashes = word_hashes(raw)
        own = words_fingerprint(hashes, raw)
        grams = ngram_hashes(hashes)
        grams = grams[grams <= self.limit]
        likely = np.unique(grams[self.maybe[grams & np.uint64(len(self.maybe) - 1)]])
        print_ = np.asarray([own], np.uint64)
        return likely[_isin(likely, self.grams)], print_[_isin(print_, self.prints)], own


def measure_overlap(train: Iterable[bytes], held_out: Iterable[tuple[str, bytes]], folder: Path) -> Overlap:
    """Overlap measured directly on texts, for data that is not a corpus; `folder` takes the hash files."""
    held = HeldOutText()
    for name, raw in held_out:
        held.add(name, raw)
    held.save(folder)
    lookup = OverlapLookup(folder)
    for raw in train:
        held.note(*lookup.hits(raw)[:2])
    return held.overlap()


def words_fingerprint(hashes: Hashes, raw: bytes) -> int:
    """64 bits that are equal for documents with the same words; of the bytes, where there are no words."""
    content = hashes.tobytes() if len(hashes) else raw
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def as_compared(raw: bytes) -> bytes:
    """Text beyond ASCII in one spelling: NFKC, lower case, punctuation as spaces."""
    if raw.isascii():
        return raw
    text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", raw.decode(errors="replace"))).lower()
    return _PUNCTUATION.sub(" ", text).encode()


def word_hashes(raw: bytes) -> Hashes:
    """One hash a word."""
    return hash_spans(*word_places(as_compared(raw)))


def word_places(raw: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The bytes of `as_compared` without ASCII's case and punctuation, and where each word begins and ends."""
    codes = np.frombuffer(raw.translate(_LETTERS), np.uint8)
    inside, ideograph = codes != 32, codes >= _IDEOGRAPH
    begins, ends = inside.copy(), inside.copy()
    begins[1:] &= ~inside[:-1] | ideograph[1:]
    ends[:-1] &= ~inside[1:] | ideograph[1:]
    return codes, np.flatnonzero(begins), np.flatnonzero(ends) + 1


def ngram_hashes(hashes: Hashes) -> Hashes:
    """One hash for every run of 13 words."""
    starts = np.arange(max(len(hashes) - GRAM_WORDS + 1, 0))
    return hash_spans(hashes, starts, starts + GRAM_WORDS)


def hash_spans(values: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Hashes:
    """A hash of each span, wherever it stands: a polynomial modulo 2^64, as the difference of two running sums."""
    powers, inverses = _powers(len(values).bit_length())
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * powers[: len(values)], out=sums[1:])
    return mix_bits((sums[stops] - sums[starts]) * inverses[starts])


@cache
def _powers(bits: int) -> tuple[Hashes, ...]:
    inverse = pow(_MULTIPLIER, -1, 1 << 64)
    return tuple(np.cumprod(np.full(1 << bits, base, np.uint64), dtype=np.uint64) for base in (_MULTIPLIER, inverse))


def mix_bits(hashes: Hashes) -> Hashes:
    """Every bit of the input moves every bit of the output, so that a limit on the value is a fair sample."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _isin(values: Hashes, table: Hashes) -> NDArray[np.bool_]:
    """Mask of the values that are in an ascending table."""
    if not len(table):
        return np.zeros(len(values), np.bool_)
    place = np.minimum(np.searchsorted(table, values), len(table) - 1)
    return np.asarray(table[place] == values)


def _empty() -> Hashes:
    return np.zeros(0, np.uint64)
