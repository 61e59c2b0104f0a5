"""Agent of LangGraph, trained by `assay serve --train`: a graph of a model and its tools, with nothing of Assay in it but one header.

    pip install langgraph langchain-openai
    assay serve qwen3-0.6b --train --out runs/agent &
    python examples/langgraph_agent.py http://127.0.0.1:8000/v1 qwen3-0.6b
"""

import sys
from typing import Any

from assay.client import ClientTrajectory, Policy
from assay.errors import UsageError

try:
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
except ImportError as error:
    sys.exit(f"this example needs {error.name}; pip install langgraph langchain-openai")


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def agent(policy: Policy, model: str, trajectory: ClientTrajectory) -> Any:
    """Asks the model, calls the tools that it asks for, and asks again until it calls none."""
    chat = ChatOpenAI(base_url=policy.url, api_key=policy.token or "none", model=model, temperature=1.0, max_tokens=64,
                      default_headers=trajectory.headers).bind_tools([add])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def main(url: str, model: str, updates: int = 4, members: int = 8) -> None:
    policy = Policy(url)
    for _ in range(updates):
        held = []
        for _ in range(members):
            try:
                with policy.trajectory(reward=lambda t: float(t.answer.strip() == "42")) as trajectory:
                    asked = {"messages": [("user", "What is 19 + 23? Use the tool.")]}
                    said = agent(policy, model, trajectory).invoke(asked, {"recursion_limit": 8})["messages"]
                    trajectory.answer = said[-1].content
            except GraphRecursionError as error:  # its reward is unknown, and not 0; the group goes on without it
                print(f"{trajectory.id}: {error}")
            held.append(trajectory)
        rewards = [each.reward for each in held]
        try:
            told = policy.train([[each.id for each in held]])
            print(f"update {told['update']}: rewards {rewards}, loss {told['loss']:.4f}, {told['tokens']} tokens, now {told['version']}; "
                  + ", ".join(f"{verdict['check']} {verdict['outcome']}" for verdict in told["verdicts"]))
        except UsageError as error:
            print(f"rewards {rewards}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
