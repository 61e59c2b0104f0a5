"""Conversations as the data of fine-tuning: read, split, rendered and ordered; what a checkpoint says of them, and their audit."""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch

from assay.data.batch import Batch
from assay.data.chat import Rendered, TrainingExample, render_conversations, unread_in_words
from assay.data.data_ledger import check_data_ledger
from assay.data.layouts import Conversation, read_conversations
from assay.data.mixture import MixedExamples, NamedRow, WeightedSource, parts_by_name, weighted_sources
from assay.data.packing import PackedExamples, hold_out
from assay.errors import UsageError
from assay.guard.corpus_checks import require_held_out
from assay.guard.data_order_checks import check_mixture
from assay.guard.example_audit import audit_examples, check_batch, check_packing, check_supervised_weight
from assay.learn.loop import Step
from assay.learn.lr_schedule import Schedule
from assay.model.families import scaled_context
from assay.model.transformer import ModelConfig, parameter_count
from assay.recipes.options import Trained, Tuned, Tuning
from assay.recipes.run import Run
from assay.recipes.starting_model import AdapterModel, StartingModel
from assay.recipes.suite import read_suite, refuse_unanswerable
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict, proven, refuted

A_LONG_RUN = 10  # minutes
SHORTEST = 8  # tokens of the shortest row that is worth a run
WRITTEN_STEPS = 50  # every batch is compared with the audited examples; one in so many is written down
NEVER = 10**12
EVALUATED_EVERY = 100  # steps, where no --save-steps is given
Spread = TypeVar("Spread")


@dataclass(frozen=True)
class Conversations:
    """Data of a fine-tuning run: training and held-out conversations as tokens, and their order. `scored_as` names what evaluations
    measure: those of two runs are compared only where it is the same.
    """

    train: Sequence[TrainingExample]
    held_out: Sequence[TrainingExample]
    rendered: Rendered
    order: PackedExamples
    steps: int | None  # that the run will take; None where time decides
    tokenizer: str  # its digest
    scored_as: str = "next-token loss"

    @cached_property
    def digest(self) -> str:
        """Digest of every token and weight, in order: another template, tokenizer, file or split is other data."""
        found = hashlib.sha256()
        for example in (*self.train, *self.held_out):
            found.update(example.id.encode() + example.tokens.tobytes() + example.weight.tobytes())
        return found.hexdigest()

    def facts(self, step: int) -> dict[str, Any]:
        """Record of the data in a checkpoint, read up to `step`; the order is a function of the seed, so it is the same at every step."""
        return {"conversations": self.digest, "scored_as": self.scored_as, "tokenizer": self.tokenizer, "seed": self.order.seed,
                "examples": len(self.train), "held_out": len(self.held_out)}

    def check_same(self, recorded: Mapping[str, Any]) -> Verdict:
        """Whether the data is what a checkpoint's `facts` say."""
        words = f"the conversations are {self.digest[:12]} now, the run began with {recorded['conversations'][:12]}"
        if recorded["conversations"] != self.digest:
            return refuted("same data", f"{words}: a file, the template or the split is another; give them back, or begin a new run")
        return proven("same data", words)

    def audit(self, start: StartingModel) -> list[Verdict]:
        rows: frozenset[int] | Literal["all"] = frozenset() if isinstance(start.weights, AdapterModel) else "all"
        embed = start.model.embed.weight.detach()  # where it lies: the rows that are looked at are few
        return [*audit_examples(self.train, start.tokenizer, start.parent.stops, embed=embed, trainable=rows, held_out=self.held_out,
                       length=self.order.length, seed=self.order.seed), self.audit_order()]

    def audit_order(self) -> Verdict:
        return check_mixture(self.order, self.order.steps) if isinstance(self.order, MixedExamples) else check_packing(self.order)

    def batches(self, run: Run, start: int) -> Iterator[Batch]:
        """Batches of step `start` and all later ones, each compared with the audited examples before it is learned from: a batch may name
        what was planned and hold something else, a held-out conversation or a mask without its end, and from any step on."""
        examples, step = {example.id: example for example in self.train}, start
        while True:
            batch = self.order.batch(step)
            self._judge(run, step, check_batch(batch, examples))
            yield batch
            step += 1

    def judge_step(self, run: Run, step: Step) -> None:
        """Check that the step trained on the weight of its audited examples: nothing was masked after the batch was made."""
        due = sum(float(self.order.examples[index].weight.sum()) for row in self.order.plan(step.index) for index in row)
        self._judge(run, step.index, check_supervised_weight(step.index, step.weight, due))

    def _judge(self, run: Run, step: int, verdict: Verdict) -> None:
        if step % WRITTEN_STEPS == 0 or verdict.outcome is Outcome.REFUTED:
            run.judge(Event.BATCH, [verdict])

    def check_losses(self, losses: Sequence[float], done: int, schedule: Schedule) -> list[Verdict]:
        """Verdicts on the training losses up to step `done` since the last evaluation; none for next-token loss."""
        return []

    def batch(self, step: int) -> Batch:
        return self.order.batch(step)

    def epoch_of(self, step: int) -> int:
        return self.order.epoch_of(step)

    @property
    def rows(self) -> int:
        """Rows in an epoch."""
        return self.order.windows

    @property
    def last_step(self) -> int:
        """The last step that the data gives before it is exhausted."""
        return self.order.steps

    @property
    def repeats_from(self) -> int:
        """The step from which on conversations are read again."""
        rows = self.order.repeats_from_row if isinstance(self.order, MixedExamples) else self.order.windows
        return rows // self.order.rows

    def times_read(self, run: Run, steps: int) -> dict[int, int]:
        """How many examples all steps so far have read how often, {times: examples}: counted from what they wrote down, and judged."""
        verdict, times = check_data_ledger(run.consumed(), self.order, steps)
        mixture = [check_mixture(self.order, steps)] if isinstance(self.order, MixedExamples) and steps else []
        run.judge(Event.DATA_LEDGER, [verdict, *mixture])
        return times

    def held_out_batches(self, rows: int, count: int | None = None) -> list[Batch]:
        """Held-out batches of `rows` rows: all that is held out, or `count` of it."""
        chosen = self.held_out if count is None else evenly(self.held_out, count)
        return held_out_batches(chosen, self.order.length, rows)


def refuse_nonsense(config: Tuned) -> None:
    if config.max_length < SHORTEST or config.batch_tokens < config.row_length:
        raise UsageError(f"--max-length {config.max_length} makes rows of {config.row_length} tokens, --batch-tokens is "
                         f"{config.batch_tokens}: expected a length of at least {SHORTEST}, and a batch of at least one row")
    refuse_unbudgeted(config)


def refuse_unbudgeted(config: Trained) -> None:
    if config.max_steps is not None and config.minutes is not None:
        raise UsageError("give one budget: --max-steps or --minutes; without either the epochs decide")
    if config.save_steps == 0 and not config.insist and not (config.minutes or math.inf) <= A_LONG_RUN:
        raise UsageError(f"--save-steps 0 on a run that may take more than {A_LONG_RUN} minutes: a crash would lose all of it; "
                         "give a number of steps, --minutes up to ten, or --insist")
    if config.suite is not None:
        refuse_unanswerable(read_suite(config.suite))


def evaluated_every(save_steps: int | None) -> int:
    """Steps between two evaluations, each with a checkpoint or, where the cost decides, perhaps one."""
    return EVALUATED_EVERY if save_steps is None else save_steps or NEVER


def load_conversations(config: Tuning, start: StartingModel) -> Conversations:
    """Load, split, render and pack the conversations. Which are held out is decided on the conversations, before anything is rendered."""
    sources = weighted_sources(config.data, "--data")
    read = [read_conversations(source.name, gsm8k=config.gsm8k, limit=config.limit).rows for source in sources]
    said = [row for rows in read for row in rows]
    if config.held_out_data is not None:
        kept, apart = said, list(read_conversations(config.held_out_data, gsm8k=config.gsm8k).rows)
    else:
        kept, apart = hold_out(said, config.held_out, config.seed)
    if not apart:
        raise UsageError("nothing is held out, so nothing could be said about the result: raise --held-out, or give --held-out-data")

    def rendered(conversations: Sequence[Conversation]) -> Rendered:
        return render_conversations(conversations, start.tokenizer, start.parent.stops, length=config.max_length, over=config.too_long,
                                    roles=config.roles,
                      turns=config.turns)

    train, held_out = rendered(kept), rendered(apart).examples
    require_held_out(config.held_out_data or ", ".join(map(str, config.data)), len(held_out), "conversation",
                     "raise --held-out, give --held-out-data with more of them, or raise --max-length where they were dropped as too long")
    refuse_beyond_context([*train.examples, *held_out], start.model.config)
    if sources[0].weight is None:
        order, steps = ordered(config, train.examples)
    else:
        order, steps = mixed(config, train.examples, sources, read)
    return Conversations(train.examples, held_out, train, order, steps, start.tokenizer.digest)


def refuse_beyond_context(examples: Sequence[TrainingExample], model: ModelConfig) -> None:
    """Rows may be longer than the context, since positions count anew in each conversation; a conversation may not."""
    longest = max((len(example.tokens) for example in examples), default=0)
    if longest > model.max_length:
        raise UsageError(f"a conversation has {longest:,} tokens, and the model's config has a context of {model.max_length:,}: beyond it "
                         f"positions mean nothing to the model; give --max-length {model.max_length}{_or_scaling(model, longest)}")


def _or_scaling(model: ModelConfig, longest: int) -> str:
    """The scaling of positions that this model takes and that reaches so far, where there is one."""
    for scaling in (f"yarn:{math.ceil(longest / model.max_length)}", "long"):
        with contextlib.suppress(UsageError):
            if scaled_context(model, scaling).max_length >= longest:
                return f", or state a scaling, such as --rope-scaling {scaling}"
    return ""


def ordered(config: Tuned, examples: Sequence[Any], packed: type[PackedExamples] = PackedExamples) -> tuple[PackedExamples, int | None]:
    """The order of the examples and the number of steps, which is not known where time decides."""
    rows = config.batch_tokens // config.row_length
    order = packed(examples, config.seed, rows, config.row_length, reachable_epochs(config, rows, examples), config.packing)
    if order.windows < rows:
        order = replace(order, rows=order.windows)
    steps = None if config.minutes is not None else config.max_steps or order.steps
    order.require(steps or 1)
    return order, steps


def mixed(config: Tuned, examples: Sequence[Any], sources: Sequence[WeightedSource], read: Sequence[Sequence[NamedRow]],
          packed: type[MixedExamples] = MixedExamples) -> tuple[PackedExamples, int | None]:
    """The order of a mixture and the number of steps. `read` are the rows of each source, in the order of `examples`."""
    rows, parts = config.batch_tokens // config.row_length, parts_by_name(sources, read, examples)
    order = packed(examples, config.seed, rows, config.row_length, config.num_train_epochs, config.packing, sources=parts,
                   most=None if config.max_steps is None else config.max_steps * rows)
    if order.windows < rows:
        order = replace(order, rows=order.windows)
    steps = None if config.minutes is not None else config.max_steps or order.steps
    order.require(steps or 1)
    return order, steps


def mixture_in_words(order: PackedExamples, steps: int | None) -> list[str]:
    """Lines that say what each source of a mixture will give; none where there is one source."""
    return [f"mixture: {check_mixture(order, steps or order.steps).reason}"] if isinstance(order, MixedExamples) else []


def reachable_epochs(config: Tuned, rows: int, examples: Sequence[Any]) -> int:
    """The epochs that --max-steps can reach: planning those after them would take time and memory for nothing."""
    if config.max_steps is None:
        return config.num_train_epochs
    fewest = math.ceil(sum(map(len, examples)) / config.row_length) if config.packing else len(examples)  # rows of an epoch
    return min(config.num_train_epochs, math.ceil(config.max_steps * rows / max(fewest, 1)))


def held_out_batches(examples: Sequence[TrainingExample], length: int, rows: int) -> list[Batch]:
    return joined_rows(PackedExamples(examples, 0, 1, length), rows)


def joined_rows(order: PackedExamples, rows: int) -> list[Batch]:
    """Batches of `rows` rows, from all rows of an order of one row a step."""
    return [_joined([order.batch(step) for step in range(at, min(at + rows, order.steps))]) for at in range(0, order.steps, rows)]


def _joined(batches: Sequence[Batch]) -> Batch:
    streams: dict[str, Any] = {name: torch.cat([batch.streams()[name] for batch in batches]) for name in batches[0].streams()}
    divisors = [batch.divisor for batch in batches if batch.divisor is not None]
    return Batch(**streams, ids=tuple(row for batch in batches for row in batch.ids), divisor=sum(divisors) if divisors else None)


def evenly(examples: Sequence[Spread], count: int) -> list[Spread]:
    """`count` of them, spread over all; their order is of no meaning, because they were chosen by what they say."""
    return list(examples[:: max(1, -(-len(examples) // count))])


def _unbalanced_in_words(model: ModelConfig) -> list[str]:
    """Message about a mixture of experts whose config asks for a balancing loss that this recipe does not add."""
    if model.experts is None or not model.experts.balance:
        return []
    return [f"a mixture of {model.experts.count} experts: the loss that would keep them equally busy (router_aux_loss_coef "
            f"{model.experts.balance:g} of its config) is not added, as in transformers by default"]


def describe_tuning(config: Tuning, start: StartingModel, data: Conversations, lr: float, device: str) -> list[str]:
    """Lines that describe everything that was derived, before anything is spent."""
    trained = sum(p.numel() for p in start.model.parameters() if p.requires_grad)
    counts, order, steps = data.rendered.counts, data.order, data.steps
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in counts["dropped"].items()) or "none dropped"
    end = f"{steps:,} steps" if steps else f"{config.minutes:g} minutes"
    planned = order.windows * (1 if isinstance(order, MixedExamples) else config.num_train_epochs)
    left = planned - order.steps * order.rows if steps == order.steps else 0
    return [start.weights.words,
            f"{start.parent.path}: {parameter_count(start.model):,} parameters, of which {trained:,} are trained; weights "
            f"{start.parent.digest[:12]}",
            *_unbalanced_in_words(start.model.config),
            f"{counts['kept']:,} conversations to train on, {counts['truncated']} truncated, {dropped}; {len(data.held_out):,} held out",
            *unread_in_words(counts["unread"]),
            f"{counts['supervised']:,} of {counts['tokens']:,} tokens are supervised; {order.windows:,} rows of {config.max_length}, "
            f"{order.padding:.1%} padding",
            *mixture_in_words(order, steps),
            f"{config.optim} at {lr:g}, {order.rows} × {config.max_length} tokens a step, {end}, on {device}"
            + (f"; the last {left} rows do not fill a step and are not read" if left > 0 else "")]
