"""Several processes: recipe × processes, replicated and sharded: digest, seconds a step, memory; and a run that changes hands.

    python -m bench.processes > results/processes.txt         a few minutes on two cores; gloo, tiny models
    python -m bench.processes dpo kto                         the table of these alone
    python -m bench.processes memory                          what a process of sft holds of a model in parts, at its opening and later
    python -m bench.processes story sft grpo                  the run that changes hands, of these alone
    python -m bench.processes memory-lora memory-dpo          the same of an adapter on a frozen base, and of dpo with its reference

Processes are forked here and share this machine's cores: seconds a step show what the protocol costs, not a speed-up. On GPUs
`torchrun --nproc-per-node 8 -m assay sft … --shards 8`, or `--fsdp`, writes the same digests and steps beside their seconds into its
run folder.
"""

import ctypes
import itertools
import json
import os
import platform
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from assay.learn.sharded import ShardedModel
from assay.outcome import RunOutcome
from assay.recipes import distill, dpo, grpo, hand_over, kto, run, sft, starting_model
from assay.recipes.dpo_options import Dpo
from assay.recipes.kto_options import Kto
from assay.recipes.options import Distill, Sft
from assay.recipes.trainer import Trainer
from assay.store.checkpoint import open_checkpoint, step_folders
from assay.store.digests import recorded_digest
from assay.store.ledger import Event, read_chain
from assay.strict_json import read_json_lines
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import NoProver
from assay.testing.two_processes import fork_processes
from assay.verdict import proven
from tests.recipes import sums
from tests.recipes.sittings import options as pretrain_options
from tests.recipes.sittings import sit

SHARDS = 4
STORIES = ("pretrain, Muon", "sft", "sft, LoRA", "distill", "grpo")
HELD = {"memory": "sft --fsdp", "memory-lora": "sft --lora-r 4 --fsdp", "memory-dpo": "dpo --fsdp"}
Recipe = Callable[[Path, dict[str, Any]], RunOutcome]


def main() -> None:
    torch.set_num_threads(1)
    unprove()
    print(f"torch {torch.__version__}, gloo, {platform.machine()}, {len(os.sched_getaffinity(0))} cores\n")
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        sums.taught(home, steps=40)
        save_model(home / "student", tiny_model("llama", seed=1))
        asked = [(f"{a}+{b}=", a + b) for a in range(12) for b in range(8)]
        sums.write(home / "pairs.jsonl", [{"prompt": prompt, "chosen": f"yes {due}", "rejected": f"no {due + 1}"} for prompt, due in asked])
        sums.write(home / "answers.jsonl", [{"prompt": prompt, "completion": f"{'no' if due % 2 else 'yes'} {due}", "label": due % 2 == 0}
                                            for prompt, due in asked])
        if sys.argv[1:2] == ["story"]:
            story(home, sys.argv[2:] or STORIES)
            return
        table(home, [name for name in sys.argv[1:] or recipes(home) if name not in HELD])
        for name in [name for name in sys.argv[1:] or HELD if name in HELD]:
            parts_held(home, name)
        if not sys.argv[1:]:
            cost_of_shards(home)
            story(home, STORIES)


def unprove() -> None:
    """A proof looks at bytes, not at processes."""
    run.Prover = NoProver  # type: ignore[misc,assignment]
    hand_over.prove = lambda *_, **__: [proven("whole", "not looked at")]
    starting_model.prove_checkpoint = lambda *_, **__: [proven("whole", "not looked at")]


def recipes(home: Path) -> dict[str, Recipe]:
    fit: dict[str, Any] = {"data": (str(home / "learned.jsonl"),), "max_length": 32, "batch_tokens": 256, "micro_batch_tokens": 64,
                           "num_train_epochs": 4, "max_steps": 12, "save_steps": 6, "held_out": 0.1, "learning_rate": 3e-3, "device": "cpu"}
    base, taught, parent = home / "base", home / "sft" / "model", step_folders(home / "sft" / "checkpoints")[-1]
    pairs = fit | {"batch_tokens": 640}  # of two answers each: five rows
    return {
        "pretrain, Muon": lambda out, how: sit(pretrain_options(out, tokens=12 * 256, **how)),
        "sft": lambda out, how: sft.sft(Sft(model=str(base), out=str(out), **fit, **how), lambda _: None),
        "sft, LoRA": lambda out, how: sft.sft(Sft(model=str(base), lora_r=4, out=str(out), **fit, **how), lambda _: None),
        "distill": lambda out, how: distill.distill(
            Distill(model=str(home / "student"), teacher=str(taught), out=str(out), **fit, **how), lambda _: None),
        "dpo": lambda out, how: dpo.dpo(Dpo(model=str(base), out=str(out), **(pairs | {"data": (str(home / "pairs.jsonl"),)}), **how),
                                        lambda _: None),
        "kto": lambda out, how: kto.kto(Kto(model=str(base), out=str(out), **(pairs | {"data": (str(home / "answers.jsonl"),)}), **how),
                                        lambda _: None),
        "grpo": lambda out, how: grpo.grpo(sums.options(parent, out, max_steps=4, overlong_buffer=7, **how), lambda _: None),
    }


def table(home: Path, names: Sequence[str]) -> None:
    print(f"{'recipe':16} {'processes':10} {'how':12} {'digest':14} {'ms a step':>10} {'MiB above the start, process 0 and last':>40}")
    for name, recipe in ((name, recipes(home)[name]) for name in names):
        rows: list[tuple[int, dict[str, Any], str]] = [(count, {"shards": SHARDS}, "replicated") for count in (1, 2, 4)]
        rows += [(count, {"fsdp": True}, "sharded") for count in (1, 2, 4)]
        for count, options, how in rows:
            with tempfile.TemporaryDirectory() as made:
                out = Path(made) / "run"
                codes = fork_processes(lambda: measured(recipe, out, options), count)  # noqa: B023 - called at once
                assert codes == [0] * count, codes
                print(f"{name:16} {count:<10} {how:12} {digest(out)[:12]:14} {1000 * seconds_a_step(out):10.1f} {memory(out, count):>40}",
                      flush=True)


def parts_held(home: Path, name: str) -> None:
    """The most memory of its own that a process of a run has, before step 1 and in all, beyond that of a tiny model's; in models."""
    depth = 24 if name == "memory" else 8
    wide = tiny_model("llama", hidden=8192, depth=depth, windows=(None,) * depth)
    save_model(home / "wide", wide)
    size, largest = (4 * found(p.numel() for p in wide.parameters()) for found in (sum, max))
    print(f"\n{HELD[name]}, a model of {size / 2**20:.0f} MiB in fp32, its largest tensor {largest / size:.3f} of it; memory of a process "
          "in models\nprocesses  process 0 opens   before step 1: process 0, last    in all: process 0, last")
    for count, how in itertools.product((2, 4) if name == "memory" else (2,), ("whole, as before", "in parts")):
        before, in_all = (["  ".join(f"{(deep - tiny) / size:.2f}" for deep, tiny in zip(*pair, strict=True)) for pair in zip(
            *(peaks(home, name, model, count, how == "in parts") for model in ("wide", "base")), strict=True)])
        print(f"{count:<10} {how:18} {before:>28} {in_all:>26}", flush=True)


def peaks(home: Path, name: str, model: str, count: int, in_parts: bool) -> tuple[list[int], list[int]]:
    """Of process 0 and the last: before step 1, and in all."""
    with tempfile.TemporaryDirectory() as made:
        codes = fork_processes(lambda: watched(home, Path(made), name, model, in_parts), count)
        assert codes == [0] * count, codes
        said = [json.loads((Path(made) / f"{rank}.json").read_text()) for rank in (0, count - 1)]
    return [each["before"] for each in said], [each["all"] for each in said]


def watched(home: Path, where: Path, name: str, model: str, in_parts: bool) -> None:
    over, most, before = threading.Event(), [0], [0]
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back
    if not in_parts:
        starting_model.opens_in_parts = lambda config: False
    usual = (Trainer.start_loop, ShardedModel.said_by_all)

    def note(act: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            before[0] = before[0] or most[0]
            return act(*given, **named)

        return noted

    Trainer.start_loop, ShardedModel.said_by_all = note(usual[0]), note(usual[1])  # type: ignore[method-assign]

    def look() -> None:
        while not over.wait(0.005):
            lines = Path("/proc/self/status").read_text().splitlines()
            most[0] = max(most[0], 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))

    watcher = threading.Thread(target=look)
    watcher.start()
    given: dict[str, Any] = {"model": str(home / model), "out": str(where / "run"), "max_length": 32, "batch_tokens": 128,
                             "micro_batch_tokens": 32, "num_train_epochs": 1, "max_steps": 2, "save_steps": 2, "held_out": 0.1,
                             "eval_examples": 4, "device": "cpu", "witness": "off", "fsdp": True, "merge": "never"}
    try:
        if name == "memory-dpo":
            dpo.dpo(Dpo(**given, data=(str(home / "pairs.jsonl"),)), lambda _: None)
        else:
            sft.sft(Sft(**given, data=(str(home / "learned.jsonl"),), lora_r=4 if name == "memory-lora" else 0), lambda _: None)
    finally:
        over.set()
        watcher.join()
    (where / f"{os.environ['RANK']}.json").write_text(json.dumps({"before": before[0], "all": most[0]}))


def cost_of_shards(home: Path) -> None:
    """What a step costs one process that need not have been cut."""
    print("\none process, sft: ms a step by --shards")
    for shards in (1, 2, 4, 8):
        with tempfile.TemporaryDirectory() as made:
            recipes(home)["sft"](Path(made) / "run", {"shards": shards})
            print(f"  --shards {shards}: {1000 * seconds_a_step(Path(made) / 'run'):.1f}", flush=True)


def measured(recipe: Recipe, out: Path, options: dict[str, Any]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe(out, options)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    (out / f"memory-{os.environ['RANK']}.json").write_text(json.dumps(used))


def digest(out: Path) -> str:
    return recorded_digest(open_checkpoint(step_folders(out / "checkpoints")[-1]).manifest)


def seconds_a_step(out: Path) -> float:
    """Of the loop, its evaluations and saves included."""
    loop = [event["loop"] for event in read_chain(out / "ledger.jsonl").events if event["kind"] == Event.SAVING][-1]
    return loop / len(read_json_lines(out / "metrics.jsonl"))


def memory(out: Path, count: int) -> str:
    return "  ".join(f"{json.loads((out / f'memory-{rank}.json').read_text()):.1f}" for rank in sorted({0, count - 1}))


def story(home: Path, names: Sequence[str]) -> None:
    """Begun by four processes, killed, continued by two, stopped, finished by one: the digest of the uninterrupted run."""
    print("\nbegun on 4, killed (SIGKILL of process 0), continued on 2, ended by SIGTERM, finished on 1; grpo after steps 2 and 3 of 4, "
          "the others after 7 and 10 of 12")
    for name in names:
        for options, how in (({"shards": SHARDS}, "replicated"), ({"fsdp": True}, "sharded")):
            change_hands(recipes(home)[name], name, options, how, (2, 3) if name == "grpo" else (7, 10))


def change_hands(recipe: Recipe, name: str, options: dict[str, Any], how: str, steps: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as made:
        uninterrupted, out = Path(made) / "uninterrupted", Path(made) / "run"
        recipe(uninterrupted, options)
        for count, step, number in ((4, steps[0], signal.SIGKILL), (2, steps[1], signal.SIGTERM)):
            codes = fork_processes(lambda: struck(recipe, out, options, step, number), count)  # noqa: B023
            print(f"  {name}, {how}: {count} processes ended with {codes}; on the disk: "
                  f"{', '.join(folder.name for folder in step_folders(out / 'checkpoints'))}")
        recipe(out, options)
        ends = [open_checkpoint(step_folders(place / "checkpoints")[-1]) for place in (out, uninterrupted)]
        assert ends[0].step == ends[1].step
        worst = max(float((ends[0].weights()[name] - due).abs().max()) for name, due in ends[1].weights().items())
        print(f"  {name}, {how}: digest {digest(out)[:12]}, uninterrupted {digest(uninterrupted)[:12]}, weights differ by at most "
              f"{worst:.1e}", flush=True)


def struck(recipe: Recipe, out: Path, options: dict[str, Any], step: int, number: signal.Signals) -> None:
    over = Trainer.over

    def strike(trainer: Trainer) -> bool:
        if trainer.done == step:
            if number is signal.SIGTERM:
                trainer.run.interrupted = int(number)
            else:
                trainer.run.settle()
                time.sleep(0.1)
                os.kill(os.getpid(), number)
        return over(trainer)

    Trainer.over = strike  # type: ignore[method-assign, assignment]
    recipe(out, options)


if __name__ == "__main__":
    main()
