"""Encoding by remembered pieces gives exactly the tokenizer's ids."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from assay.data import encode
from assay.data.encode import Encoder, TextCutter, encode_plain, id_type, known_expression, plain_backend, split_expression
from assay.errors import ArtifactError
from assay.model.tokenizer import Tokenizer

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BARE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
FAMILIES = {
    "gpt2": GPT2,
    "smollm2": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), GPT2]),
    **{f"llama{n}": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split_expression(n)), "isolated"), BARE])
       for n in (1, 2, 3)},
}
# One of each kind that the rules tell apart, and characters whose class two Unicode tables might see differently.
ALPHABETS = [("s1'! \n²", 4), ("D'1 \r\t\n", 4), ("é—5 \n'中", 4),
             ("sſK5'(\u0301 \t\x0b\x1c\x85\u3000中北カ번가й٣\r×é—\u2003\u2028", 2)]


def spec(pre_tokenizer: pre_tokenizers.PreTokenizer) -> dict:
    backend = encode.tokenizers.Tokenizer(encode.tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    return json.loads(backend.to_str())


def cut(cutter: TextCutter, text: str) -> list[str]:
    raw = text.encode()
    starts = cutter.starts(raw).tolist()
    return [raw[start:end].decode() for start, end in zip(starts, [*starts[1:], len(raw)], strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_cut_changes_what_the_tokenizer_sees(family: str) -> None:
    """Exhaustively: the pieces of all short strings are cut further exactly as the whole string is."""
    expression, seen = known_expression(spec(FAMILIES[family])), {}
    assert expression is not None
    cutter = TextCutter(expression.rule)

    def words(text: str) -> list[str]:
        if text not in seen:
            seen[text] = [word for word, _ in FAMILIES[family].pre_tokenize_str(text)]
        return seen[text]

    for alphabet, longest in ALPHABETS:
        for length in range(1, longest + 1):
            for text in map("".join, itertools.product(alphabet, repeat=length)):
                found = cut(cutter, text)
                assert "".join(found) == text
                assert [word for piece in found for word in words(piece)] == words(text), (text, found)
                whole = [piece for piece in found if expression.word.fullmatch(piece.encode())]
                assert all(words(piece) == [piece.replace(" ", "Ġ")] for piece in whole), whole


def test_a_text_is_really_cut() -> None:
    """Or the exhaustive test would pass by never cutting."""
    text = "The year 2006 (after 17 others) saw [[Anarchism]], it's said.\n\n* Café — new “北京大学” слово\n"
    for name, pre_tokenizer in FAMILIES.items():
        expression = known_expression(spec(pre_tokenizer))
        assert expression is not None
        found = cut(TextCutter(expression.rule), text)
        assert len(found) >= 24, (name, found)
        assert sum(1 for piece in found if expression.word.fullmatch(piece.encode())) >= 9, (name, found)


@pytest.mark.parametrize("unknown", [
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Metaspace(),
    pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "isolated"), BARE]),
    pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split_expression(3)), "removed"), BARE]),
    pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), GPT2])])
def test_an_expression_we_have_not_analysed_is_not_cut(unknown: pre_tokenizers.PreTokenizer) -> None:
    assert known_expression(spec(unknown)) is None


def test_a_normalizer_that_could_see_across_a_cut_is_not_cut(tokenizer: Path) -> None:
    document = Tokenizer.from_folder(tokenizer).document
    assert known_expression(document) is not None
    assert known_expression({**document, "normalizer": {"type": "NFC"}}) is not None
    assert known_expression({**document, "normalizer": {"type": "NFKC"}}) is None
    assert known_expression({**document, "model": {**document["model"], "type": "Unigram"}}) is None


@settings(max_examples=100, deadline=None)
@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab 1'.\n")), max_size=80))
def test_ids_are_the_tokenizers_own(tokenizer_and_encoder: tuple, text: str) -> None:
    backend, encoder = tokenizer_and_encoder
    assert encoder.encode(text.encode()) == encode_plain(backend, text, encoder.dtype)


@pytest.fixture(scope="module")
def tokenizer_and_encoder(tokenizer: Path) -> tuple:
    loaded = Tokenizer.from_folder(tokenizer)
    return plain_backend(loaded), Encoder(loaded, id_type(loaded))


@pytest.mark.parametrize("limits", [{"CAPACITY": 64, "_BLOCK": 16, "_SLOTS": 128}, {"_BLOCK": 7}, {"_IDS": 10, "_BLOCK": 32}])
def test_the_memory_is_bounded_and_may_forget_at_any_time(tokenizer: Path, monkeypatch: pytest.MonkeyPatch,
                                                          limits: dict[str, int]) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(encode, name, value)
    loaded = Tokenizer.from_folder(tokenizer)
    encoder = Encoder(loaded, "<u2")
    text = " ".join(f"w{chr(97 + i % 26)}x{i * 7919 % 100} {'averylongword' * (i % 5)}" for i in range(500)) + " " + "٣" * 100 + " end"
    for _ in range(2):
        assert encoder.encode(text.encode()) == encode_plain(plain_backend(loaded), text, "<u2")
    assert encoder.memory.pieces <= encode.CAPACITY
    assert all(encode.KEY_BYTES < len(piece) <= encode.LONG_BYTES for piece in encoder.memory.long)


def test_what_is_remembered_is_not_encoded_again(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where many pieces want one slot, and after the store of ids has grown."""
    monkeypatch.setattr(encode, "_SLOTS", 1024)
    monkeypatch.setattr(encode, "_BLOCK", 400)
    loaded = Tokenizer.from_folder(tokenizer)
    encoder = Encoder(loaded, "<u2")
    text = " ".join("abcdefgh"[: 1 + i % 8] + "xyz"[i % 3] * (1 + i // 24) for i in range(800))
    first = encoder.encode(text.encode())
    encoder.encode(("٣" * 40000).encode())
    known = encoder.memory.pieces
    assert encoder.encode(text.encode()) == first == encode_plain(plain_backend(loaded), text, "<u2")
    assert encoder.memory.pieces == known > 200


def test_pieces_that_differ_in_a_zero_byte_or_in_length_are_told_apart(tokenizer: Path) -> None:
    """The key is the bytes and the length: padding is no part of it, wherever the piece stands in its words."""
    loaded = Tokenizer.from_folder(tokenizer)
    encoder, backend = Encoder(loaded, "<u2"), plain_backend(loaded)
    stems = ["a", "a" * 7, "a" * 8, "a" * 9, "a" * 14, "a" * 15, "a" * 16]
    for shift in range(9):
        for text in (f"{'(' * shift}{stem}{end}" for stem in stems for end in ("", "\x00", "\x00\x00", "b", "\x01")):
            assert encoder.encode(text.encode()) == encode_plain(backend, text, "<u2"), text


def test_a_wrong_rule_is_caught_on_the_users_own_text(tokenizer: Path) -> None:
    """The fault: an expression thought safe to cut that is not."""
    encoder = Encoder(Tokenizer.from_folder(tokenizer), "<u2")
    encoder.cutter = TextCutter(lambda *_: True)  # letter by letter
    with pytest.raises(ArtifactError, match="other ids than the tokenizer"):
        encoder.encode(b"some ordinary words of text, cut in the wrong places")


def test_what_a_document_says_cannot_end_it(tokenizer: Path) -> None:
    loaded = Tokenizer.from_folder(tokenizer)
    ids = np.frombuffer(Encoder(loaded, "<u2").encode(b"a<|endoftext|>b"), "<u2")
    assert loaded.eos not in ids.tolist()
    assert loaded.decode(ids.tolist()) == "a<|endoftext|>b"
    assert loaded.eos in loaded.encode("a<|endoftext|>b")  # the tokenizer itself is left as it was


def test_added_tokens_that_are_not_special_are_kept(tokenizer: Path) -> None:
    document = Tokenizer.from_folder(tokenizer).document
    added = {"id": 400, "content": "ab 1!", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": False}
    loaded = Tokenizer({**document, "added_tokens": [*document["added_tokens"], added]}, {}, {})
    ids = np.frombuffer(Encoder(loaded, "<u2").encode(b"xx ab 1! yy"), "<u2")
    assert 400 in ids.tolist()


def test_truncation_in_the_file_cannot_cut_a_document(tokenizer: Path) -> None:
    document = Tokenizer.from_folder(tokenizer).document
    truncating = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    loaded = Tokenizer({**document, "truncation": truncating}, {}, {})
    assert len(Encoder(loaded, "<u2").encode(b"one two three four five six")) // 2 > 3
