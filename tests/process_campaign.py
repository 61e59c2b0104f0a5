"""Campaign of kills on runs of several processes: any of them, at any disk operation or transfer; whoever is left goes on.

    python -m tests.process_campaign --kills 60 --jobs 4 > results/process_kills.txt        `make campaign-processes`

A run is begun by two to four processes, replicated, sharded, or sharded with an adapter. One of them is killed, at a random operation
on the disk (also in the middle of a save) or as a tensor travels; the same command goes on with another number of processes, is killed
again, and at last finishes alone. It must end with the digest of the undisturbed run (replicated), or within rounding of it (sharded);
no checkpoint that was committed may be lost; and whoever was not killed must end by itself, in a sentence.

Run i is a function of --seed and i. What was found of each stands in --log, a line a run: the same command goes on where it was stopped.
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from assay.model.world import World
from assay.recipes import sft
from assay.recipes.options import Sft
from assay.store import durable
from assay.store.checkpoint import Checkpoint, open_checkpoint, step_folders
from assay.store.digests import recorded_digest
from assay.strict_json import read_json_lines
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.two_processes import fork_processes
from bench.processes import unprove
from tests.recipes import sums

CLOSE, OPERATIONS, STEPS, PATIENCE = 2e-4, 220, 8, 5.0
MODES: dict[str, dict[str, Any]] = {"replicated": {"shards": 4}, "sharded": {"fsdp": True},
                                     "adapter": {"fsdp": True, "lora_r": 4}}
SAID = (0, 1, -signal.SIGKILL)  # how a process may end: done, in a sentence, or killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="go on until so many processes were killed (default: 60)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each of up to four processes (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("results/process_kills.jsonl"), help="what was found of each run so far")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"$ python -m tests.process_campaign --kills {given.kills} --seed {given.seed}\n{time.strftime('%Y-%m-%d')}, torch "
          f"{torch.__version__}, Python {platform.python_version()}, gloo, {platform.machine()}\n", flush=True)
    found = strike_all(given.log, given.seed, given.kills, given.jobs)
    return tell(found)


def strike_all(log: Path, seed: int, kills: int, jobs: int) -> list[dict[str, Any]]:
    """Runs that are in the log already are not made again."""
    found = [row for row in (read_json_lines(log) if log.exists() else []) if row["seed"] == seed]
    done, number = {row["run"] for row in found}, 0
    with tempfile.TemporaryDirectory() as made, ProcessPoolExecutor(jobs, get_context("fork"), begin, (Path(made),)) as pool:
        under_way: set[Future[dict[str, Any]]] = set()
        while sum(row["kills"] for row in found) < kills:
            while len(under_way) < jobs:
                while number in done:
                    number += 1
                under_way.add(pool.submit(strike_until_done, seed, number))
                number += 1
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for one in ended:
                found.append(one.result())
                with log.open("a") as lines:
                    lines.write(json.dumps(found[-1]) + "\n")
        pool.shutdown(cancel_futures=True)
    return found


def tell(found: list[dict[str, Any]]) -> int:
    """One line a run, and the sums."""
    for row in sorted(found, key=lambda row: row["run"]):
        print(f"run {row['run']:<4} {row['how']:10} exit codes {row['codes']}; lost {row['lost']}, unsaid {row['unsaid']}, the end "
              f"differs by {row['worst']:.1e}{', same digest' if row['same'] else ''}")
    total = Counter[str]()
    for row in found:
        total.update({what: row[what] for what in ("kills", "lost", "apart", "unsaid")})
    print(f"\n{total['kills']} kills in {len(found)} runs: {total['lost']} lost a checkpoint, {total['apart']} ended elsewhere, "
          f"{total['unsaid']} processes ended without a sentence")
    return int(bool(total["lost"] or total["apart"] or total["unsaid"]))

# ---------------------------------------------------------------- one run


def begin(home: Path) -> None:
    """Begin a worker: a model and data of its own, and what undisturbed runs of them come to."""
    global HOME, DUE
    os.dup2(2, 1)  # what the runs say is no part of the table
    torch.set_num_threads(1)
    unprove()
    HOME = home / str(os.getpid())
    HOME.mkdir()
    save_model(HOME / "base", tiny_model("llama"))
    sums.write(HOME / "learned.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)])
    DUE = {how: finished(HOME / how, options) for how, options in MODES.items()}


HOME, DUE = Path(), dict[str, Checkpoint]()


def run_sft(out: Path, options: dict[str, Any]) -> None:
    sft.sft(Sft(model=str(HOME / "base"), data=(str(HOME / "learned.jsonl"),), out=str(out), max_length=32, batch_tokens=224,
                micro_batch_tokens=64, num_train_epochs=9, max_steps=STEPS, save_steps=2, held_out=0.1, learning_rate=3e-3, device="cpu",
                process_timeout=PATIENCE, **options), lambda _: None)


def finished(out: Path, options: dict[str, Any]) -> Checkpoint:
    run_sft(out, options)
    return open_checkpoint(step_folders(out / "checkpoints")[-1])


def strike_until_done(seed: int, number: int) -> dict[str, Any]:
    """Struck up to four times, then left alone."""
    chance = random.Random(f"{seed} {number}")
    how, out = chance.choice(sorted(MODES)), HOME / f"run-{number}"
    options, due = MODES[how], DUE[how]
    found: dict[str, Any] = {"seed": seed, "run": number, "how": how, "kills": 0, "lost": 0, "unsaid": 0, "codes": []}
    for _ in range(chance.randint(1, 4)):
        count = chance.randint(2, 4)
        victim, moment = chance.randrange(count), chance.randrange(OPERATIONS)
        before = [folder.name for folder in step_folders(out / "checkpoints")]
        codes = fork_processes(lambda: struck(lambda: run_sft(out, options), victim, moment), count)  # noqa: B023
        found["codes"].append(codes)
        found["kills"] += int(-signal.SIGKILL in codes)
        found["lost"] += int(not survived(out, before))
        found["unsaid"] += sum(code not in SAID for code in codes)
        if codes == [0] * count:
            break
    last = finished(out, options)
    worst = max(float((last.weights()[name] - tensor).abs().max()) for name, tensor in due.weights().items())
    same = recorded_digest(last.manifest) == recorded_digest(due.manifest)
    return found | {"worst": worst, "same": same, "apart": int(not (same if "shards" in options else worst <= CLOSE))}


def survived(out: Path, before: list[str]) -> bool:
    """Nothing older than what was committed before is the newest now, and whatever is there verifies."""
    now = step_folders(out / "checkpoints")
    for folder in now:
        open_checkpoint(folder)
    return not before or bool(now and now[-1].name >= before[-1])


def struck(act: Callable[[], object], victim: int, moment: int) -> None:
    """Run `act`, and kill process `victim` at its disk operation of this number or, one time in three, when it has sent or been sent so
    much."""
    if int(os.environ["RANK"]) == victim:
        if moment % 3:
            durable.disk = Striking(moment)
        else:
            usual, left = World.broadcast, iter(range(moment, -1, -1))

            def strike(world: World, tensor: torch.Tensor) -> None:
                if next(left, 0) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                usual(world, tensor)

            World.broadcast = strike  # type: ignore[method-assign]
    act()


class Striking(durable.Disk):
    """A disk on which one operation is the last."""

    def __init__(self, moment: int):
        self.left = moment

    def __getattribute__(self, name: str) -> Any:
        if name in ("create", "write", "sync", "rename", "mkdir"):
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


if __name__ == "__main__":
    sys.exit(main())
