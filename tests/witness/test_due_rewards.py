"""What the witness gives a completion: the documented rules, the user's function, and the rows of the run that they are asked of."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.witness.due_rewards import DueRule, due_metric, due_rules, due_scores, rows_to_grade, wrong_rewards
from assay.witness.due_texts import NotWitnessed

ROWS = [{"prompt": f"{number}+1=", "gold": str(number + 1), "pattern": rf"^{number}"} for number in range(10)]


def given(text: str, **row: Any) -> list[tuple[str, str, dict[str, Any]]]:
    return [("?", text, row)]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {"data": [str(tmp_path / "sums.jsonl")], "held_out_data": None, "held_out": 0.3, "seed": 0, "gsm8k": "", "limit": None,
            "reward": ["answer:1"], "metric": None, "overlong_buffer": 0}


def test_rules_are_read_with_their_options_and_weights():
    assert due_rules(["answer", "regex[pattern=a,b]:0.5", "mine.py:kind:2", "answer[how=lenient]:-1e-1"]) == [
        DueRule("answer", {}, 1.0), DueRule("regex", {"pattern": "a,b"}, 0.5), DueRule("mine.py:kind", {}, 2.0),
        DueRule("answer", {"how": "lenient"}, -0.1)]


def test_what_is_wanted_is_the_metric_or_the_heaviest_rule_that_is_no_judge(options: dict[str, Any]):
    options["reward"] = ["regex:0.5", "answer:2", "judge:9"]
    assert due_metric(options).name == "answer"
    assert due_metric(options | {"metric": "regex"}).name == "regex"
    with pytest.raises(NotWitnessed, match="no rule says what is wanted"):
        due_metric(options | {"reward": ["judge"]})


@pytest.mark.parametrize(("rule", "text", "row", "score"), [
    ("answer", "#### 7", {"gold": "7"}, 1.0), ("answer", "7 or 8", {"gold": "7"}, 0.0),
    ("answer", "It is 7 or so, not 9", {"gold": "9"}, 0.0), ("answer[how=lenient]", "It is 7 or so, not 9", {"gold": "9"}, 1.0),
    ("regex", "7 or 8", {"pattern": "^7"}, 1.0), ("regex", "7 or 8", {"pattern": "^8"}, 0.0), ("regex[pattern=8$]", "7 or 8", {}, 1.0)])
def test_documented_rules(rule: str, text: str, row: dict[str, Any], score: float):
    assert due_scores(due_rules([rule])[0], given(text, **row)) == [score]


@pytest.mark.parametrize(("rule", "row", "why"), [
    ("answer", {"said": "7"}, "rows without `gold` or `answer`"), ("answer[how=strict,unit=m]", {"gold": "7"}, "answer with its options"),
    ("regex", {"gold": "7"}, "the rule of regex is not written down twice"), ("format", {"gold": "7"}, "the rule of format is not")])
def test_rules_that_are_not_written_down_twice_say_so(rule: str, row: dict[str, Any], why: str):
    with pytest.raises(NotWitnessed, match=why):
        due_scores(due_rules([rule])[0], given("7", **row))


def test_a_users_function_is_asked_and_one_that_dies_is_no_score(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def kind(prompt, completion, row):\n    print('noise')\n    return len(completion) / row['by']\n")
    rule = due_rules([f"{tmp_path}/mine.py:kind:3"])[0]
    assert due_scores(rule, given("abc", by=2)) == [1.5]
    with pytest.raises(NotWitnessed, match=r"mine.py:kind died: ZeroDivisionError"):
        due_scores(rule, given("abc", by=0))


def test_held_out_rows_are_the_seeds_or_a_files_own(options: dict[str, Any], tmp_path: Path):
    held, trained = (rows_to_grade(options, held_out=which) for which in (True, False))
    assert (len(held), len(trained)) == (3, 7)
    assert {row.name for row, _ in held} | {row.name for row, _ in trained} == {row.name for row, _ in rows_to_grade(
        options | {"held_out": 0.0}, held_out=False)}
    assert all(values["prompt"] == row.plain[0] for row, values in (*held, *trained) if row.plain is not None)
    assert len(rows_to_grade(options | {"limit": 4, "held_out": 0.0}, held_out=False)) == 4
    (tmp_path / "apart.jsonl").write_text(json.dumps(ROWS[3]) + "\n")
    apart = options | {"held_out_data": str(tmp_path / "apart.jsonl")}
    assert [values["prompt"] for _, values in rows_to_grade(apart, held_out=True)] == ["3+1="]
    assert len(rows_to_grade(apart, held_out=False)) == 10


def test_a_rollouts_rewards_are_the_weighted_sums_of_its_rules(options: dict[str, Any]):
    options |= {"reward": ["answer:2", "regex:0.5"], "held_out": 0.0}
    row, _ = next(each for each in rows_to_grade(options, held_out=False) if each[1]["prompt"] == "4+1=")
    texts = [["#### 5", "4 #### 5", "7"]]
    right = [{"prompt": row.name, "rewards": [2.0, 2.5, 0.0]}]
    assert wrong_rewards(right, texts, options) == []
    assert wrong_rewards([{"prompt": row.name, "rewards": [2.0, None, 0.0]}], texts, options) == [], "an error row says nothing"
    (said,) = wrong_rewards([{"prompt": row.name, "rewards": [2.0, 1.5, 0.0]}], texts, options)
    assert said == "1 of 3 completions have another reward than their rules give: '4 #### 5' has 1.5, due is 2.5"
    wrong = [{"prompt": row.name, "rewards": [9.0, 9.0, 9.0]}]
    for unknown in ({"overlong_buffer": 7}, {"reward": ["answer:2", "mine.py:kind:1"]}, {"reward": ["regex[flags=i]:1", "answer[x=1]:1"]}):
        assert wrong_rewards(wrong, texts, options | unknown) == [], unknown
