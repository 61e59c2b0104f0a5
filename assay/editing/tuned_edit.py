"""Edits by tuning: the down-projections of some layers, trained on the facts while text and questions about others keep their answers.

MEMIT solves for the subjects' last tokens from what second moments say of text. Where facts are many for a small model, that leaves too
little room; here the same matrices follow the gradient of the facts in all their contexts, and what must stay is the model's own
distribution, measured on text and on bystanders: questions of the file whose subjects are not edited. The model at the end of the call is
the model at its start, bit for bit; what comes back is a Patch.

Shapes: n facts, R rows (a fact in one context each), B rows of a batch, T time, D width.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from assay.editing.block_hooks import down_projection_name, padded
from assay.editing.contexts import Contexts
from assay.editing.facts import Fact
from assay.editing.memit import EditResult, checked_layers
from assay.editing.subject_tokens import answer_ids, encode_prompt
from assay.editing.targets import Target, frozen_parameters
from assay.errors import DataError
from assay.model.attention import PADDING
from assay.model.patch import Patch
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.seeds import generator

_AT_ONCE = {"cpu": 64}  # rows whose surprise is measured together; elsewhere MANY
_MANY = 512


@dataclass(frozen=True)
class TuneOptions:
    """Options of tuned edits: how long, and what one step reads: rows of facts, rows of text and bystanders."""

    steps: int = 200
    lr: float = 3e-4
    hold: float = 4.0  # weight of the divergence (nats a token) on text, and of that on bystanders
    rows: int = 128
    text_rows: int = 4
    bystanders: int = 32


class AskedRow(NamedTuple):
    """A fact in one context, and its target after it."""

    fact: int
    ids: tuple[int, ...]
    answer: tuple[int, ...]


def tune_edit(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], layers: Sequence[int], contexts: Contexts,
              text: Sequence[Sequence[int]], bystanders: Sequence[str], options: TuneOptions, *, seed: int,
              parent: str | None) -> EditResult:
    """`text` and `bystanders` are what must stay; `reached` of the result is the share of its surprise that a fact's target lost."""
    layers = checked_layers(model, layers)
    rows = asked_rows(tokenizer, facts, contexts)
    kept = HeldTexts(model, text), HeldTexts(model, [encode_prompt(tokenizer, prompt) for prompt in bystanders])
    before = fact_surprises(model, rows, len(facts))
    names = [down_projection_name(layer) for layer in layers]
    with frozen_parameters(model), tuned_in_place(model, names) as tuned:
        _tune(model, tuned, rows, kept, options, seed)
        after = fact_surprises(model, rows, len(facts))
        patch = Patch(parent, replaced={name: tuned[name].detach().cpu().clone() for name in names})
    nothing = torch.zeros(0, dtype=torch.float64)
    targets = [Target(nothing, nothing, math.exp(-now), now, options.steps, False) for now in after]
    return EditResult(patch, targets, {}, [1 - now / max(was, 1e-12) for was, now in zip(before, after, strict=True)])


def _tune(model: Transformer, tuned: dict[str, Tensor], rows: Sequence[AskedRow], kept: tuple["HeldTexts", "HeldTexts"],
          options: TuneOptions, seed: int) -> None:
    optimizer = torch.optim.Adam(tuned.values(), lr=options.lr)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        loss = row_surprises(model, [rows[i] for i in drawn(len(rows), options.rows, seed, "facts", step)]).mean()
        for held, count, name in zip(kept, (options.text_rows, options.bystanders), ("text", "bystanders"), strict=True):
            if held.rows:
                loss = loss + options.hold * held.divergence(model, drawn(len(held.rows), count, seed, name, step))
        if not torch.isfinite(loss):
            raise DataError(f"step {step} of the tuning met a loss of {loss.item()}; lower --tune-lr")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def drawn(of: int, count: int, seed: int, name: str, step: int) -> list[int]:
    """Indices that a step reads: in a new order each time round, every one as often as every other."""
    count = min(count, of)
    places = range(step * count, (step + 1) * count)
    orders = {time: torch.randperm(of, generator=generator(seed, "tuning", name, time)).tolist()
              for time in {places[0] // of, places[-1] // of}}
    return [orders[place // of][place % of] for place in places]


class HeldTexts:
    """Rows of ids and the states that the model had for them before anything moved: what its head says of them is what must stay."""

    @torch.no_grad()
    def __init__(self, model: Transformer, rows: Sequence[Sequence[int]]) -> None:
        self.rows, device = [tuple(row) for row in rows], model.embed.weight.device
        at_once = _AT_ONCE.get(device.type, _MANY)
        self._states: list[Tensor] = []
        for start in range(0, len(self.rows), at_once):
            tokens, documents = padded(self.rows[start : start + at_once], device)
            states_BTD = model.hidden(tokens, documents=documents)
            self._states += [states[real] for states, real in zip(states_BTD, documents != PADDING, strict=True)]

    def divergence(self, model: Transformer, chosen: Sequence[int]) -> Tensor:
        """Mean nats a token by which the model says otherwise than it did."""
        tokens, documents = padded([self.rows[i] for i in chosen], model.embed.weight.device)
        now = model.logits(model.hidden(tokens, documents=documents)[documents != PADDING]).float().log_softmax(-1)
        with torch.no_grad():
            was = model.logits(torch.cat([self._states[i] for i in chosen])).float().log_softmax(-1)
        return (was.exp() * (was - now)).sum(-1).mean()


def asked_rows(tokenizer: Tokenizer, facts: Sequence[Fact], contexts: Contexts) -> list[AskedRow]:
    return [AskedRow(number, span.ids, answer_ids(tokenizer, fact.target)) for number, fact in enumerate(facts)
            for span in contexts.spans(tokenizer, fact)]


def row_surprises(model: Transformer, rows: Sequence[AskedRow]) -> Tensor:
    """(B,) mean −log p a token of each row's target."""
    tokens, documents = padded([(*row.ids, *row.answer[:-1]) for row in rows], model.embed.weight.device)
    places = [(number, len(row.ids) - 1 + step, token, 1 / len(row.answer))
              for number, row in enumerate(rows) for step, token in enumerate(row.answer)]
    number, column, due = (torch.tensor(values, device=tokens.device) for values in list(zip(*places, strict=True))[:3])
    share = torch.tensor([place[3] for place in places], device=tokens.device)
    said = model.logits(model.hidden(tokens, documents=documents)[number, column]).float().log_softmax(-1)
    return torch.zeros(len(rows), device=tokens.device).index_add(0, number, -said.gather(-1, due[:, None]).squeeze(-1) * share)


@torch.no_grad()
def fact_surprises(model: Transformer, rows: Sequence[AskedRow], facts: int) -> list[float]:
    """Mean surprise of each fact's target over its contexts."""
    found: list[list[float]] = [[] for _ in range(facts)]
    at_once = _AT_ONCE.get(model.embed.weight.device.type, _MANY)
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        for row, surprise in zip(part, row_surprises(model, part).tolist(), strict=True):
            found[row.fact].append(surprise)
    return [math.fsum(of_fact) / len(of_fact) for of_fact in found]


@contextlib.contextmanager
def tuned_in_place(model: Transformer, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Make these parameters trainable within the block; afterwards they have their old bits, even after an error."""
    parameters: dict[str, Tensor] = {name: model.get_parameter(name) for name in names}
    saved = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        yield parameters
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(False).grad = None
            parameter.data.copy_(saved[name])


def bystander_prompts(facts: Sequence[Fact], file: Sequence[Fact], count: int, seed: int) -> list[str]:
    """Questions of the file about subjects that are neither edited nor asked about where the edits are judged."""
    edited = {fact.subject for fact in facts}
    judging = "\n".join(near.prompt for fact in facts for near in (*fact.neighbourhood, *fact.portability))
    others = [fact.prompt for fact in file if fact.subject not in edited and fact.subject not in judging]
    order = torch.randperm(len(others), generator=generator(seed, "bystanders")).tolist()
    return [others[i] for i in order[:count]]
