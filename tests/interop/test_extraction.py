"""GSM8K answers as we and as lm-eval read them: where they part is known, and counted by kind."""

import json

import pytest

from assay.errors import DataError
from bench import extraction
from bench.extraction import Read, compared, kind, read_samples, report

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
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    found = compared([(str(i), row, text) for i, (row, text, *_) in enumerate(KNOWN)], how)
    due = [case[2 if how == "strict" else 3] for case in KNOWN]
    assert [(read.text, read.right) for read in found] == [(case[1], right) for case, right in zip(KNOWN, due, strict=True)]
    assert "other" not in {read.kind for read in found if read.right[0] != read.right[1]}
    assert report({how: found}, 1)[-1].split()[1:3] == [str(len(KNOWN)), str(sum(ours == theirs for ours, theirs in due))]


@pytest.mark.parametrize(("text", "ours", "theirs", "said"), [
    ("#### 42\n#### 41", None, "42", "several ####"),
    ("#### 42.00", "42.00", "42.00", "one number written in two ways"),
    ("The answer is 42.", "42", None, "the answer stated without ####"),
    ("####42", "42", None, "no bare number"),
    ("#### $42", "$42", None, "no bare number"),
    ("#### 42 apples", "42 apples", "42", "more than a number after ####"),
    ("<think>#### 41</think>#### 42", "42", "41", "what is thought"),
    ("so 42 and 7", "7", "42", "another number"),
])
def test_each_difference_has_its_kind(text, ours, theirs, said):
    assert said in kind(Read("0", text, "42", ours, theirs, (True, False)))


def test_the_rows_must_be_those_that_were_asked(tmp_path):
    from assay.measure.task import dataset_digest, make_examples

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
