"""The built-in rewards, and how they are asked for."""

import json
from pathlib import Path

import pytest

from assay.errors import DataError, UsageError
from assay.reward import sandbox
from assay.reward.reward_functions import answer_reward, built_in_reward, format, json_schema, length, parse_rewards, regex, unit_tests
from assay.reward.schema import check_schema, parse_strict_json, schema_fault

GOOD = "<think>a</think>\n<answer>42</answer>"


def test_answer_is_read_as_asked():
    row = {"answer": "#### 43"}
    assert [answer_reward("", "<answer>42 or 43</answer>", row, how=how) for how in ("strict", "lenient")] == [0.0, 1.0]
    assert [answer_reward("", "\\boxed{43}", row, form=form) for form in ("boxed", "tag")] == [1.0, 0.0]


@pytest.mark.parametrize(("text", "worth"), [
    (GOOD, 1), (GOOD + "\n", 1), (GOOD * 2, 0), (GOOD + "x", 0), ("x" + GOOD, 0), ("<answer>42</answer><think>a</think>", 0),
    ("<think></think><answer>42</answer>", 0), ("<think>a</think><answer> </answer>", 0), ("", 0),
    ("<think>a<answer>42</answer></think>", 0), ("<think>a</think><think>b</think><answer>42</answer>", 0)])
def test_format_wants_each_tag_once_in_order(text: str, worth: int):
    assert format("p", text, {}) == worth


def test_a_prompt_may_open_the_thinking():
    assert format("p <think>\n", GOOD.removeprefix("<think>"), {}) == 1
    assert format("p", GOOD.removeprefix("<think>"), {}) == 0


def test_length_is_daposs_soft_penalty():
    worth = [length("", "", {"completion_tokens": n}, longest=100, margin=20) for n in (0, 80, 81, 90, 100, 101, 5000)]
    assert worth == pytest.approx([0, 0, -0.05, -0.5, -1, -1, -1], abs=1e-12)
    assert length("", "x" * 90, {}, longest=100, margin=20, unit="characters") == -0.5
    with pytest.raises(DataError, match="completion_tokens"):
        length("", "", {}, longest=100, margin=20)


def test_regex():
    assert [regex("", text, {"pattern": r"^\d+$"}) for text in ("12", "x")] == [1, 0]
    assert regex("", "a,b=c", {}, pattern="a,b") == 1
    with pytest.raises(DataError, match="'pattern'"):
        regex("", "", {})


SCHEMA = {"type": "object", "required": ["n"], "additionalProperties": False, "properties": {
    "n": {"type": "integer", "minimum": 1, "maximum": 9},
    "tags": {"type": "array", "maxItems": 2, "items": {"type": "string", "minLength": 1}}, "kind": {"enum": ["a", 1]},
    "x": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^z"}]}}}


@pytest.mark.parametrize(("text", "worth"), [
    ('{"n": 3}', 1), ('{"n": 3.0, "tags": ["a"], "kind": "a", "x": null}', 1), ('```json\n{"n": 3}\n```', 1),
    ('here: ```json\n{"n": 3}\n```', 0),
    ('{"n": 0}', 0), ('{"n": 10}', 0), ('{"n": true}', 0), ('{"n": 1.5}', 0), ("{}", 0), ('{"n": 3, "m": 1}', 0), ('{"n": 3, "n": 4}', 0),
    ('{"n": 3, "tags": ["a", "b", "c"]}', 0), ('{"n": 3, "tags": [""]}', 0), ('{"n": 3, "kind": true}', 0), ('{"n": 3, "x": "y"}', 0),
    ('{"n": 3, "x": "zz"}', 1), ("[3]", 0), ('{"n": NaN}', 0), ("", 0), ("[" * 100_000, 0),
    ('```json\n{"n": 3}\n```\n```json\n{"n": 4}\n```', 0)])
def test_json_schema(text: str, worth: int):
    assert json_schema("", text, {"schema": SCHEMA}) == worth


def test_a_schema_it_cannot_enforce_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="n uses multipleOf"):
        json_schema("", "{}", {"schema": {"properties": {"n": {"multipleOf": 2}}}})
    with pytest.raises(DataError, match="asks for type 'int'"):
        check_schema({"type": "int"})
    (tmp_path / "s.json").write_text(json.dumps({"type": "array"}))
    assert json_schema("", "[1]", {}, file=str(tmp_path / "s.json")) == 1
    assert schema_fault({"n": {}}, {"properties": {"n": {"type": ["string",
                                                                  "null"]}}}) == "the document.n is object; expected string or null"
    with pytest.raises(ValueError, match="Infinity"):
        parse_strict_json("[Infinity]")


@pytest.mark.skipif(sandbox.sandbox_unavailable() is not None, reason=f"no sandbox here: {sandbox.sandbox_unavailable()}")
def test_unit_tests_run_in_the_sandbox():
    row = {"tests": ["import math", "assert add(1, 2) == 3", "assert add(math.pi, 0) == math.pi"]}
    assert unit_tests("", "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", row) == 1
    assert unit_tests("", "def add(a, b):\n    return a - b", row) == 0
    assert unit_tests("", "import os\nos._exit(0)", row) == 0
    assert unit_tests("", "```python\ndef add(a, b): return a + b\n```\n```python\nx = 1\n```", row) == 0
    with pytest.raises(DataError, match="'tests'"):
        unit_tests("", "x = 1", {})


def test_rewards_are_asked_for_by_name_option_and_weight(tmp_path: Path):
    (tmp_path / "mine.py").write_text("raise SystemExit('it is never imported here')\ndef kind(prompt, completion, row): return 1")
    rewards = parse_rewards(["answer[how=lenient,form=boxed]:2", "format:0.1", "length[longest=8,margin=2]", "regex[pattern=a,b{1,2}:c]:-1",
                             f"{tmp_path}/mine.py:kind:0.5"])
    assert [(r.name, r.weight, dict(r.options)) for r in rewards] == [
        ("answer", 2.0, {"how": "lenient", "form": "boxed"}), ("format", 0.1, {}), ("length", 1.0, {"longest": 8, "margin": 2}),
        ("regex", -1.0, {"pattern": "a,b{1,2}:c"}), ("kind", 0.5, {})]
    assert rewards[-1].file == str(tmp_path / "mine.py")
    assert [r.full_marks for r in rewards] == [1, 1, 0, 1, None]
    assert built_in_reward(rewards[0])("", "\\boxed{41} \\boxed{42}", {"gold": 42}) == 1


@pytest.mark.parametrize(("text", "sentence"), [
    ("def kidn(prompt, completion, row): return 1", "has no 'kind'; did you mean 'kidn'"), ("def kind(:", "is not Python"),
    ("kind = lambda prompt, completion, row: 1", None), ("from elsewhere import worth as kind", None), ("from elsewhere import *", None)])
def test_a_file_must_have_the_function_as_far_as_its_text_tells(text: str, sentence: str | None, tmp_path: Path):
    (tmp_path / "mine.py").write_text(text)
    if sentence is None:
        assert parse_rewards([f"{tmp_path}/mine.py:kind"])[0].name == "kind"
        return
    with pytest.raises(UsageError, match=sentence):
        parse_rewards([f"{tmp_path}/mine.py:kind"])


@pytest.mark.parametrize(("specs", "sentence"), [
    (["anwser:1"], "did you mean 'answer'"), (["answer:x"], "unknown reward"), (["answer:1", "answer:2"], "given twice"),
    (["answer:0"], "weight"), ([], "no reward"), (["answer[how=fuzzy]:1"], "how is 'fuzzy'"), (["answer[hwo=strict]"], "you mean 'how'"),
    (["length:1"], "needs longest, margin"), (["length[longest=x,margin=1]"], "expected int"), (["format[x=1]"], "it has none"),
    (["nowhere.py:f:1"], "no file"), (["answer:1e999"], "not finite"),
    (["mine.py:not a name:1"], "FUNCTION"), (["answer:--1"], "not a number")])
def test_a_bad_request_is_a_sentence(specs, sentence):
    with pytest.raises(UsageError, match=sentence):
        parse_rewards(specs)
