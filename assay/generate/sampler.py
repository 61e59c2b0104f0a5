"""Sampling through the one forward path: ids and their log-probabilities under the distribution actually sampled from.

Every request has an address in the seed, so that its draws do not depend on which requests stand beside it.
Shapes: B requests, T time, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.model.attention import PADDING, documents_from_lengths
from assay.model.cache import Cache
from assay.model.transformer import Transformer
from assay.seeds import generator


@dataclass(frozen=True)
class Sampling:
    max_new: int = 64
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new < 1 or self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UsageError(f"sampling with max_new {self.max_new}, temperature {self.temperature}, top_k {self.top_k}, "
                             f"top_p {self.top_p}: expected max_new ≥ 1, temperature ≥ 0, top_k ≥ 0 and 0 < top_p ≤ 1")


@dataclass(frozen=True)
class Completion:
    ids: tuple[int, ...]  # the stop id included, where one came
    logprobs: tuple[float, ...]  # under the sampled distribution: after temperature, top-k and top-p
    ended: Literal["stop", "length"]


@torch.no_grad()
def sample(model: Transformer, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], sampling: Sampling,
           on_token: Callable[[int, int], None] | None = None) -> list[Completion]:
    """One completion per prompt, all prompts in one batch. `on_token(request, id)` is called as tokens come."""
    _refuse_unservable(model, prompts, sampling)
    generators = [generator(sampling.seed, "sample", row) for row in range(len(prompts))]
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    logits_BV, cache = _prefill(model, prompts, sampling.max_new)
    while True:
        chosen, chosen_logprobs = choose(logits_BV, sampling, generators)
        for row in _running(ids, stop_ids):
            ids[row].append(int(chosen[row]))
            logprobs[row].append(float(chosen_logprobs[row]))
            if on_token is not None:
                on_token(row, ids[row][-1])
        if not _running(ids, stop_ids) or max(map(len, ids)) == sampling.max_new:
            break
        logits_BV = model.logits(model.hidden(chosen[:, None], cache=cache)[:, -1]).float()
    return [Completion(tuple(i), tuple(p), "stop" if i[-1] in stop_ids else "length") for i, p in zip(ids, logprobs, strict=True)]


def choose(logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    """The next token of every request and its log-probability under what it was drawn from."""
    logprobs_BV = sampled_distribution(logits_BV, sampling)
    if sampling.temperature == 0:
        chosen = logits_BV.argmax(-1)
    else:
        draws = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators]).to(logits_BV.device)
        cumulative = logprobs_BV.double().exp().cumsum(-1)
        chosen = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True).squeeze(-1)
        chosen = chosen.clamp(max=logits_BV.shape[-1] - 1)
    return chosen, logprobs_BV.gather(-1, chosen[:, None]).squeeze(-1)


def sampled_distribution(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities after temperature, top-k and top-p; greedy is the distribution that has one outcome."""
    if sampling.temperature == 0:
        certain = torch.full_like(logits_BV, float("-inf"))
        return certain.scatter(-1, logits_BV.argmax(-1, keepdim=True), 0.0)
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        least = logits_BV.topk(sampling.top_k, -1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
    if sampling.top_p < 1:
        ranked, order = logits_BV.softmax(-1).sort(-1, descending=True)
        beyond = ranked.cumsum(-1) - ranked >= sampling.top_p  # the token that crosses top_p stays
        logits_BV = logits_BV.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
    return logits_BV.log_softmax(-1)


def _prefill(model: Transformer, prompts: Sequence[Sequence[int]], max_new: int) -> tuple[Tensor, Cache]:
    c, device = model.config, model.embed.weight.device
    lengths, width = [len(prompt) for prompt in prompts], max(map(len, prompts))
    documents = documents_from_lengths(lengths, width, left=True).to(device)
    tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    tokens[documents != PADDING] = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    dtype = model.compute_dtype or model.embed.weight.dtype
    cache = Cache(c.depth, len(prompts), width + max_new, c.kv_heads, c.head_dim, dtype=dtype, device=device)
    return model.logits(model.hidden(tokens, documents=documents, cache=cache)[:, -1]).float(), cache


def _running(ids: list[list[int]], stop_ids: Collection[int]) -> list[int]:
    return [row for row, done in enumerate(ids) if not done or done[-1] not in stop_ids]


def _refuse_unservable(model: Transformer, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {row} has no tokens; give at least one, such as the beginning-of-text token")
        if max(prompt) >= model.config.vocab or min(prompt) < 0:
            raise UsageError(f"prompt {row} has token id {max(prompt)}, the vocabulary ends at {model.config.vocab - 1}; "
                             "use the model's own tokenizer")
        if len(prompt) + sampling.max_new > model.config.max_length:
            raise UsageError(f"prompt {row} has {len(prompt)} tokens and {sampling.max_new} new ones are asked for; "
                             f"the model's context is {model.config.max_length}")
