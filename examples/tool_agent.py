"""Agent in plain Python with a tool, trained by `assay serve --train`: groups of attempts at one sum, rewarded where the answer is right.

    assay serve qwen3-0.6b --train --out runs/agent &
    python examples/tool_agent.py http://127.0.0.1:8000/v1 qwen3-0.6b
"""

import json
import random
import sys

from openai import OpenAI

from assay.client import ClientTrajectory, Policy
from assay.errors import UsageError

ADD = {"type": "function", "function": {"name": "add", "description": "The sum of two numbers.", "parameters": {
    "type": "object", "required": ["a", "b"], "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}


def attempt(policy: Policy, model: str, trajectory: ClientTrajectory, a: int, b: int, turns: int = 3) -> str:
    """Asks, answers the model's calls, and gives back its last words."""
    client = OpenAI(base_url=policy.url, api_key=policy.token or "none", default_headers=trajectory.headers)
    messages = [{"role": "user", "content": f"What is {a} + {b}? Use the tool, then say the number alone."}]
    for _ in range(turns):
        said = client.chat.completions.create(model=model, messages=messages, tools=[ADD], max_tokens=64).choices[0].message
        messages.append(said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}) | {"content": said.content or ""})
        if not said.tool_calls:
            return said.content or ""
        messages += [{"role": "tool", "tool_call_id": call.id, "content": answer(call.function.arguments)} for call in said.tool_calls]
    return ""


def answer(arguments: str) -> str:
    given = json.loads(arguments)
    if not all(isinstance(given.get(name), int) for name in ("a", "b")):
        return "error: a and b must be whole numbers"
    return str(given["a"] + given["b"])


def main(url: str, model: str, updates: int = 10, groups: int = 2, members: int = 4) -> None:
    policy, draw = Policy(url), random.Random(0)
    for _ in range(updates):
        held: list[list[str]] = []
        for _ in range(groups):
            a, b = draw.randrange(10), draw.randrange(10)
            held.append([])
            for _ in range(members):
                with policy.trajectory(reward=lambda t, due=str(a + b): float(t.answer.strip() == due)) as trajectory:
                    trajectory.answer = attempt(policy, model, trajectory, a, b)
                held[-1].append(trajectory.id)
        try:
            told = policy.train(held)
            print(f"update {told['update']}: loss {told['loss']:.4f}, {told['tokens']} tokens, now {told['version']}")
        except UsageError as error:
            print(error)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
