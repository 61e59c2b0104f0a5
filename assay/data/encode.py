"""Encoder: text → token ids, exactly as the tokenizer gives them, several times faster than asking it word by word.

Where a tokenizer's pre-tokenizer is one whose cuts we have analysed, `Encoder` cuts the text itself and remembers the ids of
every piece. Any other tokenizer encodes whole documents: slower, the same ids. `encode_plain` is the twin that the tests compare
with, that spot checks use on the user's own text, and that makes the samples of a corpus.

A tokenizer of the GPT-2 or Llama-3 kind first cuts text by a regular expression and never merges across a cut. We cut at
some of the same places: those that four neighbouring characters decide, whose classes are the same in every version of
Unicode. What is unsure stays in one piece. A piece of up to 15 bytes is known by its bytes and length, packed into two
64-bit numbers: a key, not a hash, so two pieces are never confused.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import chain, product
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from assay.errors import ArtifactError, UsageError
from assay.model.tokenizer import Tokenizer

CHECK_EVERY, CHECK_BYTES = 1 << 19, 1 << 11  # bytes between two spot checks and in one: about 1 % of the work
END_OF_DOCUMENT = "<|endoftext|>"

# Llama-3's pre-tokenizer expression, the most digits of one token left open (its tokenizer.json says 3, Qwen2's 1).
LLAMA_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True)
class Expression:
    """Known properties of a pre-tokenizer: where text may be cut, and which pieces it cuts no further."""

    rule: "CutRule"
    word: re.Pattern[bytes]


class Encoder:
    """Encoder of documents that remembers the ids of the pieces it met; `encode` gives a document's ids as little-endian bytes of
    `dtype`."""

    def __init__(self, tokenizer: Tokenizer, dtype: str):
        self.backend, self.dtype = plain_backend(tokenizer), dtype
        self.model = self.backend.model
        self.expression = known_expression(tokenizer.document)
        self.cutter = TextCutter(self.expression.rule) if self.expression else None
        self.memory = PieceMemory(self._encode_piece, dtype)
        self.literal = [token["content"].encode() for token in tokenizer.document["added_tokens"] if not token["special"]]
        self.unchecked = CHECK_EVERY

    def encode(self, raw: bytes) -> bytes:
        """Encode UTF-8 text to the bytes of its token ids."""
        if self.cutter is None or not raw or any(token in raw for token in self.literal):
            return encode_plain(self.backend, raw.decode(), self.dtype)
        self.unchecked += len(raw)
        if self.unchecked >= CHECK_EVERY:
            self.unchecked = 0
            self._check(raw[:CHECK_BYTES].decode(errors="ignore"))
        return self.memory.ids_of(raw, self.cutter.starts(raw))

    def _encode_piece(self, piece: bytes) -> list[int]:
        """A word goes straight to the model, in half the time; byte-level models write the space as Ġ."""
        assert self.expression is not None
        if self.expression.word.fullmatch(piece):
            return [token.id for token in self.model.tokenize(piece.decode().replace(" ", "Ġ"))]
        return self.backend.encode(piece.decode(), add_special_tokens=False).ids

    def _check(self, text: str) -> None:
        """Check the encoding against the plain twin, now and then, on the user's own text and tokenizer."""
        assert self.cutter is not None
        raw = text.encode()
        if self.memory.ids_of(raw, self.cutter.starts(raw)) != encode_plain(self.backend, text, self.dtype):
            raise ArtifactError(f"encoding by pieces gave other ids than the tokenizer in {text[:80]!r}…; "
                                "please report this tokenizer.json")


def encode_plain(backend: tokenizers.Tokenizer, text: str, dtype: str) -> bytes:
    """The tokenizer's own ids for a whole text, without BOS or EOS."""
    return np.asarray(backend.encode(text, add_special_tokens=False).ids, dtype=dtype).tobytes()


def plain_backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A copy to which the names of special tokens are plain text: what a document says cannot end it."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True
    return backend


def id_type(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.size <= 1 << 16 else "<u4"


def boundary_id(tokenizer: Tokenizer, wanted: str | None) -> int:
    """The token that stands before and after every document: the one asked for, else the tokenizer's declared EOS."""
    if wanted is None and tokenizer.eos is not None:
        return tokenizer.eos
    token = wanted or END_OF_DOCUMENT
    if token not in tokenizer.ids:
        raise UsageError(f"the tokenizer has no token {token!r} to end documents with; name one with --boundary")
    return tokenizer.ids[token]


def split_expression(digits: int) -> str:
    """Words take one character before them, numbers are cut into at most `digits` digits, line ends stand together."""
    return LLAMA_SPLIT % ("" if digits == 1 else f"{{1,{digits}}}")


def known_expression(document: Mapping[str, Any]) -> Expression | None:
    """Split expression of a tokenizer.json; None where we do not know that cutting leaves its ids as they are."""
    normalizer, steps = document.get("normalizer"), document.get("pre_tokenizer") or {}
    if document["model"].get("type") != "BPE" or (normalizer and normalizer["type"] != "NFC"):
        return None
    *before, last = steps.get("pretokenizers") or [steps]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if last.get("use_regex", True) and not before:
        return Expression(gpt2_cuts, re.compile(rb" ?(?:[A-Za-z]+|[0-9]+)"))
    if last.get("use_regex", True):
        return Expression(gpt2_cuts, re.compile(rb" ?[A-Za-z]+")) if all(step["type"] == "Digits" for step in before) else None
    digits = _llama_digits(before[0]) if len(before) == 1 else None
    return Expression(llama_cuts(digits), re.compile(rb"[ !-&(-/:-@\[-`{-~]?[A-Za-z]+")) if digits else None


def _llama_digits(step: Mapping[str, Any]) -> int | None:
    """The most digits of one token, where the step is Llama-3's expression."""
    isolated = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    known = {split_expression(digits): digits for digits in (1, 2, 3)}
    return known.get(step["pattern"].get("Regex")) if isolated else None

# ---------------------------------------------------------------- pieces and their memory


KEY_BYTES = 15
LONG_BYTES = 48  # pieces between both are remembered in a dict; longer ones rarely come again
CAPACITY, _SLOTS, _IDS = 1 << 20, 1 << 22, 1 << 24  # pieces and ids remembered, in 80 MB; then it starts afresh
_BLOCK = 1 << 15  # pieces looked up at once: their arrays stay in the processor's cache
MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


class CharKind(IntEnum):
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


_EDGE, LETTER, DIGIT, SPACE, TAB, _LINE, SIGN, APOSTROPHE, DASH, UNSURE = CharKind
BLANK, _SIGNS = (SPACE, TAB, _LINE), (SIGN, APOSTROPHE, DASH)
# May a text be cut between `left` and `right`, given the character before them and the one after?
CutRule = Callable[[CharKind, CharKind, CharKind, CharKind], bool]


def gpt2_cuts(before: CharKind, left: CharKind, right: CharKind, after: CharKind) -> bool:
    """`'s|'t|…| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`, also with digits set apart before it."""
    if left in BLANK and right in BLANK:
        return after in (LETTER, *_SIGNS)  # of several, the last one stands alone or goes with the word
    if left in (TAB, _LINE):
        return before in (_EDGE, LETTER, DIGIT, *_SIGNS) or (before in BLANK and right != DIGIT)
    if left == APOSTROPHE and right == LETTER:
        return before in (SPACE, *_SIGNS)  # alone it may begin a contraction
    if left in _SIGNS:
        return right not in _SIGNS
    return left in (LETTER, DIGIT) and left != right


@functools.cache
def llama_cuts(digits: int) -> CutRule:
    """Llama-3's expression (encode.SPLIT), with at most so many digits in one token."""

    def rule(before: CharKind, left: CharKind, right: CharKind, after: CharKind) -> bool:
        if left == SPACE:
            return right == SPACE and after in (LETTER, DIGIT, *_SIGNS)
        if left == _LINE:
            return right in (LETTER, DIGIT, *_SIGNS) or (right == SPACE and before in _SIGNS)
        if left in _SIGNS:  # one alone goes with the word after it
            return right in (DIGIT, SPACE) or (right == LETTER and left != DASH and before in (SPACE, *_SIGNS))
        if left == right == DIGIT:
            return digits == 1  # of more, the groups depend on where the number begins
        return left in (LETTER, DIGIT) and left != right

    return rule


class TextCutter:
    """Cutter of text into pieces, by a rule kept as a table over four neighbours."""

    def __init__(self, rule: CutRule):
        self.table = _cut_table(rule)

    def starts(self, raw: bytes) -> Places:
        """Places where the pieces of a UTF-8 text begin; the first at 0."""
        kinds = np.zeros(len(raw) + 3, np.uint16)
        kinds[2:-1] = char_kinds(raw)
        around = _number(kinds[:-3], kinds[1:-2], kinds[2:-1], kinds[3:])
        cut = self.table[around]
        cut[:1] = True
        return np.flatnonzero(cut)


@functools.cache
def _cut_table(rule: CutRule) -> NDArray[np.bool_]:
    sure = [kind for kind in CharKind if kind not in (_EDGE, UNSURE)]
    table = np.zeros(len(CharKind) ** 4, np.bool_)
    for around in product(CharKind, sure, sure, CharKind):
        table[_number(*around)] = rule(*around)
    table.setflags(write=False)
    return table


class PieceMemory:
    """The ids of pieces: an open-addressed table by key, searched for many pieces at once."""

    def __init__(self, encode: Callable[[bytes], list[int]], dtype: str):
        self.encode, self.dtype = encode, dtype
        self.forget()

    def forget(self) -> None:
        self.pieces = self.used = 0
        self.slots = np.zeros(_SLOTS, np.int32)  # number + 1, so that untouched memory means empty
        self.keys = np.zeros((CAPACITY, 2), np.uint64)
        self.first, self.count = np.zeros(CAPACITY, np.int32), np.zeros(CAPACITY, np.int32)  # of a piece, in `ids`
        self.ids = np.zeros(1 << 16, self.dtype)
        self.long: dict[bytes, int] = {}

    def ids_of(self, raw: bytes, starts: Places) -> bytes:
        """The ids of all pieces, one after the other."""
        words = np.frombuffer(raw + bytes(32 - len(raw) % 8), "<u8")
        ends = np.append(starts[1:], len(raw))
        blocks = range(0, len(starts), _BLOCK)
        return b"".join(self._block(raw, words, starts[i : i + _BLOCK], ends[i : i + _BLOCK]) for i in blocks)

    def _block(self, raw: bytes, words: NDArray[np.uint64], starts: Places, ends: Places) -> bytes:
        if self.pieces + len(starts) > CAPACITY or self.used > _IDS:
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
        numbers = self.slots[slots] - 1
        looking = np.flatnonzero((numbers >= 0) & ~_equal(self.keys[numbers], keys))
        while len(looking):
            slots[looking] = (slots[looking] + 1) % _SLOTS
            numbers[looking] = there = self.slots[slots[looking]] - 1
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
        """Add new pieces under the next numbers."""
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
            empty = np.flatnonzero(self.slots[slots] == 0)
            self.slots[slots[empty]] = numbers[empty] + 1  # where two want one slot, one of them has it now
            further = self.slots[slots] != numbers + 1
            numbers, slots = numbers[further], (slots[further] + 1) % _SLOTS

    def _gathered(self, numbers: NDArray[np.int32]) -> bytes:
        first, count = self.first[numbers], self.count[numbers]
        ends = np.cumsum(count)
        return self.ids[np.repeat(first - ends + count, count) + np.arange(int(ends[-1]))].tobytes()


def char_kinds(raw: bytes) -> Bytes:
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
    """Table index of four neighbouring character kinds."""
    return ((before * len(CharKind) + left) * len(CharKind) + right) * len(CharKind) + after


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
    return (mixed % np.uint64(_SLOTS)).astype(np.int64)


def _equal(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return np.asarray((left[:, 0] == right[:, 0]) & (left[:, 1] == right[:, 1]))


def _byte_kind(code: int) -> CharKind:
    named = {" ": SPACE, "\t": TAB, "\n": _LINE, "\r": _LINE, "'": APOSTROPHE}
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
