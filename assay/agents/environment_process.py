"""Environment worker process: many episodes, one JSON request a line in and one answer a line out, until its input ends.

It loads no torch. A step that takes too long is interrupted where it stands, and its episode alone is lost; the parent kills a process
that does not even notice that. An environment that draws from `random` or `numpy.random` themselves gives the same for the same seed in
whichever process: each episode has a state of its own.
"""

import json
import math
import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRUTHS = ("bool", "bool_")  # Python's and numpy's, by the names of their types


class TookTooLongError(BaseException):
    """Timeout of an environment; not an Exception: an environment that catches those must not catch this."""


@dataclass
class _Episode:
    """An environment, the seed of its task, and the state of the modules' own generators after its last step."""

    environment: Any
    seed: int
    draws: tuple[Any, Any] = (None, None)

    def take_draws(self) -> None:
        python, numpy = self.draws
        if python is None:
            random.seed(self.seed)
        else:
            random.setstate(python)
        if (module := sys.modules.get("numpy")) is not None and numpy is None:
            module.random.seed(self.seed % 2**32)
        elif module is not None:
            module.random.set_state(numpy)

    def keep_draws(self) -> None:
        module = sys.modules.get("numpy")
        self.draws = random.getstate(), None if module is None else module.random.get_state()


def main() -> None:
    given = json.loads(sys.argv[1])
    sys.path[:] = given["path"]
    from assay.json_child import private_pipes, request_lines, write_answer

    requests, answers = private_pipes()
    make = _announced(given, answers)
    signal.signal(signal.SIGALRM, _interrupt)
    episodes: dict[str, _Episode] = {}
    process = os.getpid()
    for line in request_lines(requests):
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, given["seconds"])
        try:
            answer = _answered(make, episodes, request)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except TookTooLongError:
            answer = {"error": f"it took more than {given['seconds']:g} s", "kind": "time-out"}
        except (Exception, SystemExit) as error:  # whatever a user's environment raises becomes an error row that names it
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "error"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != process:  # an environment forked, and this is its child: the answer is for the other to give
            os._exit(0)
        write_answer(answers, {"id": request["id"], **answer})


def _answered(make: Any, episodes: dict[str, _Episode], request: Mapping[str, Any]) -> dict[str, Any]:
    from assay.agents.environment import checked_messages

    do, key = request["do"], request.get("episode", "")
    if do == "open":
        return {"messages": checked_messages(_opened(make, episodes, key, request["seed"]), "reset"), "reward": 0.0, "done": False}
    if do == "close":
        made = episodes.pop(key, None)
        if made is not None and hasattr(made.environment, "close"):
            made.environment.close()
        return {}
    if do == "drill":
        raise RuntimeError("this is a drill")
    if do == "solution":
        return {"turns": _solution(episodes[key].environment)}
    messages, reward, done = _stepped(episodes[key], request["message"])
    return {"messages": checked_messages(messages, "step"), "reward": step_reward(reward), "done": step_done(done)}


def _opened(make: Any, episodes: dict[str, _Episode], key: str, seed: int) -> Any:
    episode = episodes[key] = _Episode(None, seed)
    episode.take_draws()
    episode.environment = make()
    said = episode.environment.reset(seed)
    episode.keep_draws()
    return said


def _stepped(episode: _Episode, message: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    episode.take_draws()
    answer = episode.environment.step(message)
    episode.keep_draws()
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise TypeError(f"step gave {str(answer)[:80]!r}; expected three things: messages, reward, done")
    messages, reward, done = answer
    return messages, reward, done


def _solution(environment: Any) -> list[Any]:
    from assay.agents.environment import require_json

    turns = environment.solution() if hasattr(environment, "solution") else []
    return require_json([turn if isinstance(turn, str) else {"name": turn.name, "arguments": dict(turn.arguments)} for turn in turns],
                        "solution")


def step_done(value: Any) -> bool:
    if type(value).__name__ not in TRUTHS:
        raise TypeError(f"done is {str(value)[:80]!r}, a {type(value).__name__}; expected True or False")
    return bool(value)


def step_reward(value: Any) -> float:
    if type(value).__name__ in TRUTHS or not hasattr(value, "__float__"):
        raise TypeError(f"the reward is {str(value)[:80]!r}, a {type(value).__name__}; expected a number")
    if not math.isfinite(float(value)):
        raise ValueError(f"the reward is {float(value)}; expected a finite number")
    return float(value)


def _announced(given: Mapping[str, Any], answers: Any) -> Any:
    """A maker of environments, after the parent was told what tools they have, or what kept one from being made."""
    from assay.agents.environment import open_environment, require_json
    from assay.json_child import write_answer

    def make() -> Any:
        return open_environment(given["name"], given["options"])

    try:
        tools = require_json([dict(each) for each in make().tools], "tools")
    except Exception as error:  # a user's module may fail in any way while it is imported
        said = str(error) if type(error).__module__.startswith("assay.") else f"{type(error).__name__}: {error}"
        write_answer(answers, {"refused": said if said.startswith("--environment") else f"--environment {given['name']}: {said}"})
        sys.exit(1)
    write_answer(answers, {"tools": tools})
    return make


def _interrupt(*_: Any) -> None:
    raise TookTooLongError


if __name__ == "__main__":
    main()
