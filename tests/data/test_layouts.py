"""Rows of every kind of file and layout become the same conversations; what is not one is refused by file and line."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from assay.data.feedback import read_feedback
from assay.data.layouts import Conversation, read_conversations
from assay.data.preferences import read_preferences
from assay.errors import DataError, UsageError

ASKED, ANSWERED = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


def jsonl(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def only(path: Path, **options: Any) -> Conversation:
    (conversation,) = read_conversations(path, **options).rows
    return conversation


@pytest.mark.parametrize(("layout", "row"), [
    ("messages", {"messages": [ASKED, ANSWERED]}),
    ("prompt-completion", {"prompt": [ASKED], "completion": [ANSWERED]}),
    ("alpaca", {"instruction": "Why?", "input": "", "output": "So."}),
    ("sharegpt", {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}),
])
def test_layouts_say_the_same(tmp_path: Path, layout: str, row: dict[str, Any]):
    found = read_conversations(jsonl(tmp_path, row))
    assert found.layout == layout
    assert found.rows[0].messages == (ASKED, ANSWERED)
    assert found.rows[0].learned_from == (0 if layout in ("messages", "sharegpt") else 1)


def test_plain_text(tmp_path: Path):
    assert only(jsonl(tmp_path, {"text": "Once."})).plain == ("", "Once.")
    assert only(jsonl(tmp_path, {"prompt": "Why? ", "completion": "So."})).plain == ("Why? ", "So.")


def test_a_prompt_alone_has_nothing_to_learn(tmp_path: Path):
    assert only(jsonl(tmp_path, {"prompt": [ASKED], "answer": "4"})).prompt_only
    assert only(jsonl(tmp_path, {"prompt": "Why?"})).prompt_only
    assert not only(jsonl(tmp_path, {"messages": [ASKED, ANSWERED]})).prompt_only


def test_alpaca_and_sharegpt_keep_input_and_system(tmp_path: Path):
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."}
    assert [m["content"] for m in only(jsonl(tmp_path, row)).messages] == ["Be brief.", "Add.\n\n1 2", "3"]
    shared = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}
    assert [m["role"] for m in only(jsonl(tmp_path, shared)).messages] == ["system", "user", "assistant"]


def test_gsm8k_as_it_is_and_as_thought(tmp_path: Path):
    path = jsonl(tmp_path, {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"})
    assert only(path).messages[1]["content"] == "It is <<1+1=2>>2.\n#### 2"
    thought = only(path, gsm8k="think")
    assert thought.messages[1]["content"] == "<think>It is <<1+1=2>>2.</think><answer>2</answer>"
    assert thought.content == only(path).content  # another rendering is the same conversation
    with pytest.raises(DataError, match=r"rows.jsonl:1: the answer ends with 'two'"):
        read_conversations(jsonl(tmp_path, {"question": "1+1?", "answer": "two"}))


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "a, \"b\"\nc", "completion": "é"}, {"prompt": "x", "completion": "y"}]
    plain = jsonl(tmp_path, *rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with (tmp_path / "rows.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    due = [(row.plain, row.content) for row in read_conversations(plain).rows]
    for suffix in (".jsonl.gz", ".parquet", ".csv"):
        assert [(row.plain, row.content) for row in read_conversations(tmp_path / f"rows{suffix}").rows] == due, suffix


def test_ids_name_file_row_and_content(tmp_path: Path):
    one, two = read_conversations(jsonl(tmp_path, {"text": "a"}, "", {"text": "b"})).rows
    assert one.id.startswith("rows.jsonl:1:")
    assert two.id.startswith("rows.jsonl:2:")
    assert two.where.endswith("rows.jsonl:3")  # the line, blank ones counted
    turned = read_conversations(jsonl(tmp_path, {"text": "b", "more": 1}, {"text": "a"}, name="turned.jsonl"))
    assert [row.content for row in turned.rows] == [two.content, one.content]
    assert turned.ignored == {"more": 1}


@pytest.mark.parametrize(("rows", "words"), [
    (['{"text": "a"', ], r"rows.jsonl:1: not JSON"),
    ([{"text": "a"}, "[1]"], r"rows.jsonl:2: expected a JSON object, found list"),
    (['{"text": "a", "text": "b"}'], r"rows.jsonl:1: not JSON \('text' stands twice"),
    ([{"text": "a"}, {"messages": [ASKED, ANSWERED]}], r"rows.jsonl:2: this row has the layout messages .*the rows before text"),
    ([{"words": "a"}], r"rows.jsonl:1: no known layout has the columns words; expected one of: messages"),
    ([{"text": "a", "instruction": "b", "output": "c"}], r"fit the layouts text and alpaca; say which with --layout"),
    ([{"messages": []}], r"messages is an empty list"),
    ([{"messages": [{"role": "user"}]}], r"expected a role and a content"),
    ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], r"expected a role and a content"),
    ([{"conversations": [{"from": "stranger", "value": "a"}]}], r"a turn from 'stranger'"),
    ([{"prompt": "a", "completion": " "}], r"completion is empty"),
    ([{"prompt": "a", "completion": "b", "tools": [{"type": "function"}]}], r"rows.jsonl:1: tools stand beside a prompt that is text"),
    ([{"prompt": f"ask {n}:", "completion": f"ask {n}: b"} for n in range(4)], r"in 4 of 4 rows the completion begins with the whole"),
    ([{"prompt": "a", "completion": [ANSWERED]}],
     r"prompt is str 'a' and completion list .*expected text in both, or a list of messages in both"),
    ([], r"there is no row in it"),
])
def test_what_is_no_conversation_is_refused_in_words(tmp_path: Path, rows: list[Any], words: str):
    with pytest.raises(DataError, match=words):
        read_conversations(jsonl(tmp_path, *rows))


def test_other_files_are_refused_in_words(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match=r"unknown kind of file; expected .jsonl"):
        read_conversations(jsonl(tmp_path, {"text": "a"}, name="rows.txt"))
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b,c\n")
    with pytest.raises(DataError, match=r"rows.csv:2: 3 cells; the header names 2 columns"):
        read_conversations(tmp_path / "rows.csv")
    (tmp_path / "twice.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match=r"the column 'prompt' is there twice"):
        read_conversations(tmp_path / "twice.csv")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_conversations(tmp_path / "rows.parquet")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-9])
    with pytest.raises(DataError, match="damaged or cut short"):
        read_conversations(tmp_path / "cut.jsonl.gz")


def test_a_layout_can_be_named(tmp_path: Path):
    path = jsonl(tmp_path, {"text": "a", "instruction": "b", "output": "c"})
    assert read_conversations(path, layout="alpaca").ignored == {"text": 1}
    with pytest.raises(UsageError, match="did you mean 'alpaca'"):
        read_conversations(path, layout="alpacca")
    with pytest.raises(DataError, match="the layout messages needs messages"):
        read_conversations(path, layout="messages")


EMPTY = {"role": "assistant", "content": " \n"}


@pytest.mark.parametrize(("row", "words"), [
    ({"messages": [ASKED, EMPTY]}, r"rows.jsonl:1: turn 1 \(assistant\) is empty"),
    ({"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": ""}]}, "turn 1 .assistant. is empty"),
    ({"prompt": [ASKED], "completion": [EMPTY]}, "turn 1 .assistant. is empty"),
    ({"messages": [ASKED, ASKED, ANSWERED]}, "turns 0 and 1 are both of user"),
    ({"messages": [ASKED, ANSWERED, ANSWERED]}, "turns 1 and 2 are both of assistant"),
    ({"messages": [ANSWERED, ASKED]}, "the assistant speaks first"),
    ({"messages": [{"role": "system", "content": "Be brief."}, ANSWERED, ASKED, ANSWERED]}, "the assistant speaks first"),
])
def test_turns_that_teach_nothing_or_answer_nobody_are_refused(tmp_path: Path, row: dict[str, Any], words: str):
    with pytest.raises(DataError, match=words):
        read_conversations(jsonl(tmp_path, row))


@pytest.mark.parametrize("row", [
    {"prompt": [ANSWERED, ASKED, ASKED], "completion": [ANSWERED]},  # a prompt may be whatever it is
    {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "why"}}]}, {"role": "tool", "content": "1"},
                  {"role": "tool", "content": "2"}, ANSWERED]},
    {"messages": [ASKED, {"role": "assistant", "content": "", "reasoning_content": "Hm."}]},
    {"messages": [ASKED, ANSWERED, ASKED]},
])
def test_turns_that_are_in_order_are_not_refused(tmp_path: Path, row: dict[str, Any]):
    assert only(jsonl(tmp_path, row))


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_are_read_beside_messages_in_every_layout_that_has_them(as_text: bool, tmp_path: Path):
    """A prompt without the tools that its answer calls is another prompt, and nothing of a run would show it."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    user, said = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    tools = json.dumps([tool]) if as_text else [tool]
    for row in ({"messages": [user, said]}, {"prompt": [user], "completion": [said]}, {"prompt": [user]}):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row | {"tools": tools}) + "\n")
        assert read_conversations(file).rows[0].tools == (tool,)
        assert not read_conversations(file).ignored
    file.write_text(json.dumps({"prompt": [user], "completion": [said], "label": True, "tools": tools}) + "\n")
    assert read_feedback(file)[0].answer.tools == (tool,)
    file.write_text(json.dumps({"prompt": [user], "chosen": [said], "rejected": [said | {"content": "b"}], "tools": tools}) + "\n")
    pair = read_preferences(file)[0]
    assert pair.chosen.tools == pair.rejected.tools == (tool,)
