"""SentencePiece models: a tokenizer from the bytes of a tokenizer.model, BPE or unigram, without the sentencepiece package.

The file is a protobuf message: pieces with scores and kinds, what the trainer was told, and how text is normalised. Its character map is
handed on as it stands to the `tokenizers` library, which reads the same format. Spaces become ▁, one is put in front where the model says
so, and what no piece has becomes bytes where the model has them. What would change ids and is not understood is refused.
"""

import base64
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from assay.errors import ArtifactError, UsageError
from assay.model.gguf_tokenizer import TokenType, merges_from_scores

UNIGRAM, BPE = 1, 2
MOST_PIECES = 1 << 22
SPACE = "▁"


class PieceEntry(NamedTuple):
    text: str
    score: float
    kind: int


class SentencePieceFile(NamedTuple):
    """Contents of a SentencePiece tokenizer.model."""

    pieces: list[PieceEntry]
    trained_as: int  # UNIGRAM, BPE, …
    named: dict[str, int]  # unk, bos, eos, pad → id; -1: none
    suffix_spaces: bool
    charsmap: bytes
    dummy_prefix: bool
    remove_extra: bool
    escape: bool


def sentencepiece_document(data: bytes, where: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The document of a tokenizer.json, and the names of its special tokens. `settings` are those of tokenizer_config.json beside the
    model, which say what goes around a text."""
    found = read_sentencepiece(data, where)
    if found.suffix_spaces or not found.escape:
        raise UsageError(f"{where}: treats spaces as no usual SentencePiece model does (suffix {found.suffix_spaces}, escaped "
                         f"{found.escape}), which is not supported; have transformers write a tokenizer.json beside it")
    if found.trained_as not in (UNIGRAM, BPE):
        raise UsageError(f"{where}: a SentencePiece model of kind {found.trained_as}; expected unigram (1) or BPE (2)")
    named = {f"{name}_token": id for name, id in found.named.items() if 0 <= id < len(found.pieces)}
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(found),
                "normalizer": normalizer(found), "pre_tokenizer": None,
                "post_processor": around(found, named, settings), "decoder": decoder(found), "model": model_of(found, where)}
    return document, {name: found.pieces[id].text for name, id in named.items()}


def added_tokens(found: SentencePieceFile) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    return [{"id": id, "content": piece.text, **plain, "special": special[TokenType(piece.kind)]}
            for id, piece in enumerate(found.pieces) if piece.kind in special]


def normalizer(found: SentencePieceFile) -> dict[str, Any]:
    """The character map first; then extra spaces; then spaces as pieces have them."""
    steps: list[dict[str, Any]] = []
    if found.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(found.charsmap).decode()})
    if found.remove_extra:
        steps += [{"type": "Strip", "strip_left": True, "strip_right": True},
                  {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    steps += [{"type": "Prepend", "prepend": SPACE}] if found.dummy_prefix else []
    return {"type": "Sequence", "normalizers": [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}


def decoder(found: SentencePieceFile) -> dict[str, Any]:
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if found.dummy_prefix else []
    return {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
                                             {"type": "Fuse"}, *strip]}


def model_of(found: SentencePieceFile, where: str) -> dict[str, Any]:
    unknown = found.named["unk"]
    if not 0 <= unknown < len(found.pieces):
        raise ArtifactError(f"{where}: names piece {unknown} as unknown, and has {len(found.pieces)} pieces")
    bytes_too = any(piece.kind == TokenType.BYTE for piece in found.pieces)
    if found.trained_as == UNIGRAM:
        return {"type": "Unigram", "unk_id": unknown, "vocab": [[piece.text, piece.score] for piece in found.pieces],
                "byte_fallback": bytes_too}
    vocabulary = {piece.text: id for id, piece in enumerate(found.pieces)}
    if len(vocabulary) < len(found.pieces):
        raise ArtifactError(f"{where}: {len(found.pieces) - len(vocabulary)} pieces stand there twice; which id a text becomes is not "
                            "defined")
    merges = merges_from_scores(vocabulary, [piece.score for piece in found.pieces], [piece.kind for piece in found.pieces])
    return {"type": "BPE", "dropout": None, "unk_token": found.pieces[unknown].text, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": bytes_too, "ignore_merges": False, "vocab": vocabulary,
            "merges": merges}


def around(found: SentencePieceFile, named: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Special tokens that tokenizer_config.json puts around a text; the model itself puts nothing there."""
    ends = [named.get(f"{name}_token") if settings.get(f"add_{name}_token") else None for name in ("bos", "eos")]
    if ends == [None, None]:
        return None
    before, after = ([] if id is None else [{"SpecialToken": {"id": found.pieces[id].text, "type_id": 0}}] for id in ends)
    text = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    tokens = {found.pieces[id].text: {"id": found.pieces[id].text, "ids": [id], "tokens": [found.pieces[id].text]}
              for id in ends if id is not None}
    return {"type": "TemplateProcessing", "single": text, "pair": [*text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": tokens}

# ---------------------------------------------------------------- protobuf


def read_sentencepiece(data: bytes, where: str) -> SentencePieceFile:
    pieces, trainer, normal = list[PieceEntry](), dict[int, Any](), dict[int, Any]()
    try:
        for number, value in fields(data):
            if number == 1:
                one = dict(fields(value))
                pieces.append(PieceEntry(one.get(1, b"").decode(), float_of(one.get(2, 0)), one.get(3, int(TokenType.NORMAL))))
            elif number == 2:
                trainer = dict(fields(value))
            elif number == 3:
                normal = dict(fields(value))
            if len(pieces) > MOST_PIECES:
                raise ValueError(f"more than {MOST_PIECES:,} pieces")
    except (ValueError, IndexError, struct.error, AttributeError, TypeError) as error:
        raise ArtifactError(f"{where}: cannot be read as a SentencePiece model ({error}); restore the file") from None
    if not pieces or {piece.kind for piece in pieces} - set(map(int, TokenType)):
        raise ArtifactError(f"{where}: holds {len(pieces)} pieces, or some of an unknown kind; not a SentencePiece model")
    named = {name: signed(trainer.get(field, default)) for name, field, default in
             (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("pad", 43, -1))}
    return SentencePieceFile(pieces, trainer.get(3, UNIGRAM), named, bool(trainer.get(24, 0)), normal.get(2, b""), bool(normal.get(3, 1)),
                             bool(normal.get(4, 1)), bool(normal.get(5, 1)))


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field of a message: whole numbers, four or eight bytes as they stand, or bytes."""
    place = 0
    while place < len(data):
        key, place = varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = varint(data, place)
            yield number, value
        elif kind in (1, 2, 5):
            length, place = varint(data, place) if kind == 2 else ({1: 8, 5: 4}[kind], place)
            if place + length > len(data):
                raise ValueError(f"a field of {length} bytes ends beyond the file")
            yield number, data[place : place + length]
            place += length
        else:
            raise ValueError(f"a field of wire type {kind}")


def varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def float_of(value: Any) -> float:
    return struct.unpack("<f", value)[0] if isinstance(value, bytes) else float(value)
