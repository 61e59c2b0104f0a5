"""Loaded model under test: lm-eval's three calls over an artifact, through the one forward path and the one sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from assay.errors import UsageError
from assay.evaluation.task import Likelihood
from assay.generate.engine import Engine, fitting_slots
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.generate.policy_logprobs import completion_logprobs
from assay.model.placement import require_device
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.seeds import derive
from assay.store.artifact import Artifact, build_model

SLOTS_ON_CPU = 32
PLAIN_SAMPLING = Sampling()  # the model's own distribution


class LoadedModel:
    """An artifact built on a device, or as `model` already. `identity` names its weights, an adapter's with its base's.

    `graphed`: as `Engine` has it; False compiles nothing, which is sooner over for a few texts.
    """

    def __init__(self, artifact: Artifact, *, device: str = "cpu", dtype: torch.dtype | None = None, model: Transformer | None = None,
                 graphed: bool | None = None):
        if artifact.tokenizer is None:
            raise UsageError(f"{artifact.path}: there is no tokenizer here, so text means nothing to it; add tokenizer.json")
        require_device(device)
        self.artifact, self.tokenizer = artifact, artifact.tokenizer
        dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
        self.model, self.graphed = build_model(artifact, dtype).to(device) if model is None else model, graphed
        self.identity = artifact.digest if artifact.base is None else f"{artifact.digest}+{artifact.base.digest}"
        self.engine: Engine | None = None
        self._ids: dict[tuple[str, bool], tuple[int, ...]] = {}  # of prompts: rendering a template costs more than remembering it

    # ---------------------------------------------------------------- the three calls

    def generate_until(self, prompts: Mapping[str, str], sampling: Sampling, *, k: int, stop: Sequence[str], raw: bool) \
            -> dict[str, list[Completion]]:
        """`k` completions of each prompt, in order. Member m of prompt `id` draws at derive(seed, "sample", id, m)."""
        found = self.complete([GenerationRequest(self.ids_of(text, raw=raw), sampling, (id,), group=k, stop=tuple(stop))
                               for id, text in prompts.items()])
        return {id: found[k * place : k * (place + 1)] for place, id in enumerate(prompts)}

    def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion per member, in the order of the requests and of their members."""
        needed = max((len(request.prompt) + request.sampling.max_new for request in requests), default=1)
        if self.engine is None or self.engine.length < needed:
            self.reserve(needed, sum(request.group for request in requests))
        engine = self.engine
        assert engine is not None
        tickets = [engine.submit(request) for request in requests]
        ended = {(progress.ticket, progress.member): progress.completion for progress in engine.drain()}
        found = [ended[ticket, member] for ticket, request in zip(tickets, requests, strict=True) for member in range(request.group)]
        return [completion for completion in found if completion is not None]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Log-likelihood of each continuation after its context; the context begins as every text of this tokenizer begins.

        The space that joins them is no byte of the continuation's: lm-eval divides by the same lengths.
        """
        split = [encode_continuation(self.tokenizer, *pair) for pair in pairs]
        scored = completion_logprobs(self.model, [self._begun(*ids) for ids in split], PLAIN_SAMPLING)
        return [Likelihood(float(found.double().sum()), len(ids[1]), max(len(text.lstrip().encode()), 1))
                for found, ids, (_, text) in zip(scored, split, pairs, strict=True)]

    def greedily(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether each continuation is what greedy decoding would say."""
        split = [self._begun(*encode_continuation(self.tokenizer, *pair)) for pair in pairs]
        return [bool((found == 0).all()) for found in completion_logprobs(self.model, split, replace(PLAIN_SAMPLING, temperature=0.0))]

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[Likelihood]:
        """Log-likelihood of each whole text, every token once. Longer than the context, it is read in windows that begin with the last
        token before."""
        windows, owner = [], []
        ids = [self.tokenizer.encode(text) for text in texts]
        for number, tokens in enumerate(ids):
            parts = list(rolling_windows(tokens, self._first(), self.model.config.max_length))
            windows += parts
            owner += [number] * len(parts)
        totals = [0.0] * len(texts)
        for number, found in zip(owner, completion_logprobs(self.model, windows, PLAIN_SAMPLING), strict=True):
            totals[number] += float(found.double().sum())
        return [Likelihood(total, len(tokens), len(text.encode())) for total, tokens, text in zip(totals, ids, texts, strict=True)]

    # ---------------------------------------------------------------- how texts begin

    def seed_of(self, sampling: Sampling, id: str, member: int) -> int:
        return derive(sampling.seed, "sample", id, member)

    def length_of(self, text: str, *, raw: bool) -> int:
        return len(self.ids_of(text, raw=raw))

    def ids_of(self, text: str, *, raw: bool) -> tuple[int, ...]:
        if (text, raw) not in self._ids:
            self._ids[text, raw] = prompt_token_ids(self.tokenizer, text, raw=raw)
        return self._ids[text, raw]

    def _begun(self, context: tuple[int, ...], rest: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return context or (self._first(),), rest

    def _first(self) -> int:
        """Token id before a text that nothing precedes: the beginning-of-text token, else the end of the text before."""
        first = next((id for id in (self.artifact.stops.bos, self.artifact.stops.eos) if id is not None), None)
        if first is None:
            raise UsageError(f"{self.artifact.path}: no token begins or ends a text, so nothing can predict a first token; name one as "
                             "bos_token or eos_token")
        return first

    def require_room(self, length: int) -> None:
        if length > self.model.config.max_length:
            raise UsageError(f"the longest prompt and its new tokens are {length}, the model's context is {self.model.config.max_length}; "
                             "lower --max-new-tokens or leave the example out")

    def reserve(self, length: int, members: int) -> None:
        """An engine for all calls to come: with the same number of slots, what a prompt says does not depend on the call it is in."""
        self.require_room(length)
        slots = fitting_slots(self.model, members if self.model.embed.weight.is_cuda else min(members, SLOTS_ON_CPU), length)
        self.engine = Engine(self.model, slots=slots, length=max(length, 2), stop_ids=self.artifact.stops.stop_ids,
                             version=self.identity, tokenizer=self.tokenizer, graphed=self.graphed)


def prompt_token_ids(tokenizer: Tokenizer, text: str, *, raw: bool) -> tuple[int, ...]:
    """Token ids of a prompt: as the tokenizer begins a text, or through the chat template, which brings its own beginning."""
    if tokenizer.template is None or raw:
        return tuple(tokenizer.encode(text, special=True))
    return tuple(tokenizer.encode(tokenizer.render([{"role": "user", "content": text}], add_generation_prompt=True)))


def encode_continuation(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of both, as they stand in the joined text; where a token spans the seam, each as it stands alone."""
    before, whole = prompt_token_ids(tokenizer, context, raw=True), prompt_token_ids(tokenizer, context + continuation, raw=True)
    if whole[: len(before)] == before and len(whole) > len(before):
        return before, whole[len(before):]
    return before, tuple(tokenizer.encode(continuation))


def rolling_windows(tokens: Sequence[int], first: int, length: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(what is seen, what is predicted): every token is predicted once, after at least one other."""
    begun = (first, *tokens)
    return [((begun[start],), begun[start + 1 : start + length]) for start in range(0, len(tokens), length - 1)]
