"""Stored answers come back as they were given, and for nothing else than what they were given for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.data.batch import Batch
from assay.data.teacher_store import TeacherEntry, example_spans, open_teacher, teacher_entries, write_teacher
from assay.errors import ArtifactError, AssayError, DataError, UsageError
from assay.seeds import derive

VOCAB, K, TOKENIZER, TEACHER = 300, 4, "t" * 64, "w" * 64


def entry(id: int | str, length: int, k: int = K, vocab: int = VOCAB) -> TeacherEntry:
    chance = np.random.default_rng(derive(0, "entry", id))
    logprobs = -np.sort(chance.gamma(3.0, size=(length - 1, k)) + 2.0, -1)
    ids = np.stack([chance.choice(vocab, k, replace=False) for _ in range(length - 1)]) if length > 1 else np.zeros((0, k), int)
    return TeacherEntry(id, chance.integers(0, vocab, length), ids, logprobs)


def packed(rows: list[list[TeacherEntry]], length: int = 16, ids: bool = True) -> Batch:
    tokens, documents = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), -1, dtype=torch.int32)
    for row, entries in enumerate(rows):
        column = 0
        for number, each in enumerate(entries):
            end = column + len(each.tokens)
            tokens[row, column:end], documents[row, column:end] = torch.from_numpy(each.tokens), number
            column = end
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    weight = ((documents >= 0) & ~first).float()
    return Batch(tokens, weight, documents, ids=tuple(tuple(e.id for e in row) for row in rows) if ids else ())


def write(folder: Path, entries, **options) -> Path:
    write_teacher(folder, entries, **({"tokenizer": TOKENIZER, "teacher": TEACHER, "vocab": VOCAB, "k": K} | options))
    return folder


@pytest.fixture
def entries() -> list[TeacherEntry]:
    return [entry("a", 5), entry(7, 9), entry("7", 1), entry("d", 12)]


def test_every_answer_stands_at_the_token_it_was_given_for(tmp_path: Path, entries: list[TeacherEntry]):
    stored = open_teacher(write(tmp_path / "t", entries, temperature=2.0), tokenizer=TOKENIZER, teacher=TEACHER)
    assert (stored.temperature, stored.k) == (2.0, K)
    a, b, c, d = entries
    ids, logprobs = stored.streams_for(batch := packed([[d], [b, c, a]]))
    assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    for row, start, each in ((0, 0, d), (1, 0, b), (1, 10, a)):
        here = row, slice(start + 1, start + len(each.tokens))
        assert np.array_equal(ids[here], each.ids)
        np.testing.assert_allclose(logprobs[here], each.logprobs, rtol=2**-11)
    unsaid = batch.weight == 0
    assert (logprobs[unsaid] == -np.inf).all()
    assert torch.isfinite(logprobs[~unsaid]).all()
    replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)  # as the batch wants them


def test_what_a_batch_gives_is_what_is_written(tmp_path: Path, entries: list[TeacherEntry]):
    batch = packed([[entries[1], entries[0]], [entries[3]]])
    shape = (*batch.tokens.shape, K)
    chance = np.random.default_rng(derive(0, "streams"))
    ids = torch.from_numpy(chance.integers(0, VOCAB, shape).astype(np.int32))
    logprobs = torch.from_numpy(-chance.gamma(9.0, size=shape).astype(np.float32) - 2)
    stored = open_teacher(write(tmp_path / "t", teacher_entries(batch, ids, logprobs)))
    found_ids, found_logprobs = stored.streams_for(batch)
    counts = batch.weight != 0
    assert torch.equal(found_ids[counts], ids[counts])
    torch.testing.assert_close(found_logprobs[counts], logprobs[counts].half().float(), rtol=0, atol=0)


def test_a_row_with_one_id_is_one_example_whatever_documents_it_holds():
    batch = packed([[entry("a", 5), entry("b", 9)]])
    window = replace(batch, ids=((3,),))
    assert [tuple(span) for span in example_spans(window)] == [(3, 0, 0, 14)]
    assert [tuple(span) for span in example_spans(batch)] == [("a", 0, 0, 5), ("b", 0, 5, 14)]
    with pytest.raises(DataError, match="holds 2 documents and names 3 examples"):
        list(example_spans(replace(batch, ids=((1, 2, 3),))))
    with pytest.raises(DataError, match="its rows need ids"):
        list(example_spans(replace(batch, ids=())))


def test_a_thousand_examples_are_all_found(tmp_path: Path):
    """Keys are bytes of a hash: those that end in zeros too."""
    many = [entry(number, 3) for number in range(1000)]
    stored = open_teacher(write(tmp_path / "t", many))
    for each in many:
        ids, _ = stored.streams_for(packed([[each]], 3))
        assert np.array_equal(ids[0, 1:], each.ids)


@pytest.mark.parametrize(("vocab", "size"), [(65536, 2), (65537, 4)])
def test_ids_take_the_bytes_that_they_need(tmp_path: Path, vocab: int, size: int):
    each = entry("a", 6, vocab=vocab)
    each.ids[0, 0] = vocab - 1
    stored = open_teacher(write(tmp_path / "t", [each], vocab=vocab))
    assert (tmp_path / "t" / "ids.bin").stat().st_size == 5 * K * size
    assert (tmp_path / "t" / "logprobs.bin").stat().st_size == 5 * K * 2
    assert np.array_equal(stored.ids, each.ids)


# ---------------------------------------------------------------- what is refused


def test_another_text_another_example_and_a_cut_one_are_refused(tmp_path: Path, entries: list[TeacherEntry]):
    stored = open_teacher(write(tmp_path / "t", entries))
    a = entries[0]
    other = a._replace(tokens=(a.tokens + 1) % VOCAB)
    for wrong, words in ((other, "are for 5 other tokens than these 5"), (a._replace(tokens=a.tokens[:4]), "than these 4"),
                         (a._replace(id="z"), "was not asked about example 'z'"), (a._replace(id="d"), "are for 12 other tokens")):
        with pytest.raises(DataError, match=words):
            stored.streams_for(packed([[wrong]]))


def test_another_tokenizer_and_another_teacher_are_refused(tmp_path: Path, entries: list[TeacherEntry]):
    folder = write(tmp_path / "t", entries)
    with pytest.raises(DataError, match="its ids mean other text"):
        open_teacher(folder, tokenizer="x" * 64)
    with pytest.raises(DataError, match="wwwwwwwwwwww, not of xxxxxxxxxxxx"):
        open_teacher(folder, teacher="x" * 64)
    with pytest.raises(UsageError, match="no manifest"):
        open_teacher(tmp_path)


@pytest.mark.parametrize("name", ["index.bin", "ids.bin", "logprobs.bin", "manifest.json"])
def test_one_flipped_bit_anywhere_is_refused(tmp_path: Path, entries: list[TeacherEntry], name: str):
    folder = write(tmp_path / "t", entries)
    whole = (folder / name).read_bytes()
    for at in range(0, len(whole), 1 if name == "manifest.json" else 17):
        (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1:])
        with pytest.raises(ArtifactError):
            open_teacher(folder)
    (folder / name).write_bytes(whole[:-1])
    with pytest.raises(ArtifactError):
        open_teacher(folder)


@pytest.mark.parametrize(("strange", "words"), [
    (lambda e: e._replace(ids=e.ids[1:]), "none for the first token"), (lambda e: e._replace(ids=e.ids + VOCAB), "in a vocabulary of 300"),
    (lambda e: e._replace(logprobs=-e.logprobs), "are not log-probabilities"),
    (lambda e: e._replace(logprobs=e.logprobs * 0.0), "sum to a probability of 4"),
    (lambda e: e._replace(logprobs=e.logprobs * np.nan), "are not log-probabilities")])
def test_what_is_no_answer_is_not_stored(tmp_path: Path, strange, words: str):
    with pytest.raises(DataError, match=words):
        write(tmp_path / "t", [entry("a", 4), strange(entry("b", 5))])
    assert not list(tmp_path.iterdir())


def test_twice_or_nothing_is_not_stored(tmp_path: Path):
    with pytest.raises(DataError, match="stored twice"):
        write(tmp_path / "t", [entry("a", 4), entry("a", 4)])
    with pytest.raises(DataError, match="no example"):
        write(tmp_path / "t", [])
    with pytest.raises(UsageError, match="1 to 299 likeliest"):
        write(tmp_path / "t", [], k=VOCAB)
    with pytest.raises(AssayError, match="exists"):
        write(write(tmp_path / "t", [entry("a", 4)]), [entry("b", 4)])


def test_a_token_that_counts_but_belongs_to_no_example_is_refused(tmp_path: Path, entries: list[TeacherEntry]):
    stored = open_teacher(write(tmp_path / "t", entries))
    batch = packed([[entries[0]]])
    weight = batch.weight.clone()
    weight[0, 7] = 1.0
    object.__setattr__(batch, "weight", weight)  # a batch refuses such a weight itself, on the CPU
    with pytest.raises(DataError, match="row 0, column 7: the token counts"):
        stored.streams_for(batch)
