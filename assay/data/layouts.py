"""Conversation layouts: TRL's, Alpaca's, ShareGPT's or GSM8K's rows become conversations. A file has one layout.

  messages              messages: [{role, content}, …]; tools where there are any
  prompt-completion     prompt, completion: both text, or both lists of messages; tools beside messages, where there are any
  prompt                prompt alone, text or messages (and tools): something to answer, nothing to learn from
  text                  text: all of it is learned
  alpaca                instruction, output; input and system where there are any
  sharegpt              conversations: [{from, value}, …]; system where there is one
  gsm8k                 question, answer, whose last line is "#### " and the result

Other columns are left alone and named. Which layout it is, is read off the columns of the first row; rows of another, or of
two at once, are refused; so are tools beside text, which no template would write, and a file whose completions repeat their prompts.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from assay.config import nearest
from assay.data.data_files import DataRow, read_rows
from assay.data.hub_datasets import local_data
from assay.data.message_fields import says_nothing
from assay.errors import DataError, UsageError
from assay.strict_json import parse_json, require_shape

Message = Mapping[str, Any]  # role, content, and what else the template may ask for
Gsm8k = Literal["plain", "think"]
NO_CHANCE_ROWS = 4  # of a file, from which on what most of them have in common is no chance
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant",
            "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool"}  # of ShareGPT files


class RowContent(NamedTuple):
    """Content of a row, whichever layout it has."""

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
        """Content key, equal for conversations that say the same, wherever they stand."""
        return content_of(self.id)

    @property
    def prompt_only(self) -> bool:
        """Whether there is nothing to learn from: a prompt, for rollouts."""
        return len(self.messages) <= self.learned_from if self.messages else not (self.plain and self.plain[1])


@dataclass(frozen=True)
class ConversationFile:
    """A file of them."""

    path: Path
    layout: str
    rows: tuple[Conversation, ...]
    ignored: dict[str, int] = field(default_factory=dict)  # column → in how many rows it stands


def read_conversations(path: Path | str, *, layout: str | None = None, gsm8k: Gsm8k = "plain",
                       limit: int | None = None) -> ConversationFile:
    """`layout` decides where the columns allow two. `gsm8k="think"` writes answers as <think>…</think><answer>…</answer>. The first
    `limit` rows are read."""
    if layout is not None and layout not in CONVERSATION_LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}{nearest(layout, CONVERSATION_LAYOUTS)}")
    path, rows, ignored, first = local_data(path), [], Counter[str](), ""
    for row in read_rows(path, limit=limit):
        found = _layout(row, layout)
        if first and found != first:
            raise DataError(f"{row.where}: this row has the layout {found} ({_shown(row)}), the rows before {first}; a file has one layout")
        first = found
        ignored.update(key for key, value in row.values.items() if key not in CONVERSATION_LAYOUTS[found].columns and value is not None)
        rows.append(_conversation(row, path.name, found, gsm8k))
    if not rows:
        raise DataError(f"{path}: there is no row in it")
    refuse_repeated_prompts(path, [[row.plain] for row in rows if not row.messages])
    return ConversationFile(path, first, tuple(rows), dict(ignored))


def content_of(id: str) -> str:
    """The part of an id that depends on what is said alone."""
    return id.rsplit(":", 1)[1].partition("#")[0]


def _conversation(row: DataRow, name: str, layout: str, gsm8k: Gsm8k) -> Conversation:
    """Conversation of a row. Its digest is of the columns as they stand in the file, so that another rendering of them is the same
    conversation."""
    columns = {key: value for key, value in row.values.items() if key in CONVERSATION_LAYOUTS[layout].columns and value}
    digest = hashlib.sha256(json.dumps(columns, sort_keys=True, default=str).encode()).hexdigest()[:16]  # parquet may hold dates
    content = CONVERSATION_LAYOUTS[layout].read(row, gsm8k)
    refuse_odd_turns(row, content.messages, content.learned_from)
    return Conversation(f"{name}:{row.number}:{digest}", row.where, *content)


def refuse_odd_turns(row: DataRow, messages: tuple[Message, ...], learned_from: int) -> None:
    """Refuse supervised turns that are empty or that do not answer another speaker. A prompt may be whatever it is."""
    for k, message in enumerate(messages[learned_from:], learned_from):
        role, before = message["role"], messages[k - 1]["role"] if k else "system"
        if role == "assistant" and says_nothing(message):
            raise DataError(f"{row.where}: turn {k} (assistant) is empty, and would teach to say nothing and stop; remove it, or say what "
                            "it should")
        if role == before and role in ("user", "assistant"):
            raise DataError(f"{row.where}: turns {k - 1} and {k} are both of {role}; join them into one, or remove the one that is amiss")
        if role == "assistant" and before in ("system", "developer") and learned_from == 0:
            raise DataError(f"{row.where}: the assistant speaks first, and so answers nothing; put before it what it answers, or give the "
                            "row as prompt (its beginning) and completion (what is to be learned)")


def refuse_repeated_prompts(path: Path, rows: Sequence[Sequence[tuple[str, str] | None]]) -> None:
    """Refuse a file in which most rows' completions all begin with the whole prompt, which would then be said twice. `rows` are texts, each
    a prompt and its completion. One such row is a completion that quotes what it was asked."""
    repeated = [row[0] for row in rows if all(text is not None and _begins_with_prompt(*text) for text in row)]
    if len(repeated) > len(rows) / 2 and len(rows) >= NO_CHANCE_ROWS and repeated[0] is not None:
        raise DataError(f"{path}: in {len(repeated)} of {len(rows)} rows the completion begins with the whole prompt, such as "
                        f"{repeated[0][0][:60]!r}: the model would read it twice; remove it from the completions, or the column prompt")


def _begins_with_prompt(prompt: str, completion: str) -> bool:
    return bool(prompt.strip()) and completion.lstrip().startswith(prompt.strip())


def refuse_tools_beside_text(row: DataRow) -> None:
    if row.values.get("tools") not in (None, [], "", "[]"):
        raise DataError(f"{row.where}: tools stand beside a prompt that is text, which no chat template writes, so that the model would "
                        "never see them; give lists of messages, or remove the column tools")


def _layout(row: DataRow, asked: str | None) -> str:
    has = {key for key, value in row.values.items() if value is not None}
    if asked is not None:
        if missing := CONVERSATION_LAYOUTS[asked].needs - has:
            raise DataError(f"{row.where}: the layout {asked} needs {', '.join(sorted(missing))}; found {_shown(row)}")
        return asked
    found = [name for name, layout in CONVERSATION_LAYOUTS.items() if layout.needs <= has]
    if "prompt" in found and len(found) > 1:
        found.remove("prompt")  # a prompt beside something to learn is part of that, or the same again
    if not found:
        expected = "; ".join(f"{name} ({', '.join(sorted(layout.needs))})" for name, layout in CONVERSATION_LAYOUTS.items())
        raise DataError(f"{row.where}: no known layout has the columns {_shown(row)}; expected one of: {expected}")
    if len(found) > 1:
        raise DataError(f"{row.where}: the columns {_shown(row)} fit the layouts {' and '.join(found)}; say which with --layout")
    return found[0]


def _shown(row: DataRow) -> str:
    return ", ".join(name if value is not None else f"{name} (null)" for name, value in row.values.items()) or "none"

# ---------------------------------------------------------------- one reader a layout


def _of_messages(row: DataRow, _: Gsm8k) -> RowContent:
    return RowContent(messages_of(row, "messages"), tools=tools_of(row))


def tools_of(row: DataRow) -> tuple[Mapping[str, Any], ...] | None:
    tools = row.values.get("tools")
    if isinstance(tools, str):  # parquet and CSV have no room for free structures: TRL's files hold them as JSON text
        tools = parse_json(tools, where=f"{row.where}: tools", error=DataError, advice="expected a list of tools")
    require_shape(tools, ([dict], None), where=f"{row.where}: tools", error=DataError)
    return tuple(tools) if tools else None


def _of_prompt_completion(row: DataRow, _: Gsm8k) -> RowContent:
    prompt, completion = row.values["prompt"], row.values["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        refuse_tools_beside_text(row)
        if not completion.strip():
            raise DataError(f"{row.where}: completion is empty, and would teach to say nothing and stop; remove the row")
        return RowContent(plain=(_text(row, "prompt", empty=True), completion))
    for column, other in (("prompt", "completion"), ("completion", "prompt")):
        if not isinstance(row.values[column], list) and isinstance(row.values[other], str | list):  # name the one that is amiss
            raise DataError(f"{row.where}: {column} is {_kind(row.values[column])} and {other} {_kind(row.values[other])}; expected text "
                            "in both, or a list of messages in both")
    before = messages_of(row, "prompt")
    return RowContent(before + messages_of(row, "completion"), learned_from=len(before), tools=tools_of(row))


def _of_prompt(row: DataRow, _: Gsm8k) -> RowContent:
    if isinstance(row.values["prompt"], str):
        refuse_tools_beside_text(row)
        return RowContent(plain=(_text(row, "prompt"), ""))
    messages = messages_of(row, "prompt")
    return RowContent(messages, learned_from=len(messages), tools=tools_of(row))


def _of_text(row: DataRow, _: Gsm8k) -> RowContent:
    return RowContent(plain=("", _text(row, "text")))


def _of_alpaca(row: DataRow, _: Gsm8k) -> RowContent:
    more = _text(row, "input", empty=True) if row.values.get("input") else ""
    asked = _text(row, "instruction") + (f"\n\n{more}" if more else "")
    return _answered(asked, _text(row, "output"), _system(row))


def _of_sharegpt(row: DataRow, _: Gsm8k) -> RowContent:
    turns = _listed(row, "conversations")
    messages = []
    for turn in turns:
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in SPEAKERS or not isinstance(value, str):
            raise DataError(f"{row.where}: a turn from {speaker!r} with a value of type {type(value).__name__}; "
                            f"expected text from one of {', '.join(SPEAKERS)}")
        messages.append({"role": SPEAKERS[speaker], "content": value})
    return RowContent((*_system(row), *messages))


def _of_gsm8k(row: DataRow, gsm8k: Gsm8k) -> RowContent:
    reasoning, mark, result = (answer := _text(row, "answer")).rpartition("\n#### ")
    if not mark or not result.strip():
        raise DataError(f"{row.where}: the answer ends with {answer[-40:]!r}; expected a last line '#### ' with the result")
    if gsm8k == "think":
        answer = f"<think>{reasoning}</think><answer>{result.strip()}</answer>"
    return _answered(_text(row, "question"), answer)


def _answered(question: str, answer: str, system: tuple[Message, ...] = ()) -> RowContent:
    """One question and its answer: as messages, and as the plain text that a model without a template gets."""
    before = (*system, {"role": "user", "content": question})
    asked = "".join(f"{message['content']}\n" for message in before)
    return RowContent((*before, {"role": "assistant", "content": answer}), len(before), (asked, answer))


def _system(row: DataRow) -> tuple[Message, ...]:
    return ({"role": "system", "content": _text(row, "system")},) if row.values.get("system") else ()


def messages_of(row: DataRow, column: str) -> tuple[Message, ...]:
    messages = tuple({key: value for key, value in turn.items() if value is not None} for turn in _listed(row, column))
    for message in messages:
        if not isinstance(message.get("role"), str) or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            raise DataError(f"{row.where}: a message of {column} is {str(dict(message))[:120]}; expected a role and a content, both text")
    return tuple({"content": "", **message} for message in messages)


def _listed(row: DataRow, column: str) -> list[dict[str, Any]]:
    turns = row.values[column]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{row.where}: {column} is {_kind(turns)}; expected a list of objects, one a turn")
    return turns


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else f"{type(value).__name__} {str(value)[:60]!r}"


def _text(row: DataRow, column: str, *, empty: bool = False) -> str:
    text = row.values[column]
    if not isinstance(text, str):
        raise DataError(f"{row.where}: {column} is {type(text).__name__}; expected text")
    if not text and not empty:
        raise DataError(f"{row.where}: {column} is empty; expected text")
    return text


class RowLayout(NamedTuple):
    needs: set[str]
    may_have: set[str]
    read: Callable[[DataRow, Gsm8k], RowContent]

    @property
    def columns(self) -> set[str]:
        return self.needs | self.may_have


CONVERSATION_LAYOUTS: dict[str, RowLayout] = {
    "messages": RowLayout({"messages"}, {"tools"}, _of_messages),
    "prompt-completion": RowLayout({"prompt", "completion"}, {"tools"}, _of_prompt_completion),
    "prompt": RowLayout({"prompt"}, {"tools"}, _of_prompt),
    "text": RowLayout({"text"}, set(), _of_text),
    "alpaca": RowLayout({"instruction", "output"}, {"input", "system"}, _of_alpaca),
    "sharegpt": RowLayout({"conversations"}, {"system"}, _of_sharegpt),
    "gsm8k": RowLayout({"question", "answer"}, set(), _of_gsm8k),
}
