"""Calculator environment: a product that is hard to know by heart, a tool that computes, and a reward for the exact result."""

import ast
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

from assay.agents.environment import Answer, ToolError, answer_tool_calls, call, tool
from assay.agents.tool_calls import ChatMessage, ToolCall
from assay.errors import UsageError
from assay.reward.answer import read_answer, same_answer

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MOST_DIGITS = 40
LONGEST = 200  # characters of an expression


class Calculator:
    """`largest`: numbers are drawn up to it, from a tenth of it on. `terse`: the question is the bare expression."""

    tools = (tool("calculate", "Computes an expression of whole numbers with +, -, * and brackets.", expression="string"),)

    def __init__(self, largest: int = 99, operations: str = "+-*", terse: bool = False):
        if largest < 1 or not operations or set(operations) - set("+-*"):
            raise UsageError(f"calculator: largest is {largest} and operations {operations!r}; expected at least 1, and some of +-*")
        self.largest, self.operations, self.terse = largest, operations, terse

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        chance = random.Random(seed)
        one, two = (chance.randint(max(1, self.largest // 10), self.largest) for _ in range(2))
        self.expression = f"{one}{chance.choice(self.operations)}{two}"
        asked = f"{self.expression}=" if self.terse else f"What is {self.expression}? Use the calculator, then say the number alone."
        return [{"role": "user", "content": asked}]

    def step(self, message: ChatMessage) -> Answer:
        """A call is computed; anything else is the answer, and right where it says the result and nothing else."""
        if message.get("tool_calls") or message.get("faults"):
            return answer_tool_calls(message, self.tools, {"calculate": calculate}), 0.0, False
        return [], float(same_answer(read_answer(message["content"]), str(calculate(self.expression)))), True

    def solution(self) -> Sequence[ToolCall | str]:
        return [call("calculate", expression=self.expression), str(calculate(self.expression))]


def calculate(expression: str) -> int:
    """Evaluate whole numbers, +, -, * and brackets, and nothing else that Python would evaluate."""
    if len(expression) > LONGEST:
        raise ToolError(f"the expression has {len(expression)} characters; at most {LONGEST} are computed")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is no expression") from None
    return _computed(tree)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**MOST_DIGITS:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ToolError("only whole numbers, +, -, * and brackets are computed")
