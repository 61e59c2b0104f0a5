"""Kill campaign: every recipe killed at random moments, again and again, must end in the result of a run that nobody disturbed.

    python -m tests.kill_campaign --kills 500 --jobs 2

A kill is SIGKILL to the command and to everything that it has started, at a moment drawn from the time that the whole command takes. After
up to three kills the same command is given once more and left alone. Commands run in forks of a process that has torch imported
(tests/mutants/forked_runs.py), so that a kill meets Assay at work, not at its imports. Prints its table last, and ends with 1 where a
promise did not hold.
"""

import argparse
import datetime
import hashlib
import itertools
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.mutants import forked_runs
from tests.mutants.campaign import Bench, Slot, run_all
from tests.mutants.forked_runs import TIMED_OUT, Ended, ForkedRun
from tests.mutants.reference_runs import REFERENCE_RUNS, ReferenceRun

KILLED = ("sft", "lora", "pretrain", "distill", "distill-stored", "grpo", "edit", "ttt", "eval", "corpus", "export", "merge")
LIMIT = 300.0  # seconds that one command may take, undisturbed
MOST = 3  # kills of one run
RESULTS = ("run/model/*.safetensors", "run/adapter/*.safetensors", "run/ttt.json", "run/eval.jsonl", "scores/*.jsonl", "made/**/*.bin",
           "made/**/*.safetensors", "model.gguf", "merged/*.safetensors")
CLOCK = {"seconds", "time", "at", "started", "tokens_per_second"}
LONGER = {"--max-steps": "8", "--save-steps": "2"}  # so that kills fall between saves too
GENTLER = {"grpo": {"--learning-rate": "2e-5"}}  # eight steps of what two may take would spoil it, and that is refused
TUNE = ("--max-length", "32", "--num-train-epochs", "20", "--max-steps", "8", "--save-steps", "2", "--learning-rate", "1e-3",
        "--held-out", "0.2", "--probe-samples", "1", "--device", "cpu")
PREFERENCES = (
    ReferenceRun("dpo", ("dpo", "--model", "taught", "--data", "pairs.jsonl", "--out", "run", *TUNE), ("taught", "pairs.jsonl")),
    ReferenceRun("kto", ("kto", "--model", "taught", "--data", "judged.jsonl", "--out", "run", *TUNE), ("taught", "judged.jsonl")),
)


def longer(run: ReferenceRun) -> ReferenceRun:
    words = list(run.words)
    for name, value in (LONGER | GENTLER.get(run.name, {})).items():
        if name in words:
            words[words.index(name) + 1] = value
    return replace(run, words=tuple(words))


RUNS = tuple(longer(run) for run in REFERENCE_RUNS if run.name in KILLED) + PREFERENCES


@dataclass
class Killed:
    """Result of one killed command: the moments of its kills, and how what it left differs."""

    name: str
    moments: list[float] = field(default_factory=list)
    broken: str = ""
    left_behind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Undisturbed:
    seconds: float
    result: str


def result(folder: Path) -> str:
    """A digest of everything that a user takes away; times of the clock are left out."""
    digest = hashlib.sha256()
    found = sorted(set(itertools.chain.from_iterable(folder.glob(pattern) for pattern in RESULTS)))
    if not found:
        return "nothing was handed over"
    for path in found:
        data = path.read_bytes()
        if path.suffix in (".json", ".jsonl"):
            rows = data.splitlines() if path.suffix == ".jsonl" else [data]
            data = json.dumps([without_times(json.loads(row)) for row in rows]).replace(str(folder), "@").encode()
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + data)
    return digest.hexdigest()


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in CLOCK}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def run_for(run: ReferenceRun, folder: Path, slot: Slot, seconds: float) -> Ended:
    return forked_runs.run_command(ForkedRun(run.words, folder, slot.code, seconds))


def left_alone(bench: Bench, run: ReferenceRun, slot: Slot) -> Undisturbed | str:
    folder = slot.work(run, bench.fixtures)
    ended = run_for(run, folder, slot, LIMIT)
    if ended.code != 0 or result(folder) == "nothing was handed over":
        return f"{run.name} alone ended with {ended.code}: {(ended.out + ended.err)[-800:]}"
    return Undisturbed(ended.seconds, result(folder))


def kill_and_finish(bench: Bench, run: ReferenceRun, slot: Slot, alone: Undisturbed, chance: random.Random) -> Killed:
    folder, outcome = slot.work(run, bench.fixtures), Killed(run.name)
    ended = None
    for _ in range(MOST):
        after = chance.uniform(0.02, alone.seconds)
        ended = run_for(run, folder, slot, after)
        if ended.code != TIMED_OUT:
            break
        outcome.moments.append(round(after, 2))
    assert ended is not None
    if ended.code == TIMED_OUT:
        ended = run_for(run, folder, slot, LIMIT)
    committed = ended.code == 2 and re.search(r"exists|is there already|holds scores already", ended.err)  # before the kill came
    if ended.code != 0 and not committed:
        outcome.broken = f"exit {ended.code} after kills at {outcome.moments}: {(ended.out + ended.err)[-400:]!r}"
    elif result(folder) != alone.result:
        outcome.broken = f"another result after kills at {outcome.moments}"
    outcome.left_behind = [path.name for path in (folder / ".tmp").glob("assay*")]
    return outcome


def campaign(bench: Bench, kills: int, seed: int, minutes: float | None) -> int:
    until = None if minutes is None else time.monotonic() + minutes * 60
    bench.copy_code()
    bench.make_fixtures()
    alone: dict[str, Undisturbed] = {}
    failed: list[str] = []

    def take_alone(run: ReferenceRun, found: Undisturbed | str | None) -> None:
        if isinstance(found, Undisturbed):
            alone[run.name] = found
        else:
            failed.append(found or f"{run.name} alone: its process died")

    run_all(bench, iter(list(bench.runs.values())), lambda run, slot: left_alone(bench, run, slot), take_alone)
    found: list[Killed] = []

    def work() -> Iterator[tuple[int, ReferenceRun]]:
        for number, run in enumerate(itertools.cycle([run for run in bench.runs.values() if run.name in alone])):
            if sum(len(one.moments) for one in found) >= kills:
                return
            yield number, run

    def kill(item: tuple[int, ReferenceRun], slot: Slot) -> Killed:
        number, run = item
        return kill_and_finish(bench, run, slot, alone[run.name], random.Random(f"{seed} {number}"))

    run_all(bench, work(), kill, lambda item, killed: found.append(killed or Killed(item[1].name, broken="its process died")), until)
    return print_table(found, alone, failed)


def print_table(found: list[Killed], alone: dict[str, Undisturbed], failed: list[str]) -> int:
    print(f"{'command':16} {'alone':>7} {'kills':>6} {'finished':>9} {'equal to the undisturbed run':>29}")
    for name, undisturbed in alone.items():
        ours = [one for one in found if one.name == name]
        broken = [one.broken for one in ours if one.broken]
        kills = sum(len(one.moments) for one in ours)
        print(f"{name:16} {undisturbed.seconds:5.1f} s {kills:6} {len(ours):9} {len(ours) - len(broken):29}")
        for sentence in broken[:3]:
            print(f"    {sentence}")
    print(f"{'in all':16} {'':7} {sum(len(one.moments) for one in found):6} {len(found):9} {sum(not one.broken for one in found):29}")
    left = Counter(name.split("-")[0] for one in found for name in one.left_behind)
    print(f"left in the temporary folders of commands that then went on to their end: {dict(left) or 'nothing'}")
    for sentence in failed:
        print(f"not killed: {sentence}")
    return int(bool(failed) or any(one.broken for one in found))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kill_campaign", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="commands at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="begin nothing after so long")
    parser.add_argument("--run", action="append", choices=[run.name for run in RUNS], help="only this command (again for more)")
    chosen = parser.parse_args()
    print(f"$ python -m tests.kill_campaign {' '.join(sys.argv[1:])}\n{datetime.date.today()}, python {platform.python_version()}, "
          f"torch {version('torch')}, {os.cpu_count()} cores\n", flush=True)
    forked_runs.preload()
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        runs = [run for run in RUNS if not chosen.run or run.name in chosen.run]
        return campaign(Bench(Path(scratch) / "bench", chosen.jobs, runs, lambda text: print(text, file=sys.stderr)), chosen.kills,
                        chosen.seed, chosen.minutes)


if __name__ == "__main__":
    sys.exit(main())
