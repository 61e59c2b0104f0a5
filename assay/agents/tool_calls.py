"""Tool calls in each model's own format: Hermes and Qwen, Llama 3, Mistral, gpt-oss. What cannot be read is said, never raised.

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
from dataclasses import dataclass, field
from typing import Any

from assay.errors import DataError, UsageError
from assay.strict_json import parse_json

ChatMessage = Mapping[str, Any]
MOST_CALLS = 64  # of one turn; what comes after is a fault


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ParsedTurn:
    """What a turn says outside of its calls, the calls, and why what looks like another one is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()
    thinking: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """`structured`: its chat template wants the calls of earlier turns as fields of a message, and not as the text that was said."""

    name: str
    mark: str  # a chat template that holds it speaks this format
    parse: Callable[[str], ParsedTurn] = field(repr=False)
    write: Callable[[str, Sequence[ToolCall]], str] = field(repr=False)
    structured: bool = False

    def message(self, text: str, address: str) -> dict[str, Any]:
        """The turn as an environment and a template read it. Call ids are made of `address`: the same turn has the same ones again."""
        parsed = self.parse(text)
        calls = [{"id": call_id(address, number), "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                 for number, call in enumerate(parsed.calls)]
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if self.structured:
            said |= {"content": parsed.content} | ({"thinking": parsed.thinking} if parsed.thinking else {})
        return said | ({"tool_calls": calls} if calls else {}) | ({"faults": list(parsed.faults)} if parsed.faults else {})

    def history(self, message: ChatMessage) -> dict[str, Any]:
        """What a chat template is shown of an earlier turn: in most formats the very text that was said, calls and all."""
        shown = {key: value for key, value in message.items() if key != "faults"}
        return shown if self.structured else {key: value for key, value in shown.items() if key != "tool_calls"}


def call_id(address: str, number: int) -> str:
    """Nine letters and digits: what Mistral's template demands, and everyone else takes."""
    return hashlib.sha256(f"{address} {number}".encode()).hexdigest()[:9]


def format_for(template: str | None, name: str | None = None) -> ToolFormat:
    """By name, or the one that the chat template speaks; Hermes' where there is no sign of any."""
    if name is not None:
        if name not in TOOL_FORMATS:
            raise UsageError(f"--tool-format {name!r}; expected one of {', '.join(TOOL_FORMATS)}")
        return TOOL_FORMATS[name]
    return next((each for each in TOOL_FORMATS.values() if template is not None and each.mark in template), HERMES)

# ---------------------------------------------------------------- Hermes, Qwen, SmolLM3


def parse_hermes(text: str) -> ParsedTurn:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them."""
    bodies = re.findall(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", text, re.DOTALL)
    faults = [] if text.count("<tool_call>") <= text.count("</tool_call>") else ["a <tool_call> has no </tool_call>"]
    content = re.sub(r"<tool_call>.*?(?:</tool_call>|(?=<tool_call>)|\Z)", "", text, flags=re.DOTALL).strip()
    calls, unread = read_calls([body.strip() for body in bodies], "arguments")
    return ParsedTurn(content, () if faults else calls, (*unread, *faults))


def write_hermes(content: str, calls: Sequence[ToolCall]) -> str:
    written = [f'<tool_call>\n{json.dumps({"name": call.name, "arguments": dict(call.arguments)})}\n</tool_call>' for call in calls]
    return "\n".join([*([content] if content else []), *written])

# ---------------------------------------------------------------- Llama 3


def parse_llama3(text: str) -> ParsedTurn:
    """The whole turn is {"name": …, "parameters": {…}}, after <|python_tag|> or bare; several are separated by semicolons."""
    body = text.strip()
    tagged = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not tagged and not (body.startswith("{") and '"name"' in body):
        return ParsedTurn(text.strip())
    calls, faults = read_calls(separated_objects(body), "parameters")
    return ParsedTurn("", calls, faults)


def separated_objects(body: str) -> list[str]:
    """Objects with semicolons between them; what is no object stays as it is, for its fault to be told."""
    found, decoder = list[str](), json.JSONDecoder()
    while body := body.lstrip("; \n"):
        try:
            _, end = decoder.raw_decode(body)
        except ValueError:
            return [*found, body]
        found.append(body[:end])
        body = body[end:]
    return found


def write_llama3(content: str, calls: Sequence[ToolCall]) -> str:
    return "; ".join(json.dumps({"name": call.name, "parameters": dict(call.arguments)}) for call in calls) if calls else content

# ---------------------------------------------------------------- Mistral


def parse_mistral(text: str) -> ParsedTurn:
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or since its 2025 models [TOOL_CALLS]name[ARGS]{…} for each call."""
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return ParsedTurn(text.strip())
    if "[ARGS]" in rest:
        named = [part.partition("[ARGS]") for part in rest.split("[TOOL_CALLS]")]
        bodies = [f'{{"name": {json.dumps(name.strip().partition("[CALL_ID]")[0])}, "arguments": {given}}}' for name, _, given in named]
        return ParsedTurn(content.strip(), *read_calls(bodies, "arguments"))
    try:
        listed = parse_json(rest, where="what follows [TOOL_CALLS]", error=DataError)
    except DataError as error:
        return ParsedTurn(content.strip(), (), (str(error),))
    bodies = [json.dumps(each) for each in (listed if isinstance(listed, list) else [listed])]
    return ParsedTurn(content.strip(), *read_calls(bodies, "arguments"))


def write_mistral(content: str, calls: Sequence[ToolCall]) -> str:
    written = json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in calls])
    return content + (f"[TOOL_CALLS]{written}" if calls else "")

# ---------------------------------------------------------------- gpt-oss


def parse_gpt_oss(text: str) -> ParsedTurn:
    """Harmony: <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME …<|message|>{…}<|call|>."""
    thinking, content, calls, faults = list[str](), list[str](), list[ToolCall](), list[str]()
    for part in re.split(r"<\|start\|>assistant", text):
        header, mark, body = part.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body)[0]
        to = re.search(r"to=functions\.([^\s<]+)", header)
        if not mark:
            content += [header] if header.strip() else []
        elif to is not None:
            found, unread = read_calls([f'{{"name": {json.dumps(to[1])}, "arguments": {body}}}'], "arguments")
            calls += found
            faults += unread
        else:
            (thinking if "analysis" in header else content).append(body)
    return ParsedTurn("".join(content).strip(), tuple(calls), tuple(faults), "".join(thinking).strip())


def write_gpt_oss(content: str, calls: Sequence[ToolCall]) -> str:
    spoken = [f"<|channel|>final<|message|>{content}"] if content or not calls else []
    asked = [f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{json.dumps(dict(call.arguments))}"
             for call in calls]
    return "<|end|><|start|>assistant".join([*spoken, *asked])

# ---------------------------------------------------------------- one call


def read_calls(bodies: Sequence[str], key: str) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """Each body is an object with a name and, under `key`, arguments that are an object."""
    calls, faults = list[ToolCall](), list[str]()
    for body in bodies[:MOST_CALLS]:
        try:
            given = parse_json(body, where="a tool call", error=DataError)
        except DataError as error:
            faults.append(str(error))
            continue
        arguments = given.get(key, given.get("arguments", {})) if isinstance(given, dict) else None
        if not isinstance(arguments, dict) or not isinstance(given.get("name"), str):
            faults.append(f'a tool call must be {{"name": …, "{key}": {{…}}}}; found {body[:80]!r}')
            continue
        calls.append(ToolCall(given["name"], arguments))
    more = len(bodies) - MOST_CALLS
    return tuple(calls), (*faults, *([f"{more} calls too many: a turn may have {MOST_CALLS}"] if more > 0 else []))


HERMES = ToolFormat("hermes", "<tool_call>", parse_hermes, write_hermes)
LLAMA_3 = ToolFormat("llama3", "ipython", parse_llama3, write_llama3)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", parse_mistral, write_mistral, structured=True)
GPT_OSS = ToolFormat("gpt_oss", "<|channel|>", parse_gpt_oss, write_gpt_oss, structured=True)
TOOL_FORMATS = {each.name: each for each in (HERMES, MISTRAL, GPT_OSS, LLAMA_3)}
