"""Reasoning-gym's problems as environments (gym:NAME), where the package is installed."""

from collections.abc import Mapping, Sequence
from typing import Any

from assay.agents.environment import Answer
from assay.agents.tool_calls import ChatMessage, ToolCall
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
