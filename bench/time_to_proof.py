"""Time to a proven result: the whole command `assay sft` or `assay grpo`, from its start to its exit code, and where the time went.

    python bench/time_to_proof.py                                        # random weights of SmolLM2-135M's shape, made-up sums, one GPU
    python bench/time_to_proof.py --runs 1 --limit 120 --profile         # cold alone, and the 40 costliest calls of the command
    python bench/time_to_proof.py --shape 1.7b --max-steps 15            # the whole model; --lora-r 16: an adapter
    python bench/time_to_proof.py --shape 8b --lora-r 16 --max-steps 6 --micro-batch-tokens 4096
    python bench/time_to_proof.py --model smollm2-135m --data gsm8k.jsonl
    python bench/time_to_proof.py --verb grpo --model smollm2-135m --data gsm8k.jsonl --reward answer:1 format:0.1 --minutes 2.5
    python bench/time_to_proof.py --verb grpo --minutes 2.5              # random weights, rewarded for what is as good as drawn
    python bench/time_to_proof.py --shape tiny --rows 200 --device cpu
    python bench/time_to_proof.py --verb grpo --shape tiny --rows 4000 --device cpu --minutes 0.3 --max-completion-length 16

The first run has no compilation cache, the second has the first one's. Both have Python's bytecode of the libraries, as after any
installation by pip: where the machine's libraries have none it is written before the clock, and what that took is told. The table at the
end has a row a run: the whole command from outside, with Python's start and imports; the first step; the parts that the run itself tells;
how long the loop stood still for a checkpoint; what the witness said; and `assay prove` on what was handed over, alone, in a process that
begins with nothing (of an adapter: its base is opened and hashed for it). `--limit` ends a command that takes longer, and the row says so;
`--look` adds a run that shows what every process was doing meanwhile. Goals on an H200: 135M, three epochs of GSM8K, 45 s cold and 30 s
warm, its proof 4 s, 0.2 s a save; 8B LoRA, first step 45 s, its adapter's proof 10 s; 1.7B, 1 s a save.
"""

import argparse
import contextlib
import json
import os
import pstats
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from size import REWARD
from stacks import looked_at, timeline

from assay.model.families import hf_layout, to_foreign
from assay.model.special_tokens import resolve_special_tokens
from assay.model.transformer import ModelConfig, Transformer
from assay.recipes.run import PARTS
from assay.store.digests import environment
from assay.store.ledger import Event, Ledger
from assay.store.safetensors_files import write_sharded
from assay.store.saving import model_files
from assay.testing.tiny_models import tiny_config, tiny_tokenizer

SHAPES = {  # vocabulary, width, depth, heads, key/value heads, head size, hidden, tied
    "tiny": (320, 64, 2, 4, 2, 16, 96, True), "135m": (49152, 576, 30, 9, 3, 64, 1536, True),
    "1.7b": (49152, 2048, 24, 32, 32, 64, 8192, True), "8b": (151936, 4096, 36, 32, 8, 128, 12288, False)}
IMPORTED = """from assay.store.bytecode_cache import keep_bytecode
kept = keep_bytecode()
import torch, torch._dynamo, torch._inductor.compile_fx, assay.recipes.sft, assay.guard.proof
import transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama, peft
import sys; print("the libraries' own folders" if kept is None and sys.pycache_prefix is None else "Assay's cache")"""
COLUMNS = {"sft": ("question", "answer"), "grpo": ("prompt", "gold_completion")}  # of the made-up sums
NAMES, THINGS = ("Ann", "Ben", "Cleo", "Dan", "Eve"), ("apples", "books", "cards", "coins", "pens")


def shape_config(name: str) -> ModelConfig:
    vocab, width, depth, heads, kv_heads, head_dim, hidden, tied = SHAPES[name]
    return replace(tiny_config("qwen3" if name == "8b" else "llama"), vocab=vocab, width=width, depth=depth, heads=heads, kv_heads=kv_heads,
                   head_dim=head_dim, hidden=hidden, max_length=2048, windows=(None,) * depth, tied=tied)


def random_model(where: Path, name: str, device: str) -> Path:
    """A Hugging Face folder of random bf16 weights, made where that is quick."""
    config, tokenizer, drawn = shape_config(name), tiny_tokenizer(), torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        shapes = {key: parameter.shape for key, parameter in Transformer(config).named_parameters()}
    tensors = {key: (torch.randn(shape, device=device, generator=drawn) * 0.02 if len(shape) > 1 else torch.ones(shape)).bfloat16().cpu()
               for key, shape in shapes.items()}
    where.mkdir()
    write_sharded(where, to_foreign(hf_layout(config), tensors))
    for file, data in model_files(config, tokenizer, resolve_special_tokens(tokenizer, {}, {}), torch.bfloat16).items():
        (where / file).write_bytes(data)
    return where


def sums(where: Path, rows: int, columns: tuple[str, str]) -> Path:
    """Problems and worked answers, about as long as GSM8K's."""
    made = random.Random(0)

    def row() -> dict[str, str]:
        name, thing, have, more = made.choice(NAMES), made.choice(THINGS), made.randint(2, 99), made.randint(2, 99)
        asked = f"{name} has {have} {thing} and gets {more} more. How many {thing} does {name} have now?"
        answer = f"{name} begins with {have}. {have}+{more}=<<{have}+{more}={have + more}>>{have + more}.\n#### {have + more}"
        return dict(zip(columns, (asked, answer), strict=True))

    where.write_text("".join(json.dumps(row()) + "\n" for _ in range(rows)))
    return where


def usual_options(flags: argparse.Namespace, more: list[str], home: Path) -> list[str]:
    """Options of the verb that the bench gives where the command line does not."""
    if flags.verb == "sft":
        return ["--num-train-epochs", str(flags.epochs)]
    (home / "drawn.py").write_text(REWARD)
    return [] if "--reward" in more else ["--reward", f"{home / 'drawn.py'}:reward:1"]


def command_time(arguments: list[str], environ: dict[str, str], log: Path, flags: argparse.Namespace, *,
                 look: bool = False) -> tuple[int, float, float | None]:
    """Exit code (-9 where it was ended after --limit seconds), seconds in all, and seconds to the first line that tells of a step."""
    began, first, quiet = time.perf_counter(), None, flags.quiet
    profile = ["-m", "cProfile", "-o", f"{log}.profile"] if flags.profile else []
    looking = looked_at(log.with_suffix("")) if look else contextlib.nullcontext(dict[str, str]())
    since = time.time()
    with looking as more, log.open("w") as kept, subprocess.Popen(
            [sys.executable, *profile, "-m", "assay", *arguments], env=os.environ | environ | more, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        ending = threading.Timer(flags.limit, process.kill)
        ending.start()
        for line in process.stdout:
            now = time.perf_counter() - began
            kept.write(f"{now:8.2f}  {line}")
            if not quiet:
                print(f"{now:8.2f}  {line}", end="", flush=True)
            if first is None and line.startswith("step ") and not line.startswith("step 0"):
                first = now
    seconds = time.perf_counter() - began
    ending.cancel()
    if look:
        print(timeline(log.with_suffix(""), since), flush=True)
    if flags.profile and Path(f"{log}.profile").exists():
        pstats.Stats(f"{log}.profile").strip_dirs().sort_stats("cumulative").print_stats(40)
    return process.returncode, seconds, first


def import_all(environ: dict[str, str]) -> str:
    """Imports of a proof, in a process of its own, twice: the first writes bytecode where the machine's libraries have none, as an
    installation by pip does; the commands that follow have it."""
    told = list[str]()
    for _ in range(2):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", IMPORTED], env=os.environ | environ, text=True, capture_output=True)
        told.append(f"{time.perf_counter() - began:.1f} s{'' if done.returncode == 0 else ' (' + done.stderr[-200:] + ')'}")
    return f"imports of torch, its compiler, transformers and PEFT before the clock: {told[0]}, again {told[1]}; bytecode is kept in " \
           f"{done.stdout.strip() or 'no cache'}"


def told_by(run: Path) -> dict[str, str]:
    """Columns of a row, from the run's own ledger."""
    events = list(Ledger(run / "ledger.jsonl").events()) if (run / "ledger.jsonl").exists() else []
    spent: dict[str, float] = next((event["seconds"] for event in events if event["kind"] == Event.TIME), {})
    saving = next((event for event in events if event["kind"] == Event.SAVING), None)
    handed: dict[str, Any] = next((event for event in events if event["kind"] == Event.HAND_OVER), {"verdicts": []})
    witness = next((verdict["outcome"] for verdict in handed["verdicts"] if verdict["check"] == "witness"), "-")
    stall = "-" if saving is None or not saving["checkpoints"] else f"{saving['seconds'] / saving['checkpoints']:.2f}"
    return {name: f"{spent[name]:.1f}" if name in spent else "-" for name in PARTS} | {"a save": stall, "witness": witness}


def table(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verb", choices=("sft", "grpo"), default="sft", help="options that are not listed here are the verb's own")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m", help="of random weights")
    parser.add_argument("--model", help="instead: a model")
    parser.add_argument("--data", help="instead of made-up sums: GSM8K's JSONL")
    parser.add_argument("--rows", type=int, default=7473, help="made-up sums")
    parser.add_argument("--epochs", type=int, default=3, help="of sft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=2, help="the first without a compilation cache")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a command is ended")
    parser.add_argument("--profile", action="store_true", help="show where a command's own process spends its time; it takes longer so")
    parser.add_argument("--look", action="store_true", help="one run more: look at every process's stacks 20 times a second, and print "
                                                             "a timeline")
    parser.add_argument("--quiet", action="store_true", help="do not show what the command prints")
    parser.add_argument("--home", help="where to work; a temporary folder otherwise")
    flags, more = parser.parse_known_args()
    home = Path(flags.home or tempfile.mkdtemp(prefix="time-to-proof-"))
    home.mkdir(parents=True, exist_ok=True)
    model = flags.model or str(random_model(home / "model", flags.shape, flags.device))
    data = flags.data or str(sums(home / "sums.jsonl", flags.rows, COLUMNS[flags.verb]))
    caches = {name: str(home / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    print(import_all(caches), flush=True)
    found = list[dict[str, str]]()
    for number in range(flags.runs + flags.look):
        out, look = home / f"run-{number}", number >= flags.runs
        asked = [flags.verb, "--model", model, "--data", data, "--out", str(out), "--device", flags.device,
                 *usual_options(flags, more, home), *more]
        code, seconds, first = command_time(asked, caches, home / f"run-{number}.log", flags, look=look)
        handed = next((out / name for name in ("model", "adapter") if (out / name).exists()), None)
        proof = None if handed is None else command_time(["prove", str(handed), "--device", flags.device], caches,
                                                         home / f"proof-{number}.log", flags, look=look)
        found.append({"cache": "looked at" if look else "warm" if number else "cold", "command s": f"{seconds:.1f}", "exit": str(code),
                      "first step s": "-" if first is None else f"{first:.1f}", **told_by(out),
                      "prove alone s": "-" if proof is None else f"{proof[1]:.1f} (exit {proof[0]})"})
        print(f"\n{table(found)}", flush=True)
    print(f"\n{environment()}\n{flags.model or flags.shape}: {' '.join(asked)}")


if __name__ == "__main__":
    main()
