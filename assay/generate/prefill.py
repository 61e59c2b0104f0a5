"""Prefill: prompts computed in one pass into the KV cache, on CUDA packed into rows of few widths, each one graph; and continued.

A pass over a few prompts is hundreds of short kernels: on an H200 launching them one by one took 20 ms, computing them less
than one. Where attention takes documents of any length side by side, prompts are packed into one row, padded to one of a few
widths, and the pass is captured the second time that a width is needed.
Shapes: B rows, T time.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from assay.generate.sampler_weights import SamplerWeights
from assay.model.attention import PADDING, document_starts, documents_from_lengths, variable_length_kernel
from assay.model.kv_cache import ExtendView, PrefillView, SlotCache
from assay.model.placement import capture_graph, uncompiled
from assay.model.transfers import to_device

LEAST, GROWTH = 512, 2  # widths of a packed row: the least, and how many times as much the next one takes

Prompts = Sequence[tuple[int, ...]]


class PrefillBatch(NamedTuple):
    """Inputs of one prefill pass, all on one device."""

    tokens_BT: Tensor
    documents_BT: Tensor
    places_BT: Tensor
    starts: Tensor


class SlotExtension(NamedTuple):
    """A slot that holds the keys and values of `held` tokens, and the ids that come after them."""

    slot: int
    held: int
    ids: tuple[int, ...]


class Prefill:
    """Computes prompts and stores them. `graphed`: on CUDA alone."""

    def __init__(self, weights: SamplerWeights, cache: SlotCache, *, graphed: bool):
        self.weights, self.cache = weights, cache
        half = weights.dtype in (torch.bfloat16, torch.float16)  # all that the kernel takes
        fused = weights.model.config.fused_attention  # one long row of many prompts is for a kernel that knows no caps and no sinks
        self.packs = weights.device.type == "cuda" and half and fused and variable_length_kernel() is not None
        self.graphed = graphed and self.packs
        self._graphs: dict[int, Callable[[PrefillBatch], None] | None] = {}  # by width; None: was needed once

    def forget(self) -> None:
        """Weights have moved to other addresses."""
        self._graphs.clear()

    def __call__(self, prompts: Prompts, slots: Sequence[int]) -> None:
        """Prompt i goes into slot slots[i]."""
        made = packed_prefill(prompts, slots, self.cache) if self.packs else padded_prefill(prompts, slots, self.cache)
        filled = PrefillBatch(*(to_device(part, self.weights.device) for part in made))
        width = filled.tokens_BT.shape[1]
        with uncompiled():
            if not self.graphed or width not in self._graphs:
                self._graphs[width] = None
                self.run(filled)
                return
            replay = self._graphs[width] or self._capture(filled)
            self._graphs[width] = replay
        replay(filled)

    def run(self, filled: PrefillBatch) -> None:
        view = PrefillView(self.cache, filled.places_BT)
        self.weights.model.hidden(filled.tokens_BT, documents=filled.documents_BT, cache=view, starts=filled.starts)

    def extend(self, continued: Sequence[SlotExtension]) -> None:
        """Extend several slots with tokens that were not drawn in them: what an environment answered. A pass of its own, without graphs."""
        device, lengths = self.weights.device, [len(one.ids) for one in continued]
        documents = documents_from_lengths(lengths, max(lengths))
        tokens = torch.zeros(documents.shape, dtype=torch.long)
        tokens[documents != PADDING] = concatenated([one.ids for one in continued], sum(lengths))
        slots, held = (torch.tensor(numbers) for numbers in zip(*((one.slot, one.held) for one in continued), strict=True))
        places = torch.where(documents == PADDING, self.cache.nowhere,
                             slots[:, None] * self.cache.length + held[:, None] + torch.arange(max(lengths)))
        slots, held, places = (to_device(part, device) for part in (slots, held, places))
        view = ExtendView(self.cache, slots, held, places, max(one.held + len(one.ids) for one in continued))
        with uncompiled():
            self.weights.model.hidden(to_device(tokens, device), cache=view)

    def _capture(self, filled: PrefillBatch) -> Callable[[PrefillBatch], None]:
        """Capture a prefill as a CUDA graph, without a pass before it to warm up: one of this width has been made."""
        fixed = PrefillBatch(*(part.clone() for part in filled))
        with capture_graph() as graph:
            self.run(fixed)
        return functools.partial(_replay, graph, fixed)


def packed_prefill(prompts: Prompts, slots: Sequence[int], cache: SlotCache) -> PrefillBatch:
    """Prefill batch of all prompts in one row; `starts` is as long as it can be for the cache, so that a width is a shape."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    total, width = int(lengths.sum()), LEAST
    while width < total:
        width *= GROWTH
    ends = lengths.cumsum(0)
    document = torch.repeat_interleave(torch.arange(len(prompts)), lengths)
    position = torch.arange(total) - (ends - lengths)[document]
    tokens, documents, places = (torch.full((1, width), value) for value in (0, PADDING, cache.nowhere))
    tokens[0, :total] = concatenated(prompts, total)
    documents[0, :total] = document
    places[0, :total] = torch.tensor(slots)[document] * cache.length + position
    starts = torch.full((cache.slots + 2,), total, dtype=torch.int32)
    starts[0], starts[1 : len(prompts) + 1] = 0, ends.int()
    return PrefillBatch(tokens, documents, places, starts)


def padded_prefill(prompts: Prompts, slots: Sequence[int], cache: SlotCache) -> PrefillBatch:
    """A row for each prompt, padded on the right."""
    lengths = [len(prompt) for prompt in prompts]
    documents = documents_from_lengths(lengths, max(lengths))
    tokens = torch.zeros(documents.shape, dtype=torch.long)
    tokens[documents != PADDING] = concatenated(prompts, sum(lengths))
    return PrefillBatch(tokens, documents, cache.places(documents, torch.tensor(slots)), document_starts(documents))


def concatenated(prompts: Prompts, total: int) -> Tensor:
    """Prompts end to end. Numpy takes a tenth of the time that torch does to read Python's numbers: 0.8 ms of 256 prompts, not 7."""
    return torch.from_numpy(np.fromiter(itertools.chain.from_iterable(prompts), np.int64, total))


def _replay(graph: torch.cuda.CUDAGraph, fixed: PrefillBatch, filled: PrefillBatch) -> None:
    for mine, given in zip(fixed, filled, strict=True):
        mine.copy_(given)
    graph.replay()
