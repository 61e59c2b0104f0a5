"""Fine-tuning: sums are taught to the whole model and to an adapter, the adapter is forked, and what is handed over is proven."""

import json
from pathlib import Path

from assay.verbs.demo.stage import called

SHORT = ["--length", "32", "--batch-tokens", "512", "--epochs", "8", "--checkpoint-every", "40", "--held-out", "0.1", "--device", "cpu"]


def sums(where: Path) -> Path:
    """Made-up conversations: two numbers below 20, and what they come to."""
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(20) for b in range(20)]
    where.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def tuned(base: Path, folder: Path) -> list[str]:
    """Names of what did not hold."""
    data = ["--data", str(sums(folder / "sums.jsonl"))]
    whole, adapter, fork = folder / "sft", folder / "lora", folder / "fork"
    failed = [] if not called("sft", "--model", str(base), *data, "--out", str(whole), "--lr", "3e-3", *SHORT) else ["fine-tuning"]
    model = ["--model", str(whole / "model")]
    if called("sft", *model, *data, "--out", str(adapter), "--lora-r", "8", "--lr", "3e-3", *SHORT):
        return [*failed, "the adapter"]
    parent = max((adapter / "checkpoints").glob("step-*"))
    if called("sft", "--from", str(parent), "--optimizer-state", "fresh", *data, "--out", str(fork), "--lr", "1e-3", *SHORT):
        failed.append("the fork")
    return failed
