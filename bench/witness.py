"""What the witness costs a run: how long the loop stands still for a kept step, how long a replay takes beside it, and what share that is.

    python bench/witness.py                                       # a tiny model on the CPU
    python bench/witness.py --model smollm2-135m --tokens 256     # as `assay export smollm2-135m --to hf` wrote it; on a CPU in minutes
    python bench/witness.py --model FOLDER --device cuda --tokens 16384 --steps 40

The recipe of `assay sft` on made rows, its first and its last step kept; its proofs are left out, so that nothing else runs beside the
loop. Then the records are replayed as a proof would. The last table says what the default cadence (the first step of a sitting, the
last, two that are drawn) comes to in runs of several lengths, paced as assay/recipes/witness_pace.py paces it. Goal: at most 2 %.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from beside import surroundings

from assay.recipes import hand_over, run, sft
from assay.recipes.options import Sft
from assay.recipes.trainer import Trainer
from assay.recipes.witness_pace import FREE_SECONDS, WITNESS_SHARE
from assay.recipes.witness_records import WitnessRecords, pending_records
from assay.testing.fault_injection import swap
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import RecordingProver
from assay.verdict import Outcome, proven
from assay.witness.replay import replay_step

RUNS_OF = (1, 10, 60, 600)  # minutes
CADENCE = 4  # the first, the last and --witness 2


class StoodStill:
    """Seconds that a function of the loop took, by call."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def around(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return usual(*given)
            finally:
                self.seconds.append(time.perf_counter() - began)
        return timed


def trained(flags: argparse.Namespace, home: Path) -> tuple[float, list[float]]:
    """Seconds a step, and what each kept one cost the loop."""
    model = Path(flags.model) if flags.model != "tiny" else save_model(home / "tiny", tiny_model()).folder
    rows = [{"prompt": f"What is {a} and {b}, and why?", "completion": f"It is {a + b}, since {b} comes on top of {a}."}
            for a in range(12) for b in range(12)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Sft(model=str(model), data=(str(home / "rows.jsonl"),), out=str(home / "run"), max_length=flags.length,
                 max_steps=flags.steps, batch_tokens=flags.tokens, micro_batch_tokens=min(flags.tokens, 4096), num_train_epochs=1000,
                 save_steps=10**6, witness="0", held_out=0.02, probe_samples=0, eval_examples=2, device=flags.device)
    before, after, steps = StoodStill(), StoodStill(), list[float]()
    usual = Trainer.record

    def recorded(trainer: Trainer, *given: Any, **named: Any) -> None:
        steps.append(time.perf_counter())
        usual(trainer, *given, **named)

    with (swap(run, "Prover", RecordingProver), swap(hand_over, "prove", lambda request: [proven("whole", "left out")]),
          swap(WitnessRecords, "begin_step", before.around(WitnessRecords.begin_step)), swap(Trainer, "record", recorded),
          swap(WitnessRecords, "end_step", after.around(WitnessRecords.end_step))):
        sft.sft(config, lambda _: None)
    kept = sorted(a + b for a, b in zip(before.seconds, after.seconds, strict=False))[-2:]
    between = sorted(later - earlier for earlier, later in pairwise(steps))
    return between[len(between) // 2], kept


def replayed(home: Path, device: str) -> list[float]:
    found = []
    for record in pending_records(home / "run"):
        began = time.perf_counter()
        said = replay_step(record, device)
        assert said.outcome is Outcome.PROVEN, str(said)
        found.append(time.perf_counter() - began)
    return found


def affordable(seconds: float, one: float) -> int:
    """Steps that a run of so many seconds keeps: the first, then what fits."""
    allowed = max(FREE_SECONDS, WITNESS_SHARE * seconds)
    return max(1, min(CADENCE, int(allowed / one)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a model folder that transformers opens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--length", type=int, default=128, help="of a row")
    flags = parser.parse_args()
    print(surroundings(flags.device))
    with tempfile.TemporaryDirectory() as home:
        a_step, still = trained(flags, Path(home))
        torch.set_num_threads(1)
        taken = replayed(Path(home), flags.device)
    one = max(taken)
    print(f"{flags.model}, {flags.tokens} tokens a step on {flags.device}: a step takes {a_step:.3f} s; a kept one lets the loop stand "
          f"still for {max(still):.3f} s; a replay takes {', '.join(f'{each:.2f}' for each in taken)} s beside it (one thread)")
    print(f"{'run of':>10} {'steps kept':>11} {'replays, s':>11} {'share':>7}")
    for minutes in RUNS_OF:
        steps = affordable(60.0 * minutes, one)
        spent = steps * (one + max(still))
        words = "" if spent <= WITNESS_SHARE * 60 * minutes else "   above 2 %: " + (
            "the first step alone" if steps == 1 else f"within the {FREE_SECONDS:g} s that are always allowed")
        print(f"{minutes:>6} min {steps:>11} {spent:>11.1f} {spent / 60 / minutes:>7.2%}{words}")


if __name__ == "__main__":
    main()
