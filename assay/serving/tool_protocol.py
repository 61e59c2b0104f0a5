"""Tools and forms in OpenAI's protocol: what a request may say of them, how the model is shown it, and what it said as tool calls.

Tools are shown by the model's own chat template and calls are read in the model's own format (`agents.tool_calls`). With `tool_choice`
auto the model may call or not, and what looks like a call and cannot be read stays text, with its faults beside it. With `required` or
a named function, and with `response_format`, it cannot say anything else: tokens are drawn among those that the form allows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.agents.tool_calls import ToolCall, ToolFormat, call_id
from assay.errors import ArtifactError, DataError
from assay.generate.generation_request import Completion
from assay.generate.token_grammar import GrammarVocabulary, TokenGrammar
from assay.model.tokenizer import Tokenizer
from assay.serving.request_fields import RequestFields, RequestRefused, short_json
from assay.strict_json import parse_json

MOST_TOOLS = 128
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# What stands around a call that must come, by format: before it, its arguments' name, after it, and whether calls stand in a list.
CALL_SYNTAX = {"hermes": ("<tool_call>\n", "arguments", "\n</tool_call>", False), "llama3": ("", "parameters", "", False),
               "mistral": ("[TOOL_CALLS]", "arguments", "", True)}


@dataclass(frozen=True)
class SpeechForm:
    """Form that a chat request asks for: its tools and the format of the answer."""

    tools: tuple[dict[str, Any], ...] = ()  # shown to the model; none where tool_choice is none
    called: tuple[str, ...] = ()  # one of these must be called
    schema: Mapping[str, Any] | None = None  # of the answer, where it must be JSON

    @property
    def constrained(self) -> bool:
        return bool(self.called) or self.schema is not None


def read_speech_form(fields: RequestFields) -> SpeechForm:
    tools = _tools(fields.take("tools"))
    names = tuple(tool["function"]["name"] for tool in tools)
    choice, named = _tool_choice(fields.take("tool_choice"), names)
    schema = _answer_schema(fields.take("response_format"))
    if fields.take("parallel_tool_calls") is False and tools and choice == "auto":
        raise RequestRefused("parallel_tool_calls false is not supported with tool_choice auto: how often it calls is the model's to say; "
                             "take the first call, or set tool_choice to required", param="parallel_tool_calls",
                             code="unsupported_parameter")
    if schema is not None and tools and choice != "none":
        raise RequestRefused("response_format with tools is not supported; set tool_choice to none, or leave one of them out",
                             param="response_format", code="unsupported_parameter")
    strict = [number for number, tool in enumerate(tools) if tool["function"].get("strict")]
    if strict and choice == "auto":
        raise RequestRefused("strict is not supported with tool_choice auto; set tool_choice to required or to a function",
                             param=f"tools[{strict[0]}].function.strict", code="unsupported_parameter")
    return SpeechForm(() if choice == "none" else tools, named, schema)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise RequestRefused(f"tools: expected a list of up to {MOST_TOOLS}", param="tools", code="invalid_type")
    for number, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestRefused(f'tools[{number}]: expected {{"type": "function", "function": {{"name": …, "parameters": …}}}}',
                                 param=f"tools[{number}]", code="invalid_type")
        if not isinstance(function.get("parameters", {}), dict):
            raise RequestRefused(f"tools[{number}].function.parameters: expected a JSON schema", param=f"tools[{number}]",
                                 code="invalid_type")
    names = [tool["function"]["name"] for tool in value]
    if len(set(names)) < len(names):
        raise RequestRefused("tools: two have one name", param="tools", code="invalid_value")
    return tuple(value)


def _tool_choice(value: Any, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """none, auto or required; and which of the tools must be called."""
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        name = value["function"].get("name")
        if name not in names:
            raise RequestRefused(f"tool_choice names {short_json(name)}, which is none of the tools", param="tool_choice",
                                 code="invalid_value")
        return "required", (name,)
    choice = ("auto" if names else "none") if value is None else value
    if choice not in ("none", "auto", "required"):
        raise RequestRefused(f"tool_choice is {short_json(value)}; expected none, auto, required or a function", param="tool_choice",
                             code="invalid_value")
    if choice == "required" and not names:
        raise RequestRefused("tool_choice is required and there are no tools", param="tool_choice", code="invalid_value")
    return choice, tuple(names) if choice == "required" else ()


def _answer_schema(value: Any) -> Mapping[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    asked = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(asked, dict) or not isinstance(asked.get("schema"), dict):
        raise RequestRefused('response_format: expected {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
                             '"json_schema": {"name": …, "schema": {…}}}', param="response_format", code="invalid_value")
    return asked["schema"]

# ---------------------------------------------------------------- messages


def read_tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn, their arguments as objects: what chat templates are shown."""
    if not isinstance(value, list) or not value:
        raise RequestRefused(f"{where}.tool_calls: expected a list of calls", param=where, code="invalid_type")
    found = []
    for number, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str):
            raise RequestRefused(f'{where}.tool_calls[{number}]: expected {{"id": …, "type": "function", "function": {{"name": …, '
                                 '"arguments": "{…}"}}', param=where, code="invalid_type")
        try:
            arguments = parse_json(function.get("arguments") or "{}", where=f"{where}.tool_calls[{number}].function.arguments", shape=dict)
        except (ArtifactError, TypeError, AttributeError):
            raise RequestRefused(f"{where}.tool_calls[{number}].function.arguments: expected a JSON object, as a string", param=where,
                                 code="invalid_value") from None
        found.append({"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
                spoken: ToolFormat) -> str:
    """Render a chat with the model's own template, which must support what it is given."""
    assert tokenizer.template is not None
    shown = [dict(message) for message in messages]
    if "tool_calls" not in tokenizer.template:  # then the model's own format is what a turn with calls looks like
        shown = [_as_text(message, spoken) for message in shown]
    try:
        text = tokenizer.render(shown, tools=list(tools) or None, add_generation_prompt=True)
        if tools and text == tokenizer.render(shown, add_generation_prompt=True):
            raise RequestRefused("tools are not supported by this model: its chat template has no place for them", param="tools",
                                 code="unsupported_parameter")
    except DataError as error:
        raise RequestRefused(str(error), param="messages", code="invalid_value") from None
    return text


def _as_text(message: dict[str, Any], spoken: ToolFormat) -> dict[str, Any]:
    calls = [ToolCall(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    shown = {name: value for name, value in message.items() if name != "tool_calls"}
    return shown | {"content": spoken.write(message["content"], calls)} if calls else shown

# ---------------------------------------------------------------- grammars, and what was said


def speech_grammar(form: SpeechForm, vocabulary: GrammarVocabulary, spoken: ToolFormat) -> TokenGrammar:
    if form.schema is not None:
        return vocabulary.json_schema(form.schema)
    if spoken.name not in CALL_SYNTAX:
        raise RequestRefused(f"tool_choice other than auto and none is not supported for models that call in the format {spoken.name}",
                             param="tool_choice", code="unsupported_parameter")
    before, key, after, listed = CALL_SYNTAX[spoken.name]
    parameters = {tool["function"]["name"]: tool["function"].get("parameters", {"type": "object", "properties": {}}) for tool in form.tools}
    calls = [{"type": "object", "properties": {"name": {"const": name}, key: parameters[name]}, "required": ["name", key],
              "additionalProperties": False} for name in form.called]
    call: dict[str, Any] = {"anyOf": calls}
    return vocabulary.around(before, {"type": "array", "items": call, "minItems": 1, "maxItems": 1} if listed else call, after)


def spoken_message(completion: Completion, tokenizer: Tokenizer, spoken: ToolFormat, address: str,
                   tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A turn of a model that has tools: OpenAI's message. Where a call cannot be read the turn stays text, and its faults are told."""
    if completion.ended == "stop string":
        text = completion.text or ""
    else:
        text = tokenizer.decode(completion.ids[:-1] if completion.ended == "stop" else completion.ids)
    parsed = spoken.read(text, tools)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None, "refusal": None}
    if parsed.faults:
        return message | {"content": text, "tool_call_faults": list(parsed.faults)}
    if not parsed.calls:
        return message | {"content": parsed.content}
    calls = [{"id": call_id(address, number), "type": "function",
              "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}}
             for number, call in enumerate(parsed.calls)]
    return message | {"tool_calls": calls}
