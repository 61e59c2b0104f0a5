"""Preference-learning speed: the recipe of `assay dpo` beside TRL's DPOTrainer, same weights, same pairs, same run.

    python bench/dpo.py                                       # SmolLM2-135M's shape, 16 pairs of at most 512 tokens a side a step, one GPU
    python bench/dpo.py --shape tiny --device cpu --pairs 4 --length 96 --steps 4 --peer-steps 2 --rows 96

Weights are drawn, and so are the texts: what is measured is the time of a step, and that the two losses are one. Rows: ours, packed,
with the tokens that 16 full pairs take; ours with one pair a row, as many pairs a step as TRL; TRL as it comes (the reference is asked
at every step), with its log-probabilities computed before, and without gradient checkpointing. Ours asks its reference once, before
step 1, which is in "ready after". The loss at the end of both is of as many steps on the same pairs, in another order.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from beside import (
    TINY,
    Clock,
    Measured,
    aloud,
    fence,
    measured,
    middle,
    peak_memory,
    quiet,
    surroundings,
    train_only,
    weights,
    without_proofs,
    write_rows,
)
from sample import SMOLLM2
from sft import block_of, telling

from assay.data.batch import Batch
from assay.learn.loop import Step
from assay.recipes import dpo
from assay.recipes.dpo_options import Dpo
from assay.seeds import derive
from assay.testing.tiny_models import initialised, save_model

LR, WARM_UP, BETA = 1e-6, 4, 0.1
SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "pa", "ri", "so", "tu")


class Counted(Measured):
    """The recipe's trainer, with a clock between its steps and a count of their pairs."""

    def __init__(self, clock: Clock, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.clock, self.pairs = clock, list[int]()

    def steps(self, batches: Iterable[Batch]) -> Iterator[Step]:
        return super().steps(map(self.counted, batches))

    def counted(self, batch: Batch) -> Batch:
        self.pairs.append(sum(map(len, batch.ids)))
        return batch

    def over(self) -> bool:
        if self.done == self.clock.warm:
            self.run.settle()
        if self.done:
            self.clock.stepped(self.done)
        return super().over()


class Bench:
    def __init__(self, flags: argparse.Namespace, home: Path):
        self.flags, self.home, self.on_gpu = flags, home, flags.device.startswith("cuda")
        if flags.shape != TINY:
            save_model(home / "drawn", initialised(SMOLLM2, 0))
        self.model = TINY if flags.shape == TINY else str(home / "drawn")
        self.fp32 = weights(self.model, "float32", home, flags.length)
        self.said = [drawn_pair(number, flags.length) for number in range(flags.rows)]
        self.data = write_rows(home / "pairs.jsonl", self.said)
        self.held_out = write_rows(home / "held-out.jsonl", (drawn_pair(-1 - number, flags.length) for number in range(16)))

    def clock(self, warm: int, steps: int) -> Clock:
        return Clock(min(warm, steps), block_of(steps), self.flags.device)

    def ours(self, name: str, **options: Any) -> str:
        flags, clock = self.flags, self.clock(6, self.flags.steps)
        steps, tokens = clock.warm + flags.steps, 2 * flags.pairs * flags.length
        config = Dpo(model=str(self.fp32), data=(str(self.data),), held_out_data=str(self.held_out), out=str(self.home / name),
                     max_length=flags.length, batch_tokens=tokens, micro_batch_tokens=tokens, learning_rate=LR, beta=BETA,
                     warmup_steps=WARM_UP, max_steps=steps, num_train_epochs=steps, save_steps=0, insist=True, eval_examples=8,
                     device=flags.device, **options)
        began = time.perf_counter()
        trainer = train_only(dpo, config, aloud(flags.verbose), partial(Counted, clock))
        fence(flags.device)
        return self.line(clock, trainer.pairs, clock.marks[0] - began, trainer.watch.losses)

    def theirs(self, name: str, dtype: str = "bfloat16", **options: Any) -> str:
        import datasets
        import transformers
        import trl

        quiet()
        flags, clock = self.flags, self.clock(3, self.flags.peer_steps)
        steps, began = clock.warm + flags.peer_steps, time.perf_counter()
        args = trl.DPOConfig(str(self.home / name), per_device_train_batch_size=flags.pairs, max_length=flags.length, max_steps=steps,
                             learning_rate=LR, warmup_steps=WARM_UP, lr_scheduler_type="cosine_with_min_lr", beta=BETA,
                             lr_scheduler_kwargs={"min_lr_rate": 0.1}, adam_beta1=0.9, adam_beta2=0.95, logging_steps=1,
                             save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not self.on_gpu, bf16=self.on_gpu, **options)
        folder = weights(self.model, dtype, self.home, flags.length)
        trainer = trl.DPOTrainer(str(folder), args=args, train_dataset=datasets.Dataset.from_list(self.said),
                                 processing_class=transformers.AutoTokenizer.from_pretrained(folder), callbacks=[telling(clock)])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return self.line(clock, [flags.pairs] * steps, clock.marks[0] - began, losses)

    def line(self, clock: Clock, pairs: list[int], first: float, losses: list[float]) -> str:
        a_step = pairs[clock.warm : clock.warm + clock.block * len(clock.blocks)]
        return (f"{middle(clock.rates(pairs))} pairs/s  {1e3 * sum(clock.blocks) / len(a_step):8.1f} ms a step of "
                f"{sum(a_step) / len(a_step):.1f} pairs  ready after {first:.1f} s  {peak_memory(self.flags.device)}  loss "
                f"{losses[0]:.4f} → {losses[-1]:.4f} ({len(losses)} steps)")


def drawn_pair(number: int, length: int) -> dict[str, str]:
    """Of at most `length` tokens a side, a byte being one: a prompt of up to a quarter, answers of a tenth to two thirds."""
    draw = random.Random(derive(0, "pair", number))

    def text(least: float, most: float) -> str:
        size = draw.randint(int(least * length), int(most * length))
        return "".join(draw.choice(SYLLABLES) for _ in range(size // 2))

    return {"prompt": f"{number}: {text(0.1, 0.22)} ", "chosen": f"yes {text(0.1, 0.66)}", "rejected": f"no {text(0.1, 0.66)}"}


def rows_of(bench: Bench) -> dict[str, Callable[[], str]]:
    work: dict[str, Callable[[], str]] = {
        "assay, packed": partial(bench.ours, "packed"), "assay, one pair a row": partial(bench.ours, "alone", packing=False),
        "TRL, as it comes": partial(bench.theirs, "trl"),
        "TRL, reference precomputed": partial(bench.theirs, "trl-precomputed", precompute_ref_log_probs=True),
        "TRL, precomputed, no checkpointing": partial(bench.theirs, "trl-tuned", precompute_ref_log_probs=True,
                                                      gradient_checkpointing=False)}
    return {name: measure for name, measure in work.items() if bench.flags.only is None or bench.flags.only in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("135m", TINY), default="135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pairs", type=int, default=16, help="pairs a step")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a side")
    parser.add_argument("--rows", type=int, default=2000, help="pairs to learn from")
    parser.add_argument("--steps", type=int, default=40, help="measured, of ours")
    parser.add_argument("--peer-steps", type=int, default=12, help="measured, of TRL's")
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--verbose", action="store_true", help="what the recipe says, too")
    flags = parser.parse_args()
    without_proofs()
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(flags, Path(home))
        lines = measured(rows_of(bench), flags.device)
    print(f"\n{surroundings(flags.device)}\n{flags.shape}, random weights, {flags.pairs} pairs of at most 2 × {flags.length} tokens a step")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
