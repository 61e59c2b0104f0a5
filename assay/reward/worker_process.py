"""Reward worker process: one JSON request a line in, one answer a line out, until its input ends.

It loads no torch, so that it starts in a tenth of a second. Rewards run in its main thread, where signal.alarm works.
"""

import importlib.util
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

CPU_SECONDS_MORE = 1.0  # than the parent waits, on every core: the kernel's limit is for a parent that is gone


def main() -> None:
    given = json.loads(sys.argv[1])
    sys.path[:] = given["path"]
    from assay.json_child import private_pipes, request_lines, write_answer

    requests, answers = private_pipes()
    functions = _announced(given["rewards"], answers)
    cpu_seconds = (given["seconds"] + CPU_SECONDS_MORE) * (os.cpu_count() or 1)
    for line in request_lines(requests):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        random.seed(line)  # a reward that draws gives the same value in whichever worker, in whichever order
        request = json.loads(line)
        write_answer(answers, _answered(DRILLS if "drill" in request else functions, request))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answered(functions: Mapping[str, Callable[..., Any]], request: Mapping[str, Any]) -> dict[str, Any]:
    """Each component's value, or why it has none."""
    values, errors = {}, {}
    for name, function in functions.items():
        try:
            values[name] = number(function(request))
        except (Exception, SystemExit) as error:  # whatever a user's function raises becomes an error row that names it
            errors[name] = f"{type(error).__name__}: {error}"
    return {"id": request["id"], "values": values, "errors": errors}


def number(value: Any) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"the reward is {str(value)[:80]!r}, a {type(value).__name__}; expected a number")
    if not math.isfinite(value):
        raise ValueError(f"the reward is {float(value)}; expected a finite number")
    return float(value)


def _raising(*_: Any) -> float:
    raise RuntimeError("this is a drill")


# Known failures, asked for before a run: each must come back as an error, through the very path of every reward.
DRILLS: dict[str, Callable[..., Any]] = {"raises": _raising, "nan": lambda *_: math.nan, "inf": lambda *_: -math.inf,
                                         "text": lambda *_: "1.0", "nothing": lambda *_: None}


def _announced(rewards: list[dict[str, Any]], answers: Any) -> dict[str, Callable[..., Any]]:
    """Load all reward functions, and tell the parent that they are there, or what kept one of them from being loaded."""
    from assay.json_child import write_answer
    from assay.reward.reward_functions import RewardSpec

    functions = {}
    for reward in (RewardSpec(**each) for each in rewards):
        try:
            functions[reward.name] = _given_a_request(reward, _loaded(reward))
        except Exception as error:  # a user's file may fail in any way while it is imported
            write_answer(answers, {"refused": f"reward {reward.name}: {type(error).__name__}: {error}"})
            sys.exit(1)
    write_answer(answers, {"ready": list(functions)})
    return functions


def _given_a_request(reward: Any, function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """A reward model is given the ids that its own template and tokenizer make of the text, where those are known."""
    def asked(request: Mapping[str, Any]) -> Any:
        reading = request.get("readings", {}).get(reward.options.get("path")) if reward.learned else None
        if reading is None:
            return function(request["prompt"], request["completion"], request["row"])
        if isinstance(reading, str):
            raise ValueError(reading)
        from assay.reward.model_reward import ids_reward

        return ids_reward(reward.options["path"], reading, reward.options.get("device", "cpu"))
    return asked


def _loaded(reward: Any) -> Callable[..., Any]:
    from assay.reward.reward_functions import built_in_reward

    if reward.file is None:
        return built_in_reward(reward)
    specification = importlib.util.spec_from_file_location("assay_user_rewards", reward.file)
    if specification is None or specification.loader is None:
        raise ImportError(f"{reward.file} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, os.path.dirname(reward.file))  # it may import its neighbours
    specification.loader.exec_module(module)
    function = vars(module).get(reward.name)
    if not callable(function):
        raise LookupError(f"{reward.file} has no function {reward.name!r}")
    return function


if __name__ == "__main__":
    main()
