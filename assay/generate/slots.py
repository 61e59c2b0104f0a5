"""Decoding slots on the device: the state of every slot, and one step of all of them together.

A step feeds each slot its newest token, draws the next one and logs it, without the host: on CUDA it is one graph, launched
several times before anyone looks. Slots that have ended stay where they are and log -1.
Shapes: S slots, V vocabulary, C steps launched together.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.generate.generation_request import MOST_STOP_IDS, Sampling
from assay.generate.policy_logprobs import policy_logits, with_repetition_penalty
from assay.generate.prefill import Prefill, SlotExtension
from assay.generate.sampler_weights import SamplerWeights
from assay.kernels import cached_attention
from assay.kernels.advance_slots import NO_TOKEN, SlotState, TokenLog, advance_slots
from assay.kernels.draw_tokens import SamplingRule, draw_tokens
from assay.model.kv_cache import DecodeView, SlotCache
from assay.model.placement import capture_graph
from assay.model.transfers import to_device
from assay.model.transformer import ModelConfig, run_blocks

INTS = ("token", "position", "end", "running", "key", "top_k")  # then the stop ids
FLOATS = ("temperature", "top_p", "min_p", "penalty")
_WARM_UP = 3  # steps before capture: compilation, library handles and autotuning must not be captured
MOST_BLOCKS_PER_GRAPH = 6  # blocks that are compiled as one, at most: each adds to the time that compilation takes
COMPILED = 64  # forms of one function that may stand side by side


class SlotAssignment(NamedTuple):
    """A request's place: its last prompt token is fed at `position`, and at `end` its last token is drawn."""

    slot: int
    prompt: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    key: int

    def ints(self) -> list[int]:
        position = len(self.prompt) - 1
        stops = [*self.stop_ids, *[NO_TOKEN] * (MOST_STOP_IDS - len(self.stop_ids))]
        return [self.prompt[-1], position, position + self.sampling.max_new - 1, 1, self.key, self.sampling.top_k, *stops]

    def floats(self) -> list[float]:
        return [self.sampling.temperature, self.sampling.top_p, self.sampling.min_p, self.sampling.repetition_penalty]


class LaunchedSteps(NamedTuple):
    """Steps that were launched; `read` waits for them."""

    ids_CS: Tensor
    logprobs_CS: Tensor
    arrived: "torch.cuda.Event | None"

    @classmethod
    def to_host(cls, ids_CS: Tensor, logprobs_CS: Tensor) -> "LaunchedSteps":
        """Copies that the host does not wait for, made before the next launch writes to the same place."""
        if not ids_CS.is_cuda:
            return cls(ids_CS.clone(), logprobs_CS.clone(), None)
        ids, logprobs = (torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in (ids_CS, logprobs_CS))
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(ids_CS.device))
        return cls(ids, logprobs, arrived)

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and log-probabilities of each slot; NOBODY where the slot sampled nothing."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.ids_CS.T.tolist(), self.logprobs_CS.T.tolist()

    def finite(self) -> bool:
        """Whether every log-probability of a drawn token is a number; after `read`."""
        return bool((self.logprobs_CS.isfinite() | (self.ids_CS == NO_TOKEN)).all())


class Slots:
    """`graphed`: steps are compiled and captured, on CUDA alone; without it they run as they are written."""

    def __init__(self, weights: SamplerWeights, slots: int, length: int, steps: int, *, graphed: bool):
        c, device = weights.model.config, weights.device
        self.weights, self.steps, self.device, self.graphed = weights, steps, device, graphed
        self.cache = SlotCache(c.depth, slots, length, c.kv_heads, c.head_dim, dtype=weights.dtype, device=device)
        self.prefill = Prefill(weights, self.cache, graphed=graphed)
        self.ints = torch.zeros(len(INTS) + MOST_STOP_IDS, slots, dtype=torch.int64, device=device)
        self.floats = torch.ones(len(FLOATS), slots, device=device)
        self.token, self.position, self.end, self.running, self.key, self.top_k = self.ints[: len(INTS)]
        self.stops = self.ints[len(INTS) :]
        self.temperature, self.top_p, self.min_p, self.penalty = self.floats
        self.seen: Tensor | None = None  # (S, V): made when a repetition penalty is first asked for
        self.state = SlotState(self.token, self.position, self.end, self.running, self.stops)
        self.log = TokenLog(torch.zeros(steps, slots, dtype=torch.int64, device=device), torch.zeros(steps, slots, device=device),
                       torch.zeros(1, dtype=torch.int64, device=device))
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        if graphed:
            self.compile()

    def assign(self, assignments: Sequence[SlotAssignment]) -> None:
        slots = self._on_device([one.slot for one in assignments])
        self.ints[:, slots] = self._on_device([one.ints() for one in assignments]).T
        self.floats[:, slots] = to_device(torch.tensor([one.floats() for one in assignments]), self.device).T
        if any(one.sampling.repetition_penalty != 1 for one in assignments):
            self._mark_seen(assignments, slots)

    def stop(self, slots: Sequence[int]) -> None:
        self.running[self._on_device(list(slots))] = 0

    def clear(self, *, recapture: bool = False) -> None:
        """Forget everything that was computed under earlier weights; `recapture` where the weights have moved to other addresses."""
        self.running.zero_()
        self.cache.clear()
        if recapture:
            self._graphs.clear()
            self.prefill.forget()

    @torch.no_grad()
    def fill(self, prompts: Sequence[tuple[int, ...]], slots: Sequence[int]) -> None:
        """Compute prompts in one pass and store prompt i in slot slots[i]."""
        with self._on_own_gpu():
            self.prefill(prompts, slots)

    @torch.no_grad()
    def extend(self, continued: Sequence[SlotExtension]) -> None:
        """Compute what comes after that which these slots hold."""
        with self._on_own_gpu():
            self.prefill.extend(continued)

    @torch.no_grad()
    def launch(self, steps: int, horizon: int, penalise: bool, allowed_SV: Tensor | None = None) -> LaunchedSteps:
        """`steps` steps of every slot; no slot gets to `horizon`. `penalise` where some running slot has a penalty.

        `allowed_SV`: what each slot may draw, of one step, which is then not captured.
        """
        assert allowed_SV is None or steps == 1, "what may be drawn next depends on what was drawn"
        with self._on_own_gpu():
            if allowed_SV is not None:
                self.log.cursor.zero_()
                self.step(self.cache.length if self.graphed else horizon, penalise, allowed_SV)
                return LaunchedSteps.to_host(self.log.ids_CS[:1], self.log.logprobs_CS[:1])
            if self.graphed and penalise not in self._graphs:
                self._graphs[penalise] = self._capture(penalise)
            self.log.cursor.zero_()
            for _ in range(steps):
                if self.graphed:
                    self._graphs[penalise].replay()
                else:
                    self.step(horizon, penalise)
            return LaunchedSteps.to_host(self.log.ids_CS[:steps], self.log.logprobs_CS[:steps])

    def compile(self, **options: Any) -> None:
        """A few blocks at a time, so that all layers share one compiled graph, and what ends a block is fused with what begins the next."""
        model = self.weights.model
        cached_attention.register_cached_attention()
        model.run, model.together = torch.compile(run_blocks, dynamic=False, **options), blocks_per_graph(model.config)

    def _capture(self, penalise: bool) -> torch.cuda.CUDAGraph:
        """CUDA graph of a decoding step, captured with every slot at rest, so that the steps of the warm-up change nothing. Training
        compiles the same code for its own shapes, and beyond the limit torch would leave ours uncompiled without a warning."""
        resting, length = self.running.clone(), self.cache.length
        self.running.zero_()
        self.log.cursor.zero_()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), torch._dynamo.config.patch(recompile_limit=COMPILED):
            for _ in range(_WARM_UP):
                self.log.cursor.zero_()
                self.step(length, penalise)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        with capture_graph() as graph:
            self.step(length, penalise)
        self.running.copy_(resting)
        return graph

    def step(self, horizon: int, penalise: bool, allowed_SV: Tensor | None = None) -> None:
        model = self.weights.model
        states_SD = model.hidden(self.token[:, None], cache=DecodeView(self.cache, self.position, horizon))[:, 0]
        logits_SV = policy_logits(model, states_SD)
        if penalise:
            assert self.seen is not None
            logits_SV = with_repetition_penalty(logits_SV, self.seen, self.penalty[:, None])
        if allowed_SV is not None:
            logits_SV = logits_SV.masked_fill(~allowed_SV, float("-inf"))
        chosen, logprobs = draw_tokens(logits_SV, SamplingRule(self.temperature, self.top_k, self.top_p, self.min_p), self.key,
                                       self.position)
        if penalise:
            assert self.seen is not None
            said = chosen[:, None]
            self.seen.scatter_(1, said, self.seen.gather(1, said) | (self.running == 1)[:, None])
        advance_slots(chosen, logprobs, self.state, self.log)

    def _mark_seen(self, assignments: Sequence[SlotAssignment], slots: Tensor) -> None:
        if self.seen is None:
            self.seen = torch.zeros(self.ints.shape[1], self.weights.model.config.vocab, dtype=torch.bool, device=self.device)
        self.seen[slots] = False
        rows = [one.slot for one in assignments for _ in one.prompt]
        self.seen[self._on_device(rows), self._on_device([token for one in assignments for token in one.prompt])] = True

    def _on_own_gpu(self) -> contextlib.AbstractContextManager:
        """Kernels are launched and captured on the current GPU, which need not be the sampler's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _on_device(self, values: list) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.device)


def blocks_per_graph(config: ModelConfig) -> int:
    """How many blocks to compile as one: a part of the depth after which kinds of layers repeat, so that one graph serves all parts."""
    depth, kinds = config.depth, [config.layer_kind(layer) for layer in range(config.depth)]
    return max((n for n in range(1, MOST_BLOCKS_PER_GRAPH + 1) if depth % n == 0 and kinds[:n] * (depth // n) == kinds), default=1)
