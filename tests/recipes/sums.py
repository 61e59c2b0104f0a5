"""A tiny model that can add single digits and hedges every other time, and reinforcement runs that start from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.recipes import grpo, hand_over, run, sft
from assay.recipes.grpo_options import Grpo
from assay.recipes.options import Sft
from assay.store.checkpoint import open_checkpoint, step_folder, write_hallmark
from assay.store.ledger import Ledger
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import NoProver
from assay.verdict import Verdict, proven
from tests.recipes.sittings import rows

TAUGHT = 200  # steps: most sums are known by then


class Believer(NoProver):
    """Replacement of `Prover`: every save earns a hallmark at once."""

    def start(self, folder: Path, **_: Any) -> None:
        write_hallmark(open_checkpoint(folder), [proven("whole", "in this test")])


def unproven(patch: pytest.MonkeyPatch, prover: type = NoProver) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py and of the toy."""
    patch.setattr(run, "Prover", prover)
    patch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])


def taught(home: Path, base: Path | None = None, *, lora_r: int = 0, steps: int = TAUGHT) -> Path:
    """The last checkpoint of a fine-tuning on right answers, of which every other one says another number too: it reads as none."""
    if base is None:
        save_model(home / "base", tiny_model("llama"))
    sums = [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]
    learned = [{"prompt": prompt, "completion": said} for prompt, gold in sums for said in (str(gold), f"{gold} or {gold + 1}")]
    write(home / "learned.jsonl", learned)
    write(home / "sums.jsonl", [{"prompt": prompt, "gold": str(gold)} for prompt, gold in sums])
    config = Sft(model=str(base or home / "base"), data=(str(home / "learned.jsonl"),), out=str(home / "sft"), max_length=32,
                 batch_tokens=512,
                 micro_batch_tokens=512, num_train_epochs=steps, max_steps=steps, learning_rate=5e-3 if base is None else 2e-3,
                 lora_r=lora_r, save_steps=10**6,
                 held_out=0.05, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        unproven(patch, Believer)
        sft.sft(config, lambda _: None)
    return step_folder(home / "sft" / "checkpoints", steps)


def write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def options(parent: Path, out: Path, **changed: Any) -> Grpo:
    usual: dict[str, Any] = {
        "data": (str(parent.parent.parent.parent / "sums.jsonl"),), "out": str(out), "reward": ("answer:1",), "prompts": 4,
                             "num_generations": 4,
        "max_completion_length": 8, "num_train_epochs": 50, "max_steps": 4, "learning_rate": 2e-4, "warmup_steps": 0, "save_steps": 2,
                             "held_out": 0.3, "eval_prompts": 8,
        "micro_batch_size": 128, "device": "cpu", "reward_workers": 1}
    where = {"from_": str(parent), "optimizer_state": "fresh"} if "model" not in changed else {}
    return Grpo(**(where | usual | changed))


def reinforced(config: Grpo, say: Any = lambda _: None) -> list[Verdict]:
    found = grpo.grpo(config, say)
    assert found.interrupted is None
    return found.verdicts


def events(config: Grpo, kind: str) -> list[dict[str, Any]]:
    return [event for event in Ledger(Path(config.out) / "ledger.jsonl").events() if event["kind"] == kind]


def metrics(config: Grpo) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows(Path(config.out) / "metrics.jsonl")]


def steps_of(config: Grpo) -> list[dict[str, Any]]:
    return [row for row in metrics(config) if "loss" in row]


def left_by(config: Grpo, step: int) -> dict[str, Any]:
    """Everything that must be equal where two runs are the same."""
    out = Path(config.out)
    return {"tensors": open_checkpoint(step_folder(out / "checkpoints", step)).manifest["tensors"], "metrics": metrics(config),
            "eval": rows(out / "eval.jsonl"), "samples": rows(out / "samples.jsonl")}
