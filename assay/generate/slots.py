"""The device's half of the sampler: what every slot is doing, and one step of all of them together.

A step feeds each slot its newest token, draws the next one and notes it, without the host: on CUDA it is one graph, launched
several times before anyone looks. Slots that have ended stay where they are and note -1.
Shapes: S slots, V vocabulary, C steps of a flight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from assay.generate.policy import penalised, policy_logits
from assay.generate.request import MOST_STOP_IDS, Sampling
from assay.generate.weights import ServedModel
from assay.kernels.draw import Rule, draw
from assay.model.cache import Decoding, SlotCache

INTS = ("token", "position", "end", "running", "key", "top_k")  # then the stop ids
FLOATS = ("temperature", "top_p", "min_p", "penalty")
NOBODY = -1  # noted by a slot that drew nothing
AHEAD = 3  # flights whose results may wait to be read at once


class Seat(NamedTuple):
    """A request's place: its last prompt token is fed at `position`, and at `end` its last token is drawn."""

    slot: int
    prompt: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    key: int

    def ints(self) -> list[int]:
        position = len(self.prompt) - 1
        stops = [*self.stop_ids, *[NOBODY] * (MOST_STOP_IDS - len(self.stop_ids))]
        return [self.prompt[-1], position, position + self.sampling.max_new - 1, 1, self.key, self.sampling.top_k, *stops]

    def floats(self) -> list[float]:
        return [self.sampling.temperature, self.sampling.top_p, self.sampling.min_p, self.sampling.repetition_penalty]


class Flight(NamedTuple):
    """Steps that were launched; `read` waits for them."""

    ids_CS: Tensor
    logprobs_CS: Tensor
    landed: "torch.cuda.Event | None"

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """For each slot, its ids and log-probabilities; NOBODY where the slot drew nothing."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.ids_CS.T.tolist(), self.logprobs_CS.T.tolist()


class Slots:
    def __init__(self, served: ServedModel, slots: int, length: int, steps: int):
        c, device = served.model.config, served.device
        self.served, self.steps, self.device = served, steps, device
        self.cache = SlotCache(c.depth, slots, length, c.kv_heads, c.head_dim, dtype=served.dtype, device=device)
        self.ints = torch.zeros(len(INTS) + MOST_STOP_IDS, slots, dtype=torch.int64, device=device)
        self.floats = torch.ones(len(FLOATS), slots, device=device)
        self.token, self.position, self.end, self.running, self.key, self.top_k = self.ints[: len(INTS)]
        self.stops = self.ints[len(INTS) :]
        self.temperature, self.top_p, self.min_p, self.penalty = self.floats
        self.seen: Tensor | None = None  # (S, V): made when a repetition penalty is first asked for
        self.ids_CS = torch.zeros(steps, slots, dtype=torch.int64, device=device)
        self.logprobs_CS = torch.zeros(steps, slots, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)

    def seat(self, seats: Sequence[Seat]) -> None:
        slots = self._on_device([seat.slot for seat in seats])
        self.ints[:, slots] = self._on_device([seat.ints() for seat in seats]).T
        self.floats[:, slots] = torch.tensor([seat.floats() for seat in seats]).to(self.device).T
        if any(seat.sampling.repetition_penalty != 1 for seat in seats):
            self._mark_seen(seats, slots)

    def stop(self, slots: Sequence[int]) -> None:
        self.running[self._on_device(list(slots))] = 0

    def clear(self) -> None:
        """Nothing of what was computed under earlier weights is left."""
        self.running.zero_()
        self.cache.clear()

    @torch.no_grad()
    def launch(self, steps: int, horizon: int, penalise: bool) -> Flight:
        """`steps` steps of every slot; no slot gets to `horizon`. `penalise` where some running slot has a penalty."""
        self.cursor.zero_()
        for _ in range(steps):
            self.step(horizon, penalise)
        return Flight(self.ids_CS[:steps].clone(), self.logprobs_CS[:steps].clone(), None)

    def step(self, horizon: int, penalise: bool) -> None:
        model = self.served.model
        states_SD = model.hidden(self.token[:, None], cache=Decoding(self.cache, self.position, horizon))[:, 0]
        logits_SV = policy_logits(model, states_SD)
        if penalise:
            assert self.seen is not None
            logits_SV = penalised(logits_SV, self.seen, self.penalty[:, None])
        chosen, logprobs = draw(logits_SV, Rule(self.temperature, self.top_k, self.top_p, self.min_p), self.key, self.position)
        if penalise:
            assert self.seen is not None
            self.seen.scatter_(1, chosen[:, None], True)
        self.note(chosen, logprobs)

    def note(self, chosen: Tensor, logprobs: Tensor) -> None:
        """What was drawn is written down, and each slot goes on or ends."""
        running = self.running == 1
        self.ids_CS.index_copy_(0, self.cursor, torch.where(running, chosen, NOBODY)[None])
        self.logprobs_CS.index_copy_(0, self.cursor, logprobs[None])
        self.cursor.add_(1)
        ended = (chosen == self.stops).any(0) | (self.position >= self.end)
        going = running & ~ended
        self.token.copy_(torch.where(going, chosen, self.token))
        self.position.add_(going)
        self.running.copy_(going)

    def _mark_seen(self, seats: Sequence[Seat], slots: Tensor) -> None:
        if self.seen is None:
            self.seen = torch.zeros(self.ints.shape[1], self.served.model.config.vocab, dtype=torch.bool, device=self.device)
        self.seen[slots] = False
        rows = [seat.slot for seat in seats for _ in seat.prompt]
        self.seen[self._on_device(rows), self._on_device([token for seat in seats for token in seat.prompt])] = True

    def _on_device(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)
