"""Tiny served policy that an outside agent talks to over HTTP and trains, twice, with every check that watches it.

Each stage is a function of this module, or a method of the server, so that a fault can take its place. What the server refuses is a
verdict against the check that the refusal stands for.
"""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from assay.errors import GuardStop
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.policy_training import ServedPolicy
from assay.serving.request_fields import RequestRefused
from assay.serving.server import serve_in_background
from assay.testing.fault_injection import Plant
from assay.testing.tiny_grpo import decisive
from assay.testing.tiny_models import nudge, save_model, tiny_model
from assay.verdict import Outcome, Verdict, proven, refuted

MEMBERS, ROUNDS, RATE = 5, 2, 5e-2  # the last of a group crashes, and its reward is unknown
ERRORS = 0.12  # of 20: one of a group may crash, in both rounds
ASKED = "a question that is long enough to be worth keeping in a cache"
REFUSALS = {"other_version": "version"}  # by the code of the refusal


def a_served_policy(folder: Path, plant: Plant) -> list[Verdict]:
    """Two updates of a served policy on conversations of two turns, in the second of which the client writes the history anew."""
    base = save_model(folder / "base", nudge(tiny_model("qwen3", vocab=270), 0.3)).folder
    serving = EngineThread(ServerSize(slots=2))
    model = serving.open("policy", base, learns=True)
    policy = serving.ask(lambda: ServedPolicy(model, folder / "out", RATE, errors=ERRORS)).result()
    with serve_in_background(serving, policy=policy) as url, plant(folder):
        return decisive(run_rounds(serving, policy, url))


def run_rounds(serving: EngineThread, policy: ServedPolicy, url: str) -> list[Verdict]:
    verdicts, before = list[Verdict](), [converse_and_pay(url, seed) for seed in range(MEMBERS)]
    for _ in range(ROUNDS):
        made = [converse(url, seed) for seed in range(MEMBERS)]
        try:
            for place, name in enumerate(made[:-1]):
                pay(url, name, float(place % 2))
            post(url, f"/trajectories/{made[-1]}/close", {"error": "the agent crashed"})
            verdicts.append(proven("reward_once", f"{len(made) - 1} trajectories have a reward each"))
            speak(url, None, [{"role": "user", "content": ASKED}], 0)  # somebody else asks the same, outside of any trajectory
            named = group_to_learn(made, before, policy.updates)
            told = serving.ask(lambda named=named: policy.learn([named])).result()  # type: ignore[misc]
        except RequestRefused as error:
            return [*verdicts, refuted(REFUSALS.get(error.code or "", error.code or "refused"), str(error))]
        except GuardStop as error:
            check, _, reason = str(error).removeprefix("not trained: ").removeprefix("not recorded: ").partition(": ")
            return [*verdicts, refuted(check, reason)]
        verdicts += [Verdict(each["check"], Outcome(each["outcome"]), each["reason"], each["evidence"]) for each in told["verdicts"]]
    return verdicts

# ---------------------------------------------------------------- the agent


def converse(url: str, seed: int) -> str:
    """A trajectory of two turns. Before the second the agent shortens the answer, so that a sequence of its own begins."""
    name = post(url, "/trajectories", {})["id"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    said = speak(url, name, messages, seed)
    speak(url, name, [*messages, {"role": "assistant", "content": said[:2] + "…"}, {"role": "user", "content": "and?"}], seed + 100)
    return name


def converse_and_pay(url: str, seed: int) -> str:
    name = converse(url, seed)
    post(url, f"/trajectories/{name}/close", {"reward": float(seed % 2)})
    return name


def speak(url: str, name: str | None, messages: list[dict[str, Any]], seed: int) -> str:
    body = {"model": "policy", "messages": messages, "max_tokens": 6, "seed": seed}
    headers = {} if name is None else {"X-Assay-Trajectory": name}
    return post(url, "/chat/completions", body, headers)["choices"][0]["message"]["content"]


def pay(url: str, name: str, reward: float) -> None:
    post(url, f"/trajectories/{name}/close", {"reward": reward})


def group_to_learn(made: list[str], before: list[str], updates: int) -> list[str]:
    """The group to learn from: what was said since the last update. `before` was said before the first one and never learned from."""
    return made


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        told = json.loads(error.read())["error"]
        raise RequestRefused(told["message"], code=told.get("code"), status=error.code) from None
