"""Environments of `verifiers`: its own loop and rubric through our protocol; an error of the rubric is no reward of 0.

Skipped where verifiers 0.1.10 to 0.3 is not installed; run by hand in an environment of its own (results/frameworks.txt).
"""

import sys
from typing import Any

import pytest

from assay.agents.environment import open_environment
from assay.agents.environment_pool import EnvironmentPool
from assay.errors import DataError, UsageError

vf = pytest.importorskip("verifiers", reason="verifiers is not installed: pip install 'verifiers>=0.1.10,<0.4'")
if not hasattr(vf, "load_environment"):
    pytest.skip("verifiers 0.4 has no environments that ask for turns", allow_module_level=True)
pytest.importorskip("verifiers.clients")

SUMS = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b

def right(completion, answer):
    return float(answer in str(completion[-1].content))

def broken(completion, answer):
    raise RuntimeError("the grader is gone")

def load_environment(grader="right", rows=6):
    data = Dataset.from_list([{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(rows)])
    return vf.ToolEnv(dataset=data, tools=[add], max_turns=4, rubric=vf.Rubric(funcs=[{"right": right, "broken": broken}[grader]]))
'''


@pytest.fixture(autouse=True)
def sums(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sys.modules.pop("tiny_sums", None)


def calls(a: int, b: int) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": "one", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}]}


def test_tools_turns_and_the_rubrics_reward_come_through():
    environment = open_environment("verifiers:tiny-sums", {})
    assert [each["function"]["name"] for each in environment.tools] == ["add"]
    assert environment.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert environment.reset(3) == [{"role": "user", "content": "What is 3 + 3?"}]
    answered, reward, done = environment.step(calls(3, 3))
    assert ([message["content"] for message in answered], reward, done) == (["6"], 0.0, False)
    assert environment.step({"role": "assistant", "content": "it is 6"}) == ([], 1.0, True)
    environment.reset(4)
    assert environment.step({"role": "assistant", "content": "it is 9"}) == ([], 0.0, True)
    assert environment.reset(3) == environment.reset(9)


def test_a_rubric_that_raises_is_an_error_and_not_0():
    environment = open_environment("verifiers:tiny-sums", {"grader": "broken"})
    environment.reset(1)
    with pytest.raises(DataError, match=r"the grader is gone; verifiers scores that 0, which it is not known to be"):
        environment.step({"role": "assistant", "content": "2"})


def test_in_a_worker_process_it_is_an_error_row():
    with EnvironmentPool("verifiers:tiny-sums", {"grader": "broken"}, count=1, seconds=60.0) as pool:
        assert pool.open({"a": 2})["a"].messages[0]["content"] == "What is 2 + 2?"
        reply = pool.step({"a": {"role": "assistant", "content": "4"}})["a"]
    assert reply.error is not None
    assert "not known to be" in reply.error


@pytest.mark.parametrize(("name", "options"), [("verifiers:no-such-thing", {}), ("verifiers:tiny-sums", {"nothing": 1})])
def test_what_is_not_there_is_refused(name: str, options: dict[str, Any]):
    with pytest.raises(UsageError, match="verifiers:"):
        open_environment(name, options)


def test_a_history_that_they_write_anew_is_an_error():
    from assay.agents.verifiers_environment import VerifiersEpisode

    class Rewriting:
        async def rollout(self, row: Any, client: Any, *_: Any) -> Any:
            await client.get_response([{"role": "user", "content": "one"}], "policy", {})
            await client.get_response([{"role": "user", "content": "other"}], "policy", {})

    episode = VerifiersEpisode(Rewriting(), {})
    assert episode.next_question() == [{"role": "user", "content": "one"}]
    episode.say({"role": "assistant", "content": "?"})
    with pytest.raises(DataError, match="wrote the history anew"):
        episode.next_question()
