"""Files become documents: every byte is somewhere, bad rows are named."""

import gzip
import json
import random
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from assay.data import data_files
from assay.data.data_files import DocumentRule, find_sources, iter_documents, read_rows
from assay.errors import DataError, UsageError

TRICKY = "﻿a\r\nb\tc \n\n  é\u2028x\x85y\n no end"


def read(path: Path, **rule: object) -> list[bytes]:
    (source,) = find_sources([path])
    return [document.raw for document in iter_documents(source, DocumentRule(**rule), Counter())]  # type: ignore[arg-type]


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TRICKY.encode())
    with gzip.open(tmp_path / "b.gz", "wb") as file:
        file.write(TRICKY.encode())
    assert read(tmp_path / "a.txt") == read(tmp_path / "b.gz") == [TRICKY.encode()]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_chunks_end_at_line_ends_and_are_the_file(tmp_path: Path, size: int) -> None:
    raw = TRICKY.encode() * 3
    (tmp_path / "a.txt").write_bytes(raw)
    chunks = read(tmp_path / "a.txt", document_bytes=size)
    assert b"".join(chunks) == raw
    assert all(chunk.endswith(b"\n") and len(chunk) >= min(size, len(raw)) for chunk in chunks[:-1])
    assert all(b"\n" not in chunk[size - 1 : -1] for chunk in chunks)


def test_a_separator_line_ends_a_document_and_belongs_to_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n---\nthree ---\n---\r\n\n---\nlast")
    assert read(tmp_path / "a.txt", split="---") == [b"one\ntwo\n", b"three ---\n", b"\n", b"last"]
    (tmp_path / "b.txt").write_text("one\n\n\ntwo\n")
    left_out: Counter[str] = Counter()
    (source,) = find_sources([tmp_path / "b.txt"])
    found = list(iter_documents(source, DocumentRule(split=""), left_out))
    assert [(d.ordinal, d.raw) for d in found] == [(0, b"one\n"), (2, b"two\n")]
    assert left_out == {"empty": 1}


def test_jsonl_and_parquet_give_the_same_documents(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [TRICKY, "plain", "\x00 zero", "北京 😀"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows) + "\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows)
    parquet.write_table(pyarrow.table({"other": [1, 2, 3, 4], "text": rows}), tmp_path / "c.parquet")
    expected = [row.encode() for row in rows]
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "b.jsonl.gz") == read(tmp_path / "c.parquet") == expected


@pytest.mark.parametrize(("line", "said"), [
    ('{"text": "cut', "not JSON"), ('["text"]', "list"), ('{"body": "x"}', "an object with body"),
    ('{"text": null}', "NoneType"), ('{"text": "\\ud800"}', "not UTF-8"), ('{"text": 3}', "int")])
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: ") as error:
        read(tmp_path / "a.jsonl")
    assert said in str(error.value)


@pytest.mark.parametrize("group", [100, 8000])
def test_parquet_is_read_in_bounded_memory_whatever_its_groups_of_rows(group: int, tmp_path: Path) -> None:
    """By arrow's own count, of 32 MB that do not compress: in groups of rows, and in one."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw, path = random.Random(0), tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [draw.randbytes(2000).hex() for _ in range(8000)]}), path, row_group_size=group)
    held = [pyarrow.total_allocated_bytes() for _ in read_rows(path)]
    assert len(held) == 8000
    assert 0 < max(held) - min(held) < max(held) < path.stat().st_size / 2


def test_parquet_without_the_column_or_with_a_null_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:2: 'text' is NoneType"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column 'body', but text"):
        read(tmp_path / "a.parquet", field="body")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read(tmp_path / "b.parquet")


def text_column(*texts: bytes) -> Any:
    """As other programs write it: no parquet library checks that text is UTF-8."""
    import pyarrow

    offsets = pyarrow.array([0, *accumulate(map(len, texts))], pyarrow.int32()).buffers()[1]
    return pyarrow.Array.from_buffers(pyarrow.string(), len(texts), [None, offsets, pyarrow.py_buffer(b"".join(texts))])


def test_text_of_parquet_that_is_not_utf8_is_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": text_column(b"fine", b"caf\xe9", b"also fine")}), path := tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:2: not UTF-8 at byte 3"):
        read(path)
    left_out: Counter[str] = Counter()
    kept = list(iter_documents(find_sources([path])[0], DocumentRule(skip_invalid=True), left_out))
    assert [(document.ordinal, document.raw) for document in kept] == [(0, b"fine"), (2, b"also fine")]
    assert left_out == {"invalid": 1}


@pytest.mark.parametrize("kind", ["text", "date", "struct"])
def test_a_column_of_parquet_that_python_cannot_hold_is_named_with_its_row(kind: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = {"text": lambda: text_column(b"a", b"\xff"), "date": lambda: pyarrow.array([0, 2**50], pyarrow.timestamp("s")),
              "struct": lambda: pyarrow.StructArray.from_arrays([pyarrow.array([1, 2])] * 2, names=["x", "x"])}[kind]()
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "odd": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet:{1 if kind == 'struct' else 2}: the column 'odd' cannot be read"):
        list(read_rows(tmp_path / "a.parquet"))


def test_a_long_cell_of_csv_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n\n" + "x" * 200_000 + ",1\n")
    assert [len(row.values["text"]) for row in read_rows(tmp_path / "a.csv")] == [200_000]


def test_nothing_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    """But for what is hidden, which editors and downloads leave: a copy there would be learned twice."""
    (inner := tmp_path / "texts" / "more").mkdir(parents=True)
    (hidden := tmp_path / "texts" / ".ipynb_checkpoints").mkdir()
    for path in (tmp_path / "texts" / "a.jsonl", inner / "b.jsonl", hidden / "a-checkpoint.jsonl"):
        path.write_text('{"text": "a"}\n')
    assert [source.name for source in find_sources([tmp_path / "texts"])] == ["a.jsonl", "more/b.jsonl"]
    with pytest.raises(UsageError, match="a folder with more in it, a folder; expected files of rows"):
        list(read_rows(tmp_path / "texts"))
    for where, words in ((tmp_path / "nowhere", "a link to something that is not there"),
                         (inner, "a link to a folder, which is not followed")):
        (link := tmp_path / "texts" / "c.jsonl").symlink_to(where)
        with pytest.raises(UsageError, match=words):
            find_sources([tmp_path / "texts"])
        with pytest.raises(UsageError, match=f"c.jsonl in it, {words}"):
            list(read_rows(tmp_path / "texts"))
        link.unlink()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_not_utf8_is_refused_or_left_out_and_counted(tmp_path: Path, name: str) -> None:
    lines = [b'{"text": "fine"}\n', b'{"text": "caf\xe9"}\n', b'{"text": "also fine"}\n']
    (tmp_path / name).write_bytes(b"".join(lines))
    (source,) = find_sources([tmp_path / name])
    with pytest.raises(DataError, match=rf"{name}:2: not UTF-8"):
        list(iter_documents(source, DocumentRule(document_bytes=5), Counter()))
    left_out: Counter[str] = Counter()
    kept = list(iter_documents(source, DocumentRule(document_bytes=5, skip_invalid=True), left_out))
    assert [document.ordinal for document in kept] == [0, 2]
    assert left_out == {"invalid": 1}


def test_a_damaged_gzip_is_refused_by_name(tmp_path: Path) -> None:
    whole = gzip.compress(b"text\n" * 10000)
    for name, data in {"cut.gz": whole[: len(whole) // 2], "bad.gz": b"no gzip"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=name):
            read(tmp_path / name)


def test_memory_is_bounded_by_the_longest_document_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MAX_DOCUMENT_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"x" * 101)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x" * 101}))
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "x", "other": "y" * 1000}))
    for rule in ({}, {"split": "-"}, {"document_bytes": 10}):
        with pytest.raises(DataError, match=r"a\.txt:1: a document of more than 100 bytes"):
            read(tmp_path / "a.txt", **rule)
    for name in ("b.jsonl", "c.jsonl"):
        with pytest.raises(DataError, match=rf"{name}:1: a document of more than 100 bytes"):
            read(tmp_path / name)
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "é" * 50}))
    assert read(tmp_path / "d.jsonl") == [("é" * 50).encode()]  # escaped, the line is longer than the document


def test_names_are_the_same_on_every_machine_and_clear(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.txt").write_text("text")
    assert [source.name for source in find_sources([tmp_path])] == ["a/part.txt", "b/part.txt"]
    with pytest.raises(UsageError, match=r"2 sources are named 'part\.txt'"):
        find_sources([tmp_path / "a" / "part.txt", tmp_path / "b" / "part.txt"])
    (tmp_path / "c.docx").write_bytes(b"")
    with pytest.raises(UsageError, match="unknown kind of file"):
        find_sources([tmp_path / "c.docx"])
    with pytest.raises(UsageError, match="no such file"):
        find_sources([tmp_path / "missing.txt"])


def test_two_rules_for_one_file_are_refused() -> None:
    with pytest.raises(UsageError, match="two rules"):
        DocumentRule(split="", document_bytes=5)
    with pytest.raises(UsageError, match="document-bytes"):
        DocumentRule(document_bytes=0)
