"""Unpaired feedback: TRL's rows of prompt, completion and label become examples, each beside a completion that answers another prompt.

  unpaired        prompt, completion: both text, or both lists of messages; label: true (desirable) or false (undesirable)
  preference      prompt, chosen, rejected as in data/preferences.py: the chosen is desirable, the rejected is not

KTO compares what a completion gained with what any completion gained: the KL to the reference, estimated on completions that belong
to other prompts. Which one stands beside an example is a property of the data: the one before it that answers another prompt with
another text. So the reference can be asked once about both.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from assay.data.batch import Batch
from assay.data.chat import NOTHING_LEFT, Overlong, Rendered, TrainingExample, fit_to_length, render_conversations, supervised_runs
from assay.data.data_files import DataRow, read_rows
from assay.data.hub_datasets import local_data
from assay.data.layouts import CONVERSATION_LAYOUTS, Conversation, refuse_odd_turns, refuse_repeated_prompts
from assay.data.mixture import MixedExamples
from assay.data.packing import PackedExamples
from assay.data.preferences import PreferencePair, pair_rows, read_pair
from assay.errors import DataError
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer

_UNBOUNDED = 10**9  # tokens: examples are rendered whole, and cut beside their mismatched completion


@dataclass(frozen=True)
class SaidFeedback:
    """A row as it was read."""

    id: str  # file:row:content
    answer: Conversation
    desirable: bool
    prompt: str  # a digest of what is answered

    @property
    def content(self) -> str:
        """Key by which rows are held out together."""
        return self.prompt


@dataclass(frozen=True, eq=False)
class LabelledPair(PreferencePair):
    """An example as tokens: `chosen` is its own completion, `rejected` one that answers another prompt, and neither is preferred."""

    desirable: bool = True

    @property
    def preference(self) -> tuple[Hashable, Hashable]:
        own = self.chosen.tokens.tobytes()
        return (own, self.desirable), (own, not self.desirable)


@dataclass(frozen=True)
class PackedFeedback(PackedExamples):
    """Rows of examples, each two neighbouring documents: its own completion even, the mismatched one odd."""

    examples: Sequence[LabelledPair]  # type: ignore[assignment]

    def batch(self, step: int) -> Batch:
        return feedback_rows([[self.examples[index] for index in row] for row in self.plan(step)], self.length, self.fill)


@dataclass(frozen=True)
class MixedFeedback(PackedFeedback, MixedExamples):
    """Examples of several sources by their weights; no row holds those of two."""


def feedback_rows(rows: Sequence[Sequence[LabelledPair]], length: int, fill: int = 0) -> Batch:
    """The label of an example stands in `advantage`, at every token of its own document: 1 or −1."""
    made = pair_rows(rows, length, fill)
    assert made.documents is not None
    signs = torch.zeros_like(made.weight)
    for row, examples in enumerate(rows):
        for number, example in enumerate(examples):
            signs[row, made.documents[row] == 2 * number] = 1.0 if example.desirable else -1.0
    return replace(made, advantage=signs)

# ---------------------------------------------------------------- rows → labelled conversations


def read_feedback(path: Path | str, limit: int | None = None) -> list[SaidFeedback]:
    path = local_data(path)
    said = [each for row in read_rows(path, limit=limit) for each in read_labelled(row, path.name)]
    if not said:
        raise DataError(f"{path}: there is no row in it")
    refuse_repeated_prompts(path, [[each.answer.plain] for each in said if not each.answer.messages])
    return said


def read_labelled(row: DataRow, name: str) -> list[SaidFeedback]:
    if row.values.get("label") is None and row.values.get("chosen") is not None:
        pair = read_pair(row, name)
        return [SaidFeedback(side.id, side, desirable, pair.prompt) for side, desirable in ((pair.chosen, True), (pair.rejected, False))]
    columns = {key: row.values.get(key) for key in ("prompt", "completion", "label")}
    if missing := [key for key, value in columns.items() if value is None]:
        raise DataError(f"{row.where}: there is no {' and no '.join(missing)} among the columns {', '.join(row.values) or 'none'}; "
                        "expected prompt, completion and label, or prompt, chosen and rejected")
    label = columns["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(f"{row.where}: label is {label!r}; expected true (desirable) or false (undesirable)")
    content = CONVERSATION_LAYOUTS["prompt-completion"].read(row, "plain")
    refuse_odd_turns(row, content.messages, content.learned_from)
    id = f"{name}:{row.number}:{_digest(columns)}"
    return [SaidFeedback(id, Conversation(id, row.where, *content), bool(label), _digest(columns["prompt"]))]


def refuse_one_sided(said: Sequence[SaidFeedback], where: str) -> None:
    """KTO needs both labels."""
    labels = Counter(each.desirable for each in said)
    if len(labels) < 2:
        every = "desirable" if labels[True] else "undesirable"
        raise DataError(f"{where}: all {len(said)} rows are {every}: KTO weighs one kind against the other; add rows of the other, or "
                        "use assay sft for answers that are all good")


def _digest(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]

# ---------------------------------------------------------------- conversations → tokens


def render_feedback(said: Sequence[SaidFeedback], tokenizer: Tokenizer, stops: SpecialTokens, *, length: int,
                    over: Overlong = "drop") -> tuple[list[LabelledPair], Rendered]:
    """The examples that fit into `length` tokens, by the model's own template; and what became of the others."""
    if not said:
        return [], Rendered([])
    whole = render_conversations([each.answer for each in said], tokenizer, stops, length=_UNBOUNDED)
    kept, dropped = list[tuple[SaidFeedback, TrainingExample]](), Counter[str]()
    for each, example in zip(said, whole.examples, strict=True):
        fitted = fit_to_length(example, length, over)
        if isinstance(fitted, TrainingExample) and np.count_nonzero(fitted.weight):
            kept.append((each, fitted))
        else:
            dropped[fitted if isinstance(fitted, str) else NOTHING_LEFT] += 1
    pairs = [LabelledPair(each.id, example, mismatched(kept, place, length), each.desirable) for place, (each, example) in enumerate(kept)]
    return pairs, Rendered([example for _, example in kept], dict(dropped), sum(example.cut for _, example in kept), whole.seams,
                           whole.unread)


def mismatched(kept: Sequence[tuple[SaidFeedback, TrainingExample]], place: int, length: int) -> TrainingExample:
    """The prompt of an example with the completion of the one before it, or of the nearest before that says something else to another."""
    said, own = kept[place]
    others = (kept[place - back] for back in range(1, len(kept)))
    apart = (other for each, other in others if each.prompt != said.prompt and not np.array_equal(_completion(other), _completion(own)))
    other = next(apart, kept[place - 1][1])
    tokens = np.concatenate([own.tokens[: own.prompt], _completion(other)])[:length]
    weight = np.concatenate([own.weight[: own.prompt], other.weight[other.prompt :]])[:length]
    if not weight.any():  # a prompt that fills the length but for less than what the other completion begins with
        weight[-1] = 1.0
    return TrainingExample(f"{said.id}#mismatched", tokens, weight, other.intended[: len(supervised_runs(weight))], own.prompt, own.asked,
                           cut=True, conversation=other.conversation)


def _completion(example: TrainingExample) -> np.ndarray:
    return example.tokens[example.prompt :]
