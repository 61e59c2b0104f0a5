"""Environments: what an episode of several turns talks to. A small protocol, the built-in ones by name, and a user's own by module:Class.

    class Lookup:
        tools = [tool("look", "What stands under a name.", name="string")]

        def reset(self, seed):                  # the task of this seed, as messages; the same seed is the same task
            self.wanted = NAMES[seed % len(NAMES)]
            return [{"role": "user", "content": f"What is the colour of {self.wanted}?"}]

        def step(self, message):                # an assistant's turn → what is answered, its reward, whether the episode is over
            if message.get("tool_calls") or message.get("faults"):
                return answer_tool_calls(message, self.tools, {"look": lambda name: COLOURS[name]}), 0.0, False
            return [], float(COLOURS[self.wanted] in message["content"]), True

        def solution(self):                     # optional: the turns of a right episode, for the preflight to play
            return [call("look", name=self.wanted), COLOURS[self.wanted]]

`step` gets {"role": "assistant", "content": …}, with "tool_calls" where the turn has some (OpenAI's layout, arguments as an object) and
"faults", sentences, where one could not be read: a malformed call is the environment's to answer. What it raises is no reward: the
episode becomes an error row. One that has `close` is told when its episode is over. It runs in a process of its own
(environment_process.py) and loads no torch.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from assay.agents.tool_calls import ChatMessage, ToolCall
from assay.config import nearest
from assay.errors import AssayError, DataError, UsageError
from assay.reward.json_schema import schema_fault

T = TypeVar("T")
Answer = tuple[Sequence[ChatMessage], float, bool]  # messages, the reward of this step, whether the episode is over
BUILT_IN = {"calculator": "assay.agents.environments.calculator:Calculator",
            "kv": "assay.agents.environments.key_value_store:KeyValueStore",
            "code": "assay.agents.environments.code_sandbox:CodeSandbox",
            "search": "assay.agents.environments.corpus_search:CorpusSearch",
            "game": "assay.agents.environments.sliding_tiles:SlidingTiles"}
ADAPTERS = {"gym": "environment_adapters:GymEnvironment", "openenv": "openenv_environment:OpenEnvEnvironment",
            "verifiers": "verifiers_environment:VerifiersEnvironment"}


class Environment(Protocol):
    """`tools` are JSON schemas in OpenAI's layout; they are shown by the model's own chat template."""

    tools: Sequence[Mapping[str, Any]]

    def reset(self, seed: int) -> Sequence[ChatMessage]: ...

    def step(self, message: ChatMessage) -> Answer: ...


class ToolError(AssayError):
    """Failure of a tool, in words for the model: it is the tool's answer, and no error of the episode."""


def tool(name: str, description: str, /, **arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema: each argument by its JSON type, or by a schema of its own; all are required."""
    properties = {key: {"type": kind} if isinstance(kind, str) else dict(kind) for key, kind in arguments.items()}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}}}


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def answer_tool_calls(message: ChatMessage, tools: Sequence[Mapping[str, Any]],
                      functions: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """A message for each call, in order: what its function returns, or what is wrong with it. Faults come with the last, or alone."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    answers = [{"role": "tool", "tool_call_id": each["id"], "name": each["function"]["name"],
                "content": _answer(each["function"]["name"], each["function"]["arguments"], schemas, functions)}
               for each in message.get("tool_calls", ())]
    faults = " ".join(message.get("faults", ()))
    if faults and answers:
        answers[-1] |= {"content": f"{answers[-1]['content']}\n{faults}"}
    return answers or ([{"role": "user", "content": faults}] if faults else [])


def _answer(name: str, arguments: Mapping[str, Any], schemas: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> str:
    if name not in schemas:
        return f"error: there is no tool {name!r}; there are {', '.join(schemas)}"
    if (fault := schema_fault(dict(arguments), schemas[name], f"the arguments of {name}")) is not None:
        return f"error: {fault}"
    try:
        return str(functions[name](**arguments))
    except ToolError as error:
        return f"error: {error}"


def open_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """A built-in one, an adapter's (gym:NAME, openenv:URL, verifiers:NAME), or a class: module:Class, file.py:Class."""
    kind, _, rest = name.partition(":")
    if name in BUILT_IN:
        found = loaded_class(BUILT_IN[name])
    elif kind in ADAPTERS and rest:
        options, found = {"name": rest, **options}, loaded_class(f"assay.agents.{ADAPTERS[kind]}")
    elif rest:
        found = loaded_class(name)
    else:
        raise UsageError(f"--environment {name!r}: no such environment{nearest(name, BUILT_IN)}; your own is module:Class or "
                         "file.py:Class, others are gym:NAME, openenv:URL and verifiers:NAME")
    try:
        made = found(**options)
    except TypeError as error:
        raise UsageError(f"--environment {name}: it does not take these options: {error}") from None
    missing = [each for each in ("tools", "reset", "step") if not hasattr(made, each)]
    if missing:
        raise UsageError(f"--environment {name}: it has no {', no '.join(missing)}; an environment has tools, reset(seed) and "
                         "step(message)")
    return made


def loaded_class(name: str) -> Callable[..., Environment]:
    where, _, wanted = name.rpartition(":")
    if where.endswith(".py"):
        specification = importlib.util.spec_from_file_location("assay_user_environment", where)
        if specification is None or specification.loader is None or not os.path.exists(where):
            raise UsageError(f"--environment {name}: {where} is no Python file")
        module = importlib.util.module_from_spec(specification)
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))  # it may import its neighbours
        specification.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    if not callable(found := vars(module).get(wanted)):
        raise UsageError(f"--environment {name}: {where} has no class {wanted!r}")
    return found


def checked_messages(messages: Any, who: str) -> list[dict[str, Any]]:
    """Messages as a chat template takes them, or a sentence that names what is none."""
    listed = list(messages) if isinstance(messages, list | tuple) else None
    if listed is None or any(not isinstance(each, Mapping) or not isinstance(each.get("content"), str) or each.get("role") not in
                             ("system", "user", "tool") for each in listed):
        raise DataError(f"{who} gave {str(messages)[:120]!r}; expected a list of messages with role system, user or tool and text content")
    return require_json([dict(each) for each in listed], who)


def require_json(value: T, who: str) -> T:
    """A value that travels between processes and into texts as it is, or a sentence."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # half of a surrogate pair is a ValueError too
        raise DataError(f"{who} gave something that is no plain JSON: {error}") from None
    return value
