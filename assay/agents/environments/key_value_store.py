"""Key-value store environment: values are given one after another, to be stored; in the end one of them is asked for."""

import random
from collections.abc import Mapping, Sequence

from assay.agents.environment import Answer, ToolError, answer_tool_calls, call, tool
from assay.agents.tool_calls import ChatMessage, ToolCall
from assay.errors import UsageError

NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "knoll", "larch")


class KeyValueStore:
    """`pairs` values are told one a turn; the last turn asks for one of them. Half the reward is for storing all, half for the answer."""

    tools = (tool("put", "Stores a value under a key.", key="string", value="string"), tool("get", "The value under a key.", key="string"))

    def __init__(self, pairs: int = 3):
        if not 1 <= pairs <= len(NAMES):
            raise UsageError(f"kv: {pairs} pairs; expected 1 to {len(NAMES)}")
        self.pairs = pairs

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        chance = random.Random(seed)
        self.told = [(name, str(chance.randint(100, 999))) for name in chance.sample(NAMES, self.pairs)]
        self.wanted, self.store, self.turn = chance.choice(self.told), dict[str, str](), 0
        return [{"role": "system", "content": "Store what you are told with put, and look it up with get. Answer with the value alone."},
                self._telling()]

    def step(self, message: ChatMessage) -> Answer:
        if message.get("tool_calls") or message.get("faults"):
            return answer_tool_calls(message, self.tools, {"put": self._put, "get": self._get}), 0.0, False
        if self.turn < self.pairs:
            self.turn += 1
            return [self._telling()], 0.0, False
        stored = all(self.store.get(key) == value for key, value in self.told)
        return [], 0.5 * stored + 0.5 * (message["content"].strip() == self.wanted[1]), True

    def solution(self) -> Sequence[ToolCall | str]:
        stored: list[ToolCall | str] = [turn for key, value in self.told for turn in (call("put", key=key, value=value), "stored")]
        return [*stored, call("get", key=self.wanted[0]), self.wanted[1]]

    def _telling(self) -> Mapping[str, str]:
        if self.turn == self.pairs:
            return {"role": "user", "content": f"What is the value of {self.wanted[0]}?"}
        key, value = self.told[self.turn]
        return {"role": "user", "content": f"The value of {key} is {value}."}

    def _put(self, key: str, value: str) -> str:
        self.store[key] = value
        return "stored"

    def _get(self, key: str) -> str:
        if key not in self.store:
            raise ToolError(f"nothing is stored under {key!r}")
        return self.store[key]
