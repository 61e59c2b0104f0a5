"""SentencePiece models are read from their bytes: where the package is installed, every text has the ids that it gives."""

import importlib.util
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from assay.cli import run as assay
from assay.errors import ArtifactError, UsageError
from assay.model.sentencepiece_model import read_sentencepiece
from assay.model.tokenizer import Tokenizer

TEXTS = ["the cat sat", "  two  spaces ", "naïve café", "日本語 🎉", "tab\there", " lead", "x", "ﬁ ① a\u0301", "cats and the sat"]


def number(value: int) -> bytes:
    found = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def part(field: int, value: Any) -> bytes:
    if isinstance(value, int):
        return number(field << 3) + number(value)
    if isinstance(value, float):
        return number(field << 3 | 5) + struct.pack("<f", value)
    return number(field << 3 | 2) + number(len(value)) + value


def made(pieces: list[tuple[str, float, int]], kind: int = 2, **trainer: int) -> bytes:
    """A model of a few pieces; kinds: 1 usual, 2 unknown, 3 control, 6 byte."""
    told = part(3, kind) + b"".join(part(int(name[1:]), value) for name, value in trainer.items())
    listed = b"".join(part(1, part(1, text.encode()) + part(2, score) + part(3, sort)) for text, score, sort in pieces)
    return listed + part(2, told) + part(3, part(1, b"identity") + part(4, 0))


BYTES = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
SMALL = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *BYTES, ("▁c", -1.0, 1), ("at", -2.0, 1), ("▁cat", -3.0, 1), ("▁", -4.0, 1),
         *((letter, -5.0 - n, 1) for n, letter in enumerate("cats"))]


def opened(folder: Path, data: bytes, config: str = "{}") -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(config)
    return Tokenizer.from_folder(folder)


def test_a_small_model_is_read(tmp_path: Path):
    found = opened(tmp_path, made(SMALL), '{"add_bos_token": true}')
    assert [found.tokens[id] for id in found.encode("cat tab")] == ["▁cat", "▁", "t", "a", "<0x62>"]
    assert found.encode("cat", special=True)[0] == found.ids["<s>"] == 1
    assert found.decode(found.encode("cat  tab é")) == "cat  tab é"
    assert (found.settings["eos_token"], found.settings["unk_token"]) == ("</s>", "<unk>")


@pytest.mark.parametrize(("data", "words", "error"), [
    (b"\xff\xff", "cannot be read as a SentencePiece model", ArtifactError), (b"", "holds 0 pieces", ArtifactError),
    (made(SMALL)[:50], "cannot be read as a SentencePiece model", ArtifactError), (made([*SMALL, SMALL[-1]]), "twice", ArtifactError),
    (made(SMALL, kind=3), "kind 3", UsageError), (made(SMALL, f24=1), "treats spaces", UsageError),
    (made(SMALL, f40=9999), "as unknown", ArtifactError), (made([*SMALL, ("x", 0.0, 9)]), "unknown kind", ArtifactError)])
def test_what_is_no_model_or_not_understood_is_refused(data: bytes, words: str, error: type[Exception], tmp_path: Path):
    with pytest.raises(error, match=words):
        opened(tmp_path, data)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_ids_are_those_of_the_package(kind: str, rule: str, tmp_path: Path):
    sentencepiece = pytest.importorskip("sentencepiece")
    words, file = ["cat", "dog", "bird", "fish"] * 20, io.BytesIO()
    lines = [f"the {word} and the other {word}s sat there naïve {n}" for n, word in enumerate(words)]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, vocab_size=330, model_type=kind,
                                             byte_fallback=True, normalization_rule_name=rule, minloglevel=5, hard_vocab_limit=False)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue()), opened(tmp_path, file.getvalue())
    for text in [*TEXTS, *lines[:8]]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert read_sentencepiece(file.getvalue(), "x").trained_as == (2 if kind == "bpe" else 1)


def test_one_is_trained_where_the_package_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [f"The {word} number {n} sat  there, naïve. Another line of plainly different words follows in its turn.\n" * 30
            for n, word in enumerate(["cat", "dog", "bird"] * 4)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    ask = ["tokenizer", str(tmp_path / "text.jsonl"), "--kind", "unigram", "--vocab-size", "300", "--out", str(tmp_path / "made")]
    if importlib.util.find_spec("sentencepiece") is None:
        assert assay(ask) == 2
        assert "pip install sentencepiece" in capsys.readouterr().err
        return
    assert assay(ask) == 0
    made = Tokenizer.from_folder(tmp_path / "made")
    assert made.size == 300
    assert made.decode(made.encode(rows[0])) == rows[0]
    assert assay(["corpus", str(tmp_path / "text.jsonl"), "--tokenizer", str(tmp_path / "made"), "--out", str(tmp_path / "corpus"),
                  "--held-out", "0.3", "--max-overlap", "1", "--workers", "1"]) == 0
