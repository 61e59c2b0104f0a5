"""Tool calls in each model's own format: Hermes and Qwen, Qwen3-Coder, Llama 3, Mistral, gpt-oss. What cannot be read is said, not raised.

    parsed = HERMES.parse('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
    parsed.calls        (ToolCall("add", {"a": 1}),)
    parsed.faults       a sentence for each call that could not be read: the environment answers it

A turn's text is decoded with its special tokens, since in some formats these say that a call begins; the token that ended the turn is
left away.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.errors import DataError, UsageError
from assay.strict_json import parse_json

ChatMessage = Mapping[str, Any]
MOST_CALLS = 64  # of one turn; what comes after is a fault
HOW_TO_CALL = "write a call as one JSON object"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParsedTurn:
    """Parsed turn: the text outside of its calls, the calls, and why what looks like another call is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()
    thinking: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """`structured`: its chat template wants the calls of earlier turns as fields of a message, and not as the text that was said.
    `untyped`: arguments are said as texts, and only the tool's schema tells what they are."""

    name: str
    mark: str  # a chat template that holds it speaks this format
    parse: Callable[[str], ParsedTurn] = field(repr=False)
    write: Callable[[str, Sequence[ToolCall]], str] = field(repr=False)
    structured: bool = False
    untyped: bool = False

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        """A turn of a model that was shown these tools."""
        parsed = self.parse(text)
        return replace(parsed, calls=tuple(typed_call(call, tools) for call in parsed.calls)) if self.untyped else parsed

    def message(self, text: str, address: str, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The turn as an environment and a template read it. Call ids are made of `address`: the same turn has the same ones again."""
        parsed = self.read(text, tools)
        calls = [{"id": call_id(address, number), "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                 for number, call in enumerate(parsed.calls)]
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if self.structured:
            said |= {"content": parsed.content} | ({"thinking": parsed.thinking} if parsed.thinking else {})
        return said | ({"tool_calls": calls} if calls else {}) | ({"faults": list(parsed.faults)} if parsed.faults else {})

    def history(self, message: ChatMessage) -> dict[str, Any]:
        """An earlier turn as the chat template is shown it: in most formats the very text that was sampled, calls included."""
        shown = {key: value for key, value in message.items() if key != "faults"}
        return shown if self.structured else {key: value for key, value in shown.items() if key != "tool_calls"}


def call_id(address: str, number: int) -> str:
    """Nine letters and digits: what Mistral's template demands, and everyone else takes."""
    return hashlib.sha256(f"{address} {number}".encode()).hexdigest()[:9]


def format_for(template: str | None, name: str | None = None) -> ToolFormat:
    """Tool-call format by name, or the one that the chat template uses; Hermes' where the template shows none."""
    if name is not None:
        if name not in TOOL_FORMATS:
            raise UsageError(f"--tool-format {name!r}; expected one of {', '.join(TOOL_FORMATS)}")
        return TOOL_FORMATS[name]
    return next((each for each in TOOL_FORMATS.values() if template is not None and each.mark in template), HERMES)

# ---------------------------------------------------------------- Hermes, Qwen, SmolLM3


def parse_hermes(text: str) -> ParsedTurn:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them. One that was only thought of is none."""
    thought, rest = split_thinking(text)
    content, bodies, faults = [thought], list[str](), list[str]()
    while (begin := rest.find("<tool_call>")) >= 0:
        content.append(rest[:begin])
        rest = rest[begin + len("<tool_call>"):].lstrip()
        end = re.compile(r"</tool_call>|(?=<tool_call>)|\Z").search(rest, leading_json(rest))
        assert end is not None, "every text has an end"
        bodies.append(rest[: end.start()].strip())
        faults += [] if end[0] else ["a <tool_call> has no </tool_call>"]
        rest = rest[end.end():]
    calls, unread = read_calls(bodies, "arguments")
    return ParsedTurn("".join([*content, rest]).strip(), () if faults else calls, (*unread, *faults[:1]))


def split_thinking(text: str) -> tuple[str, str]:
    """Split a text at the end of the thinking. Its beginning may be the template's; without an end all of it is thinking."""
    if "</think>" in text:
        end = text.rindex("</think>") + len("</think>")
    else:
        end = len(text) if text.lstrip().startswith("<think>") else 0
    return text[:end], text[end:]


def write_hermes(content: str, calls: Sequence[ToolCall]) -> str:
    written = [f'<tool_call>\n{as_json({"name": call.name, "arguments": dict(call.arguments)})}\n</tool_call>' for call in calls]
    return "\n".join([*([content] if content else []), *written])

# ---------------------------------------------------------------- Qwen3-Coder, Qwen3.5, Nemotron 3


def parse_qwen3_coder(text: str) -> ParsedTurn:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>, any number of them."""
    thought, rest = split_thinking(text)
    content, calls, faults = [thought], list[ToolCall](), list[str]()
    while (begin := rest.find("<tool_call>")) >= 0:
        content.append(rest[:begin])
        rest = rest[begin + len("<tool_call>"):]
        call, end = _tagged_call(rest)
        if call is not None:
            calls.append(call)
        else:
            faults.append("a tool call must be <function=NAME>, a <parameter=KEY>VALUE</parameter> for each argument, </function>, "
                          f"</tool_call>; found {rest[:80]!r}")
            end = len(rest) if "</tool_call>" not in rest else rest.index("</tool_call>") + len("</tool_call>")
        rest = rest[end:]
    more = len(calls) - MOST_CALLS
    return ParsedTurn("".join([*content, rest]).strip(), tuple(calls[:MOST_CALLS]),
                      (*faults[:MOST_CALLS], *([f"{more} calls too many: a turn may have {MOST_CALLS}"] if more > 0 else [])))


def _tagged_call(text: str) -> tuple[ToolCall | None, int]:
    """The call at the beginning of a text, up to its </tool_call>, and where that ends; None where it is none."""
    head = re.match(r"\s*<function=([^<>\s]+)>", text)
    place, arguments = head.end() if head else 0, dict[str, Any]()
    while head and (key := re.compile(r"\s*<parameter=([^<>\s]+)>\n?").match(text, place)):
        end = text.find("</parameter>", key.end())
        if end < 0 or key[1] in arguments:
            return None, 0
        arguments[key[1]] = text[key.end():end].removesuffix("\n")
        place = end + len("</parameter>")
    tail = re.compile(r"\s*</function>\s*</tool_call>").match(text, place)
    return (ToolCall(head[1], arguments), tail.end()) if head and tail else (None, 0)


def typed_call(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """A call whose arguments are texts, as its tool's schema has them: what need not be a string is read as JSON where it is some."""
    schemas: Mapping[str, Any] = next((each["function"].get("parameters", {}).get("properties", {}) for each in tools
                                       if each["function"]["name"] == call.name), {})
    return ToolCall(call.name, {key: _typed(text, schemas.get(key)) for key, text in call.arguments.items()})


def _typed(text: str, schema: Any) -> Any:
    kinds = schema.get("type") if isinstance(schema, Mapping) else "string"
    if "string" in (kinds if isinstance(kinds, list) else [kinds]) or (isinstance(schema, Mapping) and text in schema.get("enum", ())):
        return text
    try:
        return parse_json(text, where="an argument", error=DataError)
    except DataError:
        return text


def write_qwen3_coder(content: str, calls: Sequence[ToolCall]) -> str:
    written = ["".join([f"<tool_call>\n<function={call.name}>\n", *(
        f"<parameter={key}>\n{value if isinstance(value, str) else as_json(value)}\n</parameter>\n"
        for key, value in call.arguments.items()), "</function>\n</tool_call>"]) for call in calls]
    return "\n".join([*([content] if content else []), *written])

# ---------------------------------------------------------------- Llama 3


def parse_llama3(text: str) -> ParsedTurn:
    """{"name": …, "parameters": {…}} after <|python_tag|>, or as the whole turn; several are separated by semicolons."""
    content, tagged, rest = text.partition("<|python_tag|>")
    body = rest.strip() if tagged else text.strip()
    if not tagged and not _begins_call(body):
        return ParsedTurn(text.strip())
    calls, faults = read_calls(separated_objects(body), "parameters")
    return ParsedTurn(content.strip() if tagged else "", calls, faults)


def _begins_call(body: str) -> bool:
    """An object with a name; a whole one that has other fields and no arguments is an answer in JSON."""
    if not body.startswith("{") or '"name"' not in body:
        return False
    whole = json.loads(body[:end]) if (end := leading_json(body)) else {}
    return not whole.keys() - {"name", "type", "id"} or not whole.keys().isdisjoint({"parameters", "arguments"})


def separated_objects(body: str) -> list[str]:
    """Objects with semicolons between them; what is no object stays as it is, for its fault to be told."""
    found = list[str]()
    while body := body.lstrip("; \n"):
        end = leading_json(body) or len(body)
        found.append(body[:end])
        body = body[end:]
    return found


def write_llama3(content: str, calls: Sequence[ToolCall]) -> str:
    return "; ".join(as_json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls) if calls else content

# ---------------------------------------------------------------- Mistral


def parse_mistral(text: str) -> ParsedTurn:
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or since its 2025 models [TOOL_CALLS]name[ARGS]{…} for each call."""
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return ParsedTurn(text.strip())
    rest = rest.strip()
    if "[ARGS]" in rest and (rest.startswith("[ARGS]") or not rest.startswith(("[", "{"))):
        return ParsedTurn(content.strip(), *_named_calls(rest))
    try:
        listed = parse_json(rest, where="what follows [TOOL_CALLS]", error=DataError, advice=HOW_TO_CALL)
    except DataError as error:
        return ParsedTurn(content.strip(), (), (str(error),))
    bodies = [json.dumps(each) for each in (listed if isinstance(listed, list) else [listed])]
    return ParsedTurn(content.strip(), *read_calls(bodies, "arguments"))


def _named_calls(rest: str) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """name[ARGS]{…}, the next after another [TOOL_CALLS]."""
    bodies = list[str]()
    while rest:
        name, _, given = rest.partition("[ARGS]")
        given = given.lstrip()
        end = given.find("[TOOL_CALLS]", leading_json(given))
        rest, given = ("", given) if end < 0 else (given[end + len("[TOOL_CALLS]"):].strip(), given[:end])
        bodies.append(call_body(name.strip().partition("[CALL_ID]")[0], given.strip()))
    return read_calls(bodies, "arguments")


def write_mistral(content: str, calls: Sequence[ToolCall]) -> str:
    written = as_json([{"name": call.name, "arguments": dict(call.arguments)} for call in calls])
    return content + (f"[TOOL_CALLS]{written}" if calls else "")

# ---------------------------------------------------------------- gpt-oss


def parse_gpt_oss(text: str) -> ParsedTurn:
    """Harmony: <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME …<|message|>{…}<|call|>."""
    thinking, content, bodies, faults = list[str](), list[str](), list[str](), list[str]()
    for part in re.split(r"<\|start\|>assistant", text):
        header, mark, body = part.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body)[0]
        to = re.search(r"to=([^\s<]+)", header)
        if not mark and (to is not None or "<|" in header):
            faults.append("a message has no <|message|>")
        elif not mark:
            content += [header] if header.strip() else []
        elif to is not None and not to[1].startswith("functions."):
            faults.append(f"there is no {to[1][:80]!r} here; a tool is called as functions.NAME")
        elif to is not None:
            bodies.append(call_body(to[1].removeprefix("functions."), body.strip()))
        else:
            (thinking if "analysis" in header else content).append(body)
    calls, unread = read_calls(bodies, "arguments")
    return ParsedTurn("".join(content).strip(), calls, (*unread, *faults), "".join(thinking).strip())


def write_gpt_oss(content: str, calls: Sequence[ToolCall]) -> str:
    spoken = [f"<|channel|>final<|message|>{content}"] if content or not calls else []
    asked = [f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{as_json(dict(call.arguments))}"
             for call in calls]
    return "<|end|><|start|>assistant".join([*spoken, *asked])

# ---------------------------------------------------------------- one call


def read_calls(bodies: Sequence[str], key: str) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """Read tool calls: each body is an object with a name and, under `key`, arguments that are an object. A field that nobody reads is a
    fault: it may be the arguments under another name."""
    calls, faults = list[ToolCall](), list[str]()
    for body in bodies[:MOST_CALLS]:
        try:
            given = parse_json(body, where="a tool call", error=DataError, advice=HOW_TO_CALL)
        except DataError as error:
            faults.append(str(error))
            continue
        held = [name for name in (key, "arguments") if isinstance(given, dict) and name in given]
        arguments = given[held[0]] if held else {}
        if not isinstance(given, dict) or not isinstance(arguments, dict) or not isinstance(given.get("name"), str) or (
                given.keys() - {"name", "id", "type", *held[:1]}):
            faults.append(f'a tool call must be {{"name": …, "{key}": {{…}}}}; found {body[:80]!r}')
            continue
        calls.append(ToolCall(given["name"], arguments))
    more = len(bodies) - MOST_CALLS
    return tuple(calls), (*faults, *([f"{more} calls too many: a turn may have {MOST_CALLS}"] if more > 0 else []))


def call_body(name: str, arguments: str) -> str:
    """A call whose name and arguments were said apart, as one object; what is no one JSON value is left to be told as it is."""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' if leading_json(arguments) == len(arguments) else arguments


def leading_json(text: str) -> int:
    """How many characters at the beginning of a text are one JSON value; 0 where none begins there, or one that is nested too deeply."""
    try:
        return json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return 0


def as_json(value: Any) -> str:
    """JSON as chat templates write it: letters beyond ASCII are not escaped."""
    return json.dumps(value, ensure_ascii=False)


HERMES = ToolFormat("hermes", "<tool_call>", parse_hermes, write_hermes)
QWEN3_CODER = ToolFormat("qwen3_coder", "<function=", parse_qwen3_coder, write_qwen3_coder, untyped=True)
LLAMA_3 = ToolFormat("llama3", "ipython", parse_llama3, write_llama3)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", parse_mistral, write_mistral, structured=True)
GPT_OSS = ToolFormat("gpt_oss", "<|channel|>", parse_gpt_oss, write_gpt_oss, structured=True)
TOOL_FORMATS = {each.name: each for each in (QWEN3_CODER, HERMES, MISTRAL, GPT_OSS, LLAMA_3)}
