"""Conversations, whatever layout their rows have: TRL's, Alpaca's, ShareGPT's or GSM8K's. A file has one layout.

  messages              messages: [{role, content}, …]; tools where there are any
  prompt-completion     prompt, completion: both text, or both lists of messages
  prompt                prompt alone, text or messages: something to answer, nothing to learn from
  text                  text: all of it is learned
  alpaca                instruction, output; input and system where there are any
  sharegpt              conversations: [{from, value}, …]; system where there is one
  gsm8k                 question, answer, whose last line is "#### " and the result

Other columns are left alone and named. Which layout it is, is read off the columns of the first row; rows of another, or of
two at once, are refused.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from assay.config import nearest
from assay.data.rows import Row, read_rows
from assay.errors import DataError, UsageError

Message = Mapping[str, Any]  # role, content, and what else the template may ask for
Gsm8k = Literal["plain", "think"]
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant",
            "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool"}  # of ShareGPT files


class Said(NamedTuple):
    """What a row says, whichever layout it has."""

    messages: tuple[Message, ...] = ()
    learned_from: int = 0
    plain: tuple[str, str] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True)
class Conversation:
    """`messages` go through the model's template. `plain`, a prompt and a completion, is the text of a row that has no messages,
    and what a model without a template gets of one that has a single question and answer."""

    id: str  # file:row:content
    where: str
    messages: tuple[Message, ...] = ()
    learned_from: int = 0  # the first message that may be supervised: those before are a prompt
    plain: tuple[str, str] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None

    @property
    def content(self) -> str:
        """Equal for conversations that say the same, wherever they stand."""
        return content_of(self.id)

    @property
    def prompt_only(self) -> bool:
        """There is nothing to learn from: a prompt, for rollouts."""
        return len(self.messages) <= self.learned_from if self.messages else not (self.plain and self.plain[1])


@dataclass(frozen=True)
class Conversations:
    """A file of them."""

    path: Path
    layout: str
    rows: tuple[Conversation, ...]
    ignored: dict[str, int] = field(default_factory=dict)  # column → in how many rows it stands


def read_conversations(path: Path | str, *, layout: str | None = None, gsm8k: Gsm8k = "plain") -> Conversations:
    """`layout` decides where the columns allow two. `gsm8k="think"` writes answers as <think>…</think><answer>…</answer>."""
    if layout is not None and layout not in LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}")
    path, rows, ignored, first = Path(path), [], Counter[str](), ""
    for row in read_rows(path):
        found = _layout(row, layout)
        if first and found != first:
            raise DataError(f"{row.where}: this row has the layout {found} ({_shown(row)}), the rows before {first}; a file has one layout")
        first = found
        ignored.update(key for key, value in row.values.items() if key not in LAYOUTS[found].columns and value is not None)
        rows.append(_conversation(row, path.name, found, gsm8k))
    if not rows:
        raise DataError(f"{path}: there is no row in it")
    return Conversations(path, first, tuple(rows), dict(ignored))


def content_of(id: str) -> str:
    """The part of an id that depends on what is said alone."""
    return id.rsplit(":", 1)[1].partition("#")[0]


def _conversation(row: Row, name: str, layout: str, gsm8k: Gsm8k) -> Conversation:
    """Its digest is of the columns as they stand in the file, so that another rendering of them is the same conversation."""
    columns = {key: value for key, value in row.values.items() if key in LAYOUTS[layout].columns and value}
    digest = hashlib.sha256(json.dumps(columns, sort_keys=True, default=str).encode()).hexdigest()[:16]  # parquet may hold dates
    return Conversation(f"{name}:{row.number}:{digest}", row.where, *LAYOUTS[layout].read(row, gsm8k))


def _layout(row: Row, asked: str | None) -> str:
    has = {key for key, value in row.values.items() if value is not None}
    if asked is not None:
        if missing := LAYOUTS[asked].needs - has:
            raise DataError(f"{row.where}: the layout {asked} needs {', '.join(sorted(missing))}; found {_shown(row)}")
        return asked
    found = [name for name, layout in LAYOUTS.items() if layout.needs <= has]
    if "prompt" in found and len(found) > 1:
        found.remove("prompt")  # a prompt beside something to learn is part of that, or the same again
    if not found:
        expected = "; ".join(f"{name} ({', '.join(sorted(layout.needs))})" for name, layout in LAYOUTS.items())
        raise DataError(f"{row.where}: no known layout has the columns {_shown(row)}; expected one of: {expected}")
    if len(found) > 1:
        raise DataError(f"{row.where}: the columns {_shown(row)} fit the layouts {' and '.join(found)}; say which with --layout")
    return found[0]


def _shown(row: Row) -> str:
    return ", ".join(row.values) or "none"

# ---------------------------------------------------------------- one reader a layout


def _of_messages(row: Row, _: Gsm8k) -> Said:
    tools = row.values.get("tools")
    if isinstance(tools, str):  # parquet and CSV have no room for free structures: TRL's files hold them as JSON text
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{row.where}: tools is text and not JSON ({error})") from None
    return Said(_messages(row, "messages"), tools=tuple(tools) if tools else None)


def _of_prompt_completion(row: Row, _: Gsm8k) -> Said:
    prompt, completion = row.values["prompt"], row.values["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Said(plain=(_text(row, "prompt", empty=True), _text(row, "completion")))
    for column, other in (("prompt", "completion"), ("completion", "prompt")):
        if not isinstance(row.values[column], list) and isinstance(row.values[other], str | list):  # name the one that is amiss
            raise DataError(f"{row.where}: {column} is {_kind(row.values[column])} and {other} {_kind(row.values[other])}; expected text "
                            "in both, or a list of messages in both")
    before = _messages(row, "prompt")
    return Said(before + _messages(row, "completion"), learned_from=len(before))


def _of_prompt(row: Row, _: Gsm8k) -> Said:
    if isinstance(row.values["prompt"], str):
        return Said(plain=(_text(row, "prompt"), ""))
    messages = _messages(row, "prompt")
    return Said(messages, learned_from=len(messages))


def _of_text(row: Row, _: Gsm8k) -> Said:
    return Said(plain=("", _text(row, "text")))


def _of_alpaca(row: Row, _: Gsm8k) -> Said:
    more = _text(row, "input", empty=True) if row.values.get("input") else ""
    asked = _text(row, "instruction") + (f"\n\n{more}" if more else "")
    return _answered(asked, _text(row, "output"), _system(row))


def _of_sharegpt(row: Row, _: Gsm8k) -> Said:
    turns = _listed(row, "conversations")
    messages = []
    for turn in turns:
        speaker, value = turn.get("from"), turn.get("value")
        if speaker not in SPEAKERS or not isinstance(value, str):
            raise DataError(f"{row.where}: a turn from {speaker!r} with a value of type {type(value).__name__}; "
                            f"expected text from one of {', '.join(SPEAKERS)}")
        messages.append({"role": SPEAKERS[speaker], "content": value})
    return Said((*_system(row), *messages))


def _of_gsm8k(row: Row, gsm8k: Gsm8k) -> Said:
    reasoning, mark, result = (answer := _text(row, "answer")).rpartition("\n#### ")
    if not mark or not result.strip():
        raise DataError(f"{row.where}: the answer ends with {answer[-40:]!r}; expected a last line '#### ' with the result")
    if gsm8k == "think":
        answer = f"<think>{reasoning}</think><answer>{result.strip()}</answer>"
    return _answered(_text(row, "question"), answer)


def _answered(question: str, answer: str, system: tuple[Message, ...] = ()) -> Said:
    """One question and its answer: as messages, and as the plain text that a model without a template gets."""
    before = (*system, {"role": "user", "content": question})
    asked = "".join(f"{message['content']}\n" for message in before)
    return Said((*before, {"role": "assistant", "content": answer}), len(before), (asked, answer))


def _system(row: Row) -> tuple[Message, ...]:
    return ({"role": "system", "content": _text(row, "system")},) if row.values.get("system") else ()


def _messages(row: Row, column: str) -> tuple[Message, ...]:
    messages = tuple({key: value for key, value in turn.items() if value is not None} for turn in _listed(row, column))
    for message in messages:
        if not isinstance(message.get("role"), str) or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            raise DataError(f"{row.where}: a message of {column} is {str(dict(message))[:120]}; expected a role and a content, both text")
    return tuple({"content": "", **message} for message in messages)


def _listed(row: Row, column: str) -> list[dict[str, Any]]:
    turns = row.values[column]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{row.where}: {column} is {_kind(turns)}; expected a list of objects, one a turn")
    return turns


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else f"{type(value).__name__} {str(value)[:60]!r}"


def _text(row: Row, column: str, *, empty: bool = False) -> str:
    text = row.values[column]
    if not isinstance(text, str):
        raise DataError(f"{row.where}: {column} is {type(text).__name__}; expected text")
    if not text and not empty:
        raise DataError(f"{row.where}: {column} is empty; expected text")
    return text


class Layout(NamedTuple):
    needs: set[str]
    may_have: set[str]
    read: Callable[[Row, Gsm8k], Said]

    @property
    def columns(self) -> set[str]:
        return self.needs | self.may_have


LAYOUTS: dict[str, Layout] = {
    "messages": Layout({"messages"}, {"tools"}, _of_messages),
    "prompt-completion": Layout({"prompt", "completion"}, set(), _of_prompt_completion),
    "prompt": Layout({"prompt"}, set(), _of_prompt),
    "text": Layout({"text"}, set(), _of_text),
    "alpaca": Layout({"instruction", "output"}, {"input", "system"}, _of_alpaca),
    "sharegpt": Layout({"conversations"}, {"system"}, _of_sharegpt),
    "gsm8k": Layout({"question", "answer"}, set(), _of_gsm8k),
}
