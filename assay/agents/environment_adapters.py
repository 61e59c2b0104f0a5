"""Environments of others, where their packages are installed: reasoning-gym's problems, and servers of OpenEnv."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from assay.agents.environment import Answer
from assay.agents.tool_calls import ChatMessage, ToolCall
from assay.errors import DataError, UsageError
from assay.reward.answer import read_answer
from assay.reward.gym import gym_problems, gym_score, reasoning_gym_package


class GymEnvironment:
    """gym:NAME: one problem of a reasoning-gym dataset a seed, answered in one turn and scored by the dataset itself."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, name: str):
        self.dataset = name
        reasoning_gym_package()

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        [self.row] = gym_problems(self.dataset, 1, seed=seed)
        return [{"role": "user", "content": self.row["prompt"]}]

    def step(self, message: ChatMessage) -> Answer:
        return [], gym_score(self.row, read_answer(message["content"], form="tag") or ""), True

    def solution(self) -> Sequence[ToolCall | str]:
        return [self.row["gold_completion"]]


class OpenEnvEnvironment:
    """openenv:URL: a running OpenEnv server. A turn's text is the action's field `action`; what is shown is the observation's field
    `shown`, or all of it as JSON. A server of tools (MCP) speaks another protocol, which is not spoken here."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, name: str, action: str = "message", shown: str = ""):
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ModuleNotFoundError:
            raise UsageError("OpenEnv is not installed; pip install openenv-core") from None
        self.client, self.action, self.shown = GenericEnvClient(base_url=name).sync(), action, shown

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        self.client.connect()
        return [self._message(self.client.reset(seed=seed).observation)]

    def step(self, message: ChatMessage) -> Answer:
        found = self.client.step({self.action: message["content"]})
        if found.done and found.reward is None:
            raise DataError("the server ended the episode without a reward, which is not known to be 0")
        return [] if found.done else [self._message(found.observation)], found.reward or 0.0, found.done

    def _message(self, observation: Mapping[str, Any]) -> dict[str, str]:
        if self.shown and self.shown not in observation:
            raise DataError(f"the observation has no field {self.shown!r}, only {', '.join(observation)}")
        return {"role": "user", "content": str(observation[self.shown]) if self.shown else json.dumps(observation, sort_keys=True)}
