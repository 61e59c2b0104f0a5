"""Runs every cause, and prints a table: where it was planted, by what name it was stopped, and in what words."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from assay.verdict import Outcome
from tests.recipes.sums import taught

SECONDS = 300  # that one command may take
REFUSED = re.compile(r'"message": "(.*?)",.*"code": "(weights_refused)"')  # by the server, in words
NAMED = re.compile(rf"{Outcome.REFUTED.value}\s+(\w+): (.*)|not trained: (\w+): (.*)|(a reward is given once)|^assay: (\w+): (.*)",
                   re.MULTILINE)


@dataclass(frozen=True)
class Cause:
    words: str
    where: str  # agent, server, trainer, or nothing planted
    check: str  # the name that must stop it; "" where nothing may
    told: str = ""  # to the agent


ALIVE = "nothing planted"
SERVED = (
    Cause("no cause", ALIVE, ""),
    Cause("agent's trajectory of another version", "agent", "version", "hands in old words"),
    Cause("agent's reward given twice", "agent", "reward_once", "pays twice"),
    Cause("agent's crash scored 0", "server", "episode_rewards"),
    Cause("agent's own words taken for the policy's", "server", "token_law"),
    Cause("agent's conversation rendered and encoded again", "server", "every_turn"),
    Cause("branch of an agent's conversation lost", "server", "every_turn"),
    Cause("served prefix cache of the weights before", "server", "identity"),
    Cause("saved policy that is not the served one", "server", "answers"))
FORKED = (
    Cause("no cause", ALIVE, ""),
    Cause("fork that begins with an empty adapter", "trainer", "weights_refused"),
    Cause("rollouts that never get new weights", "trainer", "version"),
    Cause("reply of another version", "trainer", "version"),
    Cause("saved adapter that is not the trained one", "trainer", "answers"),
    Cause("prefix cache that outlives an adapter", "server", "canaries"),
    Cause("adapter name reused", "server", "identity"))


def command(cause: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "tests.incident.planted", cause, *words]


def words_of(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def said_by(words: list[str]) -> tuple[int, str]:
    found = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    return found.returncode, found.stdout + found.stderr


@contextlib.contextmanager
def served(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A server's address, and afterwards the lines that it still said."""
    process, rest = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                     env=os.environ | {"PYTHONUNBUFFERED": "1"}), list[str]()
    assert process.stdout is not None
    try:
        address = next((found[1] for line in process.stdout if (found := re.search(r"serving at (\S+)", line))), None)
        assert address is not None, f"{words[-6:]}: the server ended"
        yield address, rest
    finally:
        process.send_signal(signal.SIGTERM)
        rest.append(process.communicate(timeout=60)[0])


def stopped_by(text: str) -> tuple[str, str]:
    """The first name that is against it, and its words; "" where none is."""
    for found in NAMED.finditer(text):
        named = [(found[place], found[place + 1]) for place in (1, 3, 6) if found[place]]
        name, reason = named[0] if named else ("reward_once", found[5])
        if name not in ("gain", "endings"):  # of a few steps, which need not have taught anything
            return name, reason.splitlines()[0]
    refused = REFUSED.search(text)
    return (refused[2], refused[1]) if refused else ("", "")


def make_fork(home: Path) -> tuple[Path, Path]:
    """A model that can add, a LoRA checkpoint on it that `assay sft` made and proved, and what the two make merged."""
    (home / "first").mkdir()
    base = taught(home / "first", steps=60).parent.parent / "model"
    options = {"model": base, "data": home / "first" / "learned.jsonl", "out": home / "sft", "lora-r": 4, "max-steps": 10,
               "num-train-epochs": 100, "max-length": 32, "batch-tokens": 512, "learning-rate": 2e-3, "device": "cpu", "save-steps": 10}
    code, text = said_by([sys.executable, "-m", "assay", "sft", *words_of(options)])
    assert code in (0, 3), text[-2000:]
    return home / "sft" / "checkpoints" / "step-000010", home / "sft" / "model"


def taught_by_agent(home: Path, merged: Path, cause: Cause, number: int) -> tuple[str, str]:
    """`assay serve --train` and the agent; what it leaves is proven by `assay prove`."""
    out = home / f"served-{number}"
    planted = cause.words if cause.where == "server" else ""
    with served(command(planted, "serve", str(merged), "--name", "policy", "--train", "--out", str(out), "--port", "0", "--learning-rate",
                        "5e-3", "--slots", "2", "--device", "cpu")) as (url, _):
        code, text = said_by([sys.executable, "-m", "tests.incident.agent", url, cause.told or "honest"])
    if (found := stopped_by(text))[0]:
        return found
    assert code == 0, text[-2000:]
    _, proof = said_by([sys.executable, "-m", "assay", "prove", str(max((out / "checkpoints").iterdir()))])
    name, reason = stopped_by(proof)
    return (name, reason) if name else ("", f"{text.strip().splitlines()[-1]}; assay prove: {proof.strip().splitlines()[-1]}")


def drawn_by_server(home: Path, fork: Path, cause: Cause, number: int) -> tuple[str, str]:
    """`assay grpo --from` the LoRA checkpoint, whose rollouts `assay serve --rollouts` draws."""
    served_plant, own_plant = (cause.words if cause.where == where else "" for where in ("server", "trainer"))
    options = {"from": fork, "optimizer-state": "fresh", "data": home / "first" / "sums.jsonl", "reward": "answer:1",
               "out": home / f"forked-{number}", "prompts": 4, "num-generations": 4, "max-completion-length": 8, "max-steps": 4,
               "num-train-epochs": 50, "learning-rate": 2e-3, "warmup-steps": 0, "save-steps": 2, "witness": "off", "held-out": 0.3,
               "eval-prompts": 8, "device": "cpu", "reward-workers": 1}
    base = home / "first" / "sft" / "model"
    with served(command(served_plant, "serve", str(base), "--rollouts", "--port", "0", "--device", "cpu")) as (url, _):
        _, text = said_by(command(own_plant, "grpo", *words_of(options), "--vllm-server-base-url", url.removesuffix("/v1")))
    found = stopped_by(text)
    return found if found[0] else ("", text.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="causes whose words hold these")
    only, wrong, tried = parser.parse_args().only, 0, 0
    print(f"python -m tests.incident{f' --only {only!r}' if only else ''}   {time.strftime('%Y-%m-%d')}, CPU, Python "
          f"{sys.version.split()[0]}, torch {version('torch')}, openai {version('openai')}\n")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        fork, merged = make_fork(home)
        for title, causes, play, start in (
                ("assay serve --train, and an agent in another process", SERVED, taught_by_agent, merged),
                ("assay grpo --from a LoRA checkpoint, rollouts by assay serve --rollouts", FORKED, drawn_by_server, fork)):
            print(title)
            for number, cause in enumerate(causes):
                if only not in cause.words:
                    continue
                tried += 1
                name, words = play(home, start, cause, number)
                right = name == cause.check
                wrong += not right
                print(f"  {'ok   ' if right else 'WRONG'}  {cause.words} ({cause.where}): {f'stopped by {name}' if name else 'not stopped'}"
                      f"{'' if right else f', expected {cause.check!r}'}: {words[:400]}", flush=True)
    print(f"\n{tried - wrong} of {tried} as it should be: every cause is stopped by its name, and nothing else is stopped" if not wrong
          else f"\n{wrong} of {tried} are not as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
