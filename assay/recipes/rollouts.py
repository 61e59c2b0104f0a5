"""Rollouts: prompts drawn in an order of their own, completed by the policy itself, scored, and made into batches.

Shapes: P prompts, G completions of each, N = P · G completions, B = N rows, T time.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.chat import text_prefix_ids
from assay.data.data_files import read_rows
from assay.data.layouts import Conversation, content_of, read_conversations
from assay.data.order import permuted_places
from assay.errors import DataError, GuardStop, UsageError
from assay.generate.engine import Engine, fitting_slots
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import version_name
from assay.learn.advantage import Advantages, Normalise, RewardValue, overlong_penalty, token_weights, untruncated
from assay.learn.cuda_graph import GraphedLogprobs
from assay.learn.policy import token_logprobs
from assay.model.attention import PADDING, documents_from_lengths
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.layout import Layout
from assay.reward.answer import AnswerForm, gold_answer, reading_disagreements, readings
from assay.reward.worker_pool import RewardItem, RewardWorkers, ScoredItem
from assay.seeds import derive

_Score = Callable[..., tuple[Tensor, Tensor | None]]  # token_logprobs, or a twin of it

_COLUMNS = 8  # a row's width is a multiple of this
OVERLONG = "overlong"

# ---------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prompt:
    """`row` is the line of data that it was made from, for its rewards."""

    id: str
    ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]

    @property
    def content(self) -> str:
        return content_of(self.id)


def read_prompts(file: str, tokenizer: Tokenizer, gsm8k: Any = "plain") -> list[Prompt]:
    """A file's rows as what a sampler is given: up to the generation prompt, answers left away."""
    conversations, begin = read_conversations(file, gsm8k=gsm8k).rows, text_prefix_ids(tokenizer)
    prompts = []
    for said, row in zip(conversations, read_rows(file), strict=True):
        templated = bool(said.messages) and tokenizer.template is not None
        text = tokenizer.render(asked(said), tools=said.tools, add_generation_prompt=True) if templated else _plain_text(said)
        ids = tokenizer.encode(text)
        if not templated and ids[: len(begin)] != begin:
            ids = begin + ids
        if not ids:
            raise DataError(f"{said.where}: the prompt has no tokens; there is nothing to complete")
        prompts.append(Prompt(said.id, tuple(ids), text, row.values))
    return prompts


def asked(said: Conversation) -> Sequence[Mapping[str, Any]]:
    """The messages before the answer: of a whole conversation, before its last one by the assistant."""
    if said.learned_from:
        return said.messages[: said.learned_from]
    answers = [place for place, message in enumerate(said.messages) if message["role"] == "assistant"]
    return said.messages[: answers[-1]] if answers else said.messages


def _plain_text(said: Conversation) -> str:
    if said.plain is None:
        raise DataError(f"{said.where}: the row has messages, and this model has no chat template to write them with; "
                        "add chat_template.jinja to its folder, or give prompts as text")
    return said.plain[0]


@dataclass(frozen=True)
class PromptOrder:
    """Which prompts a rollout draws: a pure function of the seed and the rollout. Every epoch reads each once, in another order."""

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
        """That the data gives before it is exhausted."""
        return self.epochs * len(self.prompts) // self.places

    def drawn(self, rollout: int) -> list[Prompt]:
        if rollout >= self.rollouts:
            raise DataError(f"rollout {rollout} needs {(rollout + 1) * self.places:,} prompts; {len(self.prompts):,} read {self.epochs} "
                            f"times give {self.rollouts:,} rollouts. Give more prompts, fewer steps, or --epochs "
                            f"{-(-(rollout + 1) * self.places // len(self.prompts))}")
        size, found = len(self.prompts), []
        for place in range(rollout * self.places, (rollout + 1) * self.places):
            key = derive(self.seed, "prompts", place // size)
            found.append(self.prompts[int(permuted_places(np.array([place % size]), size, key)[0])])
        return found

    def spare(self, rollout: int) -> Iterator[Prompt]:
        """Others, for places that taught nothing: each at most once a rollout."""
        size, taken = len(self.prompts), {prompt.id for prompt in self.drawn(rollout)}
        order = permuted_places(np.arange(size), size, derive(self.seed, "spare prompts", rollout))
        return (self.prompts[place] for place in order.tolist() if self.prompts[place].id not in taken)

    @cached_property
    def digest(self) -> str:
        """Of every prompt's ids and row, in order: another file, template, tokenizer or split is other data."""
        return prompts_digest(self.prompts)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(repr((prompt.id, prompt.ids, sorted((key, str(value)) for key, value in prompt.row.items()))).encode())
    return found.hexdigest()

# ---------------------------------------------------------------- sampling


class Sampler:
    """An engine on the trainer's own weights. What it draws carries the version that `load` last named."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, stops: SpecialTokens, *, slots: int, length: int,
                 device: str | None = None):
        self.model, self.fingerprint = model, fingerprint(model)
        self.version = version_name(0, self.fingerprint)
        length = min(length, model.config.max_length)
        self.engine = Engine(model, slots=fitting_slots(model, slots, length, device), length=length, stop_ids=stops.stop_ids,
                             version=self.version, tokenizer=tokenizer, device=device)

    def load(self, updates: int) -> str:
        """The weights as they are now, after so many updates."""
        self.fingerprint = fingerprint(self.model)
        self.version = version_name(updates, self.fingerprint)
        self.engine.load(self.version)
        return self.version

    def draw(self, prompts: Sequence[Prompt], sampling: Sampling, address: tuple[str | int, ...], group: int) -> list[list[Completion]]:
        """`group` completions of each prompt; member m of prompt p draws at (seed, *address, p, m)."""
        tickets = {self.engine.submit(GenerationRequest(prompt.ids, sampling, (*address, prompt.id), group)): place
                   for place, prompt in enumerate(prompts)}
        ended = {(tickets[progress.ticket], progress.member): progress.completion for progress in self.engine.drain()}
        return [[completion for member in range(group) if (completion := ended[place, member]) is not None]
                for place in range(len(prompts))]

# ---------------------------------------------------------------- scores


@dataclass(frozen=True)
class Group:
    prompt: Prompt
    completions: Sequence[Completion]
    scored: Sequence[ScoredItem]

    @property
    def rewards(self) -> list[RewardValue]:
        return [scored.value for scored in self.scored]


def ruled_groups(workers: RewardWorkers, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[Group]:
    """Every completion through the reward workers."""
    pairs = [(prompt, completion) for prompt, group in zip(prompts, completions, strict=True) for completion in group]
    scores = iter(workers.score([item(prompt, completion) for prompt, completion in pairs]))
    return [Group(prompt, group, [next(scores) for _ in group]) for prompt, group in zip(prompts, completions, strict=True)]


def shortened(groups: Sequence[Group], *, cap: int, overlong: int) -> list[Group]:
    """What the last `overlong` tokens before the cap cost."""
    return [replace(group, scored=[_shortened(scored, len(completion.ids), cap, overlong)
                                   for scored, completion in zip(group.scored, group.completions, strict=True)]) for group in groups]


def item(prompt: Prompt, completion: Completion) -> RewardItem:
    assert completion.text is not None, "the sampler has a tokenizer"
    return RewardItem(prompt.text, completion.text, {**prompt.row, "completion_tokens": len(completion.ids)})


def _shortened(scored: ScoredItem, length: int, cap: int, overlong: int) -> ScoredItem:
    if not overlong:
        return scored
    penalty = float(overlong_penalty([length], cap, overlong)[0])
    return replace(scored, value=None if scored.value is None else scored.value + penalty,
                   components={**scored.components, OVERLONG: penalty})


def component_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """rewards/NAME/mean and /std, TRL's names, of what is known; a component of which nothing is known is left out."""
    values: dict[str, list[float]] = {}
    for scored in (scored for group in groups for scored in group.scored):
        for name, value in scored.components.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    found: dict[str, float] = {}
    for name, known in values.items():
        if known:
            found |= {f"rewards/{name}/mean": float(np.mean(known)), f"rewards/{name}/std": float(np.std(known, ddof=1)) if len(known) > 1
                      else 0.0}
    return found


def reading_metrics(groups: Sequence[Group], form: AnswerForm) -> dict[str, float]:
    """Answers read both ways: how often the lenient reading is right, and how often right by one is wrong by the other."""
    read = [readings(str(completion.text), gold_answer(group.prompt.row), form) for group in groups for completion in group.completions]
    return {"rewards/answer/strict": float(np.mean([each.strictly_right for each in read])),
            "rewards/answer/lenient": float(np.mean([each.leniently_right for each in read])),
            "rewards/answer/readings_apart": reading_disagreements(read) / len(read)}

# ---------------------------------------------------------------- batches


def counted(groups: Sequence[Group], advantages: Advantages, *, mask_truncated: bool, cap: int) -> list[bool]:
    """Which completions are learned from: those whose reward is known and, where asked, that ended by themselves."""
    ended = [completion.ended for group in groups for completion in group.completions]
    kept = untruncated(ended) if mask_truncated else np.ones(len(ended), dtype=bool)
    found = (advantages.known_PG.flatten() & kept).tolist()
    if not any(found):
        raise GuardStop(f"of {len(found)} completions {int((~advantages.known_PG).sum())} have no known reward and "
                        f"{ended.count('length')} hit the cap of {cap} tokens: nothing is left to learn from; mend the reward, raise "
                        "--max-new, or leave --mask-truncated out")
    return found


def assembled(groups: Sequence[Group], advantage_N: Sequence[float], counted_N: Sequence[bool], normalise: Normalise, *, cap: int) -> Batch:
    """One row a completion, the sampled ids after the prompt's. Advantage and weight stand on the completion's tokens alone."""
    rows = [(group.prompt, completion) for group in groups for completion in group.completions]
    counting = token_weights([len(completion.ids) for _, completion in rows], counted_N, normalise, cap)
    lengths = [len(prompt.ids) + len(completion.ids) for prompt, completion in rows]
    width = -(-max(lengths) // _COLUMNS) * _COLUMNS
    tokens_BT = np.zeros((len(rows), width), np.int64)
    streams = {name: np.zeros((len(rows), width), np.float32) for name in ("weight", "advantage", "behaviour")}
    for row, (prompt, completion) in enumerate(rows):
        said = slice(len(prompt.ids), lengths[row])
        tokens_BT[row, : lengths[row]] = (*prompt.ids, *completion.ids)
        streams["weight"][row, said] = counting.weight_N[row]
        streams["advantage"][row, said] = advantage_N[row]
        streams["behaviour"][row, said] = completion.logprobs
    documents = documents_from_lengths(lengths, width).int()
    return Batch(torch.from_numpy(tokens_BT), documents=documents, ids=tuple((prompt.id,) for prompt, _ in rows),
                 divisor=counting.divisor, **{name: torch.from_numpy(stream) for name, stream in streams.items()})


@torch.no_grad()
def batch_logprobs(model: Transformer, batch: Batch, temperature: float, layout: Layout, *, entropy: bool,
                   score: _Score = token_logprobs) -> Tensor:
    """(B, T) on the CPU, by the same kernels and in the same parts as the objective's."""
    device, packed = model.embed.weight.device, layout.packed(batch.seen())
    parts = [score(model, part.to(device, non_blocking=True), temperature, entropy=entropy)[0]
             for part in packed.batch.split(layout.rows)]
    return packed.unpacked(torch.cat(parts).cpu())


def quickest_score(model: Transformer, layout: Layout) -> _Score:
    """As a graph, where one shape serves all."""
    return GraphedLogprobs() if model.embed.weight.is_cuda and layout.width is not None else token_logprobs


def of_completions(values_BT: Tensor, batch: Batch, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Of each row, the values at the sampled tokens."""
    assert batch.documents is not None
    ends = (batch.documents != PADDING).sum(1).tolist()
    return [row[len(prompt):end].tolist() for row, prompt, end in zip(values_BT, prompts, ends, strict=True)]
