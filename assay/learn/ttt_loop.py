"""Test-time training: a document is read in chunks, and each is scored before the document's own adapter learns from it.

Slots read their documents side by side, each with its own factors and its own Adam; a slot whose document ends takes the next
one in order. With one adapter for all (dynamic evaluation) a step is taken on all slots' chunks once all of them are scored, and what
was learned is kept from document to document. `read_and_adapt` is a generator: what it yields as scored was scored before the step
that comes after, which is not taken until whoever iterates asks for more.

Shapes: B slots, T tokens of a window, K tokens of a chunk, N elements of one slot's adapter.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import GuardStop, UsageError
from assay.model.attention import PADDING
from assay.model.batched_lora import BatchedAdapters
from assay.model.transformer import Transformer


@dataclass(frozen=True)
class TttSettings:
    """`context` counts the tokens of a window: a chunk and what is seen before it."""

    chunk: int
    context: int
    steps: int
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8
    warm: bool = False  # a document begins with the right factors of the one before it in its slot
    carry_over: bool = False  # one adapter reads all documents, and none begins afresh


@dataclass(frozen=True)
class DocumentBegun:
    """`left` is the norm of the left factors, which is to be 0 unless the adapter is carried over; `right` that of the right ones,
    relative to their first."""

    document: int
    slot: int
    adapter: str
    left: float
    right: float


@dataclass(frozen=True)
class ChunkScored:
    """Losses of the tokens of a chunk in nats, under the adapter that has taken `steps` steps: on the document's earlier chunks, or on
    all that was read before where it is carried over."""

    document: int
    slot: int
    chunk: int
    adapter: str | None
    steps: int
    losses: NDArray[np.float32]


@dataclass(frozen=True)
class AdapterUpdated:
    document: int
    slot: int
    chunk: int
    adapter: str
    steps: int


TttEvent = list[DocumentBegun] | list[ChunkScored] | list[AdapterUpdated]


@dataclass(frozen=True)
class DocumentCursor:
    """Position of a slot in its document, whose first token is predicted by nothing."""

    document: int
    tokens: Sequence[int]
    chunk: int = 0

    def span(self, settings: TttSettings) -> tuple[int, int]:
        start = 1 + self.chunk * settings.chunk
        return start, min(start + settings.chunk, len(self.tokens))

    def last(self, settings: TttSettings) -> bool:
        return self.span(settings)[1] == len(self.tokens)


def read_and_adapt(model: Transformer, documents: Sequence[Sequence[int]], settings: TttSettings, slots: int,
         adapters: BatchedAdapters | None = None) -> Iterator[TttEvent]:
    """Test-time training of documents: every token but a document's first is scored once, in order. Without adapters it is the model alone
    that reads.

    After the last chunk that an adapter is to read no step is taken: that of its document, or that of all where it is carried over.
    """
    require_readable(model, documents, settings)
    waiting, places = deque(enumerate(documents)), list[DocumentCursor | None]([None] * slots)
    adam = None if adapters is None else SlotAdam(adapters, settings)
    while True:
        if begun := _begin(places, waiting, adam):
            yield begun
        if not any(places):
            return
        window = chunk_windows(places, settings, model.embed.weight.device)
        learning = slots_that_learn(places, settings, read_on=settings.carry_over and bool(waiting))
        losses_BK = score_chunks(model, window, adam, learning)
        yield _scores(places, losses_BK, settings, adam)
        if adam is not None and any(learning):
            learn_from_chunks(model, window, losses_BK, adam, learning)
            yield _updates(places, learning, adam)
        for slot, place in enumerate(places):
            if place is not None:
                places[slot] = None if place.last(settings) else replace(place, chunk=place.chunk + 1)


def slots_that_learn(places: Sequence[DocumentCursor | None], settings: TttSettings, *, read_on: bool) -> list[bool]:
    """Slots whose chunk is to be learned from, because the adapter has something left to read. `read_on`: documents wait for it."""
    unfinished = [place is not None and not place.last(settings) for place in places]
    if not settings.carry_over:
        return unfinished
    return [place is not None and (read_on or any(unfinished)) for place in places]


def score_chunks(model: Transformer, window: Batch, adam: "SlotAdam | None", learning: Sequence[bool]) -> Tensor:
    """Loss of each token of the slots' chunks, with a graph where a step will be taken on it."""
    with torch.set_grad_enabled(adam is not None and any(learning)):
        return token_losses(model, window, adam)


def learn_from_chunks(model: Transformer, window: Batch, losses_BK: Tensor, adam: "SlotAdam", learning: Sequence[bool]) -> None:
    """Steps on chunks that were scored; the first on the very graph that scored them. A shared adapter learns from the mean over all
    tokens of the slots' chunks, others from that over their own."""
    tokens_B = window.weight.sum(1).clamp(min=1)
    if adam.adapters.shared:
        tokens_B = window.weight.sum().expand(len(tokens_B))
    for again in range(adam.settings.steps):
        if again:
            losses_BK = token_losses(model, window, adam)
        total = (losses_BK.sum(1) / tokens_B).sum()  # slots share no factor: the gradient of the sum is each one's own
        (gradient_BN,) = torch.autograd.grad(total, adam.adapters.state_BN)
        adam.step(gradient_BN, learning)


def token_losses(model: Transformer, window: Batch, adam: "SlotAdam | None") -> Tensor:
    """(B, K) nats: windows end in the same column, so that the chunks are the last K. Zero where there is no token of a chunk."""
    if adam is not None:
        adam.adapters.bind(model.compute_dtype or model.embed.weight.dtype)
    states = model.hidden(window.tokens, documents=window.documents, starts=window.starts)
    K = int(window.weight.any(0).sum())
    logits_BKV = model.logits(states[:, -K - 1 : -1]).float()
    losses = F.cross_entropy(logits_BKV.flatten(0, 1), window.tokens[:, -K:].flatten(), reduction="none")
    return losses.view(-1, K) * window.weight[:, -K:]


class SlotAdam:
    """AdamW on the slots' factors, each slot with its own moments and its own count of steps. A shared adapter has one of each."""

    def __init__(self, adapters: BatchedAdapters, settings: TttSettings):
        self.adapters, self.settings = adapters, settings
        self.steps_B = torch.zeros(len(adapters.state_BN), dtype=torch.int64)
        self.first_BN, self.second_BN = (torch.zeros_like(adapters.state_BN, requires_grad=False) for _ in range(2))

    def begin(self, slot: int) -> None:
        if self.adapters.shared:
            return
        self.adapters.begin(slot, warm=self.settings.warm)
        self.steps_B[slot], self.first_BN[slot], self.second_BN[slot] = 0, 0, 0

    @torch.no_grad()
    def step(self, gradient_BN: Tensor, learning: Sequence[bool]) -> None:
        """Slots that are not learning keep factors, moments and count as they are, bit for bit."""
        state_BN, settings, (beta1, beta2) = self.adapters.state_BN, self.settings, self.settings.betas
        learning = [any(learning)] if self.adapters.shared else learning
        norms = gradient_BN.norm(dim=1).tolist()
        if bad := [slot for slot, norm in enumerate(norms) if learning[slot] and not math.isfinite(norm)]:
            raise GuardStop(f"the gradient of slot {bad[0]} is {norms[bad[0]]} after {int(self.steps_B[bad[0]])} steps; nothing was "
                            "updated with it. Lower --learning-rate, or look at the chunk that was scored last")
        on_B = torch.tensor(learning)
        self.steps_B += on_B
        steps_B1 = self.steps_B.clamp(min=1).to(state_BN)[:, None]
        on_B1 = on_B.to(state_BN)[:, None]
        gradient_BN = torch.where(on_B1 > 0, gradient_BN, 0.0)
        self.first_BN.lerp_(gradient_BN, (1 - beta1) * on_B1)
        self.second_BN.lerp_(gradient_BN.square(), (1 - beta2) * on_B1)
        spread_BN = (self.second_BN / (1 - beta2**steps_B1)).sqrt_().add_(settings.eps)
        state_BN.mul_(1 - settings.lr * settings.weight_decay * on_B1)
        state_BN.sub_(self.first_BN / (1 - beta1**steps_B1) / spread_BN * (settings.lr * on_B1))

    def steps(self, slot: int) -> int:
        return int(self.steps_B[self.adapters.row(slot)])


def chunk_windows(places: Sequence[DocumentCursor | None], settings: TttSettings, device: torch.device) -> Batch:
    """Each slot's chunk and what stands before it, up to `context` tokens, padded on the left; an idle slot is padding alone."""
    spans = [(0, 0) if place is None else place.span(settings) for place in places]
    width = max(min(stop, settings.context) for _, stop in spans)
    shape = (len(places), width)
    tokens, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, PADDING, dtype=torch.int32)
    weight = torch.zeros(shape)
    for slot, (place, (start, stop)) in enumerate(zip(places, spans, strict=True)):
        if place is not None:
            seen = place.tokens[max(0, stop - settings.context) : stop]
            tokens[slot, -len(seen) :], documents[slot, -len(seen) :] = torch.tensor(seen), 0
            weight[slot, start - stop :] = 1
    return Batch(tokens, weight, documents).to(device)


def require_readable(model: Transformer, documents: Sequence[Sequence[int]], settings: TttSettings) -> None:
    chunk, context, steps, longest = settings.chunk, settings.context, settings.steps, model.config.max_length
    if chunk < 1 or steps < 1 or not chunk < context <= longest:
        raise UsageError(f"--chunk {chunk}, --context {context}, --steps-per-chunk {steps}: expected chunk and steps from 1, and a "
                         f"context above the chunk and within the model's {longest} tokens")
    lr, betas, decay = settings.lr, settings.betas, settings.weight_decay
    if not 0 <= lr < math.inf or not 0 <= decay < math.inf or not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"--learning-rate {lr}, --betas {betas}, --weight-decay {decay}: expected numbers from 0, and betas below 1")
    if short := [number for number, tokens in enumerate(documents) if len(tokens) < 2]:
        raise UsageError(f"document {short[0]} has {len(documents[short[0]])} tokens; expected what begins every text, and text")


def _begin(places: list[DocumentCursor | None], waiting: deque[tuple[int, Sequence[int]]], adam: SlotAdam | None) -> list[DocumentBegun]:
    """Free slots take the next documents, in order."""
    begun = []
    for slot, place in enumerate(places):
        if place is None and waiting:
            number, tokens = waiting.popleft()
            places[slot] = DocumentCursor(number, tokens)
            begun.append((number, slot))
            if adam is not None:
                adam.begin(slot)
    if adam is None or not begun:
        return []
    fingerprints = adam.adapters.fingerprints()
    return [DocumentBegun(document, slot, fingerprints[slot], *adam.adapters.norms(slot)) for document, slot in begun]


def _scores(places: Sequence[DocumentCursor | None], losses_BK: Tensor, settings: TttSettings, adam: SlotAdam | None) -> list[ChunkScored]:
    fingerprints = [None] * len(places) if adam is None else adam.adapters.fingerprints()
    on_host = losses_BK.detach().cpu().numpy()
    found = []
    for slot, place in enumerate(places):
        if place is not None:
            start, stop = place.span(settings)
            losses = on_host[slot, start - stop :].copy()
            if not np.isfinite(losses).all():
                at = int((~np.isfinite(losses)).argmax())
                raise GuardStop(f"document {place.document}, chunk {place.chunk}: token {start + at} costs {losses[at]} nats; nothing was "
                                "recorded of it. Lower --learning-rate, or look at the weights")
            steps = 0 if adam is None else adam.steps(slot)
            found.append(ChunkScored(place.document, slot, place.chunk, fingerprints[slot], steps, losses))
    return found


def _updates(places: Sequence[DocumentCursor | None], learning: Sequence[bool], adam: SlotAdam) -> list[AdapterUpdated]:
    fingerprints = adam.adapters.fingerprints()
    return [AdapterUpdated(place.document, slot, place.chunk, fingerprints[slot], adam.steps(slot))
            for slot, place in enumerate(places) if place is not None and learning[slot]]
