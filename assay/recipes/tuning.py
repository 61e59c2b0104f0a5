"""Fine-tuning, whatever the loss: conversations rendered and audited, a model or an adapter trained on them, its parent named."""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from assay.data.batch import Batch
from assay.data.chat import Rendered, TrainingExample, render_conversations
from assay.data.layouts import Conversation, read_conversations
from assay.data.packing import PackedExamples, hold_out
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut, score_examples
from assay.guard.data_order_checks import check_consumed
from assay.guard.example_audit import audit_examples, check_batch, check_packing
from assay.guard.proof_subject import ProofSampling
from assay.guard.training_guards import StepReading, StepWatch
from assay.learn.objectives import Objective
from assay.learn.optim import adamw, largest_quotient
from assay.model.placement import default_device, place_for_training
from assay.model.transformer import Transformer, parameter_count
from assay.recipes.beginning import Beginning, begin, carry
from assay.recipes.forms import Adapter
from assay.recipes.handover import SAME_LOOK
from assay.recipes.looks import Looks
from assay.recipes.options import Trained, Tuning
from assay.recipes.pace import Budget, Pace
from assay.recipes.run import Run
from assay.recipes.stopping import Stopping, early_rule
from assay.recipes.training import Parts, Training
from assay.store.artifact import build_model
from assay.store.checkpoint import open_checkpoint
from assay.store.ledger import Event
from assay.strict_json import read_json_lines
from assay.verdict import Verdict, proven, refuted, unproven

BETAS = (0.9, 0.95)
A_LONG_RUN = 10  # minutes
AUDITED_STEPS = 50  # one step in so many is compared with the audited examples, token for token


@dataclass(frozen=True)
class Conversations:
    """What is learned and what is held out, as tokens."""

    train: Sequence[TrainingExample]
    held_out: Sequence[TrainingExample]
    rendered: Rendered

    @property
    def digest(self) -> str:
        """Of every token and weight, in order: another template, tokenizer, file or split is other data."""
        found = hashlib.sha256()
        for example in (*self.train, *self.held_out):
            found.update(example.id.encode() + example.tokens.tobytes() + example.weight.tobytes())
        return found.hexdigest()


class Tuned(Training):
    """A recipe gives the objective; `score` says how held-out conversations are scored, next-token loss where it does not."""

    scored_as = "next-token loss"  # what a look's numbers are: two runs' looks are compared only where both say the same
    scale: float | None = None  # of Looks

    def __init__(self, config: Tuning, say: Callable[[str], None]):
        refuse_nonsense(config)
        device = config.device or default_device()
        pace_known: list[Pace] = []
        start = begin(self.naming_parent(config, say), device, lambda step: reach(config, start, pace_known[0], step), say)
        self.beginning, self.lr = start, config.lr or (3e-4 if isinstance(start.form, Adapter) else 3e-5)
        self.conversations = self.converse(config, device, say)
        self.order, steps = ordered(config, self.conversations)
        self.digest = self.conversations.digest
        warmup = min(config.warmup, steps // 4) if steps else config.warmup
        pace = Pace(Budget(steps, config.minutes, config.schedule, warmup, config.decay))
        pace_known.append(pace)
        every = config.checkpoint_every or 10**12
        rule = early_rule(config.patience, config.worth, schedule=config.schedule, steps=steps, every=every)
        micro = max(1, min(self.order.rows, config.micro_tokens // config.length))
        for line in _announced(config, start, self.conversations, self.order, self.lr, steps, device):
            say(line)
        optimizer = adamw(start.model.named_parameters(), self.lr, betas=BETAS, weight_decay=config.weight_decay)
        carry(optimizer, start)
        objective = self.objective(config, device, say)
        # A request that was refused until here leaves no folder, but for RUN/base.
        run = Run(Path(config.out), config, say=say, probing=ProofSampling(config.probe_samples, device))
        watched = evenly(self.conversations.held_out, config.look_examples)
        looks = Looks(run, partial(self.score, examples=watched, rows=micro), repeats_from=self.order.windows // self.order.rows,
                      device=device, also=partial(self.also_looked, examples=watched, rows=micro), scale=self.scale)
        watch = StepWatch([group["lr"] for group in optimizer.param_groups], pace.multiplier,
                      consumed=partial(check_consumed, order=self.order))
        super().__init__(config, Parts(run, start.model, start.form, optimizer, objective, self.order, pace, looks, watch, micro,
                                       config.clip, every, minutes=config.checkpoint_minutes, steps_before=start.steps_before,
                                       look_first=True, stopping=None if rule is None else Stopping(run, looks, rule, every)))
        self.examples = {example.id: example for example in self.conversations.train}

    # ---------------------------------------------------------------- what a recipe answers

    @abstractmethod
    def objective(self, config: Any, device: str, say: Callable[[str], None]) -> Objective:
        """The loss that this recipe lowers."""

    def naming_parent(self, config: Any, say: Callable[[str], None]) -> Tuning:
        """The options with the model that is to be trained, where the recipe makes it first."""
        return config

    def converse(self, config: Any, device: str, say: Callable[[str], None]) -> Conversations:
        return conversed(config, self.beginning)

    def also_looked(self, model: Transformer, examples: Sequence[TrainingExample], rows: int) -> dict[str, float]:
        """More columns for a look's line of metrics."""
        return {}

    def score(self, model: Transformer, examples: Sequence[TrainingExample], rows: int) -> HeldOut:
        return score_examples(model, held_out_batches(examples, self.config.length, rows), rows=rows)

    def score_all(self, model: Transformer) -> HeldOut:
        return self.score(model, self.conversations.held_out, self.parts.micro)

    # ---------------------------------------------------------------- what the run asks

    def data_facts(self, step: int) -> dict[str, Any]:
        return {"conversations": self.digest, "scored_as": self.scored_as, "tokenizer": self.beginning.tokenizer.digest,
                "seed": self.config.seed, "examples": len(self.conversations.train), "held_out": len(self.conversations.held_out)}

    def data_verdicts(self) -> list[Verdict]:
        start = self.beginning
        rows: frozenset[int] | Literal["all"] = frozenset() if isinstance(start.form, Adapter) else "all"
        return [*audit_examples(self.conversations.train, start.tokenizer, start.parent.stops,
                                embed=start.model.embed.weight.detach().float().cpu(),
                       trainable=rows, held_out=self.conversations.held_out, length=self.config.length, seed=self.config.seed),
                check_packing(self.order)]

    def read_times(self) -> dict[int, int]:
        return self.counted(self.order)

    def same_data(self, recorded: Mapping[str, Any]) -> Verdict:
        words = f"the conversations are {self.digest[:12]} now, the run began with {recorded['conversations'][:12]}"
        if recorded["conversations"] != self.digest:
            return refuted("same data", f"{words}: a file, the template or the split is another; give them back, or begin a new run")
        return proven("same data", words)

    def begin(self) -> None:
        """A child's first loss is its parent's: as the parent's run recorded it, and as the parent, opened anew, has on the first batch."""
        super().begin()
        if self.start == 0:
            self.watch.parent_loss = self.parent_loss(self.source.batch(0))
            if self.config.from_ is not None:
                self.run.judge(Event.FORK, [self.check_fork(Path(self.config.from_))])

    def check_fork(self, parent: Path) -> Verdict:
        """The first look equals the one that the parent's run took of this checkpoint, conversation by conversation."""
        facts = (open_checkpoint(parent).trainer() or {}).get("data", {})
        step = open_checkpoint(parent).step
        looks = [row for row in read_json_lines(parent.parent.parent / "looks.jsonl") if row["step"] == step]
        if (facts.get("conversations"), facts.get("scored_as")) != (self.digest, self.scored_as) or not looks:
            return unproven("fork", f"the parent's run did not score these conversations by {self.scored_as}: its recorded loss says "
                                    "nothing", optional=True)
        found, due = self.looks.losses[0], np.array(looks[-1]["per_document"])
        if found.shape != due.shape:
            return unproven("fork", f"the parent's run looked at {len(due)} conversations, this one at {len(found)}", optional=True)
        error, bound = float(abs(found - due).max() / (self.scale or due.mean())), SAME_LOOK[self.model.compute_dtype or torch.float32]
        words = f"the first look and the parent's at step {step} differ by {error:.1e} (relative, worst of {len(due)}), bound {bound:.0e}"
        return (proven if error <= bound else refuted)("fork", words, error=str(error))

    @torch.no_grad()
    def parent_loss(self, batch: Batch) -> float:
        parent = place_for_training(build_model(self.beginning.parent), self.device, compile=False)
        parts = [self.parts.objective(parent, part.to(self.device)).total for part in batch.split(self.parts.micro)]
        return float(torch.stack(parts).sum()) / float(batch.weight.sum())

    def planned_batches(self) -> Iterator[Batch]:
        for step, batch in enumerate(super().planned_batches(), self.start):
            if step % AUDITED_STEPS == 0:
                self.run.judge(Event.BATCH, [check_batch(batch, self.examples)])
            yield batch

    def also_recorded(self, read: StepReading) -> dict[str, Any]:
        return {"supervised_tokens": read.step.weight}


def refuse_nonsense(config: Tuning) -> None:
    if config.length < 8 or config.batch_tokens < config.length:
        raise UsageError(f"length {config.length}, batch_tokens {config.batch_tokens}: expected a length of at least 8, and a batch of at "
                         "least one row")
    refuse_unbudgeted(config)


def refuse_unbudgeted(config: Trained) -> None:
    if config.steps is not None and config.minutes is not None:
        raise UsageError("give one budget: --steps or --minutes; without either the epochs decide")
    if config.checkpoint_every == 0 and not config.insist and not (config.minutes or math.inf) <= A_LONG_RUN:
        raise UsageError(f"--checkpoint-every 0 on a run that may take more than {A_LONG_RUN} minutes: a crash would lose all of it; "
                         "give a number of steps, --minutes up to ten, or --insist")


def conversed(config: Tuning, start: Beginning) -> Conversations:
    """Who is held out is decided on the conversations, before anything is rendered."""
    said = [row for file in config.data for row in read_conversations(file, gsm8k=config.gsm8k).rows]
    if config.held_out_data is not None:
        kept, apart = said, list(read_conversations(config.held_out_data, gsm8k=config.gsm8k).rows)
    else:
        kept, apart = hold_out(said, config.held_out, config.seed)
    if not apart:
        raise UsageError("nothing is held out, so nothing could be said about the result: raise --held-out, or give --held-out-data")

    def rendered(conversations: Sequence[Conversation]) -> Rendered:
        return render_conversations(conversations, start.tokenizer, start.parent.stops, length=config.length, over=config.over,
                                    roles=config.roles,
                      turns=config.turns)

    train = rendered(kept)
    return Conversations(train.examples, rendered(apart).examples, train)


def ordered(config: Tuning, conversations: Conversations) -> tuple[PackedExamples, int | None]:
    """The order of the examples and the number of steps, which is not known where time decides."""
    rows = config.batch_tokens // config.length
    order = PackedExamples(conversations.train, config.seed, rows, config.length, config.epochs, config.packing)
    if order.windows < rows:
        order = PackedExamples(conversations.train, config.seed, order.windows, config.length, config.epochs, config.packing)
    steps = None if config.minutes is not None else config.steps or order.steps
    order.require(steps or 1)
    return order, steps


def held_out_batches(examples: Sequence[TrainingExample], length: int, rows: int) -> list[Batch]:
    order = PackedExamples(examples, 0, 1, length)
    return [_joined([order.batch(step) for step in range(at, min(at + rows, order.steps))]) for at in range(0, order.steps, rows)]


def _joined(batches: Sequence[Batch]) -> Batch:
    streams: dict[str, Any] = {name: torch.cat([batch.streams()[name] for batch in batches]) for name in batches[0].streams()}
    return Batch(**streams, ids=tuple(row for batch in batches for row in batch.ids))


def evenly(examples: Sequence[TrainingExample], count: int) -> list[TrainingExample]:
    """`count` of them, spread over all; their order is of no meaning, because they were chosen by what they say."""
    return list(examples[:: max(1, -(-len(examples) // count))])


def reach(config: Trained, start: Beginning, pace: Pace, step: int) -> float:
    """How far AdamW can have moved an element in `step` steps, decay of the largest weight there is included."""
    travelled = (config.lr or 3e-5) * largest_quotient(BETAS) * sum(pace.multiplier(taken) for taken in range(step))
    largest = max(float(tensor.abs().max()) for tensor in start.parent.tensors.values())
    return travelled * (1 + config.weight_decay * (largest + travelled)) * 1.01


def _announced(config: Tuning, start: Beginning, conversations: Conversations, order: PackedExamples, lr: float, steps: int | None,
              device: str) -> list[str]:
    """Everything that was derived, before anything is spent."""
    trained = sum(p.numel() for p in start.model.parameters() if p.requires_grad)
    counts = conversations.rendered.counts
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in counts["dropped"].items()) or "none dropped"
    end = f"{steps:,} steps" if steps else f"{config.minutes:g} minutes"
    left = order.windows * config.epochs - order.steps * order.rows if steps == order.steps else 0
    return [f"{start.parent.path}: {parameter_count(start.model):,} parameters, of which {trained:,} are trained; weights "
            f"{start.parent.digest[:12]}",
            f"{counts['kept']:,} conversations to learn, {counts['truncated']} truncated, {dropped}; "
            f"{len(conversations.held_out):,} held out",
            f"{counts['supervised']:,} of {counts['tokens']:,} tokens are supervised; {order.windows:,} rows of {config.length}, "
            f"{order.padding:.1%} padding",
            f"adamw at {lr:g}, {order.rows} × {config.length} tokens a step, {end}, on {device}"
            + (f"; the last {left} rows fill no step and are not read" if left > 0 else "")]
