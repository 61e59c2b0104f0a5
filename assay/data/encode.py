"""Text → token ids, exactly as the tokenizer gives them, several times faster than asking it for every word again.

Where a tokenizer's pre-tokenizer is one whose cuts we have analysed (pieces.py), `Encoder` cuts the text itself and
remembers the ids of every piece. Any other tokenizer encodes whole documents: slower, the same ids. `encode_plain` is the
twin that the tests compare with, that spot checks use on the user's own text, and that makes the samples of a corpus.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers

from assay.data.pieces import Cutter, Memory, Rule, gpt2, llama
from assay.errors import ArtifactError, UsageError
from assay.model.tokenizer import Tokenizer

CHECK_EVERY, CHECK_BYTES = 1 << 19, 1 << 11  # bytes between two spot checks and in one: about 1 % of the work
END_OF_DOCUMENT = "<|endoftext|>"

# Llama-3's pre-tokenizer expression, the most digits of one token left open (its tokenizer.json says 3, Qwen2's 1).
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True)
class Expression:
    """What we know of a pre-tokenizer: where text may be cut, and which pieces it cuts no further."""

    rule: Rule
    word: re.Pattern[bytes]


class Encoder:
    """Remembers the ids of the pieces it met; `encode` gives a document's ids as little-endian bytes of `dtype`."""

    def __init__(self, tokenizer: Tokenizer, dtype: str):
        self.backend, self.dtype = plain_backend(tokenizer), dtype
        self.model = self.backend.model
        self.expression = known_expression(tokenizer.document)
        self.cutter = Cutter(self.expression.rule) if self.expression else None
        self.memory = Memory(self._encode_piece, dtype)
        self.literal = [token["content"].encode() for token in tokenizer.document["added_tokens"] if not token["special"]]
        self.unchecked = CHECK_EVERY

    def encode(self, raw: bytes) -> bytes:
        """Of UTF-8."""
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
        """Against the plain twin, now and then, on the user's own text and tokenizer."""
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
    return SPLIT % ("" if digits == 1 else f"{{1,{digits}}}")


def known_expression(document: Mapping[str, Any]) -> Expression | None:
    """Of a tokenizer.json; None where we do not know that cutting leaves its ids as they are."""
    normalizer, steps = document.get("normalizer"), document.get("pre_tokenizer") or {}
    if document["model"].get("type") != "BPE" or (normalizer and normalizer["type"] != "NFC"):
        return None
    *before, last = steps.get("pretokenizers") or [steps]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if last.get("use_regex", True) and not before:
        return Expression(gpt2, re.compile(rb" ?(?:[A-Za-z]+|[0-9]+)"))
    if last.get("use_regex", True):
        return Expression(gpt2, re.compile(rb" ?[A-Za-z]+")) if all(step["type"] == "Digits" for step in before) else None
    digits = _llama_digits(before[0]) if len(before) == 1 else None
    return Expression(llama(digits), re.compile(rb"[ !-&(-/:-@\[-`{-~]?[A-Za-z]+")) if digits else None


def _llama_digits(step: Mapping[str, Any]) -> int | None:
    """The most digits of one token, where the step is Llama-3's expression."""
    isolated = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    known = {split_expression(digits): digits for digits in (1, 2, 3)}
    return known.get(step["pattern"].get("Regex")) if isolated else None
