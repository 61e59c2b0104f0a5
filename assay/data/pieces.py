"""Text cut into pieces, and a memory of their ids, both on whole arrays: no Python is run per word.

A tokenizer of the GPT-2 or Llama-3 kind first cuts text by a regular expression and never merges across a cut. We cut at
some of the same places: those that four neighbouring characters decide, whose classes are the same in every version of
Unicode. What is unsure stays in one piece. A piece of up to 15 bytes is known by its bytes and length, packed into two
64-bit numbers: a key, not a hash, so two pieces are never confused.
"""

from collections.abc import Callable
from enum import IntEnum, auto
from itertools import chain, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 15
LONG_BYTES = 48  # pieces between both are remembered in a dict; longer ones rarely come again
CAPACITY, SLOTS, IDS = 1 << 20, 1 << 22, 1 << 24  # pieces and ids remembered, in 80 MB; then it starts afresh
BLOCK = 1 << 15  # pieces looked up at once: their arrays stay in the processor's cache
MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


class Kind(IntEnum):
    EDGE = 0  # before the text and after it
    LETTER = auto()
    DIGIT = auto()
    SPACE = auto()
    TAB = auto()
    LINE = auto()  # line feed, carriage return
    SIGN = auto()
    APOSTROPHE = auto()
    DASH = auto()  # a sign beyond ASCII: several bytes, so that its neighbour may be itself
    UNSURE = auto()


EDGE, LETTER, DIGIT, SPACE, TAB, LINE, SIGN, APOSTROPHE, DASH, UNSURE = Kind
BLANK, SIGNS = (SPACE, TAB, LINE), (SIGN, APOSTROPHE, DASH)
# May a text be cut between `left` and `right`, given the character before them and the one after?
Rule = Callable[[Kind, Kind, Kind, Kind], bool]


def gpt2(before: Kind, left: Kind, right: Kind, after: Kind) -> bool:
    """`'s|'t|…| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`, also with digits set apart before it."""
    if left in BLANK and right in BLANK:
        return after in (LETTER, *SIGNS)  # of several, the last one stands alone or goes with the word
    if left in (TAB, LINE):
        return before in (EDGE, LETTER, DIGIT, *SIGNS) or (before in BLANK and right != DIGIT)
    if left == APOSTROPHE and right == LETTER:
        return before in (SPACE, *SIGNS)  # alone it may begin a contraction
    if left in SIGNS:
        return right not in SIGNS
    return left in (LETTER, DIGIT) and left != right


def llama(digits: int) -> Rule:
    """Llama-3's expression (encode.SPLIT), with at most so many digits in one token."""

    def rule(before: Kind, left: Kind, right: Kind, after: Kind) -> bool:
        if left == SPACE:
            return right == SPACE and after in (LETTER, DIGIT, *SIGNS)
        if left == LINE:
            return right in (LETTER, DIGIT, *SIGNS) or (right == SPACE and before in SIGNS)
        if left in SIGNS:  # one alone goes with the word after it
            return right in (DIGIT, SPACE) or (right == LETTER and left != DASH and before in (SPACE, *SIGNS))
        if left == right == DIGIT:
            return digits == 1  # of more, the groups depend on where the number begins
        return left in (LETTER, DIGIT) and left != right

    return rule


class Cutter:
    """Remembers a rule as a table over four neighbours."""

    def __init__(self, rule: Rule):
        sure = [kind for kind in Kind if kind not in (EDGE, UNSURE)]
        self.table = np.zeros(len(Kind) ** 4, np.bool_)
        for around in product(Kind, sure, sure, Kind):
            self.table[_number(*around)] = rule(*around)

    def starts(self, raw: bytes) -> Places:
        """Where the pieces of a UTF-8 text begin; the first at 0."""
        kinds = np.zeros(len(raw) + 3, np.uint16)
        kinds[2:-1] = kinds_of(raw)
        around = _number(kinds[:-3], kinds[1:-2], kinds[2:-1], kinds[3:])
        cut = self.table[around]
        cut[:1] = True
        return np.flatnonzero(cut)


class Memory:
    """The ids of pieces: an open-addressed table by key, searched for many pieces at once."""

    def __init__(self, encode: Callable[[bytes], list[int]], dtype: str):
        self.encode, self.dtype = encode, dtype
        self.forget()

    def forget(self) -> None:
        self.pieces = self.used = 0
        self.slots = np.full(SLOTS, -1, np.int32)
        self.keys = np.zeros((CAPACITY, 2), np.uint64)
        self.first, self.count = np.zeros(CAPACITY, np.int32), np.zeros(CAPACITY, np.int32)  # of a piece, in `ids`
        self.ids = np.zeros(1 << 16, self.dtype)
        self.long: dict[bytes, int] = {}

    def ids_of(self, raw: bytes, starts: Places) -> bytes:
        """The ids of all pieces, one after the other."""
        words = np.frombuffer(raw + bytes(32 - len(raw) % 8), "<u8")
        ends = np.append(starts[1:], len(raw))
        blocks = range(0, len(starts), BLOCK)
        return b"".join(self._block(raw, words, starts[i : i + BLOCK], ends[i : i + BLOCK]) for i in blocks)

    def _block(self, raw: bytes, words: NDArray[np.uint64], starts: Places, ends: Places) -> bytes:
        if self.pieces + len(starts) > CAPACITY or self.used > IDS:
            self.forget()
        keys = _keys(words, starts, ends - starts)
        numbers = self._find(keys)
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            spans = zip(starts[missing].tolist(), ends[missing].tolist(), strict=True)
            numbers[missing] = self._learn([raw[start:end] for start, end in spans], keys[missing])
        return self._gathered(numbers)

    def _find(self, keys: NDArray[np.uint64]) -> NDArray[np.int32]:
        """The number of each piece, or -1. The zeros of a long piece are the key of none."""
        slots = _slots(keys)
        numbers = self.slots[slots]
        looking = np.flatnonzero((numbers >= 0) & ~_equal(self.keys[numbers], keys))
        while len(looking):
            slots[looking] = (slots[looking] + 1) % SLOTS
            numbers[looking] = there = self.slots[slots[looking]]
            looking = looking[(there >= 0) & ~_equal(self.keys[there], keys[looking])]
        return numbers

    def _learn(self, pieces: list[bytes], keys: NDArray[np.uint64]) -> list[int]:
        """Numbers of pieces that are not in the table; each new one is encoded once."""
        rows: dict[bytes, int] = {}  # new piece → where it first stands
        numbers = []
        for row, piece in enumerate(pieces):
            number = self.long.get(piece)
            if number is None:
                number = self.long[piece] = self.pieces + len(rows)
                rows[piece] = row
            numbers.append(number)
        self._add([self.encode(piece) for piece in rows], keys[list(rows.values())])
        for piece in rows:
            if not KEY_BYTES < len(piece) <= LONG_BYTES:
                del self.long[piece]
        return numbers

    def _add(self, ids: list[list[int]], keys: NDArray[np.uint64]) -> None:
        """New pieces under the next numbers."""
        first, count = self.used, np.fromiter(map(len, ids), np.int32, len(ids))
        self.used += int(count.sum())
        if self.used > len(self.ids):
            self.ids = np.resize(self.ids, 2 * self.used)
        self.ids[first : self.used] = np.fromiter(chain.from_iterable(ids), self.dtype, self.used - first)
        numbers = np.arange(self.pieces, self.pieces + len(ids), dtype=np.int32)
        self.keys[numbers], self.count[numbers], self.first[numbers] = keys, count, first + np.cumsum(count) - count
        self.pieces += len(ids)
        keyed = keys[:, 1] != 0
        numbers, slots = numbers[keyed], _slots(keys[keyed])
        while len(numbers):
            empty = np.flatnonzero(self.slots[slots] < 0)
            self.slots[slots[empty]] = numbers[empty]  # where two want one slot, one of them has it now
            further = self.slots[slots] != numbers
            numbers, slots = numbers[further], (slots[further] + 1) % SLOTS

    def _gathered(self, numbers: NDArray[np.int32]) -> bytes:
        first, count = self.first[numbers], self.count[numbers]
        ends = np.cumsum(count)
        return self.ids[np.repeat(first - ends + count, count) + np.arange(int(ends[-1]))].tobytes()


def kinds_of(raw: bytes) -> Bytes:
    """The kind of every byte's character."""
    kinds = np.frombuffer(raw.translate(_BYTE_KINDS), np.uint8)
    if raw.isascii():
        return kinds
    kinds, codes = kinds.copy(), np.frombuffer(raw, np.uint8)
    leads = np.frombuffer(raw.translate(_LEADS), np.uint8)
    places = np.flatnonzero(leads)
    pairs, triples, dashes = (places[leads[places] == group] for group in (1, 2, 3))
    pairs = pairs[(codes[pairs] != 0xC3) | ((codes[pairs + 1] != 0x97) & (codes[pairs + 1] != 0xB7))]  # not × and ÷
    dashes = dashes[(codes[dashes + 1] == 0x80) & (codes[dashes + 2] >= 0x90) & (codes[dashes + 2] < 0xA8)]
    for found, width, kind in ((pairs, 2, LETTER), (triples, 3, LETTER), (dashes, 3, DASH)):
        for k in range(width):
            kinds[found + k] = kind
    return kinds


def _number(before: Any, left: Any, right: Any, after: Any) -> Any:
    """Of four neighbours in a table."""
    return ((before * len(Kind) + left) * len(Kind) + right) * len(Kind) + after


def _keys(words: NDArray[np.uint64], starts: Places, lengths: Places) -> NDArray[np.uint64]:
    """(first 8 bytes, next 7 and the length in the last); zeros for a long piece. Read from aligned words, shifted."""
    word, shift = starts >> 3, ((starts & 7) * 8).astype(np.uint64)
    low, middle, high = words[word], words[word + 1], words[word + 2]
    rest = np.uint64(63) - shift  # two shifts, because by 64 at once is undefined
    keys = np.empty((len(starts), 2), np.uint64)
    keys[:, 0] = ((low >> shift) | (middle << np.uint64(1) << rest)) & _MASKS[np.minimum(lengths, 8)]
    keys[:, 1] = ((middle >> shift) | (high << np.uint64(1) << rest)) & _MASKS[np.clip(lengths - 8, 0, 7)]
    keys[:, 1] |= lengths.astype(np.uint64) << np.uint64(56)
    keys[lengths > KEY_BYTES] = 0
    return keys


def _slots(keys: NDArray[np.uint64]) -> Places:
    mixed = keys[:, 0] * MULTIPLIERS[0] ^ keys[:, 1] * MULTIPLIERS[1]
    mixed = (mixed ^ mixed >> np.uint64(29)) * MULTIPLIERS[0] >> np.uint64(32)
    return (mixed % np.uint64(SLOTS)).astype(np.int64)


def _equal(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return np.asarray((left[:, 0] == right[:, 0]) & (left[:, 1] == right[:, 1]))


def _byte_kind(code: int) -> Kind:
    named = {" ": SPACE, "\t": TAB, "\n": LINE, "\r": LINE, "'": APOSTROPHE}
    char = chr(code)
    if code >= 127 or (code < 32 and char not in named):
        return UNSURE
    return named.get(char, LETTER if char.isalpha() else DIGIT if char.isdigit() else SIGN)


# First bytes of UTF-8 characters that are letters in every version: 1, Latin and Cyrillic (two bytes); 2, U+5000 to U+8FFF
# and most of Hangul (three). 3: perhaps a sign from U+2010 to U+2027, such as – — “ ” …
_LEADS = bytes({0xE2: 3, **dict.fromkeys((0xC3, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xD0, 0xD1), 1),
                **dict.fromkeys((0xE5, 0xE6, 0xE7, 0xE8, 0xEB, 0xEC), 2)}.get(code, 0) for code in range(256))
_BYTE_KINDS = bytes(_byte_kind(code) for code in range(256))
_MASKS = np.asarray([(1 << 8 * length) - 1 for length in range(9)], np.uint64)
