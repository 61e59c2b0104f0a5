"""Text → token ids, exactly as the tokenizer gives them, several times faster than asking it for every word again.

A byte-level tokenizer first cuts text by a regular expression and never merges across a cut. Where that expression is
one we have analysed, `Encoder` cuts the text itself, at some of the places where the tokenizer cuts too, and remembers
the ids of every piece. Any other tokenizer encodes whole documents: slower, the same ids. `encode_plain` is the twin
that the tests compare with, and the samples of every corpus are made by it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from assay.errors import ArtifactError, UsageError
from assay.model.tokenizer import Tokenizer

REMEMBERED_PIECES = 1 << 20  # about 200 MB; then the memory starts afresh
REMEMBERED_LENGTH = 48  # longer pieces rarely come again
CHECK_EVERY, CHECK_LENGTH = 1 << 18, 1 << 11  # characters between two spot checks and in one: about 1 % of the work
END_OF_DOCUMENT = "<|endoftext|>"

@dataclass(frozen=True)
class Cuts:
    """How a tokenizer lets a text be cut: `pieces` cover it, and a piece that is a `word` the tokenizer cuts no further."""

    pieces: re.Pattern[str]
    word: re.Pattern[str]


class Encoder:
    """Remembers the ids of the pieces it met; `encode` gives a text's ids as little-endian bytes of `dtype`."""

    def __init__(self, tokenizer: Tokenizer, dtype: str):
        self.backend, self.dtype = plain_backend(tokenizer), dtype
        self.cuts = safe_cuts(tokenizer.document)
        self.literal = [token["content"] for token in tokenizer.document["added_tokens"] if not token["special"]]
        self.pieces = _Pieces(self._encode_piece)
        self.model = self.backend.model
        self.unchecked = CHECK_EVERY

    def encode(self, text: str) -> bytes:
        if self.cuts is None or any(token in text for token in self.literal):
            return encode_plain(self.backend, text, self.dtype)
        self.unchecked += len(text)
        if self.unchecked >= CHECK_EVERY:
            self.unchecked = 0
            self._check(text[:CHECK_LENGTH])
        return self._by_pieces(text)

    def _by_pieces(self, text: str) -> bytes:
        assert self.cuts is not None
        return b"".join(map(self.pieces.__getitem__, self.cuts.pieces.findall(text)))

    def _encode_piece(self, piece: str) -> bytes:
        """A word goes straight to the model, in half the time; byte-level models write the space as Ġ."""
        assert self.cuts is not None
        if not self.cuts.word.fullmatch(piece):
            return encode_plain(self.backend, piece, self.dtype)
        return np.asarray([token.id for token in self.model.tokenize(piece.replace(" ", "Ġ"))], self.dtype).tobytes()

    def _check(self, text: str) -> None:
        """Against the plain twin, now and then, on the user's own text and tokenizer."""
        if self._by_pieces(text) != encode_plain(self.backend, text, self.dtype):
            raise ArtifactError(f"encoding by pieces gave other ids than the tokenizer in {text[:80]!r}…; "
                                "please report this tokenizer.json")


class _Pieces(dict[str, bytes]):
    """Piece → ids, made when first asked for."""

    def __init__(self, encode: Callable[[str], bytes]):
        self.encode = encode

    def __missing__(self, piece: str) -> bytes:
        ids = self.encode(piece)
        if len(piece) <= REMEMBERED_LENGTH:
            if len(self) >= REMEMBERED_PIECES:
                self.clear()
            self[piece] = ids
        return ids


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


# ---------------------------------------------------------------- where a text may be cut

# Llama-3's pre-tokenizer expression, the most digits of one token left open (its tokenizer.json says 3, Qwen2's 1).
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def split_expression(digits: int) -> str:
    """Words take one character before them, numbers are cut into at most `digits` digits, line ends stand together."""
    return SPLIT % ("" if digits == 1 else f"{{1,{digits}}}")


def safe_cuts(document: Mapping[str, Any]) -> Cuts | None:
    """Where this tokenizer.json lets a text be cut without changing its ids; None where we do not know."""
    normalizer, steps = document.get("normalizer"), document.get("pre_tokenizer") or {}
    if document["model"].get("type") != "BPE" or (normalizer and normalizer["type"] != "NFC"):
        return None
    *before, last = steps.get("pretokenizers") or [steps]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if last.get("use_regex", True):
        return _cuts_gpt2() if all(step["type"] == "Digits" for step in before) else None
    digits = _llama_digits(before[0]) if len(before) == 1 else None
    return _cuts_llama(digits) if digits else None


def _llama_digits(step: Mapping[str, Any]) -> int | None:
    """The most digits of one token, where the step is Llama-3's expression."""
    isolated = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    known = {split_expression(digits): digits for digits in (1, 2, 3)}
    return known.get(step["pattern"].get("Regex")) if isolated else None


# Every cut stands before an ASCII character and after one whose class is the same in every version of Unicode, where
# the tokenizer's expression cannot match across. What is uncertain is glued on until such a place comes.
# Possessive quantifiers (++): giving back a letter would cut inside a word.
_LETTER = "A-Za-zÀ-ÖØ-öø-ɏА-яא-תぁ-ゖァ-ヺ一-龥가-힣"
_SIGN = r"!-&(-/:-@\[-`{-~–—‘’“”…•"  # not the apostrophe: alone it may begin a contraction
_SIGNS = rf"(?: [{_SIGN}']++|[{_SIGN}']{{2,}}+)"


def _cuts(digits: str, word: str, *between: str) -> Cuts:
    run = rf"(?:[{_LETTER}]++|[0-9]{digits}+)"
    glued = rf"(?:[^{_LETTER}0-9]*+{run}(?=[^\x00-\x7f]))*+[^{_LETTER}0-9]*+{run}?+"
    return Cuts(re.compile("|".join([rf"[ ]?+{run}(?=[\x00-\x7f])", *between, glued])), re.compile(word))


def _cuts_gpt2() -> Cuts:
    """Of several spaces before a word the last goes with the word; before a digit that depends on the tokenizer."""
    return _cuts("+", " ?[A-Za-z]+", rf"(?:{_SIGNS}|[{_SIGN}])(?=[A-Za-z0-9 \n\r\t])", r"[\n\t\r](?=[!-~])",
                 r"[ \t\r\n]+(?=[ \t\r\n][!-/:-~])")


def _cuts_llama(digits: int) -> Cuts:
    """A sign goes with the word after it, line ends with the sign before them; single digits stand alone."""
    return _cuts("{1}" if digits == 1 else "+", r"[ !-&(-/:-@\[-`{-~]?[A-Za-z]+", rf"{_SIGNS}(?=[A-Za-z0-9 ])", rf"[{_SIGN}](?=[0-9 ])",
                 rf"[ ]?+[{_SIGN}']++[\r\n]++(?=[ -~])", r"[\r\n]++(?=[!-~])", r"[ ]+(?= [!-~])")
