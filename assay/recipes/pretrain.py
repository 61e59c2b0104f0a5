"""Pretraining from scratch: one dial for size, the rest derived and printed; budgets that bind; the best handed over, not the last."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.budget import budget
from assay.data.consumed import ids_digest
from assay.data.corpus import Corpus, assert_disjoint, open_corpus
from assay.data.order import Order, corpus_batches
from assay.errors import UsageError
from assay.guard.data import check_consumed, check_order, check_same_data
from assay.guard.parity import gradients, preflight, sample_rows
from assay.guard.resume import check_resumed
from assay.guard.update import Account, check_gradients, check_optimizer, check_steps, check_weights
from assay.guard.watch import Read, Watch, check_detectors
from assay.learn import loop
from assay.learn.ema import Ema, parted
from assay.learn.graph import GraphedAccumulate
from assay.learn.loop import Accumulate, Step, train
from assay.learn.objectives import next_token
from assay.learn.optim import adamw, load_state_tensors, muon, state_tensors
from assay.learn.schedule import cosine, warmup_stable_decay
from assay.model.placement import default_device, place_for_training
from assay.model.stops import resolve_stops
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Rope, Transformer, initialised, parameter_count, qkv_rows
from assay.recipes.handover import hand_over
from assay.recipes.looks import Looks
from assay.recipes.options import Pretrain
from assay.recipes.run import Clock, Run, plain, say_now
from assay.recipes.squeezed import require_room
from assay.store.artifact import open_artifact
from assay.store.checkpoint import Checkpoint, Contents
from assay.store.identity import environment
from assay.store.pack import Lineage, model_contents
from assay.store.saver import own
from assay.verdict import Verdict

LEARNING = 0.1  # multiplier of the peak rate below which steps may be too small to be told from rounding


@dataclass(frozen=True)
class Plan:
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
        with work.run.interruptible():
            work.begin()
            for step in train(work.model, work.optimizer, work.batches(), next_token, micro=work.plan.micro, schedule=work.multiplier,
                              clip=config.clip, start=work.start, accumulate=work.accumulate):
                work.after(step)
                if work.over():
                    break
            work.finish()
        if work.run.interrupted is not None:
            return [], work.run.interrupted
        best = work.looks.best_checkpoint(work.run.checkpoints)
        return hand_over(work.run, best, work.looks, work.corpus, rows=work.plan.micro, length=config.length,
                         max_bytes=config.max_bytes), None


class Pretraining:
    """What a run of this recipe remembers between steps."""

    def __init__(self, config: Pretrain, say: Callable[[str], None]):
        self.config, self.clock = config, Clock()
        self.corpus = open_corpus(Path(config.corpus))
        assert_disjoint(self.corpus)
        self.plan = derived(config, self.corpus)
        self.order = Order(self.corpus, config.seed, self.plan.rows, config.length, config.epochs)
        self.order.require(self.plan.steps or 1)  # refused before anything is made, where the data does not suffice
        self.tokenizer = Tokenizer.from_folder(Path(config.corpus))
        self.model = place_for_training(initialised(self.plan.model, config.seed), self.plan.device)
        for line in announced(config, self.plan, self.corpus, parameter_count(self.model)):
            say(line)
        if config.max_bytes is not None:
            of_depth = partial(shape, config.shape, vocab=self.plan.model.vocab, length=config.length)
            say(require_room(of_depth, config.depth, self.tokenizer, config.max_bytes))
        self.optimizer = optimizer_for(config, self.plan, self.model)
        self.ema = Ema(self.model, config.ema) if config.ema else None
        self.run = Run(Path(config.out), config, say=say)  # a request that was refused until here leaves no folder
        self.accumulate: Accumulate = GraphedAccumulate() if self.plan.device.startswith("cuda") else loop.accumulated
        self.looks = Looks(self.run, self.corpus, rows=self.plan.micro, length=config.length, documents=config.look_documents,
                           repeats_from=self.order.windows // self.plan.rows, device=self.plan.device)
        self.watch = Watch([group["lr"] for group in self.optimizer.param_groups], self.multiplier, vocab=self.plan.model.vocab,
                           consumed=partial(check_consumed, order=self.order))
        self.start = self.done = self.saved = 0  # steps taken before this sitting, in all, and up to the last save
        self.stop_at = self.plan.steps  # where time decides, both are found on the way
        self.decay_from: int | None = None

    def begin(self) -> None:
        """Go on from the newest good checkpoint, or make the first one: a save is made and proven before step 1."""
        found = self.run.newest() if self.run.resumed else None
        if found is not None:
            self.resume(found)
        else:
            self.run.rewind(0)
            self.looks.recall()
        self.rehearse()
        if found is None:
            self.run.save(0, lambda: self.contents(0))
        self.account = Account(self.model)

    def batches(self) -> Iterator[Batch]:
        self.run.ledger.append("data", corpus=self.corpus.digest, tokenizer=self.corpus.tokenizer_digest, windows=self.order.windows,
                               from_step=self.start, seed=self.config.seed)
        self.watch.begin()
        return corpus_batches(self.corpus, seed=self.config.seed, rows=self.plan.rows, length=self.config.length,
                              epochs=self.config.epochs, start=self.start, stop=self.plan.steps)

    def rehearse(self) -> None:
        """Before the first step of a sitting: the loss is the loss, every tensor is reached and held, the alarms are awake."""
        batch = sample_rows(self.order.batch(0)).to(self.plan.device)
        trained = [name for name, _ in self.model.named_parameters()]
        _, reached = gradients(self.model, lambda: self.accumulate(self.model, next_token, batch, len(batch), float(batch.weight.sum())),
                               backward=False)
        verdicts = [check_detectors(), *preflight(self.model, next_token, batch, self.accumulate), check_gradients(reached, trained),
                    check_optimizer(self.model, self.optimizer, trained), check_order(self.order)]
        self.run.say("\n".join(f"  {verdict}" for verdict in verdicts))
        self.run.judge("preflight", verdicts)

    def resume(self, found: Checkpoint) -> None:
        """Weights, moments and the step number: everything else is a function of them."""
        trainer = found.trainer() or {}
        tensors = open_artifact(found.folder).tensors
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])
        moments, average = parted(found.optimizer() or {})
        load_state_tensors(self.optimizer, dict(self.model.named_parameters()), moments)
        if self.ema is not None:
            self.ema.load(average)
        self.run.judge("resumed", [check_resumed(self.model, self.state(), found), check_same_data(trainer["data"]["corpus"], self.corpus),
                                   check_steps(self.optimizer, trainer["step"])])
        self.start = self.done = self.saved = trainer["step"]
        self.decay_from, self.clock = trainer["decay_from"], Clock(trainer["seconds"])
        self.stop_at = self.plan.steps or trainer["stop_at"]
        self.run.rewind(self.start)
        self.looks.recall()
        self.run.say(f"going on from step {self.start} ({found.folder.name})")
        now, was = environment(), found.facts["environment"]
        if changed := {name: f"{was.get(name)} → {now[name]}" for name in now if was.get(name) != now[name]}:
            self.run.say(f"the environment changed ({changed}): the run goes on, but is not bit for bit the uninterrupted one")
            self.run.ledger.append("not bit-exact", changed=changed)

    def multiplier(self, step: int) -> float:
        """Of every peak rate: a pure function of the step, once it is known when the way down begins."""
        if self.stop_at is None:
            return min(1.0, (step + 1) / (self.config.warmup + 1))
        if self.config.schedule == "cosine":
            return cosine(step, self.stop_at, min(self.config.warmup, self.stop_at // 2))
        decay = max(1, round(self.config.decay * self.stop_at)) if self.decay_from is None else self.stop_at - self.decay_from
        return warmup_stable_decay(step, self.stop_at, min(self.config.warmup, self.stop_at - decay), decay)

    def after(self, step: Step) -> None:
        self.record(self.watch.feed(step, [group["lr"] for group in self.optimizer.param_groups]))
        self.done = step.index + 1
        if self.ema is not None:
            self.ema.update(step.index)
        self.run.check()
        self.decide_the_end()
        if self.done == 1 or self.done % self.config.every == 0 or self.done == self.order.steps:  # the data ends here: a next step raises
            self.checkpoint()
        self.watch.begin()

    def record(self, read: list[Read]) -> None:
        for step, loss, norm in read:
            self.looks.saw(loss)
            self.run.record(step.index, loss=loss, grad_norm=norm, learning_rate=self.plan.lr * step.multiplier,
                            num_tokens=(step.index + 1) * step.tokens, epoch=self.order.epoch_of(step.index), data=ids_digest(step.ids),
                            seconds=round(self.clock.seconds, 3))
        if read:
            self.run.progress(self.done, self.stop_at, f"loss {read[-1][1]:.4f}", self.clock.seconds)

    def decide_the_end(self) -> None:
        """Under --minutes: when the flat part's share of the time is over, what is left of it is the way down, in steps."""
        pace = self.watch.pace()
        if self.config.minutes is None or self.stop_at is not None or self.done <= self.config.warmup or pace is None:
            return
        left = 60 * self.config.minutes - self.clock.seconds
        if left <= self.config.decay * 60 * self.config.minutes:
            self.decay_from, self.stop_at = self.done, self.done + max(1, int(0.98 * left / pace))
            self.run.ledger.append("way down", step=self.done, stop_at=self.stop_at, seconds_a_step=pace)

    def over(self) -> bool:
        late = self.config.minutes is not None and self.clock.seconds >= 60 * self.config.minutes
        return late or self.run.interrupted is not None or (self.stop_at is not None and self.done >= self.stop_at)

    def checkpoint(self, *, look: bool = True) -> None:
        """A look, and a save of what was looked at. What moved and what did not is accounted for first."""
        self.record(self.watch.read())
        if self.done > self.start:
            self.settle_account()
        if look:
            with contextlib.nullcontext() if self.ema is None else self.ema.swapped():
                self.looks.look(self.model, self.done, weight_set=None if self.ema is None else "ema")
        if self.saved != self.done:
            self.saved = self.done
            self.run.save(self.done, partial(self.contents, self.done))
        self.run.tidy(self.looks.best_checkpoint(self.run.checkpoints))

    def settle_account(self) -> None:
        self.run.judge("account", [self.account.moved(), self.account.frozen(), check_steps(self.optimizer, self.done),
                                   check_weights(self.model)])
        if self.multiplier(self.done - 1) >= LEARNING:
            self.account.begin()

    def contents(self, step: int) -> Contents:
        trainer = {"step": step, "seconds": self.clock.seconds, "decay_from": self.decay_from, "stop_at": self.stop_at,
                   "data": {"corpus": self.corpus.digest, "windows_read": step * self.plan.rows}, "schedule": self.config.schedule,
                   "rng": {"seed": self.config.seed, "order": "derive(seed, 'order', epoch)"}}
        # Plain pretraining text ends its documents with the boundary token, but nothing asks for an answer that stops.
        lineage = Lineage() if self.ema is None else Lineage(weight_set="raw", scored_set="ema")
        return own(model_contents(self.model, self.tokenizer, resolve_stops(self.tokenizer, {}, {}), lineage,
                                  run_config=plain(dataclasses.asdict(self.config)), trainer=trainer, optimizer=self.state()))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint's optimizer file holds, live."""
        moments = state_tensors(self.optimizer, dict(self.model.named_parameters()))
        return moments if self.ema is None else moments | self.ema.tensors()

    def finish(self) -> None:
        """Whatever ended the loop: the last values are judged, the last state is saved and proven.

        An interrupted run takes no look, because the uninterrupted one would not have taken it here.
        """
        self.record(self.watch.read())
        interrupted = self.run.interrupted is not None
        if self.done and (self.saved if interrupted else self.looks.latest_step) != self.done:
            self.checkpoint(look=not interrupted)
        self.run.finish()
        whole, more = divmod(self.done * self.plan.rows, self.order.windows)
        self.run.ledger.append("consumed", steps=self.done, windows=self.order.windows,
                               read_times={str(whole + 1): more, str(whole): self.order.windows - more})
        if self.looks.steps:
            self.run.tidy(self.looks.best_checkpoint(self.run.checkpoints))


def derived(config: Pretrain, corpus: Corpus) -> Plan:
    if (config.minutes is None) == (config.tokens is None):
        raise UsageError("give one budget: --minutes or --tokens")
    if config.depth < 1 or config.length < 8 or config.batch_tokens < config.length:
        raise UsageError(f"depth {config.depth}, length {config.length}, batch_tokens {config.batch_tokens}: expected a depth of "
                         "at least 1, a length of at least 8 and a batch of at least one row")
    if config.schedule == "cosine" and config.minutes is not None:
        raise UsageError("--schedule cosine must know its last step from the first: give --tokens, or use --schedule wsd with --minutes")
    rows = config.batch_tokens // config.length
    steps = None if config.tokens is None else max(1, math.ceil(config.tokens / (rows * config.length)))
    vocab = math.ceil(Tokenizer.from_folder(Path(config.corpus)).size / 64) * 64  # rows beyond the tokenizer's are never used
    rate = config.lr or (0.02 if config.optimizer == "muon" else 0.002)
    micro = max(1, min(rows, config.micro_tokens // config.length))
    return Plan(shape(config.shape, config.depth, vocab, config.length), rows, micro, steps, rate, config.device or default_device())


def shape(style: str, depth: int, vocab: int, length: int) -> ModelConfig:
    """width = 64 · depth, heads of 64, eight thirds of the width in a gated MLP, four times in a plain one."""
    width = 64 * depth
    gated = style == "qwen3"
    hidden = math.ceil(width * 8 / 3 / 64) * 64 if gated else 4 * width
    return ModelConfig(family=style, vocab=vocab, width=width, depth=depth, heads=depth, kv_heads=depth, head_dim=64, hidden=hidden,
                       max_length=max(length, 64), norm="rms", norm_eps=1e-6, rope=Rope(10000.0), activation="silu" if gated else "relu2",
                       gated=gated, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=True, windows=(None,) * depth, tied=True,
                       softcap=None if gated else 15.0)


def optimizer_for(config: Pretrain, plan: Plan, model: Transformer) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    if config.optimizer == "adamw":
        return adamw(named, plan.lr, weight_decay=config.weight_decay)
    slices: dict[str, tuple[int, ...]] = {}
    for layer in range(plan.model.depth):  # q, k, v and gate, up are matrices of their own, stored as rows of one
        slices[f"blocks.{layer}.attn.qkv.weight"] = qkv_rows(plan.model)
        if plan.model.gated:
            slices[f"blocks.{layer}.mlp.up.weight"] = (plan.model.hidden, plan.model.hidden)
    return muon(named, lr_matrix=plan.lr, lr_embed=config.lr_embed, lr_scalar=config.lr_embed, slices=slices,
                weight_decay=config.weight_decay)


def announced(config: Pretrain, plan: Plan, corpus: Corpus, parameters: int) -> list[str]:
    """Everything that was derived, before anything is spent."""
    m = plan.model
    end = f"{plan.steps:,} steps" if plan.steps else f"{config.minutes:g} minutes"
    lines = [f"{m.family}: {m.depth} layers of width {m.width}, {m.heads} heads, MLP {m.hidden}, vocabulary {m.vocab}: "
             f"{parameters:,} parameters",
             f"{config.optimizer} at {plan.lr:g}, {plan.rows} × {config.length} tokens a step, {end}, on {plan.device}",
             f"corpus {corpus.digest[:12]}: {corpus.train.tokens:,} training tokens, {corpus.held_out.documents} held-out documents"]
    if plan.steps:
        cost = budget(corpus, parameters, plan.steps * plan.rows * config.length)
        lines += [str(cost)]
    return lines
