"""Preference pairs as the data of a run: read, split by prompt, rendered, packed and audited; and what the reference says of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data.batch import Batch
from assay.data.chat import Rendered, unread_in_words
from assay.data.mixture import MixedExamples, WeightedSource, weighted_sources
from assay.data.packing import PackedExamples, hold_out
from assay.data.preferences import (
    MixedPairs,
    PackedPairs,
    PreferencePair,
    SaidPair,
    by_prompt,
    pair_rows,
    read_preferences,
    render_pairs,
)
from assay.data.reference_store import StoredReference, open_reference, pair_answers, write_reference
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut
from assay.evaluation.held_out_pairs import ScoredPairs, score_pairs
from assay.guard.corpus_checks import require_held_out
from assay.guard.example_audit import audit_each, check_duplicates, check_overlap
from assay.guard.example_checks import FlatExamples
from assay.guard.preference_checks import (
    check_contradictions,
    check_held_out_prompts,
    check_loss_moves,
    check_pair_reference,
    check_pairs,
    doubts,
)
from assay.guard.training_guards import LEARNING_SHARE
from assay.learn.lr_schedule import Schedule
from assay.learn.policy import token_logprobs
from assay.learn.preference import PreferenceSettings
from assay.model.placement import place_for_training
from assay.model.transformer import Transformer, parameter_count
from assay.recipes.conversations import (
    Conversations,
    evenly,
    joined_rows,
    mixed,
    mixture_in_words,
    ordered,
    refuse_beyond_context,
)
from assay.recipes.dpo_options import AgainstReference, Dpo, PairedOptions
from assay.recipes.evaluator import interval_columns
from assay.recipes.live_reference import LiveReference
from assay.recipes.run import Run
from assay.recipes.starting_model import AdapterModel, StartingModel, beside_live, reopen_parent, streamed_parent
from assay.recipes.trainer import Trainer
from assay.store.artifact import build_model, open_artifact, straight_to
from assay.store.ledger import Event
from assay.verdict import Verdict, refuted

ASKED_AGAIN = 8  # pairs of which the parent is asked anew whether the reference still says what it does
REFERENCE_FOLDER = "reference"


@dataclass(frozen=True)
class PreferenceData(Conversations):
    """`train` and `held_out` are pairs. Once the `reference` was asked, every batch carries what it says."""

    train: Sequence[PreferencePair]  # type: ignore[assignment]
    held_out: Sequence[PreferencePair]  # type: ignore[assignment]
    settings: PreferenceSettings = field(kw_only=True)
    length: int = field(kw_only=True)  # most tokens of a side
    reference: StoredReference | LiveReference | None = None

    def with_reference(self, found: StoredReference | LiveReference) -> "PreferenceData":
        return replace(self, reference=found, scored_as=f"{self.scored_as} against {found.weights[:12]}")

    def answered(self, batch: Batch) -> Batch:
        return batch if self.reference is None else self.reference.attached(batch)

    def batch(self, step: int) -> Batch:
        return self.answered(super().batch(step))

    def batches(self, run: Run, start: int) -> Iterator[Batch]:
        return map(self.answered, super().batches(run, start))

    def facts(self, step: int) -> dict[str, Any]:
        told = {} if self.reference is None else {"reference": self.reference.weights, "reference_logprobs": self.reference.digest}
        return super().facts(step) | told

    def check_same(self, recorded: Mapping[str, Any]) -> Verdict:
        if self.reference is not None and recorded.get("reference") != self.reference.weights:
            return refuted("same data", f"the reference is {self.reference.weights[:12]} now, the run began with "
                                        f"{str(recorded.get('reference'))[:12]}; give it back, or begin a new run")
        if self.reference is not None and recorded.get("reference_logprobs") != self.reference.digest:
            return refuted("same data", f"the reference's log-probabilities are {self.reference.digest[:12]} now, the run began with "
                                        f"{str(recorded.get('reference_logprobs'))[:12]}; give them back, or begin a new run")
        return super().check_same(recorded)

    def audit(self, start: StartingModel) -> list[Verdict]:
        """Audit the sides as examples, and the pairs as pairs: one good answer may stand in many of them."""
        rows: frozenset[int] | Literal["all"] = frozenset() if isinstance(start.weights, AdapterModel) else "all"
        embed = start.model.embed.weight.detach().cpu().float()
        sides = FlatExamples([side for pair in self.train for side in pair.sides])
        pairs = FlatExamples(self.train)  # type: ignore[arg-type]
        return [*audit_each(sides, start.tokenizer, start.parent.stops, embed=embed, trainable=rows, length=self.length,
                            seed=self.order.seed),
                check_pairs([*self.train, *self.held_out]), check_duplicates(pairs),
                check_contradictions([pair.preference for pair in self.train], "pair"),
                check_overlap(pairs, self.held_out, ()),  # type: ignore[arg-type]
                check_held_out_prompts(self.train, self.held_out, "pair"), self.audit_order()]

    def held_out_batches(self, rows: int, count: int | None = None) -> list[Batch]:
        chosen = list(self.held_out) if count is None else evenly(self.held_out, count)
        return [self.answered(batch) for batch in joined_rows(PackedPairs(chosen, 0, 1, self.order.length), rows)]

    def score(self, model: Transformer, rows: int, count: int | None = None) -> ScoredPairs:
        return score_pairs(model, self.held_out_batches(rows, count), self.settings, rows=rows)

    def evaluated(self, model: Transformer, rows: int, count: int | None = None) -> HeldOut:
        """Evaluate everything held out, or `count` of it: its loss, and what was measured beside it."""
        found = self.score(model, rows, count)
        bias = {} if found.length_bias is None else {"eval_length_bias": found.length_bias}
        columns = interval_columns({"eval_margin": found.margin, "eval_accuracy": found.accuracy} | bias)
        logps = {"eval_chosen_logps": float(found.chosen.mean()), "eval_rejected_logps": float(found.rejected.mean())}
        return replace(found.held_out, columns=columns | logps, words=f"margin {found.margin}, chosen preferred {found.accuracy}",
                       doubts=doubts(None, found) if self.settings.needs_reference else ())

    def check_losses(self, losses: Sequence[float], done: int, schedule: Schedule) -> list[Verdict]:
        """Whether they leave what the loss is at the reference."""
        return [check_loss_moves([loss for _, loss in learning_losses(losses, done, schedule)], self.settings)]

    def sample(self) -> Batch:
        """A few training pairs as a step would be given them."""
        chosen = evenly(self.train, ASKED_AGAIN)[:ASKED_AGAIN]
        return self.answered(pair_rows([[pair] for pair in chosen], self.order.length))


def pairs_in(ids: tuple[Any, ...]) -> int:
    return sum(len(row) for row in ids)


def learning_losses(losses: Sequence[float], done: int, schedule: Schedule) -> list[tuple[int, float]]:
    """Losses of steps at which the rate was up, with their steps; not of the first step of all, which is taken at the reference."""
    return [(step, loss) for step, loss in enumerate(losses, done - len(losses))
            if step > 0 and schedule.multiplier(step) >= LEARNING_SHARE]


def settings_of(config: Dpo) -> PreferenceSettings:
    return PreferenceSettings(config.loss_type, config.strength(), config.label_smoothing, config.simpo_gamma)


def load_preferences(config: Dpo, start: StartingModel) -> PreferenceData:
    settings = settings_of(config)
    scored_as = f"{settings.loss} preference loss, beta {settings.beta:g}, smoothing {settings.label_smoothing:g}, gamma {settings.gamma:g}"
    return PreferenceData(*split_pairs(config, start, read_preferences), start.tokenizer.digest, scored_as, settings=settings,
                          length=config.max_length)


def split_pairs(config: PairedOptions, start: StartingModel, read_file: Callable[..., list[SaidPair]]) -> "SplitExamples":
    """Read, split and render the pairs. Which are held out is decided on prompts, before anything is rendered."""
    read = read_sources(config, read_file)
    if config.held_out_data is not None:
        kept, apart = read.said, read_file(config.held_out_data)
    else:
        kept, apart = hold_out(by_prompt(read.said), config.held_out, config.seed)
    return render_split(config, start, kept, apart, read, render_pairs, PackedPairs, MixedPairs, "pair")


class ReadSources(NamedTuple):
    """The files of --data, with a weight each or none, and what each of them says."""

    sources: Sequence[WeightedSource]
    rows: Sequence[Sequence[Any]]

    @property
    def said(self) -> list[Any]:
        """Rows of all sources, one source after the other."""
        return [each for rows in self.rows for each in rows]


def read_sources(config: PairedOptions, read: Callable[[str, int | None], Sequence[Any]]) -> ReadSources:
    sources = weighted_sources(config.data, "--data")
    return ReadSources(sources, [read(source.name, config.limit) for source in sources])


class SplitExamples(NamedTuple):
    """Examples split into training and held-out ones, with what rendering reported, their order, and the number of steps."""

    train: Sequence[Any]
    held_out: Sequence[Any]
    rendered: Rendered
    order: PackedExamples
    steps: int | None


def render_split(config: PairedOptions, start: StartingModel, kept: Sequence[Any], apart: Sequence[Any], read: ReadSources,
                 render: Callable[..., tuple[list[Any], Rendered]], alone: type[PackedExamples], together: type[MixedExamples],
                 noun: str) -> SplitExamples:
    """Render both parts as tokens of two neighbouring documents each; refused where too little is held out, or a text exceeds the context.
    `together` is the order of sources that have weights, `alone` that of all others."""
    (train, rendered), (held_out, without) = (
        render(said, start.tokenizer, start.parent.stops, length=config.max_length, over=config.too_long) for said in (kept, apart))
    dropped = "".join(f" ({count} dropped: {reason})" for reason, count in without.dropped.items())
    require_held_out(config.held_out_data or ", ".join(map(str, config.data)), len(held_out), noun,
                     f"raise --held-out, give --held-out-data with more of them, or raise --max-length where they are too long{dropped}")
    refuse_beyond_context([side for pair in (*train, *held_out) for side in pair.sides], start.model.config)
    order = ordered(config, train, alone) if read.sources[0].weight is None else mixed(config, train, read.sources, read.rows, together)
    return SplitExamples(train, held_out, rendered, *order)


def describe_pairs(config: Dpo, start: StartingModel, data: PreferenceData, lr: float, device: str) -> list[str]:
    """Lines that describe everything that was derived, before anything is spent."""
    trained = sum(p.numel() for p in start.model.parameters() if p.requires_grad)
    counts, order, settings = data.rendered.counts, data.order, data.settings
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in counts["dropped"].items()) or "none dropped"
    end = f"{data.steps:,} steps" if data.steps else f"{config.minutes:g} minutes"
    against = f"the reference is {start.parent.digest[:12]}, {config.reference}" if settings.needs_reference else "there is no reference"
    return [start.weights.words,
            f"{start.parent.path}: {parameter_count(start.model):,} parameters, of which {trained:,} are trained; weights "
            f"{start.parent.digest[:12]}",
            f"{len(data.train):,} pairs to learn, {counts['truncated']} truncated, {dropped}; {len(data.held_out):,} held out",
            *unread_in_words(data.rendered.unread),
            f"{settings.loss} loss, beta {settings.beta:g}; {against}",
            f"{counts['supervised']:,} of {counts['tokens']:,} tokens are learned from; {order.windows:,} rows of {order.length}, "
            f"{order.padding:.1%} padding, {order.examples_a_row:.1f} pairs a row",
            *mixture_in_words(order, data.steps),
            f"{config.optim} at {lr:g}, {order.rows} × {order.length} tokens a step, {end}, on {device}"]

# ---------------------------------------------------------------- the reference


def reference_model(start: StartingModel) -> Transformer:
    """The parent, opened anew and held as the policy is: what it says is compared with what the policy says. Of a policy in parts it is
    read matrix by matrix."""
    reopened = reopen_parent(start)
    if start.weights.stored is not None:
        return streamed_parent(start, reopened, start.device, None).eval()
    return place_for_training(build_model(reopened, None).requires_grad_(False), start.device).eval()


def refuse_idle_reference(config: AgainstReference, settings: PreferenceSettings) -> None:
    if config.reference == "live" and not settings.needs_reference:
        raise UsageError(f"--reference live with the loss {settings.loss}, which has no reference; leave it out")


def ask_reference(data: PreferenceData, start: StartingModel, config: AgainstReference, folder: Path, rows: int,
                  say: Callable[[str], None]) -> PreferenceData:
    """The data with what the reference says of every pair: asked once, and read back ever after; or asked live, of each batch."""
    if not data.settings.needs_reference:
        return data
    if config.reference == "live":
        say(f"the parent {start.parent.digest[:12]} stays beside the policy and is asked about each batch")
        return data.with_reference(LiveReference(reference_model(start), start.parent.digest, rows))
    every, where = [*data.train, *data.held_out], folder / REFERENCE_FOLDER
    if not where.exists():
        model, answers = reference_model(start), dict[str, NDArray[np.float32]]()
        for batch in joined_rows(PackedPairs(every, 0, 1, data.order.length), rows):
            said = said_by(model, batch)
            answers.update(zip([str(id) for row in batch.ids for id in row], pair_answers(batch, said), strict=True))
        write_reference(where, (answers[pair.id] for pair in every), weights=start.parent.digest, data=data.digest)
        say(f"{where}: log-probabilities of {len(every):,} pairs by the parent {start.parent.digest[:12]}")
    return data.with_reference(open_reference(where, every, weights=start.parent.digest, data=data.digest))


def score_beside_parent(data: PreferenceData, start: StartingModel, trainer: Trainer, handed: Path) -> tuple[Any, Any, Any]:
    """Scores on everything held out: of the parent, of the model as it was trained, and of the bytes that were handed over."""
    before, trained = data.score(reference_model(start), trainer.micro), data.score(trainer.model, trainer.micro)
    opened = open_artifact(handed, to=beside_live(start) or straight_to(trainer.device))
    return before, trained, data.score(build_model(opened, None).to(trainer.device), trainer.micro)


@torch.no_grad()
def said_by(model: Transformer, batch: Batch) -> torch.Tensor:
    return token_logprobs(model, batch.to(model.embed.weight.device))[0]


def check_parent_reference(data: PreferenceData, start: StartingModel) -> list[Verdict]:
    """Check the reference of a few pairs by asking the parent again, from its bytes on disk; nothing where there is no reference."""
    return [] if data.reference is None else [check_pair_reference(data.sample(), reference_model(start), data.reference.weights),
                                              *check_live_reference(data)]


def check_live_reference(data: PreferenceData) -> list[Verdict]:
    """Check that the reference model in memory has its bits; nothing where the reference's answers are stored."""
    return [data.reference.check_unmoved()] if isinstance(data.reference, LiveReference) else []


def judge_live_reference(run: Run, data: PreferenceData) -> None:
    """Judge the live reference before a save: what was learned since the last was learned against the parent."""
    if found := check_live_reference(data):
        run.judge(Event.REFERENCE, found)
