"""Duplicates: copies and near copies are found, others are not, and the signature estimates the Jaccard similarity."""

import json
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.data import near_duplicates
from assay.data.near_duplicates import (
    Prints,
    document_prints,
    find_duplicates,
    likeness,
    prints_of_lines,
    said_in_row,
    stored_prints,
)
from assay.errors import GuardStop


@pytest.fixture(scope="module")
def documents() -> list[str]:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    return [" ".join(draw.choices(words, k=300)) for _ in range(200)]


def changed(text: str, share: float) -> str:
    draw = random.Random(1)
    return " ".join("another" if draw.random() < share else word for word in text.split())


def runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}


def test_copies_near_copies_and_others(documents: list[str]):
    near, far = changed(documents[2], 0.01), changed(documents[3], 0.3)
    texts = [*documents, documents[0], documents[1].upper() + "!", near, far, "so", "So", "so"]
    prints = document_prints([text.encode() for text in texts])
    found = find_duplicates(prints, 0.8)
    assert found.first[200:].tolist() == [0, 1, 2, 203, 204, 205, 204]
    assert (found.exact, found.near, int(found.kept.sum())) == (2, 2, 203)
    alone = find_duplicates(prints, None)
    assert alone.first[200:].tolist() == [0, 201, 202, 203, 204, 205, 204]


@pytest.mark.parametrize("share", [0.005, 0.02, 0.05, 0.2])
def test_a_signature_estimates_the_similarity(share: float, documents: list[str]):
    """The mean over 40 documents is within 3 standard errors of the truth."""
    some = documents[:40]
    here, there = (document_prints([text.encode() for text in texts]) for texts in (some, [changed(text, share) for text in some]))
    true = [len(runs(text) & runs(changed(text, share))) / len(runs(text) | runs(changed(text, share))) for text in some]
    estimates = likeness(here.signature, there.signature)
    assert abs(np.mean(estimates - true)) < 3 * 0.045 / np.sqrt(len(some))


@pytest.mark.parametrize("words", [6, 8, 12, 20, 40])
def test_short_documents_are_left_out_only_where_they_are_alike(words: int):
    """Signatures of few runs are empty for the most part: what an empty bin borrowed is no run that two documents have in common."""
    draw, texts = random.Random(words), list[str]()
    for _ in range(600):
        text = draw.choices([f"w{number}" for number in range(40)], k=words)
        cut = draw.randrange(words)
        texts += [" ".join(text), " ".join([*text[:cut], *draw.choices(["x", "y", "z"], k=draw.randrange(1, 4)), *text[cut:]])]
    here = [runs(text) for text in texts]
    alike = {row: len(here[row] & here[row - 1]) / len(here[row] | here[row - 1]) for row in range(1, len(texts), 2)}
    for threshold in (0.8, 0.5):
        first = find_duplicates(document_prints([text.encode() for text in texts]), threshold).first
        left = {row for row in range(len(texts)) if first[row] != row}
        nearest = {row: max(len(here[row] & other) / len(here[row] | other) for place, other in enumerate(here) if place != row)
                   for row in left}
        assert all(share > threshold - 0.15 for share in nearest.values())
        due = {row for row, share in alike.items() if share >= threshold + 0.1}
        assert len(due & left) >= 0.97 * len(due)


def test_rows_in_blocks_are_what_they_are_together(documents: list[str], monkeypatch: pytest.MonkeyPatch):
    lines = [("a:1", json.dumps({"messages": [{"role": "user", "content": text}]}).encode() + b"\n") for text in documents[:50]]
    whole, = prints_of_lines(lines)
    monkeypatch.setattr("assay.data.near_duplicates.line_blocks", lambda lines: ([line] for line in lines))
    for one, *others in zip(whole, *prints_of_lines(lines), strict=True):
        assert np.array_equal(one, np.concatenate(others))
    assert said_in_row({"a": "x", "b": [{"c": "y"}, 3], "d": None, "e": False}) == "x\ny\n3\nFalse"


@pytest.mark.parametrize("threshold", [0.8, None])
def test_prints_on_the_disk_say_what_those_in_memory_say(threshold: float | None, documents: list[str], tmp_path: Path):
    """Chains of copies that change a little each time, so that groups join through their members, in an order that mixes them."""
    chains = [text for text in documents[:40] for text in [text, text, *accumulate([text] * 5, lambda last, _: changed_once(last))]]
    random.Random(2).shuffle(chains)
    prints = document_prints([text.encode() for text in chains])
    blocks = [Prints(*(stream[first : first + 7] for stream in prints)) for first in range(0, len(chains), 7)]
    with stored_prints(blocks, tmp_path / "none" / "out.jsonl") as stored:
        assert not list(tmp_path.iterdir())
        found = find_duplicates(stored, threshold)
    due = find_duplicates(prints, threshold)
    assert found.first.tolist() == due.first.tolist()
    assert (found.exact, found.near) == (due.exact, due.near)
    assert threshold is None or found.near > 100
    assert not (due.first[due.first] != due.first).any(), "every group is known by its earliest"


def changed_once(text: str) -> str:
    """Some words at its end instead of as many at its beginning: less than 0.8 of it is left after a few times."""
    words = text.split()
    return " ".join([*words[12:], *words[:12][::-1]])


def test_words_of_any_length_are_told_apart():
    """Words are hashed by eight bytes: a change anywhere in a long one, or another length, is another word."""
    base = [f"{letter * 27}" for letter in "abcde"]
    texts = [" ".join(base)]
    for place in (0, 7, 8, 15, 16, 23, 26):
        texts.append(" ".join([base[0][:place] + "z" + base[0][place + 1 :], *base[1:]]))
    texts += [" ".join([base[0][:size], *base[1:]]) for size in (1, 7, 8, 9, 16, 24, 26)]
    signatures = document_prints([text.encode() for text in texts]).signature
    assert len({row.tobytes() for row in signatures}) == len(texts)
    assert np.array_equal(document_prints([texts[0].upper().encode()]).signature[0], signatures[0])


def test_exact_copies_are_found_without_signatures(documents: list[str], monkeypatch: pytest.MonkeyPatch):
    def refused(texts: object) -> None:
        raise AssertionError("a signature was computed")

    lines = [("a:1", json.dumps({"text": text}).encode() + b"\n") for text in [*documents[:20], documents[3]]]
    with_them = find_duplicates(next(prints_of_lines(lines)), None)
    monkeypatch.setattr("assay.data.near_duplicates._least_hashes", refused)
    found = find_duplicates(next(prints_of_lines(lines, signed=False)), None)
    assert found.first.tolist() == with_them.first.tolist()
    assert (found.exact, found.near) == (1, 0)


@pytest.mark.parametrize(("name", "wrong"), [
    ("_least_hashes", lambda usual, texts: usual(texts)[::-1]),
    ("_least_hashes", lambda usual, texts: usual(texts) & ~np.uint64(0x3FF)),
    ("likeness", lambda _, one, other: (one == other).mean(-1)),
], ids=["of other documents", "too few bits", "empty bins are equal"])
def test_signatures_that_do_not_say_how_alike_documents_are_are_refused(name: str, wrong: Callable[..., Any],
                                                                        monkeypatch: pytest.MonkeyPatch):
    near_duplicates.refuse_wrong_likeness()
    usual = getattr(near_duplicates, name)
    monkeypatch.setattr(near_duplicates, name, lambda *given: wrong(usual, *given))
    with pytest.raises(GuardStop, match="rows would be left out by mistake"):
        near_duplicates.refuse_wrong_likeness()
