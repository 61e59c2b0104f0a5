"""Time to a proven result: the whole command `assay sft`, from its start to its exit code, and where the time went.

    python bench/time_to_proof.py                                        # random weights of SmolLM2-135M's shape, made-up sums, one GPU
    python bench/time_to_proof.py --shape 1.7b --max-steps 15            # the whole model; --lora-r 16: an adapter
    python bench/time_to_proof.py --shape 8b --lora-r 16 --max-steps 6 --micro-batch-tokens 4096
    python bench/time_to_proof.py --model smollm2-135m --data gsm8k.jsonl
    python bench/time_to_proof.py --shape tiny --rows 200 --device cpu

The first run has no compilation cache, the second has the first one's. `command` is the wall time from outside, with Python's start and
imports; the line of parts is what the run itself says; `proofs` are the seconds of `assay prove` on RUN/model alone, in a process that
begins with nothing. Goal on an H200: 135M, three epochs of GSM8K, at most 45 s cold and 30 s warm.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

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


def sums(where: Path, rows: int) -> Path:
    """Problems and worked answers in GSM8K's layout, about as long."""
    made = random.Random(0)

    def row() -> dict[str, str]:
        name, thing, have, more = made.choice(NAMES), made.choice(THINGS), made.randint(2, 99), made.randint(2, 99)
        return {"question": f"{name} has {have} {thing} and gets {more} more. How many {thing} does {name} have now?",
                "answer": f"{name} begins with {have}. {have}+{more}=<<{have}+{more}={have + more}>>{have + more}.\n#### {have + more}"}

    where.write_text("".join(json.dumps(row()) + "\n" for _ in range(rows)))
    return where


def command_time(arguments: list[str], environ: dict[str, str], log: Path, quiet: bool) -> tuple[int, float, float | None]:
    """Exit code, seconds in all, and seconds to the first line that tells of a step."""
    began, first = time.perf_counter(), None
    with log.open("w") as kept, subprocess.Popen([sys.executable, "-m", "assay", *arguments], env=os.environ | environ, text=True,
                                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter() - began
            kept.write(f"{now:8.2f}  {line}")
            if not quiet:
                print(f"{now:8.2f}  {line}", end="", flush=True)
            if first is None and line.startswith("step ") and not line.startswith("step 0"):
                first = now
    return process.returncode, time.perf_counter() - began, first


def parts_of(run: Path) -> dict[str, float]:
    spent = next((event["seconds"] for event in Ledger(run / "ledger.jsonl").events() if event["kind"] == Event.TIME), {})
    return {name: spent[name] for name in PARTS if name in spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m", help="of random weights")
    parser.add_argument("--model", help="instead: a model")
    parser.add_argument("--data", help="instead of made-up sums: GSM8K's JSONL")
    parser.add_argument("--rows", type=int, default=7473, help="made-up sums")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=2, help="the first without a compilation cache")
    parser.add_argument("--quiet", action="store_true", help="do not show what the command prints")
    parser.add_argument("--home", help="where to work; a temporary folder otherwise")
    flags, more = parser.parse_known_args()
    home = Path(flags.home or tempfile.mkdtemp(prefix="time-to-proof-"))
    home.mkdir(parents=True, exist_ok=True)
    model = flags.model or str(random_model(home / "model", flags.shape, flags.device))
    data = flags.data or str(sums(home / "sums.jsonl", flags.rows))
    caches = {name: str(home / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    found = []
    for number in range(flags.runs):
        out = home / f"run-{number}"
        asked = ["sft", "--model", model, "--data", data, "--out", str(out), "--num-train-epochs", str(flags.epochs),
                 "--device", flags.device, *more]
        code, seconds, first = command_time(asked, caches, home / f"run-{number}.log", flags.quiet)
        found.append((code, seconds, first, parts_of(out)))
        proof = command_time(["prove", str(out / "model"), "--device", flags.device], caches, home / f"proof-{number}.log", flags.quiet)
        print(f"assay prove RUN/model alone: exit code {proof[0]}, {proof[1]:.1f} s", flush=True)
    print(f"\n{environment()}\n{flags.model or flags.shape}: {' '.join(asked)}")
    for number, (code, seconds, first, parts) in enumerate(found):
        told = ", ".join(f"{name} {spent:.1f}" for name, spent in parts.items())
        print(f"{'cold' if number == 0 else 'warm'}: command {seconds:.1f} s, exit code {code}; first step told of after "
              f"{'-' if first is None else f'{first:.1f} s'}; {sum(parts.values()):.1f} s of the run: {told}")


if __name__ == "__main__":
    main()
