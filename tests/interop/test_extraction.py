"""GSM8K answers as we and as lm-eval read them: where they part is known, and listed by cause."""

import json
import re

import pytest

from assay.errors import DataError
from assay.reward.answer import read_number
from assay.statistics.estimate import clustered
from bench import extraction
from bench.extraction import CAUSES, FORMS, Read, cause, compared, differences, judged_right, made, read_samples, report

ROW = {"question": "How many?", "answer": "6 * 7 = 42\n#### 42"}
THOUSANDS = {"question": "How much?", "answer": "#### 1,234"}
BELOW = {"question": "How cold?", "answer": "#### -5"}
# (row, text, judged right by our strict and lm-eval's strict-match, by lenient and flexible-extract)
KNOWN = [
    (ROW, "6 * 7 = 42\n#### 42", (True, True), (True, True)),
    (ROW, "#### 41", (False, False), (False, False)),
    (ROW, "#### 42.", (True, True), (True, True)),
    (THOUSANDS, "#### 1,234", (True, True), (True, True)),
    (THOUSANDS, "#### 1234", (True, True), (True, True)),
    (BELOW, "#### -5", (True, True), (True, True)),
    (ROW, "#### $42", (True, False), (True, True)),
    (ROW, "####42", (True, False), (True, True)),
    (ROW, "#### 42 apples", (False, True), (True, True)),
    (ROW, "#### 42.00", (True, False), (True, False)),
    (ROW, "#### 41\n#### 42", (False, False), (True, True)),
    (ROW, "#### 42\n#### 41", (False, True), (False, False)),
    (ROW, "The answer is 42.", (True, False), (True, True)),
    (ROW, "It is 42, and 7 remain", (False, False), (False, False)),
    (ROW, "#### forty-two", (False, False), (False, False)),
    (ROW, "<think>#### 41</think>#### 42", (True, False), (True, True)),
]


@pytest.mark.parametrize("how", ["strict", "lenient"])
def test_the_known_differences_and_no_others(how):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    found = compared([(str(i), row, text) for i, (row, text, *_) in enumerate(KNOWN)], how)
    due = [case[2 if how == "strict" else 3] for case in KNOWN]
    assert [(read.text, read.right) for read in found] == [(case[1], right) for case, right in zip(KNOWN, due, strict=True)]
    assert "other" not in {cause(read) for read in found if not read.alike}
    counted = sum(ours == theirs for ours, theirs in due), sum(read.alike for read in found)
    assert re.split("  +", report({how: found}, 1)[1])[1:3] == [
        str(clustered([1] * count + [0] * (len(KNOWN) - count), range(len(KNOWN)))) for count in counted]


def read(text: str, ours: str | None, theirs: str | None, right: tuple[bool, bool] = (False, False)) -> Read:
    numbers = read_number(ours or ""), read_number((theirs or "").replace(",", ""))
    return Read("0", text, "42", ours, theirs, numbers, right)


@pytest.mark.parametrize(("text", "ours", "theirs", "due"), [
    ("#### 42\n#### 41", None, "42", "several"),
    ("so 42\n#### \n####", None, "42", "empty"),
    ("#### 42.00", "42.00", "42.00", "spelling"),
    ("The answer is 42.", "42", None, "other mark"),
    ("####42", "42", None, "dressed"),
    ("#### $42", "$42", None, "dressed"),
    ("#### 42 apples", "42 apples", "42", "more"),
    ("#### 42\nand 7 are left", "42", "7", "marked"),
    ("#### forty-two of 50", "forty-two of 50", "50", "marked"),
    ("<think>#### 41</think>#### 42", "42", "41", "thinking"),
    ("It is 42 ...", "42", "...", "no digits"),
    ("they are 1,2,3", "3", "1,2,3", "list"),
    ("that is 10-3", "3", "-3", "minus"),
    ("that is 1/2", "1/2", "2", "fraction"),
    ("It is 42 of x2", "42", "2", "in a word"),
    ("so 42. And 7", "7", "42.", "other"),
])
def test_each_difference_has_its_cause(text, ours, theirs, due):
    assert cause(read(text, ours, theirs)) == due
    assert due in CAUSES


def test_every_difference_is_listed_and_those_of_the_score_come_first():
    same = read("#### 42\nso 42", "42", "42", (True, True))
    number, score = read("#### 41\nand 7", "41", "7"), read("#### 42\nand 7", "42", "7", (True, False))
    assert [(each.judged_alike, each.alike) for each in (same, number, score)] == [(True, True), (True, False), (False, False)]
    [head, first, second] = differences([number, score], None)
    assert head.startswith("  marked: 2, of which right to us alone 1, to lm-eval alone 0.")
    assert first.startswith("    ! 0: gold 42, ours '42', lm-eval '7': ")
    assert second.startswith("      0: gold 42, ours '41', lm-eval '7': ")
    assert len(differences([number, score], 1)) == 2


def test_made_answers_are_right_or_one_too_high():
    assert [text for _, _, text in made([ROW, THOUSANDS], "thousands", 0)] == ["6 * 7 = 42\n#### 42", "#### 1,234"]
    assert [text for _, _, text in made([ROW], "sum", 1)] == ["6 * 7 = 42\n#### 42 + 1 = 43"]
    with pytest.raises(DataError, match="whole number"):
        list(made([{"question": "?", "answer": "#### 1/2"}], "plain", 0))


def test_no_form_of_a_wrong_answer_is_right_when_read_strictly():
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    for form in FORMS:
        assert judged_right(list(made([ROW, THOUSANDS, BELOW], form, 1)), "strict")[0] == 0, form
    assert judged_right(list(made([ROW, THOUSANDS, BELOW], "marked twice", 1)), "strict") == (0, 3)
    assert judged_right(list(made([ROW, THOUSANDS, BELOW], "talk after", 1)), "lenient") == (0, 3)


def test_what_lm_eval_logged_must_be_what_it_reads_here(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    data, log = tmp_path / "test.jsonl", tmp_path / "samples.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    entry = {"doc_id": 0, "doc": ROW, "resps": [["#### 42, of 43"]]}
    logged = [entry | {"filter": "strict-match", "filtered_resps": ["42,"], "exact_match": 1.0},
              entry | {"filter": "flexible-extract", "filtered_resps": ["43"], "exact_match": 0.0}]
    log.write_text("".join(json.dumps(each) + "\n" for each in logged))
    assert read_samples(log, data) == [("0", ROW, "#### 42, of 43")]
    for change in ({"filtered_resps": ["42"]}, {"exact_match": 0.0}, {"doc": BELOW}):
        log.write_text(json.dumps(logged[0] | change) + "\n")
        with pytest.raises(DataError, match="document 0"):
            read_samples(log, data)


def test_the_rows_must_be_those_that_were_asked(tmp_path):
    from assay.evaluation.task import dataset_digest, make_examples

    data = tmp_path / "test.jsonl"
    data.write_text(json.dumps(ROW) + "\n" + json.dumps(BELOW) + "\n")
    folder = tmp_path / "eval"
    folder.mkdir()
    asked = {"task": "gsm8k", "examples": 2, "dataset": dataset_digest(make_examples([ROW, BELOW]))}
    (folder / "request.json").write_text(json.dumps(asked))
    rows = [{"id": "0", "samples": [{"text": "#### 42"}, {"text": "?"}]}, {"id": "1", "samples": [{"text": "#### -5"}]}]
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_samples(folder, data) == [("0", ROW, "#### 42"), ("0", ROW, "?"), ("1", BELOW, "#### -5")]
    data.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW) + "\n")
    with pytest.raises(DataError, match="holds gsm8k on dataset"):
        read_samples(folder, data)


def test_without_lm_eval_the_way_out_is_said(monkeypatch):
    monkeypatch.setattr(extraction, "find_spec", lambda name: None)
    with pytest.raises(extraction.UsageError, match="pip install lm-eval"):
        extraction.theirs_config()
