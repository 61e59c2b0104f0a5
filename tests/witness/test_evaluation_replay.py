"""The witness of an evaluation proves clean ones through the real command, refutes wrong ones, and says what it did not see."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from assay.cli import run
from assay.evaluation import eval_witness
from assay.evaluation.eval_witness import ask_eval_witness
from assay.evaluation.tasks.answers import canonical, make_problem
from assay.reward.answer import read_answer, read_number, same_answer
from assay.testing.tiny_models import save_adapter
from assay.verdict import Outcome
from assay.witness.due_answers import as_number, is_same, lenient_answer, strict_answer, voted
from assay.witness.due_evaluation import due_sum, judge_evaluation
from tests.evaluation.eval_fixtures import PROBLEMS, QUESTION, saved, write_rows

CHECKS = ["witness prompts", "witness texts", "witness scores"]
PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "\\boxed ", "{", "}", "####", "#", "### ", "\n", " ", "\t", "42", "41",
    "-5", "1,000", "1/2", "$", "**", "\\(", "\\)", "\\text{", "%", ".", ",", "the answer is ", "Answer: ", "answer = ", "yes", "Paris",
    "no.", "x", "²", "٣", "_", "a1", ".5", "2e3", "\\frac{1}{2}", "−3", "+", "-", "\xa0", "\u2028", "12.0", " or ", "/0", "{,}", "\\,",
    "\x1c"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("witnessed")
    saved(folder / "model")
    write_rows(folder / "problems.jsonl", PROBLEMS)
    write_rows(folder / "choices.jsonl", [QUESTION | {"id": "a"}, QUESTION | {"id": "b", "question": "Which is hard?", "answerKey": "1"}])
    write_rows(folder / "texts.jsonl", [{"text": "Figs ripen late in the year. " * 9}, {"text": "Stones do not ripen."}])
    return folder


def evaluated(place: Path, name: str, *words: str, model: str = "model", witness: str = "4") -> list[dict[str, Any]]:
    """Through the command; its verdicts, by the witness alone."""
    out = place / name
    assert run(["eval", str(place / model), "--out", str(out), "--device", "cpu", "--witness", witness, *words]) == 0
    return [each for each in json.loads((out / "eval.json").read_text())["verdicts"] if each["check"] in CHECKS]


@pytest.fixture(scope="module")
def sampled(place: Path) -> Path:
    """Sampled evaluation with a fresh process as witness."""
    words = ("--task", "gsm8k", "--data", str(place / "problems.jsonl"), "-k", "3", "--temperature", "0.8", "--top-k", "40",
             "--top-p", "0.9", "--max-new-tokens", "8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval_witness, "ask_eval_witness", ask_eval_witness)  # in a process of its own, which the other tests do without
        found = evaluated(place, "sampled", *words)
    assert [(each["check"], each["outcome"]) for each in found] == [(check, "PROVEN") for check in CHECKS], found
    assert "transformers' own tokenizer and template" in found[0]["reason"]
    return place / "sampled"


@pytest.mark.parametrize(("task", "words", "unproven"), [
    ("arithmetic", ("--limit", "5", "--max-new-tokens", "6"), []), ("choices", ("--data", "choices.jsonl"), []),
    ("text", ("--data", "texts.jsonl"), ["witness scores"]),
    ("graded", ("--data", "problems.jsonl", "--grader", "answer", "--max-new-tokens", "4"), ["witness scores"])])
def test_clean_evaluations_are_proven(task: str, words: tuple[str, ...], unproven: list[str], place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    found = evaluated(place, task, "--task", task, *words)
    assert [each["check"] for each in found if each["outcome"] == "UNPROVEN"] == unproven, found
    assert not [each for each in found if each["outcome"] == "REFUTED"]


def test_an_adapter_is_scored_by_peft(place: Path):
    save_adapter(place / "adapter", place / "model")
    found = evaluated(place, "adapted", "--task", "arithmetic", "--limit", "3", "--max-new-tokens", "4", model="adapter")
    assert [each["outcome"] for each in found] == ["PROVEN"] * 3, found


def changed(folder: Path, target: Path, change: Any) -> Path:
    """A copy whose first kept example is changed."""
    shutil.copytree(folder, target)
    first = json.loads((target / "witness.json").read_text())["items"][0]["id"]
    rows = [json.loads(line) for line in (target / "scores.jsonl").read_text().split("\n") if line]
    for row in rows:
        if row["id"] == first:
            change(row["samples"][0])
    (target / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


@pytest.mark.parametrize(("check", "change"), [
    ("witness texts", {"text": "something else"}), ("witness texts", {"logprob": -1.0}), ("witness scores", {"score": 1.0}),
    ("witness scores", {"lenient": 1.0}), ("witness scores", {"answer": "7"})])
def test_what_was_changed_is_refuted(check: str, change: dict[str, Any], sampled: Path, tmp_path: Path):
    out = changed(sampled, tmp_path / "out", lambda sample: sample.update(change))
    found = {verdict.check: verdict for verdict in judge_evaluation(out)}
    assert found[check].outcome is Outcome.REFUTED, found


def test_greedy_texts_must_be_the_likeliest(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = evaluated(place, "greedy", "--task", "arithmetic", "--limit", "4", "--max-new-tokens", "4")
    assert [each["outcome"] for each in found] == ["PROVEN"] * 3, found

    def other_token(sample: dict[str, Any]) -> None:
        sample["ids"][1] = 70 if sample["ids"][1] != 70 else 71

    out = changed(place / "greedy", tmp_path / "out", other_token)
    monkeypatch.setattr("assay.witness.due_evaluation.due_text", lambda kept, ids: next(
        sample["text"] for row in kept.scored.values() for sample in row["samples"] if sample["ids"] == ids))
    assert judge_evaluation(out)[1].outcome is Outcome.REFUTED


def test_what_it_does_not_know_is_unproven_with_its_reason(place: Path, sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = evaluated(place, "off", "--task", "arithmetic", "--limit", "3", "--max-new-tokens", "4", witness="0")
    assert {each["reason"] for each in found} == {"--witness 0"}
    with monkeypatch.context() as patch:
        patch.setitem(eval_witness.MOST_EVAL_WORK, "cpu", 1.0)
        prompts, texts, scores = evaluated(place, "large", "--task", "arithmetic", "--limit", "3", "--max-new-tokens", "4")
    assert (prompts["outcome"], texts["outcome"], scores["outcome"]) == ("PROVEN", "UNPROVEN", "UNPROVEN")
    assert "are more than a second reading on cpu may take" in texts["reason"]
    monkeypatch.setattr(eval_witness.sys, "executable", "/bin/false")
    assert {verdict.outcome for verdict in ask_eval_witness(sampled, "cpu")} == {Outcome.UNPROVEN}


def test_answers_are_read_as_the_evaluation_reads_them():
    """Two programs by one rule, on texts made of all that a reading may stumble over."""
    chance = random.Random(0)
    for _ in range(3000):
        text = "".join(chance.choice(PIECES) for _ in range(chance.randint(0, 12)))
        strict, lenient = read_answer(text, "strict"), read_answer(text, "lenient")
        assert (strict_answer(text), lenient_answer(text), voted(strict), as_number(text)) == (
            strict, lenient, canonical(strict), read_number(text)), text
        for gold in ("42", "1/2", "Paris."):
            assert is_same(strict, gold) == same_answer(strict, gold), text
            assert is_same(lenient, gold) == same_answer(lenient, gold), text


def test_made_sums_are_those_of_the_rule():
    assert [due_sum(number, 3) for number in range(20)] == [make_problem(number, 3) for number in range(20)]
