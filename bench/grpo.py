"""A step of reinforcement: the recipe of `assay grpo` beside TRL's GRPOTrainer, same weights, same prompts, same reward, same run.

    python bench/grpo.py --data gsm8k.jsonl                      # SmolLM2-135M, 16 prompts × 8 completions of at most 256 tokens
    python bench/grpo.py --data gsm8k.jsonl --ignore-stop        # every completion is as long as it may be: equal work
    python bench/grpo.py --data gsm8k.jsonl --model tiny --device cpu --prompts 2 --group 4 --max-new 16 --max-prompt 400 --micro 4

A step samples, scores, asks the reference, learns, and hands the new weights to the sampler. Ours is the recipe's, with all that
it checks on the way; its first checkpoint is waited for before the clock starts, and its proofs, which run beside the loop, are
left out. TRL as it comes has gradient checkpointing on and samples by transformers' generate; tuned, it has none. Temperature,
group, KL (k3, 0.01), loss (token-level, clip 0.2) and learning rate are the same. Weights are bfloat16 for TRL, which takes the
dtype of a folder, as it does of the hub's; ours are fp32 with bf16 compute. Parts of a step are fenced, each by itself: TRL's in the
steps that are measured, ours in others that follow, since ours does on the host what the GPU need not wait for.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
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

from assay.learn.loop import Step
from assay.recipes import grpo
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompts import read_prompts
from assay.recipes.reference import Reference
from assay.recipes.rollouts import RolloutCollector, Sampler
from assay.recipes.starting_model import StartingModel, load_start
from assay.reward.reward_functions import built_in_reward, parse_rewards
from assay.reward.worker_pool import RewardWorkers
from assay.store.artifact import open_artifact

HELD_OUT = 4  # prompts: the recipe wants some
KL_WEIGHT = 0.01


class Parts:
    """Seconds of each part of a step, since the last `begin`."""

    def __init__(self, device: str):
        self.device, self.on, self.seconds = device, False, {}

    seconds: dict[str, float]

    def begin(self) -> None:
        self.on = True
        self.seconds.clear()

    def timed(self, name: str, function: Callable[..., Any], when: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            if not (self.on and when()):
                return function(*given, **named)
            fence(self.device)
            began = time.perf_counter()
            made = function(*given, **named)
            fence(self.device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return made

        return wrapped

    def line(self, steps: int, a_step: float) -> str:
        """Of a mean step, what is not in a part named `rest`."""
        shares = {name: seconds / steps for name, seconds in self.seconds.items()}
        shares["rest"] = a_step - sum(shares.values())
        return ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in shares.items()) + " ms"


class Timed(Clocked):
    """The recipe's trainer, with a clock after its steps and, once `whole` of them are measured, around the parts of those that follow."""

    def __init__(self, clock: Clock, whole: int, *given: Any, **named: Any):
        super().__init__(clock, *given, **named)
        self.whole, self.timing, self.lengths = whole, Parts(clock.device), []
        self.accumulate = self.timing.timed("learning", self.accumulate)

    lengths: list[float]

    def record(self, step: Step, **columns: Any) -> None:
        super().record(step, **columns)
        self.lengths.append(columns["completions/mean_length"])
        print(f"    step {self.done}", flush=True)

    def over(self) -> bool:
        if self.done == self.clock.warm + self.whole:
            self.timing.begin()
        return super().over()


PARTS = {"weights to the sampler": (Sampler, "load"), "sampling": (Sampler, "draw"), "scoring": (RewardWorkers, "score"),
         "checks of the rollout": (RolloutCollector, "check"), "reference": (Reference, "logprobs")}


@contextlib.contextmanager
def parts_timed(methods: Mapping[str, tuple[type, str]], parts: Callable[[], Parts | None]) -> Iterator[None]:
    """Each method by the `Parts` that there are when it is called."""
    kept = {name: getattr(owner, method) for name, (owner, method) in methods.items()}

    def timed(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            clock = parts()
            return kept[name](*given, **named) if clock is None else clock.timed(name, kept[name])(*given, **named)
        return call

    for name, (owner, method) in methods.items():
        setattr(owner, method, timed(name))
    try:
        yield
    finally:
        for name, (owner, method) in methods.items():
            setattr(owner, method, kept[name])


def without_stops(config: Grpo, *given: Any) -> StartingModel:
    """In the place of `load_start`: every completion is as long as it may be."""
    start = load_start(config, *given)
    return replace(start, parent=replace(start.parent, stops=replace(start.parent.stops, stop_ids=())))


class Bench:
    def __init__(self, flags: argparse.Namespace, home: Path):
        self.flags, self.home, self.on_gpu = flags, home, flags.device.startswith("cuda")
        self.room = flags.max_prompt + flags.max_new
        self.fp32 = weights(flags.model, "float32", home, self.room)
        self.rows = self.chosen()

    def chosen(self) -> list[dict[str, Any]]:
        """Rows whose prompts are short enough, as many as are needed; and a few that are held out."""
        tokenizer = open_artifact(self.fp32).tokenizer
        assert tokenizer is not None
        short = [prompt for prompt in read_prompts(self.flags.data, tokenizer) if len(prompt.ids) <= self.flags.max_prompt]
        ours = self.flags.warm + self.flags.steps + self.flags.parts
        steps = 1 + max(ours, 1 + self.flags.peer_steps)  # where prompts end, a run makes a checkpoint
        apart, learned = short[:HELD_OUT], short[HELD_OUT:][: steps * self.flags.prompts]
        if len(learned) < steps * self.flags.prompts:
            raise SystemExit(f"{len(short)} prompts of at most {self.flags.max_prompt} tokens are too few; raise --max-prompt")
        write_rows(self.home / "held-out.jsonl", (dict(prompt.row) for prompt in apart))
        rows = [dict(prompt.row) for prompt in learned]
        write_rows(self.home / "train.jsonl", rows)
        print(f"{len(rows)} prompts of {statistics.mean(len(prompt.ids) for prompt in learned):.0f} tokens", flush=True)
        return rows

    # ---------------------------------------------------------------- ours

    def ours(self, name: str, **options: Any) -> str:
        flags, clock = self.flags, Clock(self.flags.warm, 1, self.flags.device)
        config = Grpo(model=str(self.fp32), data=(str(self.home / "train.jsonl"),), held_out_data=str(self.home / "held-out.jsonl"),
                      out=str(self.home / name), reward=tuple(flags.reward), prompts=flags.prompts, num_generations=flags.group,
                      max_completion_length=flags.max_new, temperature=flags.temperature, kl_estimator="k3", beta=KL_WEIGHT,
                      max_steps=flags.warm + flags.steps + flags.parts, learning_rate=Grpo.RATES.whole, warmup_steps=0,
                      save_steps=0, insist=True, eval_prompts=2, micro_batch_size=flags.micro, device=flags.device,
                      **options)
        began = time.perf_counter()
        made: list[Timed] = []

        def timed(*given: Any, **named: Any) -> Timed:
            made.append(Timed(clock, flags.steps, *given, **named))
            return made[0]

        grpo.load_start = without_stops if flags.ignore_stop else load_start  # type: ignore[assignment]
        with parts_timed(PARTS, lambda: made[0].timing if made else None):
            trainer = train_only(grpo, config, aloud(flags.verbose), timed)
        seconds, lengths = clock.per_step(), trainer.lengths[flags.warm :]
        return self.line(seconds[: flags.steps], seconds[flags.steps :], trainer.timing, lengths[: flags.steps], clock.marks[0] - began)

    # ---------------------------------------------------------------- TRL's

    def theirs(self, name: str, **options: Any) -> str:
        import trl

        quiet()
        flags, clock, lengths, parts = self.flags, Clock(1, 1, self.flags.device), [], Parts(self.flags.device)
        began, micro = time.perf_counter(), min(flags.peer_micro, flags.prompts * flags.group)
        forced = {"generation_kwargs": {"min_new_tokens": flags.max_new}} if flags.ignore_stop else {}
        args = trl.GRPOConfig(str(self.home / name), per_device_train_batch_size=micro, num_generations=flags.group,
                              gradient_accumulation_steps=flags.prompts * flags.group // micro, max_completion_length=flags.max_new,
                              temperature=flags.temperature, beta=KL_WEIGHT, max_steps=1 + flags.peer_steps, learning_rate=Grpo.RATES.whole,
                              lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, logging_steps=10**6,
                              save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not self.on_gpu, bf16=self.on_gpu,
                              **forced, **options)
        trainer = self.trainer(args, clock, parts)
        sample = parts.timed("sampling", trainer._generate_single_turn)

        def sampled(*given: Any, **named: Any) -> Any:
            made = sample(*given, **named)
            lengths.append(statistics.mean(len(ids) for ids in made[0]))
            return made

        trainer._generate_single_turn = sampled
        trainer._calculate_rewards = parts.timed("scoring", trainer._calculate_rewards)
        trainer._get_per_token_logps_and_entropies = parts.timed(
            "reference", trainer._get_per_token_logps_and_entropies, when=lambda: not torch.is_grad_enabled())
        trainer.training_step = learning(parts, trainer.training_step)
        trainer.train()
        return self.line(clock.per_step(), clock.per_step(), parts, lengths[1:], clock.marks[0] - began)

    def trainer(self, args: Any, clock: Clock, parts: Parts) -> Any:
        import datasets
        import transformers
        import trl

        class Stepped(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                print(f"    step {state.global_step}", flush=True)
                if state.global_step == clock.warm:
                    parts.begin()
                clock.stepped(state.global_step)

        folder = weights(self.flags.model, "bfloat16", self.home, self.room)
        prompts = [{"prompt": [{"role": "user", "content": row["question"]}], **row} for row in self.rows]
        return trl.GRPOTrainer(str(folder), rewarded(self.flags.reward), args=args, train_dataset=datasets.Dataset.from_list(prompts),
                               processing_class=transformers.AutoTokenizer.from_pretrained(folder), callbacks=[Stepped()])

    # ---------------------------------------------------------------- what is said of both

    def line(self, seconds: list[float], fenced: list[float], parts: Parts, lengths: list[float], first: float) -> str:
        """`fenced` are the steps whose parts were measured."""
        completions, mean, length = self.flags.prompts * self.flags.group, statistics.mean(seconds), statistics.mean(lengths)
        return (f"{middle(seconds, 3)} s a step  {completions} completions of {length:.0f} tokens, {completions * length / mean:,.0f} "
                f"tokens/s  ready after {first:.1f} s  {peak_memory(self.flags.device)}\n"
                f"{'':34} mean step of {len(fenced)}, fenced: {parts.line(len(fenced), statistics.mean(fenced))}")


def learning(parts: Parts, step: Callable[..., Any]) -> Callable[..., Any]:
    """TRL samples inside its training step: what is left of that is learning."""
    def wrapped(*given: Any, **named: Any) -> Any:
        inside = sum(seconds for name, seconds in parts.seconds.items() if name != "learning")
        fence(parts.device)
        began = time.perf_counter()
        made = step(*given, **named)
        fence(parts.device)
        inside = sum(seconds for name, seconds in parts.seconds.items() if name != "learning") - inside
        parts.seconds["learning"] = parts.seconds.get("learning", 0.0) + time.perf_counter() - began - inside
        return made

    return wrapped


def rewarded(specs: list[str]) -> Callable[..., list[float]]:
    """Our rewards as TRL calls them: in its own process, one completion after the other."""
    rewards = [(reward.weight, built_in_reward(reward)) for reward in parse_rewards(specs)]

    def reward(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
        rows = [{"question": question, "answer": answer, "completion_tokens": len(ids)}
                for question, answer, ids in zip(columns["question"], columns["answer"], completion_ids, strict=True)]
        return [sum(weight * function(prompt[-1]["content"], said[0]["content"], row) for weight, function in rewards)
                for prompt, said, row in zip(prompts, completions, rows, strict=True)]

    return reward


def rows_of(bench: Bench) -> dict[str, Callable[[], str]]:
    work: dict[str, Callable[[], str]] = {
        "assay, whole model": partial(bench.ours, "whole"), "TRL, as it comes": partial(bench.theirs, "trl"),
        "TRL, no gradient checkpointing": partial(bench.theirs, "trl-tuned", gradient_checkpointing=False)}
    if bench.flags.lora:
        work["assay, LoRA r16"] = partial(bench.ours, "lora", lora_r=16)
    if bench.flags.no_peers:
        work = {name: measure for name, measure in work.items() if name.startswith("assay")}
    return {name: measure for name, measure in work.items() if bench.flags.only is None or bench.flags.only in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="GSM8K's rows, .jsonl")
    parser.add_argument("--model", default="smollm2-135m", help=f"as assay grpo takes it, or {TINY}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--reward", nargs="+", default=["answer:1"], help="built-in ones")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--max-prompt", type=int, default=128, help="tokens; longer prompts are left out, for all")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--ignore-stop", action="store_true", help="nobody stops before --max-new")
    parser.add_argument("--micro", type=int, default=64, help="completions that go through our model at a time")
    parser.add_argument("--peer-micro", type=int, default=32, help="through TRL's; the rest is accumulated")
    parser.add_argument("--warm", type=int, default=3, help="steps before the clock starts, of ours; TRL has one")
    parser.add_argument("--steps", type=int, default=6, help="measured, of ours")
    parser.add_argument("--parts", type=int, default=3, help="more steps of ours, fenced, to measure their parts")
    parser.add_argument("--peer-steps", type=int, default=2, help="measured, of TRL's")
    parser.add_argument("--lora", action="store_true", help="ours as an adapter, too")
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="what the recipe says, too")
    flags = parser.parse_args()
    without_proofs()
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(flags, Path(home))
        lines = measured(rows_of(bench), flags.device)
    stop = ", nobody stops early" if flags.ignore_stop else ""
    print(f"\n{surroundings(flags.device)}\n{flags.model}, {flags.prompts} prompts × {flags.group} completions of at most {flags.max_new} "
          f"tokens, T {flags.temperature:g}, KL on, {' '.join(flags.reward)}{stop}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
