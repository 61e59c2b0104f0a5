"""Environment worker process: many episodes, one JSON request a line in and one answer a line out, until its input ends.

It loads no torch. A step that takes too long is interrupted where it stands, and its episode alone is lost; the parent kills a process
that does not even notice that.
"""

import json
import math
import random
import signal
import sys
from collections.abc import Mapping
from typing import Any


class TookTooLongError(BaseException):
    """Not an Exception: an environment that catches those must not catch this."""


def main() -> None:
    given = json.loads(sys.argv[1])
    sys.path[:] = given["path"]
    from assay.json_child import private_pipes, request_lines, write_answer

    requests, answers = private_pipes()
    make = _announced(given, answers)
    signal.signal(signal.SIGALRM, _interrupt)
    episodes: dict[str, Any] = {}
    for line in request_lines(requests):
        request = json.loads(line)
        random.seed(line)  # an environment that draws from the module's own generator gives the same in whichever worker
        signal.setitimer(signal.ITIMER_REAL, given["seconds"])
        try:
            answer = _answered(make, episodes, request)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except TookTooLongError:
            answer = {"error": f"it took more than {given['seconds']:g} s", "kind": "time-out"}
        except (Exception, SystemExit) as error:  # whatever a user's environment raises becomes an error row that names it
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "error"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_answer(answers, {"id": request["id"], **answer})


def _answered(make: Any, episodes: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    from assay.agents.environment import checked_messages

    do, key = request["do"], request.get("episode", "")
    if do == "open":
        episodes[key] = make()
        return {"messages": checked_messages(episodes[key].reset(request["seed"]), "reset"), "reward": 0.0, "done": False}
    if do == "close":
        made = episodes.pop(key, None)
        if hasattr(made, "close"):
            made.close()
        return {}
    if do == "drill":
        raise RuntimeError("this is a drill")
    if do == "solution":
        turns = episodes[key].solution() if hasattr(episodes[key], "solution") else []
        return {"turns": [turn if isinstance(turn, str) else {"name": turn.name, "arguments": dict(turn.arguments)} for turn in turns]}
    messages, reward, done = episodes[key].step(request["message"])
    return {"messages": checked_messages(messages, "step"), "reward": step_reward(reward), "done": bool(done)}


def step_reward(value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"the reward is {str(value)[:80]!r}, a {type(value).__name__}; expected a number")
    if not math.isfinite(float(value)):
        raise ValueError(f"the reward is {float(value)}; expected a finite number")
    return float(value)


def _announced(given: Mapping[str, Any], answers: Any) -> Any:
    """A maker of environments, after the parent was told what tools they have, or what kept one from being made."""
    from assay.agents.environment import open_environment
    from assay.json_child import write_answer

    def make() -> Any:
        return open_environment(given["name"], given["options"])

    try:
        tools = [dict(each) for each in make().tools]
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
