"""Rollout batches: completions as rows with their advantages, a row each or packed, so that a run has one shape whatever is said in it.

Shapes: N completions, B = N rows of one completion each, T time; R packed rows of width W.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.packing import fill_rows
from assay.generate.generation_request import Completion
from assay.learn.advantage import Normalise, token_weights
from assay.learn.cuda_graph import GraphedLogprobs
from assay.learn.policy import token_logprobs
from assay.model.attention import PADDING, documents_from_lengths
from assay.model.transformer import Transformer
from assay.recipes.prompts import Prompt

TokenScore = Callable[..., tuple[Tensor, Tensor | None]]  # token_logprobs, or a twin of it
Drawn = Sequence[tuple[Prompt, Completion]]  # N, group by group

PACKED_WIDTH, PACKED_TOKENS = 1024, 8192  # of packed rows, and of all that go through a GPU at a time: enough to keep it busy
NOWHERE = -1
COLUMNS = 8  # a row's width is a multiple of this


@dataclass(frozen=True)
class Layout:
    """`rows` at a time, each of one completion, or packed into rows of `width`.

    Packed, one shape serves all rollouts, however long what was said is: it is compiled and captured once, and little of it is padding.
    """

    rows: int
    width: int | None = None

    def packed(self, batch: Batch) -> "Packed":
        assert batch.documents is not None
        if self.width is None:
            return Packed(batch, torch.arange(batch.tokens.numel()).view(batch.tokens.shape), batch)
        lengths = (batch.documents != PADDING).sum(1).numpy()
        plan = dealt(fill_rows(np.arange(len(batch)), lengths, self.width), self.rows)
        places, documents = np.full((len(plan), self.width), NOWHERE), np.full((len(plan), self.width), PADDING, np.int32)
        for row, members in enumerate(plan):
            for number, (member, end) in enumerate(zip(members, lengths[members].cumsum().tolist(), strict=True)):
                here = slice(end - lengths[member], end)
                places[row, here] = member * batch.tokens.shape[1] + np.arange(lengths[member])
                documents[row, here] = number
        places_RW = torch.from_numpy(places)
        streams: dict[str, Any] = {name: torch.where(places_RW == NOWHERE, 0, stream.flatten()[places_RW.clamp(min=0)])
                                   for name, stream in batch.streams().items()}
        ids = tuple(tuple(consumed for member in members for consumed in batch.ids[member]) for members in plan) if batch.ids else ()
        return Packed(replace(batch, **streams | {"documents": torch.from_numpy(documents)}, ids=ids), places_RW, batch)


class Packed(NamedTuple):
    batch: Batch
    places_RW: Tensor  # where each token stood in the rows, counted through
    source: Batch

    def unpacked(self, values_RW: Tensor) -> Tensor:
        """(B, T): values of the packed batch where their tokens stood before, 0 in padding."""
        values, places = values_RW.numpy(), self.places_RW.numpy()  # numpy's indexing is quicker for so few
        found, there = np.zeros(self.source.tokens.numel(), values.dtype), places != NOWHERE
        found[places[there]] = values[there]
        return torch.from_numpy(found).view(self.source.tokens.shape)


def layout_of(device: str, micro: int, longest: int, context: int) -> Layout:
    """`micro` completions of at most `longest` tokens may go through the model at a time."""
    if not device.startswith("cuda"):
        return Layout(micro)
    width = min(max(PACKED_WIDTH, longest), context)
    return Layout(max(1, min(micro * longest, PACKED_TOKENS) // width), width)


def dealt(plan: list[list[int]], hands: int) -> list[list[int]]:
    """Rows of a batch and some empty ones, so that there are `hands` in each micro-batch, of much the same kind in all."""
    whole = plan + [[]] * (-len(plan) % hands)
    parts = len(whole) // hands
    return [row for part in range(parts) for row in whole[part::parts]]

# ---------------------------------------------------------------- completions as a batch


def batch_of(drawn: Drawn, advantage_N: Sequence[float], counted_N: Sequence[bool], normalise: Normalise, *, cap: int) -> Batch:
    """Batch of completions, one row each, the sampled ids after the prompt's. Advantage and weight stand on the completion's tokens
    alone."""
    counting = token_weights([len(completion.ids) for _, completion in drawn], counted_N, normalise, cap)
    lengths = [len(prompt.ids) + len(completion.ids) for prompt, completion in drawn]
    width = -(-max(lengths) // COLUMNS) * COLUMNS
    tokens_BT = np.zeros((len(drawn), width), np.int64)
    streams = {name: np.zeros((len(drawn), width), np.float32) for name in ("weight", "advantage", "behaviour")}
    for row, (prompt, completion) in enumerate(drawn):
        said = slice(len(prompt.ids), lengths[row])
        tokens_BT[row, : lengths[row]] = (*prompt.ids, *completion.ids)
        streams["weight"][row, said] = counting.weight_N[row]
        streams["advantage"][row, said] = advantage_N[row]
        streams["behaviour"][row, said] = completion.logprobs
    documents = documents_from_lengths(lengths, width).int()
    return Batch(torch.from_numpy(tokens_BT), documents=documents, ids=tuple((prompt.id,) for prompt, _ in drawn),
                 divisor=counting.divisor, **{name: torch.from_numpy(stream) for name, stream in streams.items()})


@torch.no_grad()
def batch_logprobs(model: Transformer, batch: Batch, temperature: float, layout: Layout, *, entropy: bool,
                   score: TokenScore = token_logprobs) -> Tensor:
    """(B, T) on the CPU, by the same kernels and in the same parts as the objective's."""
    device, packed = model.embed.weight.device, layout.packed(batch.seen())
    parts = [score(model, part.to(device, non_blocking=True), temperature, entropy=entropy)[0]
             for part in packed.batch.split(layout.rows)]
    return packed.unpacked(torch.cat(parts).cpu())


def quickest_score(model: Transformer, layout: Layout) -> TokenScore:
    """Fastest way to compute log-probabilities: as a CUDA graph, where one shape serves all."""
    return GraphedLogprobs() if model.embed.weight.is_cuda and layout.width is not None else token_logprobs


def of_completions(values_BT: Tensor, batch: Batch, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Values at the sampled tokens of each row."""
    assert batch.documents is not None
    ends = (batch.documents != PADDING).sum(1).tolist()
    return [row[len(prompt):end].tolist() for row, prompt, end in zip(values_BT, prompts, ends, strict=True)]
