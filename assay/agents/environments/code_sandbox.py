"""Code sandbox environment: write a function, try it out, hand it in; hidden tests decide. Programs run in reward/sandbox.py."""

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from assay.agents.environment import Answer, answer_tool_calls, call, tool
from assay.agents.tool_calls import ChatMessage, ToolCall
from assay.reward.sandbox import judge_program, require_sandbox, run_python

PRINTED = 1000  # characters of a program's output that are shown


class CodeTask(NamedTuple):
    """`{n}` stands for a number that the seed draws."""

    asked: str
    program: str
    tests: str


CODE_TASKS = (CodeTask("add {n} to a number", "def f(x):\n    return x + {n}", "assert f(0) == {n}\nassert f(-7) == {n} - 7"),
         CodeTask("return the square of a number, plus {n}", "def f(x):\n    return x * x + {n}",
              "assert f(3) == 9 + {n}\nassert f(-2) == 4 + {n}"),
         CodeTask("return the sum of a list of numbers, times {n}", "def f(x):\n    return sum(x) * {n}",
              "assert f([]) == 0\nassert f([1, 2]) == 3 * {n}"),
         CodeTask("return a text {n} times in a row", "def f(x):\n    return x * {n}", "assert f('ab') == 'ab' * {n}\nassert f('') == ''"),
         CodeTask("count the numbers of a list that are larger than {n}", "def f(x):\n    return sum(each > {n} for each in x)",
              "assert f([{n}, {n} + 1, {n} + 2]) == 2\nassert f([]) == 0"))


class CodeSandbox:
    """A turn that is no call hands in the program: its last code block, or all of it."""

    tools = (tool("run", "Runs a Python program and shows what it prints.", program="string"),)

    def __init__(self) -> None:
        require_sandbox()

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        chance = random.Random(seed)
        task, n = chance.choice(CODE_TASKS), chance.randint(2, 99)
        self.asked, self.program, self.tests = (part.replace("{n}", str(n)) for part in task)
        return [{"role": "user", "content": f"Write a Python function f(x): {self.asked}. You may run programs to try it out. Hand it in "
                                            "as a ```python block."}]

    def step(self, message: ChatMessage) -> Answer:
        if message.get("tool_calls") or message.get("faults"):
            return answer_tool_calls(message, self.tools, {"run": run_and_show}), 0.0, False
        blocks = re.findall(r"```(?:python)?\n(.*?)```", message["content"], re.DOTALL)
        handed_in = blocks[-1] if blocks else message["content"]
        return [], float(judge_program(handed_in, self.tests, names=["f"]).passed), True

    def solution(self) -> Sequence[ToolCall | str]:
        return [call("run", program=f"{self.program}\nprint('defined')"), f"```python\n{self.program}\n```"]


def run_and_show(program: str) -> str:
    """Output of a program, and how it ended where that was not well; both are for the model to read."""
    ended = run_python(program)
    shown = (ended.stdout + ended.stderr)[-PRINTED:]
    return shown if ended.status == "ran" else f"{shown}\n{ended.status}: {ended.reason}"
