"""Environments behind a real OpenEnv server: words or calls of tools as actions, a session an episode, rewards that are known or none.

Skipped where OpenEnv is not installed; run by hand in an environment of its own (results/frameworks.txt).
"""

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.agents.environment import ToolError, open_environment
from assay.agents.environment_pool import EnvironmentPool
from assay.agents.openenv_environment import answer_of_call
from assay.errors import AssayError, DataError

SERVER = '''
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    message: str


class Heard(Observation):
    text: str = ""


class Doubling(Environment):
    """Double a number; the second answer ends the episode. A guess of 13 is never paid."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.turns = 0

    def reset(self, seed=None, episode_id=None, **_):
        self.turns, self.number = 0, seed
        return Heard(text=f"double {seed}", done=False, reward=None)

    def step(self, action, timeout_s=None, **_):
        self.turns += 1
        right = action.message.strip() == str(2 * self.number)
        reward = None if action.message.strip() == "13" else float(right)
        return Heard(text="try again", done=right or self.turns == 2, reward=reward if right or self.turns == 2 else None)

    @property
    def state(self):
        return State(step_count=self.turns)


class Adding(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("adding")
        self.said = None

        @tools.tool
        def add(a: int, b: int) -> int:
            """The sum of two numbers."""
            if a < 0:
                raise ValueError("a is below 0")
            return a + b

        @tools.tool
        def answer(number: int) -> str:
            """The last word."""
            self.said = number
            return "heard"

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **_):
        self.number, self.said = seed, None
        return Heard(text=f"what is {seed} + {seed}?", done=False, reward=None)

    def _step_impl(self, action, timeout_s=None, **_):
        raise ValueError("only tools are called here")

    async def step_async(self, action, timeout_s=None, **rest):
        found = await super().step_async(action, timeout_s=timeout_s, **rest)
        if isinstance(action, CallToolAction) and self.said is not None:
            found.done, found.reward = True, float(self.said == 2 * self.number)
        return found

    @property
    def state(self):
        return State()


words = create_fastapi_app(Doubling, Word, Heard, max_concurrent_envs=3)
tools = create_fastapi_app(Adding, CallToolAction, CallToolObservation, max_concurrent_envs=3)
uvicorn.run({"words": words, "tools": tools}[sys.argv[1]], host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
'''


@contextlib.contextmanager
def served(kind: str, folder: Path) -> Iterator[str]:
    (folder / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(folder / "server.py"), kind, str(port)])
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, "the OpenEnv server ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("openenv.core.generic_client", reason="OpenEnv is not installed: pip install openenv")
    with served("words", tmp_path_factory.mktemp("words")) as url:
        yield url


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("openenv.core.generic_client", reason="OpenEnv is not installed: pip install openenv")
    with served("tools", tmp_path_factory.mktemp("tools")) as url:
        yield url


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*called: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": str(place), "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(called)]}


def test_words_are_actions_and_the_servers_reward_comes_through(words: str):
    environment = open_environment(f"openenv:{words}", {"shown": "text"})
    assert environment.reset(4) == [{"role": "user", "content": "double 4"}]
    assert environment.step(says("7")) == ([{"role": "user", "content": "try again"}], 0.0, False)
    assert environment.step(says("8")) == ([], 1.0, True)
    environment.close()  # type: ignore[attr-defined]


def test_an_episode_that_ends_without_a_reward_is_an_error_row_and_its_session_is_free_again(words: str):
    with EnvironmentPool(f"openenv:{words}", {"shown": "text"}, count=1, seconds=60.0) as pool:
        for first in range(0, 9, 3):  # the server has three sessions
            names = {f"{first + place}": 5 for place in range(3)}
            assert all(reply.error is None for reply in pool.open(names).values())
            replies = pool.step({name: says("13") for name in names})
            assert all(reply.error is None for reply in replies.values())
            replies = pool.step({name: says("13" if name == "0" else "10") for name in names})
            assert [reply.error is None for reply in replies.values()] == [name != "0" for name in names]
            if first == 0:
                assert "not known to be 0" in (replies["0"].error or "")
            pool.close(names)
        opened = pool.open({str(number): 1 for number in range(20, 24)})
        assert [name for name, reply in opened.items() if reply.error is not None] == ["23"]
        assert re.search("capacity", opened["23"].error or "", flags=re.I)


def test_tools_are_shown_called_and_the_episode_ends_by_the_server(tools: str):
    environment = open_environment(f"openenv:{tools}", {"tools": True})
    assert [each["function"]["name"] for each in environment.tools] == ["add", "answer"]
    assert set(environment.tools[0]["function"]["parameters"]["required"]) == {"a", "b"}
    assert "what is 3 + 3?" in environment.reset(3)[0]["content"]
    answered, reward, done = environment.step(calls(("add", {"a": 3, "b": 3}), ("add", {"a": "x", "b": 1}), ("add", {"a": -1, "b": 1}),
                                                    ("lost", {})))
    said = [each["content"] for each in answered]
    assert (said[0], reward, done) == ("6", 0.0, False)
    assert "error" in said[1]
    assert "below 0" in said[2]
    assert "no tool 'lost'" in said[3]
    assert environment.step(calls(("answer", {"number": 6}), ("add", {"a": 1, "b": 1}))) == ([], 1.0, True)
    environment.close()  # type: ignore[attr-defined]


def test_a_turn_without_a_call_ends_an_episode_that_nobody_paid_and_that_is_no_0(tools: str):
    environment = open_environment(f"openenv:{tools}", {"tools": True})
    environment.reset(3)
    with pytest.raises(DataError, match="not known to be 0"):
        environment.step(says("six"))
    environment.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "error"), [("execution_error", ToolError), ("timeout", DataError), ("transport_error", DataError)])
def test_what_a_tool_did_wrong_is_answered_and_what_the_server_did_is_an_error(kind: str, error: type[AssayError]):
    with pytest.raises(error, match="it broke"):
        answer_of_call({"tool_name": "add", "error": {"error_type": kind, "message": "it broke"}})
