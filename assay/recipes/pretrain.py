"""Pretraining from scratch: one dial for size, the rest derived and printed; budgets that bind; the best handed over, not the last."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from assay.data.order import Order
from assay.data.token_corpus import Corpus, assert_disjoint, open_corpus, token_budget
from assay.errors import UsageError
from assay.evaluation.held_out_loss import score_corpus
from assay.guard.data_order_checks import check_consumed, check_epoch_order, check_same_data
from assay.guard.proof_subject import ProofSampling
from assay.guard.training_guards import StepWatch
from assay.learn.ema import Ema
from assay.learn.objectives import next_token
from assay.learn.optim import adamw, muon
from assay.model.placement import default_device, place_for_training
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Rope, Transformer, initialised, parameter_count, qkv_rows
from assay.recipes.forms import Whole
from assay.recipes.handover import hand_over
from assay.recipes.looks import Looks
from assay.recipes.options import Pretrain
from assay.recipes.pace import Budget, Pace
from assay.recipes.run import Run, say_now
from assay.recipes.squeezed import require_room, squeezed
from assay.recipes.stopping import Stopping, early_rule
from assay.recipes.training import Parts, Training
from assay.store.saving import Lineage
from assay.verdict import Verdict

DECAY = {"muon": 0.3, "adamw": 0.1}  # on enwik8, read five times in two minutes, 0.3 gave 1.145 bits per byte; 0.01 learned it by heart


@dataclass(frozen=True)
class _Plan:
    """What the dial and the budgets come to."""

    model: ModelConfig
    rows: int
    micro: int
    steps: int | None  # None: time decides
    lr: float
    device: str


def pretrain(config: Pretrain, say: Callable[[str], None] = say_now) -> tuple[list[Verdict], int | None]:
    """The verdicts on what was handed over, and the signal that interrupted the run, if one did: then nothing was."""
    work = Pretraining(config, say)
    with work.run.sitting():
        if (interrupted := work.go()) is not None:
            return [], interrupted
        score_all = partial(score_corpus, corpus=work.corpus, rows=work.plan.micro, length=config.length, context=config.length // 2)
        recorded, verdicts = hand_over(work.run, work.looks.best_checkpoint(work.run.checkpoints), work.looks, score_all)
        if config.max_bytes is not None:
            verdicts += squeezed(work.run, work.run.folder / "model", recorded, work.corpus, rows=work.plan.micro, length=config.length,
                                 max_bytes=config.max_bytes)
        return verdicts, None


class Pretraining(Training):
    def __init__(self, config: Pretrain, say: Callable[[str], None]):
        self.corpus = open_corpus(Path(config.corpus))
        assert_disjoint(self.corpus)
        self.plan = plan = derived(config, self.corpus)
        self.order = Order(self.corpus, config.seed, plan.rows, config.length, config.epochs)
        self.order.require(plan.steps or 1)  # refused before anything is made, where the data does not suffice
        pace = Pace(Budget(plan.steps, config.minutes, config.schedule, config.warmup, config.decay))
        rule = early_rule(config.patience, config.worth, schedule=config.schedule, steps=plan.steps, every=config.every)
        tokenizer = Tokenizer.from_folder(Path(config.corpus))
        model = place_for_training(initialised(plan.model, config.seed), plan.device, recompute=config.recompute)
        for line in _announced(config, plan, self.corpus, parameter_count(model)):
            say(line)
        if config.max_bytes is not None:
            of_depth = partial(shape, config, vocab=plan.model.vocab)
            say(require_room(of_depth, config.depth, tokenizer, config.max_bytes))
        optimizer = optimizer_for(config, plan, model)
        ema = Ema(model, config.ema) if config.ema else None
        # A request that was refused until here leaves no folder.
        run = Run(Path(config.out), config, say=say, probing=ProofSampling(config.probe_samples, plan.device))
        look = partial(score_corpus, corpus=self.corpus, rows=plan.micro, length=config.length, count=config.look_documents)
        looks = Looks(run, look, repeats_from=self.order.windows // plan.rows, device=plan.device)
        watch = StepWatch([group["lr"] for group in optimizer.param_groups], pace.multiplier, vocab=plan.model.vocab,
                      consumed=partial(check_consumed, order=self.order))
        # Plain pretraining text ends its documents with the boundary token, but nothing asks for an answer that stops.
        lineage = Lineage() if ema is None else Lineage(weight_set="raw", scored_set="ema")
        form = Whole(model, tokenizer, resolve_special_tokens(tokenizer, {}, {}), lambda step: lineage)
        super().__init__(config, Parts(run, model, form, optimizer, next_token, self.order, pace, looks, watch, plan.micro, config.clip,
                                       config.every, ema, stopping=None if rule is None else Stopping(run, looks, rule, config.every)))

    def data_facts(self, step: int) -> dict[str, Any]:
        return {"corpus": self.corpus.digest, "tokenizer": self.corpus.tokenizer_digest, "seed": self.config.seed,
                "windows_read": step * self.plan.rows}

    def data_verdicts(self) -> list[Verdict]:
        return [check_epoch_order(self.order)]

    def read_times(self) -> dict[int, int]:
        return self.counted(self.order)

    def same_data(self, recorded: Mapping[str, Any]) -> Verdict:
        return check_same_data(recorded["corpus"], self.corpus)


def derived(config: Pretrain, corpus: Corpus) -> _Plan:
    if (config.minutes is None) == (config.tokens is None):
        raise UsageError("give one budget: --minutes or --tokens")
    if config.depth < 1 or config.length < 8 or config.batch_tokens < config.length:
        raise UsageError(f"depth {config.depth}, length {config.length}, batch_tokens {config.batch_tokens}: expected a depth of "
                         "at least 1, a length of at least 8 and a batch of at least one row")
    rows = config.batch_tokens // config.length
    steps = None if config.tokens is None else max(1, math.ceil(config.tokens / (rows * config.length)))
    vocab = math.ceil(Tokenizer.from_folder(Path(config.corpus)).size / 64) * 64  # rows beyond the tokenizer's are never used
    rate = config.lr or (0.02 if config.optimizer == "muon" else 0.002)
    micro = max(1, min(rows, config.micro_tokens // config.length))
    return _Plan(shape(config, config.depth, vocab), rows, micro, steps, rate, config.device or default_device())


def shape(config: Pretrain, depth: int, vocab: int) -> ModelConfig:
    """width = 64 · depth, heads of 64, eight thirds of the width in a gated MLP, four times in a plain one."""
    style, length = config.shape, config.length
    if style != "assay" and (config.value_residual or config.attention_gate):
        raise UsageError(f"--shape {style} opens in transformers, which has neither --value-residual nor --attention-gate; "
                         "add --shape assay, or leave them out")
    width = 64 * depth
    gated = style == "qwen3"
    hidden = math.ceil(width * 8 / 3 / 64) * 64 if gated else 4 * width
    return ModelConfig(family=style, vocab=vocab, width=width, depth=depth, heads=depth, kv_heads=depth, head_dim=64, hidden=hidden,
                       max_length=max(length, 64), norm="rms", norm_eps=1e-6, rope=Rope(10000.0), activation="silu" if gated else "relu2",
                       gated=gated, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=True, windows=(None,) * depth, tied=True,
                       softcap=None if gated else 15.0, value_residual=config.value_residual, attention_gate=config.attention_gate)


def optimizer_for(config: Pretrain, plan: _Plan, model: Transformer) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    decay = config.weight_decay if config.weight_decay is not None else DECAY[config.optimizer]
    if config.optimizer == "adamw":
        return adamw(named, plan.lr, weight_decay=decay)
    slices: dict[str, tuple[int, ...]] = {}
    for layer in range(plan.model.depth):  # q, k, v and gate, up are matrices of their own, stored as rows of one
        slices[f"blocks.{layer}.attn.qkv.weight"] = qkv_rows(plan.model)
        if plan.model.gated:
            slices[f"blocks.{layer}.mlp.up.weight"] = (plan.model.hidden, plan.model.hidden)
    return muon(named, lr_matrix=plan.lr, lr_embed=config.lr_embed, lr_scalar=config.lr_embed, slices=slices,
                weight_decay=decay)


def _announced(config: Pretrain, plan: _Plan, corpus: Corpus, parameters: int) -> list[str]:
    """Everything that was derived, before anything is spent."""
    m = plan.model
    end = f"{plan.steps:,} steps" if plan.steps else f"{config.minutes:g} minutes"
    lines = [f"{m.family}: {m.depth} layers of width {m.width}, {m.heads} heads, MLP {m.hidden}, vocabulary {m.vocab}: "
             f"{parameters:,} parameters",
             f"{config.optimizer} at {plan.lr:g}, {plan.rows} × {config.length} tokens a step, {end}, on {plan.device}",
             f"corpus {corpus.digest[:12]}: {corpus.train.tokens:,} training tokens, {corpus.held_out.documents} held-out documents"]
    if plan.steps:
        cost = token_budget(corpus, parameters, plan.steps * plan.rows * config.length)
        lines += [str(cost)]
    return lines
