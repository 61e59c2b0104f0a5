"""Sampling engine: continuous batching over fixed slots, through the one forward path, on the trainer's own weights.

Requests wait in a queue; a free slot takes the next at once. A prompt is computed once and stored in the slots of all who share
it, and one that goes on from an earlier completion (`follows`) is computed from there. A step gives every running slot one token
or, on CUDA, several. Keys and values belong to one version of the weights: `load` names the next one, and what was computed under
the last is gone.

Batch composition: a slot's draws depend on its own request alone. Its logits depend on its neighbours by rounding only, through
the shape of the prefill and the number of slots: in fp32 on a CPU log-probabilities moved by at most 1e-5 in the tests.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import torch

from assay.errors import GuardStop, UsageError
from assay.generate.detokenize import Detokenizer
from assay.generate.generation_request import MOST_STOP_IDS, Completion, CompletionProgress, FinishReason, GenerationRequest, Sampling
from assay.generate.policy_logprobs import batched_by_length
from assay.generate.prefill import SlotExtension
from assay.generate.sampler_weights import SamplerWeights, fingerprint
from assay.generate.slots import NO_TOKEN, LaunchedSteps, SlotAssignment, Slots
from assay.generate.token_grammar import GrammarPath
from assay.model.tokenizer import Tokenizer
from assay.model.transfers import to_device
from assay.model.transformer import Transformer
from assay.seeds import derive

MOST_SLOTS = {"cuda": 1024, "cpu": 256}
CACHE_SHARE = 0.25  # of the memory that is free, for keys and values
STEPS_PER_LAUNCH = 4  # tokens that a GPU makes for every slot before the host reads them; meanwhile as many again are under way
PREFILL_TOKENS = 32768  # prompt tokens that are computed at once
REFILL_SHARE = 32  # of all slots, one in so many may stand empty until as many are: computing few prompts takes a GPU as long as many


class ActiveCompletion:
    """One member of a request, from the queue to its end."""

    def __init__(self, ticket: int, member: int, request: GenerationRequest, stop_ids: tuple[int, ...], tokenizer: Tokenizer | None):
        self.ticket, self.member, self.request, self.stop_ids, self.tokenizer = ticket, member, request, stop_ids, tokenizer
        self.ended: FinishReason | None = None
        self.restart()

    def restart(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.launched = 0  # steps that were launched for it, whether or not they have been read
        reads_text = self.tokenizer is not None and (self.request.stop or self.request.stream)
        self.detokenizer = Detokenizer(self.tokenizer, self.request.stop) if reads_text and self.tokenizer is not None else None
        self.path = GrammarPath(self.request.grammar) if self.request.grammar is not None else None

    @property
    def key(self) -> int:
        return derive(self.request.sampling.seed, "sample", *self.request.address, self.request.first + self.member)

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that must be in the cache before the last prompt token is fed."""
        return self.request.prompt[:-1]

    @property
    def left(self) -> int:
        return self.request.sampling.max_new - self.launched

    def gain(self, ids: list[int], logprobs: list[float], version: str) -> CompletionProgress:
        """Take the tokens of launched steps, up to the one that ends the completion."""
        stopped_after = self.detokenizer.feed(ids) if self.detokenizer is not None else None
        if stopped_after is not None:
            ids, logprobs, self.ended = ids[:stopped_after], logprobs[:stopped_after], "stop string"
        self.ids += ids
        self.logprobs += logprobs
        assert len(self.ids) <= self.request.sampling.max_new, "the device ends a slot that has drawn its last token"
        if self.ended is None and self.ids and self.ids[-1] in self.stop_ids:
            self.ended = "stop"
        elif self.ended is None and len(self.ids) == self.request.sampling.max_new:
            self.ended = "length"
        if self.path is not None and self.ended is None:
            self.path.take(ids)
            self.ended = "no token" if self.path.allowed is None else None
        return self.progress(ids, logprobs, version)

    def progress(self, ids: Sequence[int], logprobs: Sequence[float], version: str) -> CompletionProgress:
        completion, text = None, self.detokenizer.take() if self.detokenizer is not None and self.request.stream else ""
        if self.ended is not None:
            text += self.detokenizer.finish(self.ended == "stop string") if self.detokenizer is not None else ""
            completion = Completion(tuple(self.ids), tuple(self.logprobs), self.ended, version, self._whole_text())
        return CompletionProgress(self.ticket, self.member, tuple(ids), tuple(logprobs), text if self.request.stream else "", completion)

    def _whole_text(self) -> str | None:
        if self.detokenizer is not None:
            return self.detokenizer.text
        return None if self.tokenizer is None else self.tokenizer.decode(self.ids, special=False)


class Engine:
    """`slots` requests at a time, each of at most `length` tokens with its prompt. `version` names the weights as they are now.

    `device`: where to sample, if not on the model's own weights; they are then copied there at every `load`, and checked by digest.
    `steps` tokens are made for every slot before the host looks (None: 4 on CUDA, else 1); `graphed`: as one CUDA graph each
    (None: on CUDA). Neither changes what is said. An engine that `lags` has weights of its own and may sample while they are trained.
    """

    def __init__(self, model: Transformer, *, slots: int, length: int, stop_ids: Collection[int] = (), version: str,
                 tokenizer: Tokenizer | None = None, device: torch.device | str | None = None, steps: int | None = None,
                 graphed: bool | None = None, lags: bool = False):
        if slots < 1 or not 2 <= length <= model.config.max_length:
            raise UsageError(f"an engine of {slots} slots of {length} tokens: expected at least one slot and 2 to "
                             f"{model.config.max_length} tokens, the model's context")
        self.weights = SamplerWeights(model, device, lags=lags)
        on_gpu = self.weights.device.type == "cuda"
        mixture = model.config.experts is not None  # which experts a token goes to is read on the host, so no graph can hold a step
        if mixture and graphed:
            raise UsageError("a mixture of experts is sampled without CUDA graphs; leave graphed=True out")
        graphed = on_gpu and not mixture if graphed is None else graphed
        self.slots = Slots(self.weights, slots, length, steps or (STEPS_PER_LAUNCH if on_gpu else 1), graphed=graphed)
        self.length, self.stop_ids, self.version, self.tokenizer = length, tuple(stop_ids), version, tokenizer
        self._launches_ahead = 2 if on_gpu else 1  # launches under way at once: a GPU has work while the host reads what it did before
        self._least_free = max(1, slots // REFILL_SHARE) if on_gpu else 1  # slots that are filled anew together, while others wait
        self._tickets = 0
        self._waiting: deque[ActiveCompletion] = deque()
        self._in_slots: list[ActiveCompletion | None] = [None] * slots
        self._prefixes: list[tuple[int, ...]] = [()] * slots  # the prefix whose keys and values stand in each slot
        self._kept: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # of ticket and member that ended: its slot and what it holds
        self.forwarded = 0  # tokens that went through the model, since the engine was made
        self.reused = 0  # prompt tokens whose keys and values were there from an earlier completion
        self._reach = [1] * slots  # no slot stands at or beyond this place
        self._launched: deque[tuple[LaunchedSteps, list[ActiveCompletion | None]]] = deque()

    # ── what a caller does ────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: GenerationRequest) -> int:
        """Put a request into the queue; its ticket comes back with everything it gains."""
        stop_ids = self.stop_ids if request.stop_ids is None else request.stop_ids
        _refuse_unservable(request, stop_ids, self.length, self.weights.model.config.vocab, self.tokenizer)
        self._tickets += 1
        self._waiting.extend(ActiveCompletion(self._tickets, member, request, stop_ids, self.tokenizer) for member in range(request.group))
        return self._tickets

    def step(self) -> list[CompletionProgress]:
        """Progress since the last call, at most one entry for each completion in progress; [] where nothing is left to do."""
        self._refuse_other_weights(self.weights.written())
        self._admit()
        while self._may_launch() and any(active is not None and active.left > 0 for active in self._in_slots):
            self._launch()
        return self._collect(*self._launched.popleft()) if self._launched else []

    def drain(self) -> list[CompletionProgress]:
        """Steps until nothing is left; the entries that carry completions, in the order of their ends."""
        ended: list[CompletionProgress] = []
        while not self.idle:
            ended += [progress for progress in self.step() if progress.completion is not None]
        return ended

    def cancel(self, ticket: int) -> list[CompletionProgress]:
        """End the request's members that are not over, with what they have; a ticket that is over is left alone."""
        cancelled = [active for active in (*self._waiting, *self._in_slots) if active is not None and active.ticket == ticket]
        self._waiting = deque(active for active in self._waiting if active.ticket != ticket)
        for active in cancelled:
            active.ended = "cancelled"
        self._free_slots()
        return [active.progress((), (), self.version) for active in cancelled]

    def load(self, version: str, *, begun: Literal["refuse", "restart"] = "refuse") -> None:
        """The trainer's weights as they are now, under a new name. No token is ever drawn from keys and values of two versions:
        requests that have begun are refused, or begin again from their prompts and lose what they had."""
        running = [active for active in self._in_slots if active is not None]
        if running and begun == "refuse":
            raise UsageError(f"{len(running)} requests have begun under version {self.version!r} and cannot go on under {version!r}; "
                             "drain or cancel them first, or load with begun='restart'")
        for active in reversed(running):
            active.restart()
            self._waiting.appendleft(active)
        self._in_slots = [None] * len(self._in_slots)
        self._prefixes = [()] * len(self._prefixes)
        self._kept.clear()
        self._launched.clear()
        self.slots.clear(recapture=self.weights.load())
        self.version = version

    def latest_before(self, prompt: tuple[int, ...]) -> tuple[int, int] | None:
        """Ticket and member of the completion, of these weights, that the prompt goes on from the furthest; for `follows`."""
        begun = {said: len(held) for said, (_, held) in self._kept.items() if len(held) < len(prompt) and prompt[: len(held)] == held}
        return max(begun, key=lambda said: begun[said], default=None)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._launched and all(active is None for active in self._in_slots)

    # ── launches ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _may_launch(self) -> bool:
        """Whether the next step may be launched ahead: what may come next in a grammar depends on what came, so nothing is launched ahead
        of it."""
        awaited = any(active is not None and active.path is not None for _, launched in self._launched for active in launched)
        return len(self._launched) < self._launches_ahead and not awaited

    def _launch(self) -> None:
        launched = [active if active is not None and active.left > 0 else None for active in self._in_slots]
        allowed_SV = self._allowed(launched)
        steps = 1 if allowed_SV is not None else min(self.slots.steps, max(active.left for active in launched if active is not None))
        for slot, active in enumerate(launched):
            if active is not None:
                self._reach[slot] += min(steps, active.left)
                active.launched += steps
        penalise = any(active is not None and active.request.sampling.repetition_penalty != 1 for active in launched)
        self._launched.append((self.slots.launch(steps, min(max(self._reach), self.length), penalise, allowed_SV), launched))

    def _allowed(self, launched: Sequence[ActiveCompletion | None]) -> torch.Tensor | None:
        """(S, V): which tokens each slot may draw; None where nobody follows a grammar."""
        paths = {slot: active.path for slot, active in enumerate(launched) if active is not None and active.path is not None}
        if not paths:
            return None
        allowed_SV = torch.ones(len(launched), self.weights.model.config.vocab, dtype=torch.bool)
        for slot, path in paths.items():
            assert path.allowed is not None, "a completion that nothing can follow has ended"
            allowed_SV[slot] = path.allowed
        return to_device(allowed_SV, self.weights.device)

    def _collect(self, steps: LaunchedSteps, launched: list[ActiveCompletion | None]) -> list[CompletionProgress]:
        gained: list[CompletionProgress] = []
        all_ids, all_logprobs = steps.read()
        if not steps.finite():
            of = f" of version {self.version!r}" if self.version else ""
            raise GuardStop(f"a token{of} has a log-probability that is no number: the model's logits are not "
                            "finite; a weight or an activation overflowed")
        for active, ids, logprobs in zip(launched, all_ids, all_logprobs, strict=True):
            if active is None or active.ended is not None or ids[0] == NO_TOKEN:
                continue
            count = len(ids) if ids[-1] != NO_TOKEN else ids.index(NO_TOKEN)
            gained.append(active.gain(ids[:count], logprobs[:count], self.version))
            self.forwarded += count
        self._free_slots()
        return gained

    def _free_slots(self) -> None:
        """Free the slots whose completions have ended; the device is told of those that it would go on with."""
        over = [(slot, active) for slot, active in enumerate(self._in_slots) if active is not None and active.ended is not None]
        unfinished = [slot for slot, active in over if active.ended not in ("stop", "length")]
        if unfinished:
            self.slots.stop(unfinished)
        for slot, active in over:
            self._in_slots[slot] = None
            if active.ids:  # the last one was drawn and not fed
                self._kept[active.ticket, active.member] = slot, (*active.request.prompt, *active.ids[:-1])

    # ── admission ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        free = [slot for slot, active in enumerate(self._in_slots) if active is None]
        if not self._waiting or len(free) < min(len(self._waiting), self._least_free):
            return
        self._refuse_other_weights(self.weights.replaced())
        arrivals = self._placed(free)
        continued = [extension for slot, active in arrivals if (extension := self._continued(slot, active)) is not None]
        again = {extension.slot for extension in continued}
        self.reused += sum(extension.held for extension in continued)
        self._fill_prefixes([(slot, active.prefix) for slot, active in arrivals if slot not in again])
        self._extend([extension for extension in continued if extension.ids])
        self.slots.assign([SlotAssignment(slot, t.request.prompt, t.request.sampling, t.stop_ids, t.key) for slot, t in arrivals])
        filled = {slot for slot, _ in arrivals}
        self._kept = {said: kept for said, kept in self._kept.items() if kept[0] not in filled}
        for slot, active in arrivals:
            self._in_slots[slot], self._prefixes[slot], self._reach[slot] = active, active.prefix, len(active.request.prompt)

    def _placed(self, free: list[int]) -> list[tuple[int, ActiveCompletion]]:
        """The next requests with a slot each: the one that holds what a request goes on from, else one that nobody waits for, else any."""
        arrivals, own, left = [self._waiting.popleft() for _ in free[: len(self._waiting)]], dict[int, int](), dict.fromkeys(free)
        for place, active in enumerate(arrivals):
            home = self._home(active)
            if home in left:
                own[place] = home
                del left[home]
        awaited = {self._home(active) for active in self._waiting}
        others = iter(sorted(left, key=lambda slot: slot in awaited))
        return [(own[place] if place in own else next(others), active) for place, active in enumerate(arrivals)]

    def _home(self, active: ActiveCompletion) -> int:
        """The slot that holds what a request goes on from; -1 where there is none."""
        follows = active.request.follows
        return -1 if follows is None else self._kept.get(follows, (-1, ()))[0]

    def _continued(self, slot: int, active: ActiveCompletion) -> SlotExtension | None:
        """Rest to compute where the slot holds the beginning of the request's prompt; None where it does not."""
        if active.request.follows is None or self._home(active) != slot:
            return None
        held = self._kept[active.request.follows][1]
        if active.prefix[: len(held)] != held:
            return None
        return SlotExtension(slot, len(held), active.prefix[len(held):])

    def _extend(self, continued: Sequence[SlotExtension]) -> None:
        for part in batched_by_length([len(one.ids) for one in continued], PREFILL_TOKENS):
            self.slots.extend([continued[i] for i in part])
            self.forwarded += sum(len(continued[i].ids) for i in part)

    def _fill_prefixes(self, wanted: list[tuple[int, tuple[int, ...]]]) -> None:
        """Fill the prefixes: every slot gets the keys and values of its prefix: its own, copied from another slot, or computed once for all
        who want it."""
        held = {prefix: slot for slot, prefix in enumerate(self._prefixes)}
        copies = [(held[prefix], slot, len(prefix)) for slot, prefix in wanted
                  if prefix and prefix in held and self._prefixes[slot] != prefix]
        absent: dict[tuple[int, ...], list[int]] = {}
        for slot, prefix in wanted:
            if prefix and prefix not in held:
                absent.setdefault(prefix, []).append(slot)
        if copies:  # before anything new is stored, which may be where it is copied from
            self._copy(copies)
        prefixes = list(absent)
        for part in batched_by_length([len(prefix) for prefix in prefixes], PREFILL_TOKENS):
            self.slots.fill([prefixes[i] for i in part], [absent[prefixes[i]][0] for i in part])
            self.forwarded += sum(len(prefixes[i]) for i in part)
        if more := [(home, slot, len(prefix)) for prefix, (home, *others) in absent.items() for slot in others]:
            self._copy(more)

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy KV-cache entries between slots; each item is (source slot, target slot, number of places)."""
        sources, targets, widths = zip(*copies, strict=True)
        self.slots.cache.copy(self._indices(sources), self._indices(targets), max(widths))

    def _indices(self, values: Iterable[int]) -> torch.Tensor:
        return to_device(torch.tensor(list(values), dtype=torch.int64), self.weights.device)

    def _refuse_other_weights(self, changed: bool) -> None:
        if changed:
            raise GuardStop(f"the weights have changed since version {self.version!r} was loaded, so what is sampled now would carry "
                            "the wrong name and stale keys; call load(version) after every update of the weights")


def fitting_slots(model: Transformer, wanted: int, length: int, device: torch.device | str | None = None) -> int:
    """Number of slots: as many as wanted, if the device can hold their keys and values beside everything else."""
    where = model.embed.weight.device if device is None else torch.device(device)
    most = MOST_SLOTS.get(where.type, MOST_SLOTS["cpu"])
    if where.type == "cuda":
        c, size = model.config, (model.compute_dtype or model.embed.weight.dtype).itemsize
        a_slot = 2 * c.depth * length * c.kv_heads * c.head_dim * size
        most = min(most, int(CACHE_SHARE * torch.cuda.mem_get_info(where)[0] // a_slot))
    return max(1, min(wanted, most))


def generate(model: Transformer, requests: Sequence[GenerationRequest], *, stop_ids: Collection[int] = (), version: str | None = None,
             tokenizer: Tokenizer | None = None, slots: int | None = None) -> list[Completion]:
    """One completion per member, in the order of the requests and of their members. `version` None: the weights' fingerprint."""
    if not requests:
        return []
    members = sum(request.group for request in requests)
    length = min(max(len(r.prompt) + r.sampling.max_new for r in requests), model.config.max_length)
    engine = Engine(model, slots=slots or fitting_slots(model, members, length), length=max(length, 2), stop_ids=stop_ids,
                    version=fingerprint(model) if version is None else version, tokenizer=tokenizer)
    tickets = [engine.submit(request) for request in requests]
    ended = {(progress.ticket, progress.member): progress.completion for progress in engine.drain()}
    found = [ended[ticket, member] for ticket, request in zip(tickets, requests, strict=True) for member in range(request.group)]
    return [completion for completion in found if completion is not None]


def sample(model: Transformer, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], sampling: Sampling,
           on_token: Callable[[int, int], None] | None = None, version: str = "", graphed: bool | None = None) -> list[Completion]:
    """One completion per prompt, all prompts at once; prompt i draws at address i. `on_token(i, id)` is called as tokens come.

    `graphed`: as `Engine` has it.
    """
    length = max((len(prompt) for prompt in prompts), default=1) + sampling.max_new
    if length > model.config.max_length:
        raise UsageError(f"a prompt has {length - sampling.max_new} tokens and {sampling.max_new} new ones are asked for; "
                         f"the model's context is {model.config.max_length}")
    engine = Engine(model, slots=max(1, len(prompts)), length=length, stop_ids=stop_ids, version=version, graphed=graphed)
    row_of = {engine.submit(GenerationRequest(tuple(prompt), sampling, (row,))): row for row, prompt in enumerate(prompts)}
    done: dict[int, Completion] = {}
    while not engine.idle:
        for progress in engine.step():
            row = row_of[progress.ticket]
            if on_token is not None:
                for token in progress.ids:
                    on_token(row, token)
            if progress.completion is not None:
                done[row] = progress.completion
    return [done[row] for row in range(len(prompts))]


def _refuse_unservable(request: GenerationRequest, stop_ids: Sequence[int], length: int, vocab: int, tokenizer: Tokenizer | None) -> None:
    prompt, asked = request.prompt, request.sampling.max_new
    if not prompt:
        raise UsageError("the prompt has no tokens; give at least one, such as the beginning-of-text token")
    if max(prompt) >= vocab or min(prompt) < 0:
        wrong = max(prompt) if max(prompt) >= vocab else min(prompt)
        raise UsageError(f"the prompt has token id {wrong}, the vocabulary ends at {vocab - 1}; use the model's own tokenizer")
    if len(prompt) + asked > length:
        raise UsageError(f"the prompt has {len(prompt)} tokens and {asked} new ones are asked for; the context is {length} tokens")
    if request.group < 1 or len(stop_ids) > MOST_STOP_IDS:
        raise UsageError(f"a request for {request.group} completions with {len(stop_ids)} stop ids: expected at least 1 completion and "
                         f"at most {MOST_STOP_IDS} stop ids")
    if (request.stop or request.stream) and tokenizer is None:
        raise UsageError("stop strings and streamed text need a tokenizer; give the engine one")
    if not all(request.stop):
        raise UsageError("a stop string is empty; every text would end before it began")
