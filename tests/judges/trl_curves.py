"""TRL's training curves: its invariant suite's question, asked of a tiny model: the same rows in the same order, step by step.

TRL records loss and gradient norm of every step, and asks that other micro-batches give the same curve. Here TRL trains a tiny Llama in
float32 on the CPU, each way of cutting its batches, with and without masked prompts; our loop must go the same way.
"""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from assay.data.batch import Batch
from assay.learn.loop import train
from assay.learn.objectives import next_token
from assay.learn.optim import adamw
from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import save_hf_folder, tiny_model
from tests.judges.score import Score, packages

ASKS = "which loss and which gradient norm has this step of SFT? (20 steps, 3 ways to cut a batch, prompts learned or masked)"
STEPS, ROWS, LENGTH, PROMPT, RATE = 20, 8, 32, 12, 3e-3
BOUND = 1e-4  # of the loss and of the norm, relative; float32 moved them by 6e-6 in 20 steps, a dropped micro-batch by 0.26


def judge(folder: Path) -> Score:
    score = Score(packages("trl", "transformers"))
    tokens = torch.randint(3, 300, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[:, PROMPT:] = tokens[:, :1]  # something to learn: every answer repeats its row's first token
    with tempfile.TemporaryDirectory() as scratch:
        base = save_hf_folder(Path(scratch) / "base", tiny_model("llama", tied=False))
        for masked in (False, True):
            ours = our_curve(base, tokens, masked)
            for micro in (8, 4, 1):
                theirs = their_curve(base, tokens, masked, micro, Path(scratch) / f"{masked}-{micro}")
                compare(score, f"{'masked' if masked else 'whole'} rows, {micro} at a time", ours, theirs)
    return score


def compare(score: Score, case: str, ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True), 1):
        for what, here, there in zip(("loss", "gradient norm"), found, expected, strict=True):
            score.agree(abs(here - there) <= BOUND * abs(there), f"{case}, step {step}, {what}", f"{here:.6g}, TRL {there:.6g}")


def our_curve(base: Path, tokens: torch.Tensor, masked: bool) -> list[tuple[float, float]]:
    model = build_model(open_artifact(base)).train()
    weight = torch.ones(tokens.shape)
    weight[:, : PROMPT if masked else 1] = 0
    batches = [Batch(tokens[at : at + ROWS], weight[at : at + ROWS]) for at in range(0, len(tokens), ROWS)]
    optimizer = adamw(model.named_parameters(), RATE, betas=(0.9, 0.999), weight_decay=0.0)
    return [(float(step.loss), float(step.grad_norm)) for step in train(model, optimizer, batches, next_token, micro=3)]


def their_curve(base: Path, tokens: torch.Tensor, masked: bool, micro: int, out: Path) -> list[tuple[float, float]]:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *arguments: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    rows = {"input_ids": tokens.tolist()}
    if masked:
        rows["completion_mask"] = [[0] * PROMPT + [1] * (LENGTH - PROMPT)] * len(tokens)
    settings = SFTConfig(output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=micro, gradient_accumulation_steps=ROWS // micro,
                         learning_rate=RATE, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
                         logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
                         completion_only_loss=masked, max_length=None, disable_tqdm=True)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = InOrder(model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), args=settings,
                          train_dataset=Dataset.from_dict(rows), processing_class=AutoTokenizer.from_pretrained(base))
        trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
