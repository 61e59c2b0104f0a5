"""The external agent: talks to the served policy by the OpenAI client, pays, and asks for updates. What stops it is its last line.

    python -m tests.incident.agent URL [honest|pays twice|hands in old words]
"""

import contextlib
import sys
from typing import Any

from openai import OpenAI

from assay.client import ClientTrajectory, Policy
from assay.errors import UsageError

MEMBERS, UPDATES, MODEL = 5, 2, "policy"
ASKED = "what is 2 + 2? think of it as long as you like, and then say it"


def speak(policy: Policy, messages: list[dict[str, Any]], seed: int, headers: dict[str, str]) -> str:
    client = OpenAI(base_url=policy.url, api_key="none", default_headers=headers, max_retries=0)
    said = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, seed=seed)  # type: ignore[arg-type]
    return said.choices[0].message.content or ""


def converse(policy: Policy, trajectory: ClientTrajectory, seed: int) -> None:
    """Two turns with a tool's result between them; before a third the agent shortens what was said, as agents do."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    messages += [{"role": "assistant", "content": speak(policy, messages, seed, trajectory.headers)},
                 {"role": "user", "content": "the calculator says 4"}]
    messages += [{"role": "assistant", "content": speak(policy, messages, seed + 100, trajectory.headers)},
                 {"role": "user", "content": "and?"}]
    messages[1]["content"] = messages[1]["content"][:2] + "…"
    speak(policy, messages, seed + 200, trajectory.headers)


def attempt(policy: Policy, member: int, seed: int) -> str:
    """The last member of a group crashes after its first words: its reward is unknown."""
    found = ""
    with contextlib.suppress(ZeroDivisionError), policy.trajectory(reward=float(member % 2)) as trajectory:
        found = trajectory.id
        converse(policy, trajectory, seed)
        if member == MEMBERS - 1:
            raise ZeroDivisionError("the agent's own mistake")
    return found


def main(url: str, kind: str = "honest") -> None:
    policy = Policy(url)
    old = [attempt(policy, member, member) for member in range(MEMBERS)] if kind == "hands in old words" else []
    for update in range(UPDATES):
        group = [attempt(policy, member, 1000 * update + member) for member in range(MEMBERS)]
        speak(policy, [{"role": "user", "content": ASKED}], 0, {})  # somebody else asks the same
        if kind == "pays twice":
            policy._post(f"/trajectories/{group[0]}/close", {"reward": 1.0})
        told = policy.train([old if old and update else group])
        print(f"update {told['update']}: {told['tokens']} tokens, now {told['version']}; "
              + ", ".join(f"{verdict['check']} {verdict['outcome']}" for verdict in told["verdicts"]), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UsageError as error:
        print(f"stopped: {error}")
