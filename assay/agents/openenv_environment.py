"""Environments behind an OpenEnv server (openenv:URL), through OpenEnv's own client: a session of its own, over a WebSocket, an episode.

Two kinds of servers. Where an action is words, a turn's text is the action's field `action`. Where actions are calls of tools (an MCP
environment), `tools=true`: the server's tools are shown to the policy, its calls are steps, and a turn without a call ends the episode.
What an observation shows is its field `shown`, or all of it as JSON. A reward that never came is unknown, and not 0.

A server gives so many sessions at a time as it was started for (max_concurrent_envs, 1 where it does not say): a rollout needs one for
each of its episodes, and what has none is an error row that says so.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from assay.agents.environment import Answer, ToolError, answer_tool_calls
from assay.agents.tool_calls import ChatMessage
from assay.errors import DataError, UsageError

ANSWERED_FAULTS = ("execution_error", "invalid_args", "tool_not_found")  # of a call: the model's to hear. Others are the server's failure


class OpenEnvEnvironment:
    def __init__(self, name: str, action: str = "message", shown: str = "", tools: bool = False):
        self.client, self.action, self.shown = openenv_client(name), action, shown
        self.tools: Sequence[Mapping[str, Any]] = listed_tools(name) if tools else ()
        self.calls_tools, self.paid, self.over = tools, False, False

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        self.client.connect()
        return [{"role": "user", "content": self._shown(self.client.reset(seed=seed).observation)}]

    def step(self, message: ChatMessage) -> Answer:
        return self._called(message) if self.calls_tools else self._said(message)

    def close(self) -> None:
        """The server's session ends with the connection."""
        self.client.close()

    def _said(self, message: ChatMessage) -> Answer:
        found = self.client.step({self.action: message["content"]})
        if found.done and found.reward is None:
            raise DataError("the server ended the episode without a reward, which is not known to be 0")
        return [] if found.done else [{"role": "user", "content": self._shown(found.observation)}], found.reward or 0.0, found.done

    def _called(self, message: ChatMessage) -> Answer:
        earned: list[float] = []

        def call(tool: str, /, **arguments: Any) -> str:
            if self.over:
                raise ToolError("the episode is over")
            found = self.client.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
            self.over = found.done
            if found.reward is not None:
                self.paid = True
                earned.append(float(found.reward))
            return answer_of_call(found.observation)

        names = [each["function"]["name"] for each in self.tools]
        answers = answer_tool_calls(message, self.tools, {name: functools.partial(call, name) for name in names})
        over = self.over or not answers
        if over and not self.paid:
            raise DataError("the episode ended and the server gave no reward for any of its steps, which is not known to be 0")
        return [] if over else answers, sum(earned), over

    def _shown(self, observation: Mapping[str, Any]) -> str:
        if self.shown and self.shown not in observation:
            raise DataError(f"the observation has no field {self.shown!r}, only {', '.join(observation)}")
        return str(observation[self.shown]) if self.shown else json.dumps(observation, sort_keys=True)


def answer_of_call(observation: Mapping[str, Any]) -> str:
    """Result of a tool as text; ToolError with its message where it failed, DataError where the server did."""
    if (error := observation.get("error")) is not None:
        if error.get("error_type") not in ANSWERED_FAULTS:
            raise DataError(f"the server could not call {observation.get('tool_name')}: {error.get('error_type')}: {error.get('message')}")
        raise ToolError(str(error.get("message")))
    result = observation.get("result")
    found = result.get("data") if isinstance(result, Mapping) and "data" in result else result
    return found if isinstance(found, str) else json.dumps(found, sort_keys=True)


@functools.cache
def listed_tools(url: str) -> tuple[Mapping[str, Any], ...]:
    """The server's tools in OpenAI's layout."""
    client = openenv_client(url)
    try:
        client.connect()
        listed = client.step({"type": "list_tools"}).observation.get("tools")
    finally:
        client.close()
    if not listed:
        raise UsageError(f"the OpenEnv server at {url} names no tools; leave tools=true out where an action is words")
    return tuple({"type": "function", "function": {
        "name": each["name"], "description": each.get("description", ""),
        "parameters": each.get("input_schema") or each.get("inputSchema") or {"type": "object", "properties": {}}}} for each in listed)


def openenv_client(url: str) -> Any:
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ModuleNotFoundError:
        raise UsageError("OpenEnv is not installed; pip install openenv") from None
    return GenericEnvClient(base_url=url).sync()
