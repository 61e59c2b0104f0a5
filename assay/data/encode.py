"""Text → token ids, exactly as the tokenizer gives them, several times faster than asking it for every word again.

A byte-level tokenizer first cuts text by a regular expression and never merges across a cut. Where that expression is
one we have analysed, `Encoder` cuts the text itself, at some of the places where the tokenizer cuts too, and remembers
the ids of every piece. Any other tokenizer encodes whole documents: slower, the same ids. `encode_plain` is the twin
that the tests compare with, and the samples of every corpus are made by it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from assay.errors import ArtifactError, UsageError

REMEMBERED_PIECES = 1 << 20  # about 200 MB; then the memory starts afresh
REMEMBERED_LENGTH = 48  # longer pieces rarely come again
END_OF_DOCUMENT = "<|endoftext|>"

# Llama-3's pre-tokenizer expression, with the most digits of one token left open (its tokenizer.json says 3, Qwen2's 1).
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def split_expression(digits: int) -> str:
    """Words take one character before them, numbers are cut into at most `digits` digits, line ends stand together."""
    return SPLIT % ("" if digits == 1 else f"{{1,{digits}}}")


# Cutting is safe where both neighbours are ASCII, so that no table of Unicode classes is asked, and the tokenizer's
# expression cannot match across. The last alternative glues on until such a place comes. Possessive quantifiers (++):
# giving back a letter would cut inside a word.
_RUN = r"(?:[A-Za-z]++|[0-9]++)"
_SIGN = r"[!-&(-/:-@\[-`{-~]"  # not the apostrophe: it may begin a contraction
_GLUED = rf"(?:[^A-Za-z0-9]*+{_RUN}(?=[^\x00-\x7f]))*+[^A-Za-z0-9]*+{_RUN}?+"
_CUT_GPT2 = re.compile(rf"[ ]?+(?:{_SIGN}++|{_RUN})(?=[\x00-&(-\x7f])|\n(?=[!-~])|{_GLUED}")
_CUT_LLAMA = re.compile(rf" {_SIGN}++(?=[A-Za-z0-9 ])|{_SIGN}{{2,}}+(?=[A-Za-z0-9 ])|{_SIGN}(?=[0-9 ])"
                        rf"|[ ]?+{_SIGN}++[\r\n]++(?=[ -~])|[\r\n]++(?=[!-~])|{_GLUED}")
Cut = Callable[[str], list[str]]


class Encoder:
    """Remembers the ids of the pieces it met; `encode` gives a text's ids as little-endian bytes of `dtype`."""

    def __init__(self, tokenizer: Tokenizer, dtype: str):
        self.tokenizer, self.dtype = tokenizer, dtype
        spec = json.loads(tokenizer.to_str())
        self.cut = safe_cut(spec)
        self.literal = [token["content"] for token in spec["added_tokens"] if not token["special"]]
        self.pieces = _Pieces(tokenizer, dtype)

    def encode(self, text: str) -> bytes:
        if self.cut is None or any(token in text for token in self.literal):
            return encode_plain(self.tokenizer, text, self.dtype)
        return b"".join(map(self.pieces.__getitem__, self.cut(text)))


class _Pieces(dict[str, bytes]):
    def __init__(self, tokenizer: Tokenizer, dtype: str):
        self.tokenizer, self.dtype = tokenizer, dtype

    def __missing__(self, piece: str) -> bytes:
        ids = encode_plain(self.tokenizer, piece, self.dtype)
        if len(piece) <= REMEMBERED_LENGTH:
            if len(self) >= REMEMBERED_PIECES:
                self.clear()
            self[piece] = ids
        return ids


def encode_plain(tokenizer: Tokenizer, text: str, dtype: str) -> bytes:
    """The tokenizer's own ids for a whole text; no BOS or EOS is added, and special tokens' names are plain text."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype=dtype).tobytes()


def load_tokenizer(path: Path) -> Tokenizer:
    """From a tokenizer.json or the folder that holds one; truncation and padding off, special tokens not read from text."""
    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception, whatever is wrong with the file
        raise ArtifactError(f"{file}: the tokenizers library cannot read it ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if json.loads(tokenizer.to_str())["model"].get("dropout"):
        raise UsageError(f"{file}: the tokenizer has BPE dropout, which gives other ids every time; set it to null")
    return tokenizer


def tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path}: no tokenizer.json here; give that file or the folder that holds it")
    return file


def tokenizer_digest(path: Path) -> str:
    """sha256 of tokenizer.json: what decides the ids of a text."""
    return hashlib.sha256(tokenizer_file(path).read_bytes()).hexdigest()


def id_type(tokenizer: Tokenizer) -> str:
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    return "<u2" if largest < 1 << 16 else "<u4"


def boundary_token(tokenizer: Tokenizer, path: Path, wanted: str | None) -> tuple[str, int]:
    """The token that stands before and after every document: the one asked for, else the tokenizer's declared EOS."""
    token = wanted or _declared_eos(path) or END_OF_DOCUMENT
    number = tokenizer.token_to_id(token)
    if number is None:
        raise UsageError(f"{path}: the tokenizer has no token {token!r} to end documents with; name one with --boundary")
    return token, number


def _declared_eos(path: Path) -> str | None:
    config = tokenizer_file(path).with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    return eos["content"] if isinstance(eos, dict) else eos


def safe_cut(spec: dict[str, Any]) -> Cut | None:
    """Where this tokenizer.json lets a text be cut without changing its ids; None where we do not know."""
    if spec["model"]["type"] != "BPE" or (spec["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    steps = spec["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    own_expression, before = steps[-1].get("use_regex", True), steps[:-1]
    if own_expression and all(step["type"] == "Digits" for step in before):
        return _CUT_GPT2.findall
    if not own_expression and len(before) == 1 and _is_llama_split(before[0]):
        return _CUT_LLAMA.findall
    return None


def _is_llama_split(step: dict[str, Any]) -> bool:
    known: Iterable[str] = (split_expression(digits) for digits in (1, 2, 3))
    return (step["type"] == "Split" and step["pattern"].get("Regex") in known
            and step["behavior"] == "Isolated" and not step["invert"])
