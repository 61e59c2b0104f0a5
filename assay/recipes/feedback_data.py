"""Feedback as the data of a KTO run: read, split by prompt, rendered, packed and audited; and its KL, estimated anew at every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.chat import unread_in_words
from assay.data.feedback import (
    LabelledPair,
    MixedFeedback,
    PackedFeedback,
    SaidFeedback,
    feedback_rows,
    read_feedback,
    refuse_one_sided,
    render_feedback,
)
from assay.data.layouts import content_of
from assay.data.packing import hold_out
from assay.data.preferences import ENOUGH_PROMPTS
from assay.evaluation.held_out_feedback import ScoredFeedback, score_feedback
from assay.evaluation.held_out_loss import HeldOut
from assay.guard.example_audit import audit_each, check_duplicates, check_overlap
from assay.guard.example_checks import FlatExamples
from assay.guard.kto_checks import check_feedback, check_kto_moves, feedback_doubts, unbalanced
from assay.guard.preference_checks import check_contradictions, check_held_out_prompts, moved_reference
from assay.learn.lr_schedule import Schedule
from assay.learn.unpaired import KtoSettings, with_baseline
from assay.model.transformer import Transformer, parameter_count
from assay.recipes.conversations import evenly, joined_rows, mixture_in_words
from assay.recipes.evaluator import interval_columns
from assay.recipes.kto_options import Kto
from assay.recipes.preference_data import ASKED_AGAIN, PreferenceData, learning_losses, read_sources, render_split
from assay.recipes.starting_model import AdapterModel, StartingModel
from assay.verdict import Verdict


@dataclass(frozen=True)
class FeedbackData(PreferenceData):
    """`train` and `held_out` are examples beside a mismatched completion. Batches that are learned from carry the KL of `policy`."""

    train: Sequence[LabelledPair]
    held_out: Sequence[LabelledPair]
    settings: KtoSettings = field(kw_only=True)  # type: ignore[assignment]
    policy: Transformer | None = None
    micro: int = 1

    def followed(self, policy: Transformer, micro: int) -> "FeedbackData":
        """This data, whose batches are given the KL of this policy when they are asked for."""
        return replace(self, policy=policy, micro=micro)

    def answered(self, batch: Batch) -> Batch:
        found = super().answered(batch)
        if self.policy is None or found.reference is None or not self.settings.has_baseline:
            return found
        return with_baseline(self.policy, found, self.micro)

    def audit(self, start: StartingModel) -> list[Verdict]:
        rows: frozenset[int] | Literal["all"] = frozenset() if isinstance(start.weights, AdapterModel) else "all"
        own, held_out = FlatExamples([pair.chosen for pair in self.train]), [pair.chosen for pair in self.held_out]
        embed = start.model.embed.weight.detach().cpu().float()
        return [*audit_each(own, start.tokenizer, start.parent.stops, embed=embed, trainable=rows, length=self.length,
                            seed=self.order.seed),
                check_feedback(self.train), check_duplicates(own),
                check_contradictions([pair.preference for pair in self.train], "answer"), check_overlap(own, held_out, ()),
                check_held_out_prompts(self.train, self.held_out, "answer"), self.audit_order()]

    def held_out_batches(self, rows: int, count: int | None = None) -> list[Batch]:
        """Held-out batches with the reference, and without a KL: an evaluation estimates its own, of the model that it scores."""
        chosen = list(self.held_out) if count is None else evenly(self.held_out, count)
        return [super(FeedbackData, self).answered(batch) for batch in joined_rows(PackedFeedback(chosen, 0, 1, self.order.length), rows)]

    def score(self, model: Transformer, rows: int, count: int | None = None) -> ScoredFeedback:  # type: ignore[override]
        return score_feedback(model, self.held_out_batches(rows, count), self.settings, rows=rows)

    def evaluated(self, model: Transformer, rows: int, count: int | None = None) -> HeldOut:
        found = self.score(model, rows, count)
        apart = {} if found.one_sided else {"eval_margin": found.margin()}
        bias = {} if found.length_bias is None else {"eval_length_bias": found.length_bias}
        columns = interval_columns({"eval_accuracy": found.accuracy} | apart | bias)
        words = "".join(f"margin {margin}, " for margin in apart.values()) + f"on the right side of the KL {found.accuracy}"
        return replace(found.held_out, columns=columns | {"eval_kl": found.kl}, words=words, doubts=feedback_doubts(None, found))

    def check_losses(self, losses: Sequence[float], done: int, schedule: Schedule) -> list[Verdict]:
        learning = learning_losses(losses, done, schedule)
        due = [self.settings.at_reference(self.labels(self.order.ids(step))) for step, _ in learning]
        return [check_kto_moves([loss for _, loss in learning], due)]

    def labels(self, ids: tuple[Any, ...]) -> Tensor:
        """Labels of the examples in some rows: 1 where desirable, -1 where not."""
        read = {str(id) for row in ids for id in row}
        return torch.tensor([1.0 if pair.desirable else -1.0 for pair in self.train if pair.id in read])

    def sample(self) -> Batch:
        chosen = evenly(self.train, ASKED_AGAIN)[:ASKED_AGAIN]
        return self.answered(feedback_rows([[pair] for pair in chosen], self.order.length))

    def sample_off_reference(self) -> Batch:
        """The sample against a reference that the policy has left: at its own the KL is 0, however it is estimated."""
        assert self.policy is not None
        return with_baseline(self.policy, moved_reference(self.sample()), self.micro)


def kto_settings(config: Kto) -> KtoSettings:
    return KtoSettings(config.loss_type, config.beta, config.desirable_weight, config.undesirable_weight)


def by_asked(said: Sequence[SaidFeedback]) -> list[SaidFeedback]:
    """Answers to one prompt are held out together, but for data that has hardly any prompts: there each answer is by itself."""
    if len({each.prompt for each in said}) >= ENOUGH_PROMPTS:
        return list(said)
    return [replace(each, prompt=content_of(each.id)) for each in said]


def load_feedback(config: Kto, start: StartingModel) -> FeedbackData:
    """Load, split and pack KTO's labelled answers. Which are held out is decided on prompts, before anything is rendered."""
    settings = kto_settings(config)
    read = read_sources(config, read_feedback)
    said = read.said
    refuse_one_sided(said, ", ".join(map(str, config.data)))
    kept, apart = (said, read_feedback(config.held_out_data)) if config.held_out_data is not None else hold_out(
        by_asked(said), config.held_out, config.seed)
    split = render_split(config, start, kept, apart, read, render_feedback, PackedFeedback, MixedFeedback, "example")
    scored_as = (f"{settings.loss} loss, beta {settings.beta:g}, weights {settings.desirable_weight:g} and "
                 f"{settings.undesirable_weight:g}")
    return FeedbackData(*split, start.tokenizer.digest, scored_as, settings=settings, length=config.max_length)


def describe_feedback(config: Kto, start: StartingModel, data: FeedbackData, lr: float, device: str) -> list[str]:
    """Lines that describe everything that was derived, before anything is spent."""
    trained = sum(p.numel() for p in start.model.parameters() if p.requires_grad)
    counts, order, settings = data.rendered.counts, data.order, data.settings
    good = sum(pair.desirable for pair in data.train)
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in counts["dropped"].items()) or "none dropped"
    end = f"{data.steps:,} steps" if data.steps else f"{config.minutes:g} minutes"
    doubt = unbalanced(good, len(data.train) - good, settings)
    return [start.weights.words,
            f"{start.parent.path}: {parameter_count(start.model):,} parameters, of which {trained:,} are trained; weights "
            f"{start.parent.digest[:12]}",
            f"{good:,} desirable and {len(data.train) - good:,} undesirable answers to train on, {counts['truncated']} truncated, "
            f"{dropped}; {len(data.held_out):,} held out",
            *unread_in_words(data.rendered.unread), *([doubt] if doubt else []),
            f"{settings.loss} loss, beta {settings.beta:g}; the reference is {start.parent.digest[:12]}",
            f"{order.windows:,} rows of {order.length}, {order.padding:.1%} padding, {order.examples_a_row:.1f} answers a row, "
            "each with one of another prompt beside it",
            *mixture_in_words(order, data.steps),
            f"{config.optim} at {lr:g}, {order.rows} × {order.length} tokens a step, {end}, on {device}"]
