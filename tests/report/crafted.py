"""Runs made by hand through the real ledger and store: what a page is shown, without a model that learns."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml

from assay.store import checkpoint
from assay.store.checkpoint import Contents
from assay.store.ledger import Ledger
from assay.verdict import Verdict, proven, refuted, unproven

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=\"window.pwned=1\"><svg onload=pwned=1>\u202e\x00'&amp;\ud800"
ENVIRONMENT = {"assay": "0.1.0", "python": "3.11", "torch": "2.13", "device": "cpu"}


def a_run(folder: Path, *, recipe: str = "Sft", verdicts: list[Verdict] | None = None, ending: str = "hand over", steps: int = 40,
          config: dict[str, Any] | None = None) -> Path:
    """A run of `steps` steps with looks, a proof and an end: hand over, stopped, consumed or none."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"out": folder.name, "model": "base", "seed": 0}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics(steps)))
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.append("start", recipe=recipe, config=config or {})
    ledger.append("preflight", verdicts=[v.to_json() for v in verdicts or [proven("loss", "the loss is the loss", error=1e-7)]])
    ledger.append("data", conversations="c0ffee", seed=0, windows=12)
    ledger.append("save", step=steps, checkpoint=f"step-{steps:06d}")
    ledger.append("proof", checkpoint=f"step-{steps:06d}", outcome="PROVEN",
                  verdicts=[proven("whole", "every file is there").to_json(), proven("generations", "3 of 3 ended").to_json()])
    end(ledger, ending, steps)
    ledger.close()
    return folder


def end(ledger: Ledger, how: str, steps: int) -> None:
    if how != "none":
        ledger.append("consumed", steps=steps, windows=12)
    if how == "hand over":
        ledger.append("hand over", checkpoint=f"step-{steps:06d}", unit="nats per token",
                      score={"mean": 0.5, "low": 0.4, "high": 0.6, "n": 90},
                      verdicts=[proven("score", "exported bytes score the same").to_json(),
                                unproven("consumer", "transformers is not installed", optional=True).to_json()])
    if how == "stopped":
        ledger.append("stopped", reason="loss is nan at step 7", exit_code=4, stands="step-000040")


def metrics(steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(steps):
        rows.append({"step": step, "loss": 3 * math.exp(-step / 20) + 0.1 * math.sin(step), "grad_norm": 1 + math.cos(step) / 2,
                     "learning_rate": 1e-3 * (1 - step / steps), "num_tokens": step * 512})
        if step % 10 == 9:
            loss = 3 * math.exp(-step / 20) + 0.2
            rows.append({"step": step, "eval_nats_per_token": loss, "eval_loss": loss, "eval_low": loss - 0.1, "eval_high": loss + 0.1,
                         "eval_documents": 90})
    return rows


def rollouts(steps: int) -> list[dict[str, Any]]:
    """GRPO's names, as TRL has them."""
    return [{"step": step, "loss": 0.01 * math.sin(step), "reward": step / steps, "reward_std": 0.3, "rewards/answer/mean": step / steps,
             "rewards/answer/std": 0.2, "kl": 0.001 * step, "entropy": 2 - step / steps, "completions/mean_length": 40.0 + step,
             "completions/min_length": 3.0, "completions/max_length": 90.0, "completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.25,
             **({"eval_answer": 0.3 + step / 100, "eval_low": 0.2 + step / 100, "eval_high": 0.5 + step / 100, "eval_prompts": 64,
                 "eval_reward": 0.4} if step % 5 == 4 else {})} for step in range(steps)]


def a_checkpoint(where: Path, value: float, *, parent: dict[str, str] | None = None, base: dict[str, str] | None = None,
                 step: int | None = None, change: str = "moved", marked: bool = True) -> str:
    """The digest of its weights."""
    from assay.store.digests import recorded_digest

    facts: dict[str, Any] = {"change": change, "parent": parent, "environment": ENVIRONMENT, "code": "c" * 64, "tokenizer": "t" * 64}
    where.parent.mkdir(parents=True, exist_ok=True)
    found = checkpoint.write_checkpoint(where, Contents("model", {"w": torch.full((3,), value)}, facts=facts | ({"base": base} if base
                                                                                                                else {}),
                                             trainer=None if step is None else {"step": step}))
    if marked:
        checkpoint.write_hallmark(found, [proven("whole", "every file is there")])
    return recorded_digest(found.manifest)


def some_verdicts(text: str = "as it should be") -> list[Verdict]:
    return [proven("loss", f"the loss is the loss {text}", error=1e-7), unproven("fork", f"nothing to compare with {text}", optional=True),
            refuted("signal", f"of 256 groups none had rewards that differ {text}", groups=256, text=text)]
