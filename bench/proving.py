"""What saving and proving cost a run: the recipe of `assay sft` with its checkpoints, and the same steps without them, by turns.

    python bench/proving.py --data gsm8k.jsonl                                            # SmolLM2-135M, one GPU
    python bench/proving.py --data gsm8k.jsonl --model tiny --device cpu --batch 4 --steps 30 --every 10 --pairs 1

Both look at what is held out as often; what differs is the snapshot, the writing, and the proofs in processes of their own, which
take cores and, for what they sample, the GPU. The clock runs over the steps: what is still being proven after the last one takes
nothing from the loop. Goal: saving and proving take at most 2 % of the wall time.
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from beside import Clock, aloud, fence, surroundings, train_only
from sft import LR, WARM_UP, Bench, Timed, ask_what_is_learned

from assay.recipes import sft
from assay.recipes.options import Sft
from assay.store.checkpoint import step_folder
from assay.store.ledger import Event, Ledger

WARM = 6  # steps before the clock


class Unsaved(Timed):
    """The same run, of which nothing is kept."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.run.save = lambda step, *_, **__: step_folder(self.run.checkpoints, step)  # type: ignore[method-assign]


def seconds(bench: Bench, name: str, kind: type[Timed]) -> tuple[float, int]:
    """Of the measured steps; and how many checkpoints came in them."""
    flags, clock = bench.flags, Clock(WARM, bench.flags.steps, bench.flags.device)
    steps, out = WARM + flags.steps, bench.home / name
    config = Sft(model=str(bench.fp32), data=(str(bench.train),), held_out_data=str(bench.home / "held-out.jsonl"), gsm8k="think",
                 out=str(out), max_length=flags.length, batch_tokens=flags.batch * flags.length, learning_rate=LR, warmup_steps=WARM_UP,
                 max_steps=steps,
                 num_train_epochs=steps * flags.batch * flags.length // bench.tokens + 2, save_steps=flags.every, eval_examples=8,
                 device=flags.device)
    train_only(sft, config, aloud(flags.verbose), partial(kind, clock))
    fence(flags.device)
    saves = [event["step"] for event in Ledger(out / "ledger.jsonl").events() if event["kind"] == Event.SAVE]
    (taken,) = clock.blocks
    return taken, sum(WARM < step < steps for step in saves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask_what_is_learned(parser)
    parser.add_argument("--held-out", type=int, default=64, help="conversations that are not")
    parser.add_argument("--steps", type=int, default=400, help="measured")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--pairs", type=int, default=2, help="runs with and without them")
    flags = parser.parse_args()
    if flags.every >= flags.steps:
        parser.error(f"--every {flags.every} of --steps {flags.steps}: no checkpoint would come among them")
    found: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(flags, Path(home))
        for pair in range(flags.pairs):
            (saved, count), (plain, none) = seconds(bench, f"saved-{pair}", Timed), seconds(bench, f"plain-{pair}", Unsaved)
            assert count > 0
            assert none == 0
            found.append((saved, plain))
            print(f"{flags.steps} steps: {saved:.2f} s with {count} checkpoints, {plain:.2f} s without", flush=True)
    each = [(saved - plain) / count for saved, plain in found]
    print(f"\n{surroundings(flags.device)}\n{flags.model}, {flags.batch} × {flags.length} tokens a step, a checkpoint every {flags.every}")
    print(f"a checkpoint, written and proven, takes {statistics.mean(each):.2f} s of the loop ({', '.join(f'{s:.2f}' for s in each)}): "
          f"{100 * sum(s - p for s, p in found) / sum(p for _, p in found):.1f} % here, and at most 2 % where one comes every "
          f"{max(0.0, max(each)) / 0.02:.0f} s or more")


if __name__ == "__main__":
    main()
