"""Pretraining from scratch: --depth sets the size, the rest is derived and printed; the best checkpoint is handed over, not the last."""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from assay.data.data_ledger import check_data_ledger
from assay.data.mixture import MixedOrder, weighted_sources, whole_shares
from assay.data.order import Order, iterate_batches
from assay.data.token_corpus import Corpus, assert_disjoint, open_corpus, token_budget
from assay.errors import UsageError
from assay.evaluation.held_out_loss import score_corpus
from assay.guard.conclusion_checks import check_budget
from assay.guard.corpus_checks import check_document_copies, require_held_out_documents
from assay.guard.data_order_checks import check_epoch_order, check_mixture, check_same_data
from assay.guard.loss_preflight import preflight_loss, sample_rows
from assay.guard.training_guards import check_detectors, check_initial_weights
from assay.learn.ema import Ema
from assay.learn.lr_schedule import Budget, Schedule
from assay.learn.objectives import next_token
from assay.learn.optim import adamw, muon
from assay.learn.sharded import StoredTensors
from assay.model.placement import load_compiler_beside, place_for_training, uncompiled
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import (
    InitialSpread,
    ModelConfig,
    Rope,
    Transformer,
    initial_tensor,
    initialised,
    outlined,
    parameter_count,
    qkv_rows,
)
from assay.outcome import RunOutcome
from assay.recipes.compute_dtype import asked_compute, refuse_fp16
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator, stopping_rule
from assay.recipes.given_shape import GivenShape, is_given, read_shape
from assay.recipes.hand_over import hand_over, write_down
from assay.recipes.memory_plan import MemoryPlan, device_memory, plan_pretraining, record_use, require_fit
from assay.recipes.options import Pretrain
from assay.recipes.processes import follow, join_processes, moments_wait, shards_parameters
from assay.recipes.run import Run, TimeSpent, open_run, print_line
from assay.recipes.size_limit import require_room, write_squeezed
from assay.recipes.squeezed_code import least_code_bytes
from assay.recipes.starting_model import Ancestry, WholeModel
from assay.recipes.trainer import SavePlan, Trainer
from assay.store.ledger import Event
from assay.store.remote import local_path
from assay.store.saving import Lineage
from assay.verdict import Outcome, Verdict


@dataclass(frozen=True)
class _Plan:
    """Plan of a pretraining run: what --depth and the budgets come to."""

    model: ModelConfig
    rows: int
    micro: int
    steps: int | None  # None: time decides
    lr: float
    device: str
    spread: InitialSpread
    in_parts: bool  # no process ever holds the model whole

AUDITED_ROWS = 4096  # of a mixture, before step 1
PRETRAINING_EVALUATED_EVERY = 500  # steps, where no --save-steps is given


@dataclass(frozen=True)
class CorpusData:
    """Data of a pretraining run: the corpus, what a checkpoint records of it, the check that it is unchanged, its audit, and how often it
    was read.
    """

    corpus: Corpus
    order: Order

    def facts(self, step: int) -> dict[str, Any]:
        others = {"mixed": [other.digest for other in self.others]} if self.others else {}
        return {"corpus": self.corpus.digest, "tokenizer": self.corpus.tokenizer_digest, "seed": self.order.seed,
                "windows_read": step * self.order.rows} | others

    def describe_mixture(self) -> list[str]:
        if not isinstance(self.order, MixedOrder):
            return []
        total, order = sum(self.order.shares), self.order
        return [f"mixture: {share / total:.1%} of the rows from {corpus.folder}, {alone.windows:,} windows"
                for corpus, share, alone in zip(order.corpora, order.shares, order.orders, strict=True)]

    @property
    def others(self) -> tuple[Corpus, ...]:
        return self.order.others if isinstance(self.order, MixedOrder) else ()

    def check_same(self, recorded: Mapping[str, Any]) -> Verdict:
        found = [check_same_data(recorded["corpus"], self.corpus)]
        found += [check_same_data(digest, other) for digest, other in zip(recorded.get("mixed", []), self.others, strict=True)]
        return next((verdict for verdict in found if verdict.outcome is Outcome.REFUTED), found[0])

    def audit(self) -> list[Verdict]:
        """Audit the order and the held-out documents. Of a mixture the first rows are counted here, and all that were read at the end."""
        some = max(1, min(self.order.steps, AUDITED_ROWS // self.order.rows))
        order = check_mixture(self.order, some) if isinstance(self.order, MixedOrder) else check_epoch_order(self.order)
        return [order, check_document_copies(self.corpus)]

    def times_read(self, run: Run, steps: int) -> dict[int, int]:
        """How many windows all steps so far have read how often, {times: windows}: counted from what they wrote down, and judged."""
        verdict, times = check_data_ledger(run.consumed(), self.order, steps)
        mixture = [check_mixture(self.order, steps)] if isinstance(self.order, MixedOrder) and steps else []
        run.judge(Event.DATA_LEDGER, [verdict, *mixture])
        return times

    @property
    def repeats_from(self) -> int:
        """The step from which on windows are read again."""
        rows = self.order.repeats_from_row if isinstance(self.order, MixedOrder) else self.order.windows
        return rows // self.order.rows


def corpus_order(config: Pretrain, corpus: Corpus, rows: int) -> Order:
    """Order of the windows of one corpus, or of several by their shares. No held-out document of --corpus may occur in another corpus's
    training text.
    """
    if not config.mix:
        return Order(corpus, config.seed, rows, config.max_length, config.num_train_epochs)
    sources = weighted_sources(config.mix, "--mix")
    shares = [source.weight or Fraction(1) for source in sources]
    rest = 1 - sum(shares, Fraction(0))
    if sources[0].weight is None or rest <= 0:
        raise UsageError(f"--mix {' '.join(config.mix)}: expected FOLDER:SHARE, with shares that add up to less than 1; the rest is "
                         "--corpus's")
    others = tuple(open_corpus(local_path(source.name)) for source in sources)
    for number, other in enumerate(others):
        if twin := next((each for each in (corpus, *others[:number]) if each.digest == other.digest), None):
            raise UsageError(f"--mix {other.folder}: the same corpus as {twin.folder}, whose text would be read twice and counted as new; "
                             "leave it out, or raise --num-train-epochs")
        assert_disjoint(other, corpus)
    return MixedOrder(corpus, config.seed, rows, config.max_length, config.num_train_epochs, others=others,
                      shares=whole_shares([rest, *shares]))


def pretrain(config: Pretrain, say: Callable[[str], None] = print_line) -> RunOutcome:
    """Run pretraining: build, preflight, train, evaluate and save, hand over. The same command resumes an interrupted run, which hands
    nothing over.
    """
    spent = TimeSpent()
    world, say = join_processes(config, say)
    load_compiler_beside(world.device)
    corpus = open_corpus(local_path(config.corpus))
    assert_disjoint(corpus)
    require_held_out_documents(corpus)
    plan = derived(config, corpus, world.device)
    data = CorpusData(corpus, corpus_order(config, corpus, plan.rows))
    data.order.require(plan.steps or 1)  # refused before anything is made, where the data does not suffice
    schedule = Schedule(Budget(plan.steps, config.minutes, config.lr_scheduler_type, config.warmup_steps, config.decay_ratio))
    every = config.save_steps or PRETRAINING_EVALUATED_EVERY
    rule = stopping_rule(config.early_stopping_patience, config.early_stopping_threshold, schedule=config.lr_scheduler_type,
                         steps=plan.steps, every=every)
    tokenizer = Tokenizer.from_folder(corpus.folder)
    memory = require_memory(config, plan)
    model = build_untrained(config, plan)
    if world.rank > 0:
        return follow(world, model, next_token, config, partial(optimizer_for, config, plan, model), config.ema)
    for line in (*describe_pretraining(config, plan, corpus, parameter_count(model)), *data.describe_mixture()):
        say(line)
    if config.max_bytes is not None:
        say(require_room(partial(shape, config, vocab=plan.model.vocab), config.depth, tokenizer, config.max_bytes,
                         least_code_bytes() if config.count_code else 0))
    optimizer = optimizer_for(config, plan, model)
    ema = Ema(model, config.ema) if config.ema else None
    scored_set = None if ema is None else "ema"

    with world, open_run(config, say, plan.device, spent) as run:
        trainer = Trainer(run, whole_model(config, plan, model, tokenizer), optimizer, next_token, schedule, micro=plan.micro,
                          clip=config.max_grad_norm, order=data.order, ema=ema,
                          saves=SavePlan(every, data.order.steps, paced=config.save_steps is None), vocab=plan.model.vocab, world=world)
        some = partial(score_corpus, corpus=corpus, rows=plan.micro, length=config.max_length, count=config.eval_documents)
        evaluator = HeldOutEvaluator(run, some, device=plan.device, repeats_from=data.repeats_from)
        early = EarlyStopping(run, evaluator.history, rule, every)

        def save(*, evaluate: bool) -> None:
            """Account for the updates, evaluate, and save what was evaluated."""
            trainer.account()
            if evaluate:
                with trainer.scored_weights():
                    evaluator.evaluate(model, trainer.done, trainer.new_losses(), weight_set=scored_set)
            trainer.save(data.facts(trainer.done), best=evaluator.best_checkpoint())
            if evaluate:
                early.judge(trainer.done)

        with run.interruptible():
            if (saved := run.newest()) is not None:
                trainer.resume(saved, data.check_same((saved.trainer() or {})["data"]))
            evaluator.recall()
            early.judge(trainer.done)
            run.preflight(preflight_pretrain(trainer, data, plan.spread))
            trainer.save(data.facts(trainer.done))  # where nothing is saved yet: a save is made and proven before step 1

            trainer.start_loop(data.facts(trainer.done), data.order.windows)
            with closing(trainer.steps(iterate_batches(data.order, trainer.done, None))) as steps:
                while not (trainer.over() or early.reason):
                    step = next(steps)
                    trainer.record(step, epoch=data.order.epoch_of(step.index))
                    if trainer.save_due():
                        save(evaluate=True)
                    elif trainer.extra_save_due():
                        save(evaluate=False)
            trainer.end_loop()
            record_use(run, memory, plan.device)
            if run.interrupted is None and evaluator.latest_step != trainer.done:
                save(evaluate=True)
            elif trainer.saved != trainer.done:
                save(evaluate=False)  # where a signal came, the uninterrupted run would not have been evaluated here
            trainer.finish(data.times_read(run, trainer.done), data.order.windows, evaluator.best_checkpoint())
        if run.interrupted is not None:
            return RunOutcome(run.folder, interrupted=run.interrupted)

        return hand_over_pretrained(config, plan, run, evaluator, corpus, check_budget(trainer.schedule, trainer.done, early.reason))


def hand_over_pretrained(config: Pretrain, plan: _Plan, run: Run, evaluator: HeldOutEvaluator, corpus: Corpus,
                         budget: Verdict) -> RunOutcome:
    """Export the best checkpoint, prove it and score it on all held-out documents; with --max-bytes, also write it quantised to fit."""
    everything = partial(score_corpus, corpus=corpus, rows=plan.micro, length=config.max_length, context=config.max_length // 2)
    handed = hand_over(run, evaluator, everything)
    handed.verdicts.append(budget)
    write_down(run, handed)
    verdicts = handed.verdicts
    if config.max_bytes is not None:
        verdicts = verdicts + write_squeezed(run, run.folder / "model", handed.recorded, corpus, rows=plan.micro,
                                             length=config.max_length, max_bytes=config.max_bytes,
                                             count_code=config.count_code, max_seconds=config.artifact_seconds)
    return RunOutcome(run.folder, verdicts, model=run.folder / "model", results={"held_out": handed.recorded.estimate})


def preflight_pretrain(trainer: Trainer, data: CorpusData, spread: InitialSpread) -> list[Verdict]:
    """Pretraining preflight: the loss against plain cross-entropy, gradients of every tensor, the alarms for values that are not finite,
    and the order of the corpus.
    """
    batch = trainer.first_micro_batch(data.order.batch(0))
    found = trainer.gradients(batch)
    with uncompiled():
        return [check_detectors(), *preflight_loss(trainer.model, trainer.objective, sample_rows(batch), trainer.accumulate_alone),
                *trainer.check_precision(batch, found), *trainer.check_reach(found),
                *([] if trainer.done else [check_initial_weights(trainer.parameters(), trainer.model.config.depth, spread.wide,
                                                                 divided=spread.divided)]),
                *data.audit(), *trainer.check_world(data.order.batch(0))]  # last: with --fsdp nobody holds the whole model afterwards


def require_memory(config: Pretrain, plan: _Plan) -> MemoryPlan:
    """Memory plan of the run; refused where the device cannot hold it, or where fp16 cannot work."""
    memory = plan_pretraining(config, plan.model, plan.device)
    if (available := device_memory(plan.device)) is not None:
        require_fit(memory, available, plan.device)
    refuse_fp16(config, plan.model)
    return memory


def build_untrained(config: Pretrain, plan: _Plan) -> Transformer:
    """Build the untrained model, placed for training. With --fsdp every process makes an outline, and is sent its rows of each tensor as
    process 0 draws it.
    """
    made = outlined(plan.model) if plan.in_parts else initialised(plan.model, config.seed, plan.spread)
    return place_for_training(made, plan.device, compute=asked_compute(config), recompute=config.gradient_checkpointing,
                              compile=False if config.fsdp else None)


def whole_model(config: Pretrain, plan: _Plan, model: Transformer, tokenizer: Tokenizer) -> WholeModel:
    """Weights to train: the whole model. Plain pretraining text ends its documents with the boundary token, but nothing asks for an answer
    that stops.
    """
    lineage = Lineage(weight_set="raw", scored_set="ema") if config.ema else Lineage()
    weights = WholeModel(model, tokenizer, resolve_special_tokens(tokenizer, {}, {}), Ancestry(lineage, lineage))
    if plan.in_parts:
        weights.stored = StoredTensors(partial(initial_tensor, outlined(plan.model), config.seed, plan.spread), {})
    return weights


def derived(config: Pretrain, corpus: Corpus, device: str) -> _Plan:
    """The plan that options and corpus give."""
    refuse_unclear_pretrain(config)
    rows = config.batch_tokens // config.max_length
    steps = None if config.tokens is None else max(1, math.ceil(config.tokens / (rows * config.max_length)))
    micro = max(1, min(rows, config.micro_batch_tokens // config.max_length))
    chosen = chosen_shape(config, Tokenizer.from_folder(corpus.folder))
    return _Plan(chosen.model, rows, micro, steps, config.matrices().learning_rate, device, chosen.spread, shards_parameters(config))


def refuse_unclear_pretrain(config: Pretrain) -> None:
    if (config.minutes is None) == (config.tokens is None):
        raise UsageError("give one budget: --minutes or --tokens")
    if config.max_bytes is None and (config.count_code or config.artifact_seconds is not None):
        raise UsageError("--count-code and --artifact-seconds are about the artifact of --max-bytes; give that too, or leave them out")
    if config.depth < 1 or config.max_length < 8 or config.batch_tokens < config.max_length:
        raise UsageError(f"depth {config.depth}, length {config.max_length}, batch_tokens {config.batch_tokens}: expected a depth of "
                         "at least 1, a length of at least 8 and a batch of at least one row")


def chosen_shape(config: Pretrain, tokenizer: Tokenizer) -> GivenShape:
    """Architecture of the model: derived from --depth, or read from a config.json."""
    if not is_given(config.shape):
        return GivenShape(shape(config, config.depth, padded_vocab(tokenizer)), InitialSpread())
    if config.max_bytes is not None or config.value_residual or config.attention_gate:
        raise UsageError(f"--shape {config.shape}: --max-bytes, --value-residual and --attention-gate belong to the shapes that --depth "
                         "makes; leave them out")
    return read_shape(config.shape, vocab=tokenizer.size, length=config.max_length)


def padded_vocab(tokenizer: Tokenizer) -> int:
    """Vocabulary size, padded; the rows beyond the tokenizer's are never used."""
    return math.ceil(tokenizer.size / 64) * 64


def shape(config: Pretrain, depth: int, vocab: int) -> ModelConfig:
    """Architecture by depth: width 64 · depth, heads of 64, an MLP of eight thirds of the width (gated) or four times the width (plain)."""
    style, length = config.shape, config.max_length
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
    decay = config.matrices().weight_decay
    if config.optimizer == "adamw":
        return adamw(named, plan.lr, weight_decay=decay, moments=moments_wait(config, in_parts=plan.in_parts))
    slices: dict[str, tuple[int, ...]] = {}
    for layer in range(plan.model.depth):  # q, k, v and gate, up are matrices of their own, stored as rows of one
        slices[f"blocks.{layer}.attn.qkv.weight"] = qkv_rows(plan.model)
        if plan.model.gated:
            slices[f"blocks.{layer}.mlp.up.weight"] = (plan.model.hidden, plan.model.hidden)
    return muon(named, lr_matrix=plan.lr, lr_embed=config.embedding_learning_rate, lr_scalar=config.embedding_learning_rate, slices=slices,
                weight_decay=decay, moments=moments_wait(config, in_parts=plan.in_parts))


def describe_pretraining(config: Pretrain, plan: _Plan, corpus: Corpus, parameters: int) -> list[str]:
    """Lines that describe everything that was derived, printed before training."""
    m = plan.model
    end = f"{plan.steps:,} steps" if plan.steps else f"{config.minutes:g} minutes"
    in_parts = ["built in parts: process 0 draws a tensor at a time, and nobody holds the model whole"] if plan.in_parts else []
    lines = [*in_parts,
             f"{m.family}: {m.depth} layers of width {m.width}, {m.heads} heads, MLP {m.hidden}, vocabulary {m.vocab}: "
             f"{parameters:,} parameters",
             f"{config.optimizer} at {plan.lr:g}, {plan.rows} × {config.max_length} tokens a step, {end}, on {plan.device}",
             f"corpus {corpus.digest[:12]}: {corpus.train.tokens:,} training tokens, {corpus.held_out.documents} held-out documents"]
    if plan.steps:
        cost = token_budget(corpus, parameters, plan.steps * plan.rows * config.max_length)
        lines += [str(cost)]
    return lines
