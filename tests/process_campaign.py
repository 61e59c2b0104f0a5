"""Campaign of kills on runs of several processes: any of them, at any disk operation or transfer; whoever is left goes on.

    python -m tests.process_campaign --kills 60 > results/process_kills.txt        `make campaign-processes`

A run is begun by two to four processes, replicated or sharded. One of them is killed, at a random operation on the disk (also in the
middle of a save) or as a tensor travels; the same command goes on with another number of processes, is killed again, and at last finishes.
It must end with the digest of the undisturbed run (replicated), or within rounding of it (sharded), and no checkpoint that was
committed may be lost.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from assay.model.world import World
from assay.recipes import sft
from assay.recipes.options import Sft
from assay.store import durable
from assay.store.checkpoint import open_checkpoint, step_folders
from assay.store.digests import recorded_digest
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.two_processes import fork_processes
from bench.processes import unprove
from tests.recipes import sums

CLOSE, OPERATIONS, STEPS = 2e-4, 220, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    unprove()
    chance, found = random.Random(given.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        prepare(home)
        due = {how: finished(home, home / how, options) for how, options in MODES.items()}
        while found["kills"] < given.kills:
            how = chance.choice(sorted(MODES))
            one = strike_until_done(home, home / f"run-{found['runs']}", MODES[how], due[how], chance)
            print(f"{how:10} {dict(one)}", flush=True)
            found.update(one)
    print(f"{found['kills']} kills in {found['runs']} runs: {found['lost']} lost a checkpoint, {found['apart']} ended elsewhere")
    return int(bool(found["lost"] or found["apart"]))


MODES: dict[str, dict[str, Any]] = {"replicated": {"shards": 4}, "sharded": {"fsdp": True}}


def prepare(home: Path) -> None:
    save_model(home / "base", tiny_model("llama"))
    sums.write(home / "learned.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)])


def run_sft(home: Path, out: Path, options: dict[str, Any]) -> None:
    sft.sft(Sft(model=str(home / "base"), data=(str(home / "learned.jsonl"),), out=str(out), max_length=32, batch_tokens=224,
                micro_batch_tokens=64, num_train_epochs=9, max_steps=STEPS, save_steps=2, held_out=0.1, learning_rate=3e-3, device="cpu",
                process_timeout=5.0, **options), lambda _: None)


def finished(home: Path, out: Path, options: dict[str, Any]) -> Any:
    run_sft(home, out, options)
    return open_checkpoint(step_folders(out / "checkpoints")[-1])


def strike_until_done(home: Path, out: Path, options: dict[str, Any], due: Any, chance: random.Random) -> Counter[str]:
    """Killed up to four times, then left alone."""
    found = Counter(runs=1, kills=0, lost=0, apart=0)
    for _ in range(chance.randint(1, 4)):
        count = chance.randint(2, 4)
        victim, moment = chance.randrange(count), chance.randrange(OPERATIONS)
        before = [folder.name for folder in step_folders(out / "checkpoints")]
        codes = fork_processes(lambda: struck(lambda: run_sft(home, out, options), victim, moment), count)  # noqa: B023
        found["kills"] += int(-signal.SIGKILL in codes)
        found["lost"] += int(not survived(out, before))
        if codes == [0] * count:
            break
    last = finished(home, out, options)
    worst = max(float((last.weights()[name] - tensor).abs().max()) for name, tensor in due.weights().items())
    same = recorded_digest(last.manifest) == recorded_digest(due.manifest)
    found["apart"] += int(not (same if "shards" in options else worst <= CLOSE))
    return found


def survived(out: Path, before: list[str]) -> bool:
    """Nothing older than what was committed before is the newest now, and whatever is there verifies."""
    now = step_folders(out / "checkpoints")
    for folder in now:
        open_checkpoint(folder)
    return not before or bool(now and now[-1].name >= before[-1])


def struck(act: Callable[[], object], victim: int, moment: int) -> None:
    """In process `victim`: killed at its disk operation of this number or, one time in three, when it has sent or been sent so much."""
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
