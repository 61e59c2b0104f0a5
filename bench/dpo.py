"""Preference learning and on-policy distillation: `assay dpo` and `assay distill --on-policy 1` beside TRL's trainers for both.

    python bench/dpo.py                                       # SmolLM2-135M's shape, 16 pairs of at most 512 tokens a side a step, one GPU
    python bench/dpo.py --only on-policy                      # the rows of on-policy distillation alone
    python bench/dpo.py --shape tiny --device cpu --pairs 4 --length 96 --steps 4 --peer-steps 2 --rows 96 --new-tokens 16

Weights are drawn, and so are the texts: what is measured is the time of a step, and that the two losses are one. Rows: ours with one pair
a row, as many pairs a step as TRL; TRL on the same pairs in the same order from the same fp32 weights, for as many steps at the same
rates, whose curve stands beside ours; TRL with bfloat16 weights, as it comes (the reference is asked at every step), and with its
log-probabilities computed before and without gradient checkpointing; ours packed, with about as many pairs a step. Ours asks its
reference once, before step 1, which is in "ready after". The last lines say how many times as many pairs a second.

On-policy distillation: 16 prompts a step, which the student answers with --new-tokens tokens each, and a teacher of the same shape scores
by the generalised JSD with beta 0.5; DistillationTrainer and GKDTrainer (lambda 1) at the same temperature. Drawn weights hardly ever end
a text, so that all draw and score as many tokens. The recipe's preflight would rightly refuse a teacher that knows nothing, and is left
out here.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from beside import (
    TINY,
    Clock,
    Clocked,
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
from assay.recipes import distill, dpo
from assay.recipes.dpo_options import Dpo
from assay.recipes.options import Distill
from assay.seeds import derive
from assay.store.artifact import open_artifact
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import initialised, save_model, tiny_model

LR, BETA = 5e-6, 0.1
SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "pa", "ri", "so", "tu")


class Counted(Clocked):
    """The recipe's trainer, with a clock between its steps, a count of their pairs and the lines of the file that they are."""

    def __init__(self, clock: Clock, *given: Any, **named: Any):
        super().__init__(clock, *given, **named)
        self.pairs, self.lines = list[int](), list[int]()

    def steps(self, batches: Iterable[Batch]) -> Generator[Step, None, None]:
        return super().steps(map(self.counted, batches))

    def counted(self, batch: Batch) -> Batch:
        self.pairs.append(sum(map(len, batch.ids)))
        self.lines += [int(str(id).split(":")[1]) for row in batch.ids for id in row]
        return batch


class Bench:
    def __init__(self, flags: argparse.Namespace, home: Path):
        self.flags, self.home, self.on_gpu = flags, home, flags.device.startswith("cuda")
        if flags.shape != TINY:
            save_model(home / "drawn", initialised(SMOLLM2, 0))
        self.model = TINY if flags.shape == TINY else str(home / "drawn")
        self.fp32 = weights(self.model, "float32", home, flags.length)
        self.chats = [{"messages": [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["chosen"]}]}
                      for pair in (drawn_pair(number, flags.length // 2) for number in range(flags.rows))]
        self.said = [drawn_pair(number, flags.length) for number in range(flags.rows)]
        self.data = write_rows(home / "pairs.jsonl", self.said)
        self.held_out = write_rows(home / "held-out.jsonl", (drawn_pair(-1 - number, flags.length) for number in range(16)))
        self.curve, self.order, self.rates = list[float](), list[int](), dict[str, float]()

    def clock(self, warm: int, steps: int) -> Clock:
        return Clock(min(warm, steps), block_of(steps), self.flags.device)

    @property
    def rows_packed(self) -> int:
        """Rows of two full pairs that hold about as many pairs as a step of TRL's."""
        tokens = sum(2 * len(pair["prompt"]) + len(pair["chosen"]) + len(pair["rejected"]) + 2 for pair in self.said) / len(self.said)
        return max(1, round(1.05 * self.flags.pairs * tokens / (4 * self.flags.length)))

    def ours(self, name: str, **options: Any) -> str:
        flags, clock = self.flags, self.clock(6, self.flags.steps)
        packing = options.get("packing", True)
        steps, tokens = clock.warm + flags.steps, flags.length * (4 * self.rows_packed if packing else 2 * flags.pairs)
        config = Dpo(model=str(self.fp32), data=(str(self.data),), held_out_data=str(self.held_out), out=str(self.home / name),
                     max_length=flags.length, batch_tokens=tokens, micro_batch_tokens=tokens, learning_rate=flags.lr, beta=BETA,
                     warmup_steps=0, max_steps=steps, num_train_epochs=steps, save_steps=0, insist=True, eval_examples=8,
                     device=flags.device, **options)
        began = time.perf_counter()
        trainer = train_only(dpo, config, aloud(flags.verbose), partial(Counted, clock))
        fence(flags.device)
        if not packing:
            self.curve, self.order = list(trainer.watch.losses), trainer.lines
        return self.line(name, clock, trainer.pairs, clock.marks[0] - began, trainer.watch.losses)

    def theirs(self, name: str, dtype: str = "bfloat16", steps: int | None = None, **options: Any) -> str:
        import datasets
        import transformers
        import trl
        from torch.utils.data import SequentialSampler

        class InOrder(trl.DPOTrainer):
            def _get_train_sampler(self, *_: Any) -> Any:
                return SequentialSampler(self.train_dataset)

        quiet()
        flags, clock = self.flags, self.clock(3, self.flags.peer_steps if steps is None else steps - 3)
        steps, began = clock.warm + flags.peer_steps if steps is None else steps, time.perf_counter()
        args = trl.DPOConfig(str(self.home / name), per_device_train_batch_size=flags.pairs, max_length=flags.length, max_steps=steps,
                             learning_rate=flags.lr, warmup_steps=0, lr_scheduler_type="cosine_with_min_lr", beta=BETA,
                             lr_scheduler_kwargs={"min_lr_rate": 0.1}, adam_beta1=0.9, adam_beta2=0.95, logging_steps=1,
                             save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not self.on_gpu, bf16=self.on_gpu, **options)
        folder = weights(self.model, dtype, self.home, flags.length)
        rows = datasets.Dataset.from_list([self.said[line - 1] for line in self.order] if self.order else self.said)
        trainer = InOrder(str(folder), args=args, train_dataset=rows, callbacks=[telling(clock)],
                          processing_class=transformers.AutoTokenizer.from_pretrained(folder))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return self.line(name, clock, [flags.pairs] * steps, clock.marks[0] - began, losses) + self.apart(losses)

    def apart(self, losses: list[float]) -> str:
        """From our curve, where theirs is of as many steps on the same pairs in the same order."""
        if len(losses) != len(self.curve):
            return ""
        gaps = [abs(ours - theirs) for ours, theirs in zip(self.curve, losses, strict=True)]
        return f"; apart from ours by at most {max(gaps):.4f}, by {sum(gaps) / len(gaps):.4f} on average, of a fall of " \
               f"{self.curve[0] - min(self.curve):.4f}"

    def teacher(self, dtype: str) -> Path:
        """Of the same shape, with other weights, and the student's tokenizer."""
        where = self.home / f"teacher-{dtype}"
        if not where.exists():
            source = self.home / "teacher"
            if not source.exists():
                shape = tiny_model("llama", 1, max_length=2 * self.flags.length) if self.flags.shape == TINY else initialised(SMOLLM2, 1)
                save_model(source, shape)
            export_artifact(open_artifact(str(source)), "hf", where, dtype)
        return where

    def ours_on_policy(self, name: str) -> str:
        flags, clock = self.flags, self.clock(4, self.flags.peer_steps)
        steps, chats, length = clock.warm + flags.peer_steps, write_rows(self.home / "chats.jsonl", self.chats), self.flags.length
        config = Distill(model=str(self.fp32), teacher=str(self.teacher("float32")), data=(str(chats),), held_out=0.02,
                         out=str(self.home / name), max_length=length, packing=False, batch_tokens=flags.pairs * length,
                         micro_batch_tokens=flags.pairs * length, learning_rate=flags.lr, warmup_steps=0, max_steps=steps,
                         num_train_epochs=steps, save_steps=0, insist=True, eval_examples=2, device=flags.device, on_policy=1.0,
                         divergence="jsd", beta=0.5, max_new_tokens=flags.new_tokens)
        began, usual = time.perf_counter(), (distill.preflight_distill, distill.preflight_own_words)
        distill.preflight_distill = distill.preflight_own_words = lambda *_: []  # type: ignore[assignment]
        try:
            trainer = train_only(distill, config, aloud(flags.verbose), partial(Counted, clock))
        finally:
            distill.preflight_distill, distill.preflight_own_words = usual
        fence(flags.device)
        return self.line(name, clock, trainer.pairs, clock.marks[0] - began, trainer.watch.losses, "prompts")

    def theirs_on_policy(self, name: str, trainer_of: Callable[..., Any]) -> str:
        import datasets
        import transformers

        quiet()
        flags, clock = self.flags, self.clock(1, self.flags.gkd_steps)
        steps, began, dtype = clock.warm + flags.gkd_steps, time.perf_counter(), "bfloat16" if self.on_gpu else "float32"
        args = {"output_dir": str(self.home / name), "per_device_train_batch_size": flags.pairs, "max_steps": steps,
                "learning_rate": flags.lr, "warmup_steps": 0, "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "adam_beta1": 0.9, "adam_beta2": 0.95, "logging_steps": 1,
                "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": not self.on_gpu, "bf16": self.on_gpu, "beta": 0.5,
                "temperature": 1.0, "gradient_checkpointing": False}
        student = weights(self.model, dtype, self.home, flags.length)
        words = transformers.AutoTokenizer.from_pretrained(student, padding_side="left")
        words.pad_token = words.pad_token or words.eos_token
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=dtype)
        trainer = trainer_of(args, flags, load(student), load(self.teacher(dtype)), datasets.Dataset.from_list(self.chats),
                             processing_class=words, callbacks=[telling(clock)])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return self.line(name, clock, [flags.pairs] * steps, clock.marks[0] - began, losses, "prompts")

    def line(self, name: str, clock: Clock, pairs: list[int], first: float, losses: list[float], what: str = "pairs") -> str:
        a_step, rates = pairs[clock.warm : clock.warm + clock.block * len(clock.blocks)], clock.rates(pairs)
        self.rates[name] = statistics.median(rates)
        return (f"{middle(rates)} {what}/s  {1e3 * sum(clock.blocks) / len(a_step):8.1f} ms a step of "
                f"{sum(a_step) / len(a_step):.1f} {what}  ready after {first:.1f} s  {peak_memory(self.flags.device)}  loss "
                f"{losses[0]:.4f} → {losses[-1]:.4f} ({len(losses)} steps)")

    def times(self) -> list[str]:
        """How many times the rate of each of TRL's rows each of ours has, of one method."""
        return [f"{mine} is {self.rates[mine] / self.rates[other]:.1f} × {other}" for mine in self.rates for other in self.rates
                if mine.startswith("assay") and other.startswith("TRL") and ("on-policy" in mine) == ("on-policy" in other)]


def trl_distillation(args: dict[str, Any], flags: argparse.Namespace, student: Any, teacher: Any, rows: Any, **more: Any) -> Any:
    import trl

    asked = rows.map(lambda row: {"prompt": row["messages"][:-1]}, remove_columns=["messages"])
    settings = trl.DistillationConfig(**args, max_completion_length=flags.new_tokens)
    return trl.DistillationTrainer(student, teacher, settings, asked, **more)


def trl_gkd(args: dict[str, Any], flags: argparse.Namespace, student: Any, teacher: Any, rows: Any, **more: Any) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    settings = GKDConfig(**args, max_length=flags.length, lmbda=1.0, max_new_tokens=flags.new_tokens)
    return GKDTrainer(student, teacher, args=settings, train_dataset=rows, **more)


def drawn_pair(number: int, length: int) -> dict[str, str]:
    """Of at most `length` tokens a side, a byte being one: a prompt of up to a quarter, answers of a tenth to two thirds."""
    draw = random.Random(derive(0, "pair", number))

    def text(least: float, most: float) -> str:
        size = draw.randint(int(least * length), int(most * length))
        return "".join(draw.choice(SYLLABLES) for _ in range(size // 2))

    return {"prompt": f"{number}: {text(0.1, 0.22)} ", "chosen": f"yes {text(0.1, 0.66)}", "rejected": f"no {text(0.1, 0.66)}"}


def rows_of(bench: Bench) -> dict[str, Callable[[], str]]:
    tuned: dict[str, Any] = {"precompute_ref_log_probs": True, "gradient_checkpointing": False}
    of_ours = min(6, bench.flags.steps) + bench.flags.steps
    work: dict[str, Callable[..., str]] = {
        "assay, one pair a row": partial(bench.ours, packing=False),
        "TRL, fp32 weights, same pairs": partial(bench.theirs, dtype="float32", steps=of_ours),
        "TRL, bf16 weights, as it comes": bench.theirs,
        "TRL, bf16, precomputed, no checkpointing": partial(bench.theirs, **tuned),
        "assay, on-policy": bench.ours_on_policy,
        "TRL, on-policy, DistillationTrainer": partial(bench.theirs_on_policy, trainer_of=trl_distillation),
        "assay, packed": bench.ours,
        "TRL, on-policy, GKDTrainer": partial(bench.theirs_on_policy, trainer_of=trl_gkd)}
    began = time.perf_counter()
    return {name: partial(in_time, began + bench.flags.limit, partial(measure, name)) for name, measure in work.items()
            if bench.flags.only is None or bench.flags.only in name}


def in_time(end: float, measure: Callable[[], str]) -> str:
    return measure() if time.perf_counter() < end else "not measured: the time was up (--limit)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("135m", TINY), default="135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pairs", type=int, default=16, help="pairs a step")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a side")
    parser.add_argument("--rows", type=int, default=600, help="pairs to learn from")
    parser.add_argument("--steps", type=int, default=24, help="measured, of ours")
    parser.add_argument("--peer-steps", type=int, default=8, help="measured, of TRL's DPOTrainer and of our on-policy distillation")
    parser.add_argument("--gkd-steps", type=int, default=3, help="measured, of TRL's on-policy distillation")
    parser.add_argument("--new-tokens", type=int, default=128, help="that the student writes to a prompt, on-policy")
    parser.add_argument("--lr", type=float, default=LR, help="peak learning rate of all rows")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no further row is begun")
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--verbose", action="store_true", help="what the recipe says, too")
    flags = parser.parse_args()
    without_proofs()
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(flags, Path(home))
        lines = measured(rows_of(bench), flags.device)
    print(f"\n{surroundings(flags.device)}\n{flags.shape}, random weights, {flags.pairs} pairs of at most 2 × {flags.length} tokens a step")
    print("\n".join([*lines, *bench.times()]))


if __name__ == "__main__":
    main()
