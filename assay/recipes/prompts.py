"""Prompts as the data of reinforcement: read, split and drawn in an order of their own; what a checkpoint says of them.

Shapes: P prompts, G completions of each.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from assay.data.chat import text_prefix_ids
from assay.data.data_files import read_rows
from assay.data.data_ledger import ids_digest
from assay.data.hub_datasets import local_data
from assay.data.layouts import Conversation, content_of, read_conversations
from assay.data.mixture import MixedDraws, parts_by_name, placed_row, weighted_sources
from assay.data.order import permuted_places
from assay.data.packing import hold_out
from assay.errors import DataError, UsageError
from assay.guard.data_order_checks import check_mixture
from assay.model.tokenizer import Tokenizer
from assay.recipes.grpo_options import Grpo
from assay.recipes.starting_model import StartingModel
from assay.reward.worker_pool import AskedPrompt
from assay.seeds import derive
from assay.strict_json import read_json_lines
from assay.verdict import Verdict, proven, refuted

AUDITED_PROMPTS = 4096  # of a mixture, before step 1


@dataclass(frozen=True)
class Prompt:
    """`row` is the line of data that it was made from, for its rewards; `asked` what it says before any template."""

    id: str
    ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]
    asked: AskedPrompt | None = None

    @property
    def content(self) -> str:
        return content_of(self.id)


def read_prompts(file: str, tokenizer: Tokenizer, gsm8k: Any = "plain", limit: int | None = None) -> list[Prompt]:
    """A file's rows as what a sampler is given: up to the generation prompt, answers left away."""
    conversations, begin = read_conversations(file, gsm8k=gsm8k, limit=limit).rows, text_prefix_ids(tokenizer)
    prompts = []
    for said, row in zip(conversations, read_rows(local_data(file), limit=limit), strict=True):
        templated = bool(said.messages) and tokenizer.template is not None
        text = tokenizer.render(asked(said), tools=said.tools, add_generation_prompt=True) if templated else plain_prompt(said)
        ids = tokenizer.encode(text)
        if not templated and ids[: len(begin)] != begin:
            ids = begin + ids
        if not ids:
            raise DataError(f"{said.where}: the prompt has no tokens; there is nothing to complete")
        plain = None if said.plain is None else said.plain[0]
        prompts.append(Prompt(said.id, tuple(ids), text, row.values, AskedPrompt(said.where, tuple(asked(said)), said.tools, plain)))
    return prompts


def asked(said: Conversation) -> Sequence[Mapping[str, Any]]:
    """The messages before the answer: of a whole conversation, before its last one by the assistant."""
    if said.learned_from:
        return said.messages[: said.learned_from]
    answers = [place for place, message in enumerate(said.messages) if message["role"] == "assistant"]
    return said.messages[: answers[-1]] if answers else said.messages


def plain_prompt(said: Conversation) -> str:
    if said.plain is None:
        raise DataError(f"{said.where}: the row has messages, and this model has no chat template to write them with; "
                        "add chat_template.jinja to its folder, or give prompts as text")
    return said.plain[0]


@dataclass(frozen=True)
class PromptOrder:
    """Order of the prompts that rollouts draw: a pure function of the seed and the rollout. Every epoch reads each once, in another
    order."""

    prompts: Sequence[Prompt]
    seed: int
    places: int  # a rollout
    epochs: int

    def __post_init__(self) -> None:
        if not 1 <= self.places <= len(self.prompts) or self.epochs < 1:
            raise UsageError(f"{self.places} prompts a rollout of {len(self.prompts)} in the data, {self.epochs} epochs: expected at least "
                             "one of each, and as many prompts as a rollout takes; lower --prompts, or give more data")

    @property
    def rollouts(self) -> int:
        """Rollouts that the data gives before it is exhausted."""
        return self.epochs * len(self.prompts) // self.places

    def drawn(self, rollout: int) -> list[Prompt]:
        if rollout >= self.rollouts:
            raise DataError(f"rollout {rollout} needs {(rollout + 1) * self.places:,} prompts; {len(self.prompts):,} read {self.epochs} "
                            f"times give {self.rollouts:,} rollouts. Give more prompts, fewer steps, or --num-train-epochs "
                            f"{-(-(rollout + 1) * self.places // len(self.prompts))}")
        size, found = len(self.prompts), []
        for place in range(rollout * self.places, (rollout + 1) * self.places):
            key = derive(self.seed, "prompts", place // size)
            found.append(self.prompts[int(permuted_places(np.array([place % size]), size, key)[0])])
        return found

    def epoch_of(self, rollout: int) -> int:
        return rollout * self.places // len(self.prompts)

    def times_drawn(self, rollouts: int) -> dict[int, int]:
        """{times: prompts}, as planned: prompts that took the place of silent ones come on top, and the samples name them."""
        whole, more = divmod(rollouts * self.places, len(self.prompts))
        return {times: prompts for times, prompts in ((whole, len(self.prompts) - more), (whole + 1, more)) if prompts}

    def check_shares(self, rollouts: int) -> list[Verdict]:
        """No verdicts: there is one source."""
        return []

    def spare(self, rollout: int) -> Iterator[Prompt]:
        """Others, for places that taught nothing: each at most once a rollout."""
        size, taken = len(self.prompts), {prompt.id for prompt in self.drawn(rollout)}
        order = permuted_places(np.arange(size), size, derive(self.seed, "spare prompts", rollout))
        return (self.prompts[place] for place in order.tolist() if self.prompts[place].id not in taken)

    @cached_property
    def digest(self) -> str:
        """Digest of every prompt's ids and row, in order: another file, template, tokenizer or split is other data."""
        return prompts_digest(self.prompts)


@dataclass(frozen=True)
class MixedPromptOrder(PromptOrder):
    """Prompts of several sources by their weights."""

    draws: MixedDraws = field(kw_only=True)

    @property
    def rollouts(self) -> int:
        return self.draws.prompts_in_all // self.places

    def drawn(self, rollout: int) -> list[Prompt]:
        if rollout >= self.rollouts:
            out = self.draws.sources[placed_row(self.draws.prompts_in_all, self.draws.shares).source].name
            raise DataError(f"rollout {rollout} needs {(rollout + 1) * self.places:,} prompts, and after {self.draws.prompts_in_all:,} "
                            f"{out} has been read {self.epochs} time(s), as --num-train-epochs allows: the mixture gives {self.rollouts:,} "
                            "rollouts. Raise --num-train-epochs, lower its weight, or take fewer steps")
        return [self.prompts[number] for number in self.draws.drawn(rollout)]

    def epoch_of(self, rollout: int) -> int:
        return self.draws.epoch_of(rollout)

    def times_drawn(self, rollouts: int) -> dict[int, int]:
        return self.draws.times_drawn(rollouts)

    def check_shares(self, rollouts: int) -> list[Verdict]:
        return [check_mixture(self.draws, rollouts)]


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(repr((prompt.id, prompt.ids, sorted((key, str(value)) for key, value in prompt.row.items()))).encode())
    return found.hexdigest()


@dataclass(frozen=True)
class PromptData:
    """Data of a GRPO run: training and held-out prompts, and their order. A rollout is trained on `updates` times."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    dropped: int  # too long
    order: PromptOrder
    updates: int
    tokenizer: str  # its digest

    @cached_property
    def digest(self) -> str:
        return prompts_digest([*self.train, *self.held_out])

    @property
    def steps(self) -> int:
        """Steps that the data gives before it is exhausted."""
        return self.order.rollouts * self.updates

    def epoch_of(self, step: int) -> int:
        return self.order.epoch_of(step // self.updates)

    def facts(self, step: int) -> dict[str, Any]:
        """Record of the prompts in a checkpoint: the same at every step, which the order is a function of."""
        return {"prompts": self.digest, "tokenizer": self.tokenizer, "seed": self.order.seed, "examples": len(self.train),
                "held_out": len(self.held_out)}

    def check_same(self, recorded: Mapping[str, Any]) -> Verdict:
        words = f"the prompts are {self.digest[:12]} now, the run began with {recorded['prompts'][:12]}"
        if recorded["prompts"] != self.digest:
            return refuted("same data", f"{words}: a file, the template or the split is another; give them back, or begin a new run")
        return proven("same data", words)

    def audit(self) -> list[Verdict]:
        """Audit the split and the order of the prompts. Of a mixture the first prompts are counted here, and all that were drawn at the
        end."""
        some = min(self.order.rollouts, max(1, AUDITED_PROMPTS // self.order.places))
        return [check_apart(self.train, self.held_out), *self.order.check_shares(some)]

    def check_shares(self, steps: int) -> list[Verdict]:
        """Check that every source of a mixture gave its share."""
        return self.order.check_shares(steps // self.updates) if steps >= self.updates else []

    def times_read(self, steps: int) -> dict[int, int]:
        return self.order.times_drawn(steps // self.updates)

    @property
    def longest(self) -> int:
        """Tokens."""
        return max(len(prompt.ids) for prompt in (*self.train, *self.held_out))


def split_prompts(config: Grpo, start: StartingModel) -> PromptData:
    """Read the prompts and hold some out. Which are held out is decided by what the prompts say, before any is dropped for its length."""
    def read(file: str, limit: int | None = None) -> list[Prompt]:
        return read_prompts(file, start.tokenizer, config.gsm8k, limit)

    sources = weighted_sources(config.data, "--data")
    by_source = [read(source.name, config.limit) for source in sources]
    said = [prompt for prompts in by_source for prompt in prompts]
    kept, apart = (said, read(config.held_out_data)) if config.held_out_data else hold_out(said, config.held_out, config.seed)
    room = start.model.config.max_length - config.max_completion_length
    longest = min(room, config.max_prompt_length or room)
    train, held_out = ([prompt for prompt in some if len(prompt.ids) <= longest] for some in (kept, apart))
    if len(held_out) < 2:
        raise UsageError(f"{len(held_out)} prompts are held out, so nothing could be said about the result: raise --held-out, or give "
                         "--held-out-data")
    order = PromptOrder(train, config.seed, config.prompts, config.num_train_epochs)
    if sources[0].weight is not None:
        draws = MixedDraws(parts_by_name(sources, by_source, train), config.seed, config.prompts, config.num_train_epochs)
        order = MixedPromptOrder(train, config.seed, config.prompts, config.num_train_epochs, draws=draws)
    return PromptData(train, held_out, len(kept) + len(apart) - len(train) - len(held_out), order, config.num_iterations,
                      start.tokenizer.digest)


def check_apart(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> Verdict:
    """Check that no held-out prompt is trained on, in this file or another, under this number or another."""
    seen = {prompt.content for prompt in train} | {prompt.text for prompt in train}
    both = [prompt.id for prompt in held_out if prompt.content in seen or prompt.text in seen]
    if both:
        return refuted("held_out", f"{len(both)} held-out prompts are trained on too: a gain on them would say nothing; remove them",
                       prompts=len(both))
    return proven("held_out", f"none of {len(held_out)} held-out prompts is among the {len(train)} that are trained on")


def check_prompt_ledger(metrics: Path, prompts: PromptData, steps: int) -> Verdict:
    """Check that the prompts which the rollouts of all sessions wrote down are those that were planned: none lost, skipped or taken
    again."""
    written = {row["step"]: row["prompts_digest"] for row in read_json_lines(metrics) if "prompts_digest" in row}
    for step in range(0, steps, prompts.updates):
        due = ids_digest((tuple(prompt.id for prompt in prompts.order.drawn(step // prompts.updates)),))
        if written.get(step) != due:
            return refuted("prompt_ledger", f"step {step} wrote down the prompts {written.get(step, 'of no rollout')}, the plan has {due}: "
                           "the order was lost between two sittings, or a rollout was", step=step)
    return proven("prompt_ledger", f"{steps // prompts.updates} rollouts drew the prompts that were planned for them")


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` of them; who they are depends on what they say alone."""
    return list(prompts[:: max(1, -(-len(prompts) // max(2, count)))])
