"""Built-in environments pay for solutions and not for silence; in worker processes errors, crashes and time-outs are rows of their own."""

import re
from pathlib import Path

import pytest

from assay.agents.environment import answer_tool_calls, open_environment, tool
from assay.agents.environment_pool import EnvironmentPool
from assay.agents.environments.calculator import calculate
from assay.agents.environments.sliding_tiles import slid
from assay.agents.tool_calls import HERMES, ToolCall
from assay.errors import UsageError
from assay.reward.sandbox import sandbox_unavailable

OPTIONS = {"kv": {"pairs": 2}, "game": {"size": 2, "goal": 8}}
FAULTY = '''
import os, random, time

class Faulty:
    tools = []
    def __init__(self):
        self.said = 0
    def reset(self, seed):
        self.seed = seed
        return [{"role": "user", "content": f"task {seed}"}]
    def step(self, message):
        self.said += 1
        if message["content"] == "raise": raise RuntimeError("no answer")
        if message["content"] == "exit": raise SystemExit(3)
        if message["content"] == "crash": os._exit(7)
        if message["content"] == "sleep":
            try: time.sleep(60)
            except Exception: pass
        if message["content"] == "nan": return [], float("nan"), True
        if message["content"] == "bool": return [], True, True
        if message["content"] == "words": return "hello", 0.0, False
        if message["content"] == "done in words": return [], 1.0, "False"
        if message["content"] == "gymnasium": return [], 1.0, True, False, {}
        if message["content"] == "object": return [{"role": "user", "content": "a", "of": object()}], 0.0, False
        if message["content"] == "half a character": return [{"role": "user", "content": "a\\ud800"}], 0.0, False
        if message["content"] == "fork": return [], float(os.fork() == 0), True
        return [{"role": "user", "content": f"{self.seed} heard {self.said}"}], 0.5, False

class Drawing:
    """Draws from the modules' own generators."""
    tools = []
    def reset(self, seed):
        return [{"role": "user", "content": f"{random.random()} {numpy.random.random()}"}]
    def step(self, message):
        return self.reset(0), 0.0, False
'''


def played(environment, turns):
    total, done = 0.0, False
    for number, turn in enumerate(turns):
        text = HERMES.write("", [turn]) if isinstance(turn, ToolCall) else turn
        _, reward, done = environment.step(HERMES.message(text, str(number)))
        total += reward
        if done:
            break
    return total, done


@pytest.mark.parametrize("name", ["calculator", "kv", "code", "search", "game"])
def test_a_solution_pays_and_silence_does_not(name):
    if name == "code" and sandbox_unavailable():
        pytest.skip(sandbox_unavailable())
    environment = open_environment(name, OPTIONS.get(name, {}))
    solved, silent = [], []
    for seed in range(2 if name == "code" else 6):
        first = environment.reset(seed)
        assert environment.reset(seed) == first, "the same seed is the same task"
        solved.append(played(environment, environment.solution())[0])
        environment.reset(seed)
        silent.append(played(environment, [""] * 8)[0])
    assert sum(solved) > sum(silent)
    assert max(silent) == 0
    if name != "game":
        assert min(solved) == 1


@pytest.mark.parametrize(("call", "words"), [
    (ToolCall("compute", {}), "there is no tool"), (ToolCall("calculate", {}), "expression"),
    (ToolCall("calculate", {"expression": "2**9"}), "only whole numbers"),
    (ToolCall("calculate", {"expression": "__import__('os')"}), "only whole numbers"),
    (ToolCall("calculate", {"expression": "1+"}), "is no expression"), (ToolCall("calculate", {"expression": "(2+3)*4"}), "20")])
def test_a_wrong_call_is_answered_in_words(call, words):
    environment = open_environment("calculator", {})
    environment.reset(0)
    [answer], reward, done = environment.step(HERMES.message(HERMES.write("", [call]), "a"))
    assert words in answer["content"]
    assert (answer["role"], reward, done) == ("tool", 0.0, False)


def test_a_fault_is_answered_alone_or_with_the_last_call():
    tools = [tool("a", "A.", x="integer")]
    assert answer_tool_calls({"faults": ["it was no JSON"]}, tools, {}) == [{"role": "user", "content": "it was no JSON"}]
    both = answer_tool_calls({"faults": ["no JSON"], "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": {"x": 2}}}]}, tools,
                        {"a": lambda x: x + 1})
    assert [each["content"] for each in both] == ["3\nno JSON"]


def test_arithmetic_and_tiles():
    assert calculate("-3*(4-10)") == 18
    assert slid([[2, 2, 4], [0, 2, 2], [0, 0, 0]], "left") == [[4, 4, 0], [4, 0, 0], [0, 0, 0]]
    assert slid([[2, 0], [2, 0]], "down") == [[0, 0], [4, 0]]


def test_reasoning_gym_scores_its_own_problems():
    pytest.importorskip("reasoning_gym")
    environment = open_environment("gym:chain_sum", {})
    assert environment.reset(3) == environment.reset(3)
    assert played(environment, environment.solution()) == (1.0, True)
    environment.reset(4)
    assert played(environment, ["<answer>no</answer>"])[0] < 1


def test_the_environment_of_the_guide_works_as_it_stands(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    [block] = re.findall(r"```python\n(from assay.agents.environment import.*?)```", guide, re.DOTALL)
    (tmp_path / "lookup.py").write_text(block)
    environment = open_environment(f"{tmp_path / 'lookup.py'}:Lookup", {})
    assert len({environment.reset(seed)[0]["content"] for seed in range(1000)}) == 200
    for seed in range(5):
        environment.reset(seed)
        assert played(environment, environment.solution()) == (1.0, True)


@pytest.mark.parametrize(("name", "options", "words"), [
    ("calculater", {}, "did you mean 'calculator'"), ("calculator", {"largst": 9}, "does not take these options"),
    ("nowhere.py:A", {}, "no Python file"), ("assay.errors:Nobody", {}, "has no class"), ("assay.errors:UsageError", {}, "has no tools")])
def test_what_is_no_environment_is_refused(name, options, words):
    with pytest.raises(UsageError, match=words):
        open_environment(name, options)

# ---------------------------------------------------------------- worker processes


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    file = tmp_path_factory.mktemp("environment") / "faulty.py"
    file.write_text(FAULTY)
    with EnvironmentPool(f"{file}:Faulty", {}, count=1, seconds=0.5) as pool:
        yield pool


def said(text):
    return {"role": "assistant", "content": text}


def test_what_goes_wrong_is_an_error_row_of_its_own_and_nobody_elses(faulty):
    names = ["raise", "exit", "sleep", "nan", "bool", "words", "done in words", "gymnasium", "object", "half a character", "fork", "well"]
    faulty.open({name: number for number, name in enumerate(names)})
    replies = faulty.step({name: said(name) for name in names})
    faulty.close(names)
    assert replies["well"].reward == 0.5
    assert replies["well"].messages[0]["content"] == "11 heard 1"
    assert replies["fork"].reward == 0, "the answer is the process's own, and not its child's"
    kinds = {name: replies[name].kind for name in names}
    assert kinds == dict.fromkeys(names, "error") | {"sleep": "time-out", "fork": None, "well": None}
    assert "expected True or False" in replies["done in words"].error
    assert "expected three things" in replies["gymnasium"].error
    assert "no plain JSON" in replies["object"].error
    assert "surrogates" in replies["half a character"].error
    assert "no answer" in replies["raise"].error
    assert "a finite number" in replies["nan"].error


def test_a_crash_loses_its_episode_and_the_others_are_played_again(faulty):
    faulty.open({"one": 1, "two": 2})
    faulty.step({"one": said("a"), "two": said("b")})
    replies = faulty.step({"one": said("crash"), "two": said("c")})
    given = faulty.rewards(["one", "two"])
    faulty.close(["one", "two"])
    assert (replies["one"].kind, replies["one"].error) == ("crash", "its process ended with status 7")
    assert (replies["two"].messages[0]["content"], replies["two"].replayed) == ("2 heard 2", True)
    assert given == {"one": [0.5], "two": [0.5, 0.5]}


def test_what_an_environment_draws_is_of_its_seed_and_its_turns_alone(tmp_path):
    """In whichever process, among whatever others, and again after a process died."""
    (tmp_path / "drawing.py").write_text(f"import numpy\n{FAULTY}")
    with EnvironmentPool(f"{tmp_path / 'drawing.py'}:Drawing", {}, count=2) as pool:
        opened = pool.open({"a": 1, "b": 1, "c": 2, "d": 1})
        first = pool.step({"d": said("x"), "a": said("x")})
        pool._workers[0].child.stop()
        second = pool.step({"a": said("y"), "d": said("y"), "b": said("x")})
    told = {name: reply.messages[0]["content"] for name, reply in opened.items()}
    assert told["a"] == told["b"] == told["d"] != told["c"]
    assert first["a"].messages == first["d"].messages == second["b"].messages != opened["a"].messages
    assert second["a"].messages == second["d"].messages != first["a"].messages
    assert [second[name].replayed for name in "adb"] == [True, False, False]


def test_a_refusal_names_what_cannot_be_opened(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with EnvironmentPool(f"{tmp_path / 'broken.py'}:A", {}, count=1) as pool, pytest.raises(UsageError, match="ZeroDivisionError"):
        pool.open({"a": 0})
    with pytest.raises(UsageError, match="at least one process"):
        EnvironmentPool("calculator", {}, count=0)
