"""Message fields: what a message says beside its content (tool calls, reasoning), and whether a rendered turn says it too.

A template may write a value as JSON in another spacing, order or escaping, as Python's repr, in XML, or stripped: each piece of it
(a name, a key, a leaf) is looked for alone, in any of these forms, in what is left of the turn without its content.
"""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.errors import DataError
from assay.strict_json import parse_json

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALL_FIELDS = ("tool_calls", "function_call")
_KNOWN = {"role", "content", *REASONING_FIELDS, *CALL_FIELDS}


def says_nothing(message: Mapping[str, Any]) -> bool:
    """Whether a message has no content, no call and no reasoning: all that a turn of it could teach is to say nothing and stop."""
    return not any(str(message[name]).strip() for name in ("content", *REASONING_FIELDS, *CALL_FIELDS) if message.get(name))


def says_more_than_content(message: Mapping[str, Any]) -> bool:
    return any(message.get(name) for name in (*REASONING_FIELDS, *CALL_FIELDS))


def other_fields(message: Mapping[str, Any]) -> list[str]:
    """Fields that are neither content nor calls nor reasoning, and say something."""
    return sorted(name for name, value in message.items() if name not in _KNOWN and value not in (None, "", [], {}))


def unwritten_fields(message: Mapping[str, Any], turn: str) -> list[str]:
    """The fields of a message that the text of its turn does not say, each with the first piece that is not there."""
    missing, rest = [], turn
    for name in ("content", *REASONING_FIELDS):
        if isinstance(said := message.get(name), str) and said.strip():
            found = next((form for form in text_forms(said.strip()) if form in rest), None)
            if found is None:
                missing.append(f"{name} ({_shown(said)})")
            else:
                rest = rest.replace(found, " ", 1)  # a call that the words announce is not yet a call
    for name in CALL_FIELDS:
        lost = [piece for piece in call_pieces(message.get(name)) if not is_written(piece, rest)]
        if lost:
            missing.append(f"{name} ({_shown(lost[0])})")
    return missing


def call_pieces(calls: Any) -> Iterator[Any]:
    """The names and the arguments of calls: every key and every leaf. Ids and types are bookkeeping."""
    listed = calls if isinstance(calls, list | tuple) else [calls] if calls else []
    for call in listed:
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if not isinstance(function, Mapping):
            yield function
            continue
        yield function.get("name")
        arguments = function.get("arguments")
        yield from [arguments] if isinstance(arguments, str) else leaves(arguments)


def leaves(value: Any) -> Iterator[Any]:
    """Keys and leaves of a JSON value; a key without a value is none: tables fill rows up with them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner is not None:
                yield key
                yield from leaves(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from leaves(inner)
    elif value is not None:
        yield value


def is_written(piece: Any, text: str) -> bool:
    """Arguments that are JSON in a text may have been written as they are, or as the value that they spell."""
    if not isinstance(piece, str):
        return piece is None or any(form in text for form in {json.dumps(piece, default=str), str(piece)})
    if not piece.strip() or any(form in text for form in text_forms(piece.strip())):
        return True
    inner = _parsed(piece)
    return isinstance(inner, dict | list) and all(is_written(leaf, text) for leaf in leaves(inner))


def text_forms(text: str) -> list[str]:
    """Forms in which a text may be rendered: as it is, as JSON escapes it (once, or within JSON again), as Python does, and as XML does."""
    once = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    return [text, *once, *(json.dumps(form)[1:-1] for form in once), repr(text)[1:-1], html.escape(text), html.escape(text, quote=False)]


def _parsed(text: str) -> Any:
    try:
        return parse_json(text, where="arguments", error=DataError)
    except DataError:
        return None


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
