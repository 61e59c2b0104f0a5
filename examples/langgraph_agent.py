"""Agent of LangGraph, trained by `assay serve --train`: its prebuilt tool loop, with nothing of Assay in it but two headers.

    pip install langgraph langchain-openai
    assay serve qwen3-0.6b --train --out runs/agent &
    python examples/langgraph_agent.py http://127.0.0.1:8000/v1 qwen3-0.6b
"""

import sys

from assay.client import Policy

try:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent
except ImportError as error:
    sys.exit(f"this example needs {error.name}; pip install langgraph langchain-openai")


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def main(url: str, model: str, members: int = 8) -> None:
    policy, held = Policy(url), []
    for _ in range(members):
        with policy.trajectory(reward=lambda t: float("42" in t.answer)) as trajectory:
            chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=1.0, max_tokens=64, default_headers=trajectory.headers)
            asked = {"messages": [("user", "What is 19 + 23? Use the tool.")]}
            trajectory.answer = create_react_agent(chat, [add]).invoke(asked, {"recursion_limit": 8})["messages"][-1].content
        held.append(trajectory.id)
    print(policy.train([held]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
