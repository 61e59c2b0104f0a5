"""Checks of files of rows: silent on what `assay data` makes of all kinds of files, and refuting what it once let through."""

import gzip
import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from assay.config import parse
from assay.data import near_duplicates, row_files
from assay.data.indexed_rows import IndexedRows
from assay.data.mixture import WeightedSource
from assay.data.row_files import deduplicate, mix_rows, split_rows
from assay.guard.row_file_checks import check_deduplicated, check_known_rows, check_mixed, check_split
from assay.verbs import data
from assay.verdict import Outcome, Verdict

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "seven", "old", "stone",
         "bridges", "near", "mill", "market")


def made_rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows, some of them copies, copies in another order of columns, near copies and short ones."""
    made, rows = random.Random(seed), list[dict[str, Any]]()
    for number in range(count):
        kind = made.random()
        if rows and kind < 0.15:
            rows.append(dict(reversed(made.choice(rows).items())))
        elif rows and kind < 0.3:
            old = made.choice(rows)
            rows.append(old | {"text": f"{old['text']} once"})
        else:
            text = " ".join(made.choices(WORDS, k=made.choice((1, 3, 8, 40, 120)))) + made.choice(("", " 橋の下", " naïve", "_x"))
            rows.append({"text": text, "n": number, "deep": {"b": [1.0, None, True], "a": -0.0}})
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row, ensure_ascii=bool(number % 2)) + ("\r\n" if number % 5 == 1 else "\n") + "\n" * (number % 7 == 3)
                   for number, row in enumerate(rows))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.rstrip("\n").encode())
    return str(path)


def outcome(verdict: Verdict) -> Outcome:
    return verdict.outcome


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_mixed_split_and_deduplicated_is_counted_again_without_a_word(seed: int, tmp_path: Path):
    made = random.Random(seed)
    one, two = (written(tmp_path / f"{name}.jsonl{made.choice(('', '.gz'))}", made_rows(10 * seed + number, made.randint(8, 60)))
                for number, name in enumerate("ab"))
    share = Fraction(made.randint(1, 9), 10)
    sources = [WeightedSource(one, share), WeightedSource(two, 1 - share)]
    for number, rows in enumerate((None, 5)):
        told = mix_rows(sources, str(tmp_path / f"mixed-{number}.jsonl"), rows=rows, epochs=3, seed=seed)
        assert outcome(check_mixed(sources, told, rows=rows, epochs=3)) is Outcome.PROVEN
    told = split_rows(one, str(tmp_path / "parts"), held_out=0.3, seed=seed)
    assert outcome(check_split(one, told, held_out=0.3)) is Outcome.PROVEN
    for threshold in (0.8, 0.5, None):
        told = deduplicate([one, two], str(tmp_path / f"single-{threshold}.jsonl"), threshold=threshold, field=None, workers=1)
        found = check_deduplicated([one, two], told, threshold=threshold, field=None)
        assert outcome(found) is Outcome.PROVEN, found
        assert told["exact"] > 0
    told = deduplicate([one], str(tmp_path / "column.jsonl"), threshold=0.8, field="text", workers=1)
    assert outcome(check_deduplicated([one], told, threshold=0.8, field="text")) is Outcome.PROVEN


@pytest.mark.parametrize("action", ["mix", "split", "dedup"])
def test_known_rows_give_what_they_gave(action: str):
    assert outcome(check_known_rows(action)) is Outcome.PROVEN


def swapped(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, other: Callable[..., Any]) -> None:
    usual = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: other(usual, *given, **named))


@pytest.mark.parametrize(("action", "owner", "name", "other"), [
    ("mix", row_files, "derive", lambda usual, seed, *address: usual(seed, address[0])),  # sources in one order
    ("mix", IndexedRows, "in_order", lambda usual, index, seed: (index.row(place % len(index)) for place in range(10**6))),
    ("split", row_files, "derive", lambda usual, seed, *address: usual(seed, "held-out")),  # whatever the seed
    ("split", row_files, "near_across", lambda *_: 0),
    ("dedup", near_duplicates, "_root", lambda _, group, document: 0),
], ids=["one order for all sources", "no order", "no seed", "near copies unseen", "all alike"])
def test_known_rows_tell_what_another_file_would_not(action: str, owner: object, name: str, other: Callable[..., Any],
                                                     monkeypatch: pytest.MonkeyPatch):
    swapped(monkeypatch, owner, name, other)
    assert outcome(check_known_rows(action)) is Outcome.REFUTED

# ---------------------------------------------------------------- faults, through the verb


def run(*words: object) -> int:
    return data.run(parse(data.FLAGS, list(map(str, words)), prog="assay data"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a.jsonl", made_rows(1, 50)), written(tmp_path / "b.jsonl", made_rows(2, 30))


def refuted_words(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("REFUTED") and "rows:" in line.split(": ")[0] + ":"]
    return " ".join(line for line in lines if "known rows" not in line)


@pytest.mark.parametrize(("name", "other", "words"), [
    ("mixed_lines", lambda usual, files, shares, *how: usual(files, tuple(reversed(shares)), *how), "by the rows that are its own"),
    ("mixed_lines", lambda _, files, shares, rows, seed: (files[0].row(0) for _ in range(rows)), "more or less often"),
    ("rows_given", lambda usual, rows, shares: [rows, 0], "were due"),
    ("rows_until_empty", lambda usual, available, shares: usual([each // 3 for each in available], shares), "no source has been read"),
    ("rows_until_empty", lambda usual, available, shares: 2 * usual(available, shares), "allows"),
], ids=["shares the wrong way round", "one row for all", "all counted as the first's", "ended early", "read too often"])
def test_a_mixture_that_is_another_is_refuted_and_kept_under_another_name(name: str, other: Callable[..., Any], words: str,
                                                                         files: tuple[str, str], tmp_path: Path, capsys: Any,
                                                                         monkeypatch: pytest.MonkeyPatch):
    swapped(monkeypatch, row_files, name, other)
    out = tmp_path / "mixed.jsonl"
    assert run("mix", f"{files[0]}:0.8", f"{files[1]}:0.2", "--out", out) == 3
    assert words in refuted_words(capsys)
    assert not out.exists()
    assert (tmp_path / "mixed.jsonl.refuted").exists()


@pytest.mark.parametrize(("other", "words"), [
    (lambda usual, *given: (~usual(*given)[0], usual(*given)[1]), "different rows are held out"),
    (lambda usual, *given: (0 * usual(*given)[0] > 0, 1), "0 different rows are held out"),
    (lambda usual, contents, share, seed: (usual(range(len(contents)), share, seed)[0], 1), "on both sides"),
], ids=["sides the wrong way round", "nothing held out", "copies apart"])
def test_a_split_that_is_another_is_refuted(other: Callable[..., Any], words: str, files: tuple[str, str], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    swapped(monkeypatch, row_files, "rows_apart", other)
    assert run("split", files[0], "--share", 0.3, "--out", tmp_path / "parts") == 3
    assert words in refuted_words(capsys)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["held-out.jsonl.refuted", "train.jsonl.refuted"]


def test_a_split_that_loses_rows_is_refuted(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    told = split_rows(files[0], str(tmp_path / "parts"), held_out=0.3, seed=0)
    train = Path(told["train"]["file"])
    train.write_bytes(b"".join(train.read_bytes().splitlines(keepends=True)[1:]))
    assert "are not those of" in check_split(files[0], told, held_out=0.3).reason


@pytest.mark.parametrize(("how", "name", "other", "words"), [
    ("minhash", "find_duplicates", lambda usual, prints, threshold: usual(prints, 0.0), "of its runs of words in common"),
    ("minhash", "placed_lines", lambda usual, name: list(usual(name))[:-9], "copies and"),
    ("exact", "find_duplicates", lambda usual, prints, threshold: usual(prints._replace(exact=prints.exact // 2**62), threshold),
     "different rows are in the files"),
    ("exact", "find_duplicates", lambda usual, prints, threshold: usual(prints._replace(exact=prints.exact * 0 + range(len(prints.exact))),
                                                                        threshold), "different rows are in the files"),
], ids=["all are alike", "the end unread", "hashes cut", "no copies seen"])
def test_rows_left_out_that_repeat_nothing_are_refuted(how: str, name: str, other: Callable[..., Any], words: str, files: tuple[str, str],
                                                       tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    swapped(monkeypatch, row_files, name, other)
    assert run("dedup", *files, "--how", how, "--workers", 1, "--out", tmp_path / "single.jsonl") == 3
    assert words in refuted_words(capsys)
    assert not (tmp_path / "single.jsonl").exists()


def test_verdicts_stand_in_json_too(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("dedup", files[0], "--workers", 1, "--out", tmp_path / "single.jsonl", "--json") == 0
    assert [verdict["check"] for verdict in json.loads(capsys.readouterr().out)["verdicts"]] == ["known rows", "rows"]
