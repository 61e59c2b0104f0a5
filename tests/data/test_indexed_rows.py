"""Rows of files that are never held: what is written is what it was when they were, memory does not grow with what rows say, and a file
that changes under way is refused."""

import csv
import gzip
import hashlib
import io
import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.data import near_duplicates, row_files
from assay.data.mixture import WeightedSource, placed_row
from assay.data.near_duplicates import find_duplicates, lines_prints
from assay.data.order import permuted_places
from assay.data.row_files import deduplicate, look_at_rows, mix_rows, placed_lines, row_content, row_lines, split_rows
from assay.errors import GuardStop, StoreError
from assay.seeds import derive
from assay.testing.fault_injection import swap

KINDS = ("rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.csv", "rows.tsv", "folder")
Texts = Sequence[Sequence[bytes]]


def written(folder: Path, kind: str, count: int = 40) -> Path:
    """Rows of many lengths, some of them copies, in a file of that kind; lines of JSON with blank ones between them and an open end."""
    rows = [{"text": f"{kind} {n % 30} " + "é" * (n % 30), "more": "x"} for n in range(count)]
    path = folder / kind
    lines = "\n \n".join(json.dumps(row, ensure_ascii=bool(n % 2)) for n, row in enumerate(rows)).encode()
    if kind.endswith(".jsonl"):
        path.write_bytes(lines)
    elif kind.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif kind.endswith(".parquet"):
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=7)
    elif kind == "folder":
        path.mkdir()
        (path / "a.jsonl").write_bytes(lines)
        written(path, "b.csv", 5)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t" if kind.endswith(".tsv") else ",").writerows([list(rows[0]), *map(dict.values, rows)])
    return path


def mixed_in_memory(texts: Texts, shares: tuple[int, ...], rows: int, seed: int) -> Iterator[bytes]:
    """Plain twin of `mixed_lines`: every row held, and every order whole."""
    for row in range(rows):
        source, number = placed_row(row, shares)
        epoch, place = divmod(number, len(texts[source]))
        key = derive(derive(seed, "source", source), "order", epoch)
        yield texts[source][permuted_places(np.arange(len(texts[source])), len(texts[source]), key).tolist()[place]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_is_the_bytes_that_it_was_when_its_rows_were_held(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("assay.data.indexed_rows._PLACES", 7)  # orders in blocks, the last one shorter
    names = [str(written(tmp_path, kind)), str(written(tmp_path, "other.jsonl", 11))]
    texts = [list(row_lines(name)) for name in names]
    sources = [WeightedSource(name, weight) for name, weight in zip(names, (Fraction(3), Fraction(2)), strict=True)]
    before = sorted(tmp_path.rglob("*"))
    found = mix_rows(sources, str(tmp_path / "new" / "out.jsonl"), rows=None, epochs=4, seed=5)
    due = b"".join(mixed_in_memory(texts, (3, 2), found["rows"], 5))
    assert (tmp_path / "new" / "out.jsonl").read_bytes() == due
    assert found["sha256"] == hashlib.sha256(due).hexdigest()
    assert found["ran_out"] == names[1]
    assert found["sources"][names[1]]["times_read"] == 4
    assert set(tmp_path.rglob("*")) - set(before) == {tmp_path / "new", tmp_path / "new" / "out.jsonl"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_holds_out_the_rows_that_it_did_when_contents_were_held_as_text(kind: str, tmp_path: Path):
    name = str(written(tmp_path, kind))
    lines = [(row_content(line, where), line) for where, line in placed_lines(name)]
    apart = set(sorted({content for content, _ in lines}, key=lambda content: derive(3, "held-out", content))[:9])
    found = split_rows(name, str(tmp_path / "parts"), held_out=9 / len({content for content, _ in lines}), seed=3)
    for side, wanted in (("train", False), ("held-out", True)):
        due = b"".join(line for content, line in lines if (content in apart) is wanted)
        assert (tmp_path / "parts" / f"{side}.jsonl").read_bytes() == due
    assert found["copies"] == len(lines) - len({content for content, _ in lines})


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_are_those_that_were_found_in_memory(kind: str, tmp_path: Path):
    names = [str(written(tmp_path, each)) for each in (kind, "other.jsonl")]
    lines = [placed for name in names for placed in placed_lines(name)]
    due = find_duplicates(lines_prints(lines, None, True), 0.8)
    found = deduplicate(names, str(tmp_path / "out.jsonl"), threshold=0.8, field=None, workers=1)
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(line for (_, line), kept in zip(lines, due.kept, strict=True) if kept)
    assert (found["exact"], found["near"]) == (due.exact, due.near)
    copies = len(list(row_lines(names[0]))) - len({json.dumps(json.loads(line), sort_keys=True) for line in row_lines(names[0])})
    assert look_at_rows(names[0])["copies"] == copies


def jobs(folder: Path, name: str) -> dict[str, Callable[[], dict[str, Any]]]:
    return {"mix": lambda: mix_rows([WeightedSource(name, Fraction(1))], str(folder / "mixed.jsonl"), rows=None, epochs=2, seed=0),
            "split": lambda: split_rows(name, str(folder / "parts"), held_out=0.1, seed=0),
            "dedup": lambda: deduplicate([name], str(folder / "clean.jsonl"), threshold=0.8, field=None, workers=1),
            "look": lambda: look_at_rows(name)}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("verb", ["mix", "split", "dedup", "look"])
def test_memory_grows_by_some_tens_of_bytes_a_row(verb: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four times the rows, of 4,000 bytes each: what is taken more is a small part of what they say."""
    monkeypatch.setattr(near_duplicates, "line_blocks", partial(near_duplicates.line_blocks, size=1 << 16))
    monkeypatch.setattr(row_files, "in_pieces", partial(row_files.in_pieces, size=1 << 16))

    def peak(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        lines = b"".join(b'{"text": "%s"}\n' % b" ".join(b"w%da%d" % (n, k) for k in range(100, 600)) for n in range(1000, 1000 + count))
        (folder / f"rows{suffix}").write_bytes(gzip.compress(lines, 1) if suffix.endswith(".gz") else lines)
        del lines
        job = jobs(folder, str(folder / f"rows{suffix}"))[verb]
        tracemalloc.start()
        job()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(50)  # what is made once
    assert (peak(1600) - peak(400)) / 1200 < 160


def changed_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"rows.jsonl 29 ", b"rows.jsonl 92 "))


def one_more(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'\n{"text": "one more"}\n')


def one_less(path: Path) -> None:
    path.write_bytes(path.read_bytes().rpartition(b"\n \n")[0])


@pytest.mark.parametrize(("verb", "change"), [("mix", changed_byte), ("mix", one_less), ("split", changed_byte), ("split", one_more),
                                             ("split", one_less), ("dedup", changed_byte), ("dedup", one_more), ("dedup", one_less)])
def test_a_file_that_changes_between_two_readings_is_refused(verb: str, change: Callable[[Path], None], tmp_path: Path):
    path, write_lines = written(tmp_path, "rows.jsonl"), row_files.write_lines

    def changed_meanwhile(*given: Any) -> str:
        change(path)
        return write_lines(*given)

    with swap(row_files, "write_lines", changed_meanwhile), pytest.raises(GuardStop, match=r"row \d+ is not what it was when"):
        jobs(tmp_path, str(path))[verb]()
    assert not [each for each in tmp_path.rglob("*") if each.is_file() and each != path]


@pytest.mark.parametrize("verb", ["mix", "split", "dedup"])
def test_a_temporary_file_that_finds_no_room_is_said(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path, "rows.jsonl.gz")
    monkeypatch.setattr("assay.store.durable.tempfile.TemporaryFile", lambda dir: io.BufferedWriter(io.FileIO("/dev/full", "w")))
    with pytest.raises(StoreError, match="the disk is full"):
        jobs(tmp_path, str(path))[verb]()
    assert {each.name for each in tmp_path.iterdir()} <= {"rows.jsonl.gz", "parts"}
