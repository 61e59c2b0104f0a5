"""Fine-tuning speed: the recipe of `assay sft` beside TRL's SFTTrainer, same weights, same conversations, same run.

    python bench/sft.py --data gsm8k.jsonl                                   # SmolLM2-135M, 32 rows of 512 tokens a step, one GPU
    python bench/sft.py --data gsm8k.jsonl --held-out-steps 30               # and what both learned in as many steps
    python bench/sft.py --data gsm8k.jsonl --model tiny --device cpu --batch 4 --steps 4 --peer-steps 2

Tokens are those that are not padding, counted alike for all. Ours are steps of the recipe with all that it does in them; its first
checkpoint is waited for before the clock starts, and its proofs, which run beside the loop, are left out. TRL's rows: as it comes,
with packing=True, and tuned (packing, no gradient checkpointing, twice the rows). Weights are bfloat16 for TRL, which takes the
dtype of a folder, as it does of the hub's; ours are fp32 with bf16 compute. Learning rate, warm-up and betas are the same for all.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from beside import (
    TINY,
    Clock,
    Clocked,
    aloud,
    asked_and_answered,
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

from assay.data.batch import Batch
from assay.data.chat import TrainingExample, render_conversations
from assay.data.data_files import read_rows
from assay.data.layouts import read_conversations
from assay.evaluation.held_out_loss import score_examples
from assay.learn.loop import Step
from assay.model.attention import PADDING
from assay.model.families import from_foreign, hf_layout
from assay.model.placement import place_for_training
from assay.recipes import sft
from assay.recipes.conversations import held_out_batches
from assay.recipes.options import Sft
from assay.store.artifact import assemble_model, open_artifact

LR, WARM_UP = 3e-5, 4  # steps, of the learning rate


class Timed(Clocked):
    """The recipe's trainer, with a clock between its steps and a count of what they read."""

    def __init__(self, clock: Clock, *given: Any, **named: Any):
        super().__init__(clock, *given, **named)
        self.real = []

    real: list[int]

    def steps(self, batches: Iterable[Batch]) -> Generator[Step, None, None]:
        return super().steps(map(self.counted, batches))

    def counted(self, batch: Batch) -> Batch:
        assert batch.documents is not None
        self.real.append(int((batch.documents != PADDING).sum()))
        return batch


class Bench:
    def __init__(self, flags: argparse.Namespace, home: Path):
        self.flags, self.home, self.on_gpu = flags, home, flags.device.startswith("cuda")
        self.fp32 = weights(flags.model, "float32", home, flags.length)
        self.artifact = open_artifact(self.fp32)
        self.train, self.apart = self.split()

    def split(self) -> tuple[Path, list[TrainingExample]]:
        """Conversations that fit a row: those that are learned, as a file, and some that never are."""
        assert self.artifact.tokenizer is not None
        said = read_conversations(self.flags.data, gsm8k="think").rows
        fits = render_conversations(said, self.artifact.tokenizer, self.artifact.stops, length=self.flags.length, over="drop").examples
        kept = {example.id: example for example in fits}
        rows = [(one, row.values) for one, row in zip(said, read_rows(self.flags.data), strict=True) if one.id in kept]
        apart, learned = rows[: self.flags.held_out], rows[self.flags.held_out :][: self.flags.rows]
        self.conversations = [asked_and_answered(one) for one, _ in learned]
        self.tokens = sum(len(kept[one.id]) for one, _ in learned)
        print(f"{len(learned):,} conversations of {self.tokens / len(learned):.0f} tokens to learn, {len(apart)} held out", flush=True)
        write_rows(self.home / "held-out.jsonl", (row for _, row in apart))
        return write_rows(self.home / "train.jsonl", (row for _, row in learned)), [kept[one.id] for one, _ in apart]

    def clock(self, warm: int, steps: int) -> Clock:
        """Where all train for as many steps, the second half of them is measured."""
        steps = max(1, self.flags.held_out_steps // 2) if self.flags.held_out_steps else steps
        return Clock(min(warm, steps), block_of(steps), self.flags.device)

    # ---------------------------------------------------------------- ours

    def ours(self, name: str, *, lr: float = LR, **options: Any) -> str:
        flags, clock = self.flags, self.clock(6, self.flags.steps)
        steps = flags.held_out_steps or clock.warm + flags.steps
        epochs = steps * flags.batch * flags.length // self.tokens + 2
        config = Sft(model=str(self.fp32), data=(str(self.train),), held_out_data=str(self.home / "held-out.jsonl"), gsm8k="think",
                     out=str(self.home / name), max_length=flags.length, batch_tokens=flags.batch * flags.length, learning_rate=lr,
                     warmup_steps=WARM_UP,
                     max_steps=steps, num_train_epochs=epochs, save_steps=0, insist=True, eval_examples=8, device=flags.device, **options)
        began = time.perf_counter()
        trainer = train_only(sft, config, aloud(flags.verbose), partial(Timed, clock))
        fence(flags.device)
        learned = "" if not flags.held_out_steps else self.scored(trainer.model, steps)
        return self.line(clock, trainer.real, clock.marks[0] - began, learned)

    # ---------------------------------------------------------------- TRL's

    def theirs(self, name: str, dtype: str = "bfloat16", *, rows: int | None = None, **options: Any) -> str:
        import datasets
        import transformers
        import trl

        quiet()
        flags, clock, real = self.flags, self.clock(3, self.flags.peer_steps), list[int]()
        steps, began = flags.held_out_steps or clock.warm + flags.peer_steps, time.perf_counter()
        args = trl.SFTConfig(str(self.home / name), per_device_train_batch_size=rows or flags.batch, max_length=flags.length,
                             max_steps=steps, learning_rate=LR, warmup_steps=WARM_UP, lr_scheduler_type="cosine_with_min_lr",
                             lr_scheduler_kwargs={"min_lr_rate": 0.1}, adam_beta1=0.9, adam_beta2=0.95, logging_steps=10**6,
                             save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not self.on_gpu, bf16=self.on_gpu, **options)
        folder = weights(flags.model, dtype, self.home, flags.length)
        trainer = trl.SFTTrainer(str(folder), args=args, train_dataset=datasets.Dataset.from_list(self.conversations),
                                 processing_class=transformers.AutoTokenizer.from_pretrained(folder), callbacks=[telling(clock)])
        trainer.data_collator = counting(trainer.data_collator, real)
        trainer.train()
        learned = "" if not flags.held_out_steps else self.scored(self.read_back(trainer.model), steps)
        return self.line(clock, real, clock.marks[0] - began, learned)

    def read_back(self, model: Any) -> Any:
        """What TRL trained, in our forward path, so that one function scores both."""
        tensors, config = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}, self.artifact.config
        ours = from_foreign(config, hf_layout(config), tensors, "what TRL trained")
        return place_for_training(assemble_model(config, ours, torch.float32), self.flags.device, compile=False)

    # ---------------------------------------------------------------- what is said of both

    def scored(self, model: Any, steps: int) -> str:
        found = score_examples(model, held_out_batches(self.apart, self.flags.length, self.flags.batch), rows=self.flags.batch)
        return f"  held-out {found.estimate} nats per token after {steps} steps"

    def line(self, clock: Clock, real: list[int], first: float, learned: str) -> str:
        a_step = real[clock.warm : clock.warm + clock.block * len(clock.blocks)]
        return (f"{middle([rate / 1e3 for rate in clock.rates(real)])} k tokens/s  {1e3 * sum(clock.blocks) / len(a_step):8.1f} ms a step "
                f"of {sum(a_step) / len(a_step):,.0f} tokens  ready after {first:.1f} s  {peak_memory(self.flags.device)}{learned}")


def block_of(steps: int) -> int:
    """Steps between two looks at the clock: at least three blocks, where there are as many steps."""
    return max(1, min(8, steps // 3))


def counting(collate: Callable[[Sequence[Any]], dict[str, Any]], real: list[int]) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Batches are made in the order in which they are trained on; without a mask there is no padding."""
    def collated(examples: Sequence[Any]) -> dict[str, Any]:
        batch = collate(examples)
        real.append(int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel())
        return batch

    return collated


def telling(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Stepped(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.stepped(state.global_step)

    return Stepped()


def rows_of(bench: Bench) -> dict[str, Callable[[], str]]:
    flags = bench.flags
    tuned: dict[str, Any] = {"packing": True, "gradient_checkpointing": False, "rows": 2 * flags.batch}
    whole, packing = partial(bench.ours, "whole"), partial(bench.theirs, "trl-packing", packing=True)
    work: dict[str, Callable[[], str]] = {
        "assay, whole model": whole, "assay, LoRA r16": partial(bench.ours, "lora", lora_r=16, lr=10 * LR),
        "TRL, as it comes": partial(bench.theirs, "trl"), "TRL, packing=True": packing,
        "TRL, tuned": partial(bench.theirs, "trl-tuned", **tuned)}
    if bench.on_gpu and importlib.util.find_spec("liger_kernel"):
        work["TRL, tuned, Liger"] = partial(bench.theirs, "trl-liger", **tuned, use_liger_kernel=True)
    if flags.held_out_steps:  # as many tokens a step, and fp32 weights where bfloat16 ones would round small updates away
        work = {"assay, whole model": whole, "TRL, packing=True": packing,
                "TRL, packing=True, fp32 weights": partial(bench.theirs, "trl-fp32", "float32", packing=True)}
    if flags.no_peers:
        work = {name: measure for name, measure in work.items() if name.startswith("assay")}
    return {name: measure for name, measure in work.items() if flags.only is None or flags.only in name}


def ask_what_is_learned(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="GSM8K's rows, .jsonl")
    parser.add_argument("--model", default="smollm2-135m", help=f"as assay sft takes it, or {TINY}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=32, help="rows a step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4000, help="conversations that are learned")
    parser.add_argument("--verbose", action="store_true", help="what the recipe says, too")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask_what_is_learned(parser)
    parser.add_argument("--held-out", type=int, default=256, help="conversations that are not")
    parser.add_argument("--steps", type=int, default=40, help="measured, of ours")
    parser.add_argument("--peer-steps", type=int, default=9, help="measured, of TRL's")
    parser.add_argument("--held-out-steps", type=int, default=0, help="train everybody for so many steps and score what was learned")
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--no-peers", action="store_true")
    flags = parser.parse_args()
    without_proofs()
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(flags, Path(home))
        lines = measured(rows_of(bench), flags.device)
    print(f"\n{surroundings(flags.device)}\n{flags.model}, {flags.batch} × {flags.length} tokens a step, GSM8K in think format")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
