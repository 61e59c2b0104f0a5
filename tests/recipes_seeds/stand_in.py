"""A recipe's promises without its training: FOLDER SEED [FATE=SEED …].

A file `mended` beside the folder undoes every fate but a guard's.
"""

import os
import signal
import sys
import time
from pathlib import Path

from assay.store.ledger import Ledger


def main(folder: Path, seed: int, fates: set[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    note(folder / "sittings", "x")
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.append("start")
    (folder / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if (folder.parent / "mended").exists():
        fates &= {"guard"}
    if "usage" in fates:
        print("assay: corpus: no such folder", file=sys.stderr)
        return 2
    if "meet" in fates:
        wait_for_the_other(folder, seed)
    (folder / "metrics.jsonl").write_text("".join(rows(seed, "collapse" in fates)))
    print("step 5", flush=True)
    if "sleep" in fates:
        return sleep(folder)
    return ended(ledger, seed, fates)


def ended(ledger: Ledger, seed: int, fates: set[str]) -> int:
    if "guard" in fates:
        print("assay: constant_loss: loss 1.0 at 30 steps", file=sys.stderr)
        return 4
    if "crash" in fates:
        print(1 / 0)
    if "killed" in fates:
        os.kill(os.getpid(), signal.SIGKILL)
    mean = 9.0 if "collapse" in fates else round(1.2 + seed / 1000, 3)
    low, high = (mean, mean) if "collapse" in fates else (1.1, 1.3)
    ledger.append("hand over", score={"mean": mean, "low": low, "high": high, "n": 9, "level": 0.95})
    if "refuted" in fates:
        print("  REFUTED   score: exported bytes score 9.9")
        return 3
    return 0


def rows(seed: int, collapses: bool) -> list[str]:
    """A loss that falls alike for all, and from step 20 on climbs for a seed that collapses."""
    losses = [4 - 0.05 * step + 0.001 * ((7 * step + seed) % 5) + (3 if collapses and step >= 20 else 0) for step in range(40)]
    return [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses)] + ['{"step": 39, "eval_bits_per_byte": 1']


def sleep(folder: Path) -> int:
    caught: list[int] = []

    def save(number: int, _: object) -> None:
        caught.append(number)
        note(folder / "saved", str(number))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, save)
    (folder / "asleep").touch()
    for _ in range(3000):
        if caught:
            time.sleep(0.2)  # a second signal would be noted too
            return 128 + caught[0]
        time.sleep(0.02)
    return 1


def wait_for_the_other(folder: Path, seed: int) -> None:
    (folder / "here").touch()
    other = folder.parent / f"seed-{3 - seed}" / "here"
    deadline = time.monotonic() + 60
    while not other.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def note(file: Path, text: str) -> None:
    with file.open("a") as opened:
        opened.write(text + " ")


if __name__ == "__main__":
    mine = {fate.partition("=")[0] for fate in sys.argv[3:] if fate.partition("=")[2] == sys.argv[2]}
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), mine))
