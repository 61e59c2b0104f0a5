"""A trained tokenizer: deterministic, lossless on any text, its special tokens reserved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.data.bpe import BPE_SPECIAL_TOKENS, train_tokenizer, write_tokenizer
from assay.data.data_files import DocumentRule
from assay.data.encode import Encoder
from assay.errors import DataError, GuardStop, UsageError
from assay.model.tokenizer import Tokenizer
from tests.data.conftest import write_jsonl


def test_training_again_in_a_fresh_process_gives_the_same_bytes(jsonl: Path, tokenizer: Path, tmp_path: Path) -> None:
    code = ("import sys; from pathlib import Path; from assay.data.bpe import *; from assay.data.data_files import DocumentRule; "
            "write_tokenizer(train_tokenizer([Path(sys.argv[1])], 400, rule=DocumentRule())[0], Path(sys.argv[2]))")
    subprocess.run([sys.executable, "-c", code, str(jsonl), str(tmp_path / "again")], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tokenizer / name).read_bytes()


def test_special_tokens_come_first_and_the_size_is_kept(tokenizer: Path) -> None:
    loaded = Tokenizer.from_folder(tokenizer)
    assert loaded.size == 400
    assert [loaded.ids[token] for token in BPE_SPECIAL_TOKENS] == [0, 1, 2]
    assert loaded.eos == loaded.bos == 0
    assert set(BPE_SPECIAL_TOKENS) == {loaded.tokens[i] for i in loaded.special_ids}


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_decodes_to_itself(loaded: Tokenizer, text: str) -> None:
    assert loaded.backend.decode(loaded.backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def loaded(tokenizer: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer)


@pytest.mark.parametrize(("digits", "pieces"), [(1, 5), (2, 3), (3, 2)])
def test_numbers_are_cut_into_at_most_so_many_digits(tmp_path: Path, digits: int, pieces: int) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["12345 words and others " * 50] * 40)
    trained, _ = train_tokenizer([path], 264, rule=DocumentRule(), digits=digits)
    words = [word for word, _ in trained.backend.pre_tokenizer.pre_tokenize_str("12345")]
    assert len(words) == pieces
    assert Encoder(trained, "<u2").cutter is not None  # and the fast encoder knows its expression


def test_compression_is_measured_on_text_not_trained_on(jsonl: Path, texts: list[str]) -> None:
    compression = train_tokenizer([jsonl], 400, rule=DocumentRule())[1]
    assert 3 <= len(compression.bytes) <= 30
    assert 1.2 < sum(compression.bytes) / sum(compression.tokens) < 4
    assert set(compression.bytes) <= {len(text.encode()) for text in texts}


def test_a_text_of_one_document_is_trained_on_whatever_its_name(tmp_path: Path) -> None:
    """One name in twenty would be kept for the measurement, and nothing be left."""
    for number in range(60):
        (text := tmp_path / f"{number}.txt").write_text("one text and no other, " * 20)
        assert train_tokenizer([text], 270, rule=DocumentRule())[1].bytes == []


def test_what_cannot_be_trained_is_refused(jsonl: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 259"):
        train_tokenizer([jsonl], 258, rule=DocumentRule())
    with pytest.raises(UsageError, match="--digits is 4"):
        train_tokenizer([jsonl], 400, rule=DocumentRule(), digits=4)
    with pytest.raises(DataError, match="and no more, --vocab-size is 400"):
        train_tokenizer([write_jsonl(tmp_path / "a.jsonl", ["ab"] * 99)], 400, rule=DocumentRule())
    with pytest.raises(DataError, match="no text to train on"):
        train_tokenizer([write_jsonl(tmp_path / "b.jsonl", [""])], 400, rule=DocumentRule())


def test_a_tokenizer_that_loses_text_or_has_no_end_is_not_written(tokenizer: Path, tmp_path: Path) -> None:
    document = json.loads((tokenizer / "tokenizer.json").read_text())
    for wrong, words in ((Tokenizer.from_parts(document | {"decoder": None}, eos_token="<|endoftext|>"), "comes back from its ids"),
                         (Tokenizer.from_parts(document, bos_token="<|endoftext|>"), "no token ends a text")):
        with pytest.raises(GuardStop, match=words):
            write_tokenizer(wrong, tmp_path / "made")
    assert not (tmp_path / "made").exists()
