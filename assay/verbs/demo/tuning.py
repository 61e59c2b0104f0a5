"""Fine-tuning: sums are taught to the whole model and to an adapter, the adapter is forked, another student is taught by the first."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from assay.verbs.demo.stage import called

SHORT = ["--length", "32", "--batch-tokens", "512", "--epochs", "200", "--held-out", "0.05", "--device", "cpu"]


def lessons(folder: Path) -> tuple[Path, Path]:
    """What is learned: sums of single digits, every other one hedged. And the sums alone, with what they come to."""
    sums = [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]
    learned = [{"prompt": prompt, "completion": said} for prompt, gold in sums for said in (str(gold), f"{gold} or {gold + 1}")]
    return (write(folder / "learned.jsonl", learned),
            write(folder / "sums.jsonl", [{"prompt": prompt, "gold": str(gold)} for prompt, gold in sums]))


def write(where: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    where.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def tuned(base: Path, folder: Path) -> list[str]:
    """Names of what did not hold."""
    learned, _ = lessons(folder)
    data, whole, adapter = ["--data", str(learned), *SHORT], folder / "sft", folder / "lora"
    if called("sft", "--model", str(base), "--out", str(whole), "--steps", "200", "--lr", "5e-3", "--checkpoint-every", "100", *data):
        return ["fine-tuning"]
    if called("sft", "--model", str(whole / "model"), "--out", str(adapter), "--lora-r", "4", "--steps", "20", "--lr", "2e-3", *data):
        return ["the adapter"]
    parent = ["--from", str(last_checkpoint(adapter)), "--optimizer-state", "fresh"]
    failed = ["the fork"] if called("sft", *parent, "--out", str(folder / "fork"), "--steps", "10", "--lr", "1e-3", *data) else []
    student = ["--teacher", str(whole / "model"), "--student", str(base), "--steps", "40", "--lr", "3e-3"]
    return [*failed, "the student"] if called("distill", *student, "--out", str(folder / "student"), *data) else failed


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))
