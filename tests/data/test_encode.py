"""Encoding by remembered pieces gives exactly the tokenizer's ids."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from assay.data import encode
from assay.data.encode import Cuts, Encoder, encode_plain, id_type, plain_backend, safe_cuts, split_expression
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
# One of each kind that the expressions tell apart, and those whose class the two regex engines might see differently.
ALPHABETS = [("s1'! \n²", 5), ("sſK5'—(\u0301 \t\x0b\x1c\x85\u3000中カй٣\r", 3), ("D'1 \r\n", 5)]


def spec(pre_tokenizer: pre_tokenizers.PreTokenizer) -> dict:
    backend = encode.tokenizers.Tokenizer(encode.tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    return json.loads(backend.to_str())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_cut_changes_what_the_tokenizer_sees(family: str) -> None:
    """Exhaustively: pieces of all short strings are cut further exactly as the whole string is."""
    cuts, seen = safe_cuts(spec(FAMILIES[family])), {}
    assert cuts is not None

    def words(text: str) -> list[str]:
        if text not in seen:
            seen[text] = [word for word, _ in FAMILIES[family].pre_tokenize_str(text)]
        return seen[text]

    for alphabet, longest in ALPHABETS:
        for length in range(1, longest + 1):
            for text in map("".join, itertools.product(alphabet, repeat=length)):
                pieces = cuts.pieces.findall(text)
                assert "".join(pieces) == text
                assert [word for piece in pieces if piece for word in words(piece)] == words(text), (text, pieces)
                assert all(words(piece) == [piece.replace(" ", "Ġ")] for piece in pieces if cuts.word.fullmatch(piece)), pieces


def test_a_corpus_of_english_is_really_cut() -> None:
    """Or the exhaustive test would pass by never cutting."""
    text = "The year 2006 (after 17 others) saw [[Anarchism]], it's said.\n\n* Café — new\n"
    for name, pre_tokenizer in FAMILIES.items():
        cuts = safe_cuts(spec(pre_tokenizer))
        assert cuts is not None
        pieces = cuts.pieces.findall(text)
        assert len(pieces) >= 20, (name, pieces)
        assert sum(1 for piece in pieces if cuts.word.fullmatch(piece)) >= 9, (name, pieces)


@pytest.mark.parametrize("unknown", [
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Metaspace(),
    pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "isolated"), BARE]),
    pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split_expression(3)), "removed"), BARE]),
    pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), GPT2])])
def test_an_expression_we_have_not_analysed_is_not_cut(unknown: pre_tokenizers.PreTokenizer) -> None:
    assert safe_cuts(spec(unknown)) is None


def test_a_normalizer_that_could_see_across_a_cut_is_not_cut(tokenizer: Path) -> None:
    document = Tokenizer.from_folder(tokenizer).document
    assert safe_cuts(document) is not None
    assert safe_cuts({**document, "normalizer": {"type": "NFC"}}) is not None
    assert safe_cuts({**document, "normalizer": {"type": "NFKC"}}) is None
    assert safe_cuts({**document, "model": {**document["model"], "type": "Unigram"}}) is None


@settings(max_examples=100, deadline=None)
@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab 1'.\n")), max_size=80))
def test_ids_are_the_tokenizers_own(tokenizer_and_encoder: tuple, text: str) -> None:
    backend, encoder = tokenizer_and_encoder
    assert encoder.encode(text) == encode_plain(backend, text, encoder.dtype)


@pytest.fixture(scope="module")
def tokenizer_and_encoder(tokenizer: Path) -> tuple:
    loaded = Tokenizer.from_folder(tokenizer)
    return plain_backend(loaded), Encoder(loaded, id_type(loaded))


def test_the_memory_is_bounded(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "REMEMBERED_PIECES", 10)
    loaded = Tokenizer.from_folder(tokenizer)
    encoder = Encoder(loaded, "<u2")
    text = " ".join(f"w{i}x" for i in range(500)) + " " + "é" * 100 + " end"
    assert encoder.encode(text) == encode_plain(plain_backend(loaded), text, "<u2")
    assert len(encoder.pieces) <= 10
    assert max(map(len, encoder.pieces)) <= encode.REMEMBERED_LENGTH


def test_a_wrong_cut_is_caught_on_the_users_own_text(tokenizer: Path) -> None:
    """The fault: an expression thought safe that is not."""
    encoder = Encoder(Tokenizer.from_folder(tokenizer), "<u2")
    encoder.cuts = Cuts(re.compile("."), re.compile("x"))  # letter by letter
    with pytest.raises(ArtifactError, match="other ids than the tokenizer"):
        encoder.encode("some ordinary words of text, cut in the wrong places")


def test_what_a_document_says_cannot_end_it(tokenizer: Path) -> None:
    loaded = Tokenizer.from_folder(tokenizer)
    ids = np.frombuffer(Encoder(loaded, "<u2").encode("a<|endoftext|>b"), "<u2")
    assert loaded.eos not in ids.tolist()
    assert loaded.decode(ids.tolist()) == "a<|endoftext|>b"
    assert loaded.eos in loaded.encode("a<|endoftext|>b")  # the tokenizer itself is left as it was


def test_added_tokens_that_are_not_special_are_kept(tokenizer: Path) -> None:
    document = Tokenizer.from_folder(tokenizer).document
    added = {"id": 400, "content": "ab 1!", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": False}
    loaded = Tokenizer({**document, "added_tokens": [*document["added_tokens"], added]}, {}, {})
    ids = np.frombuffer(Encoder(loaded, "<u2").encode("xx ab 1! yy"), "<u2")
    assert 400 in ids.tolist()


def test_truncation_in_the_file_cannot_cut_a_document(tokenizer: Path) -> None:
    document = Tokenizer.from_folder(tokenizer).document
    truncating = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    loaded = Tokenizer({**document, "truncation": truncating}, {}, {})
    assert len(Encoder(loaded, "<u2").encode("one two three four five six")) // 2 > 3
