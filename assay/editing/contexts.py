"""Contexts of a fact: the bare prompt, the prompt after prefixes that the model itself sampled, and the fact's rephrasings.

A key or a value that holds after any text, and not after this one alone, is an average over them: half of it the bare
prompt, half the others, the same weights wherever an average is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.editing.block_hooks import keys_and_state
from assay.editing.facts import Fact
from assay.editing.subject_tokens import SubjectSpan, locate_subject
from assay.generate.engine import sample
from assay.generate.generation_request import Sampling
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.seeds import derive

OPENINGS = ("The", "Therefore", "Because", "I", "You")
BARE = ""
_ROWS = {"cpu": 64}  # in one forward pass; elsewhere MANY
_MANY = 512


@dataclass(frozen=True)
class Contexts:
    """Texts that come before a prompt; the first is empty."""

    prefixes: tuple[str, ...]

    def weights(self) -> Tensor:
        """Weights of the contexts of a fact that has no rephrasings."""
        return context_weights(len(self.prefixes))

    def texts(self, fact: Fact) -> list[tuple[str, int]]:
        """Every text in which the fact is sought, and where its subject starts; the bare prompt comes first."""
        texts = [(prefix + fact.prompt, len(prefix) + fact.start) for prefix in self.prefixes]
        return texts + [(said.prompt, said.start) for said in fact.rephrasings]

    def spans(self, tokenizer: Tokenizer, fact: Fact) -> list[SubjectSpan]:
        return [locate_subject(tokenizer, text, start, fact.subject, fact.name) for text, start in self.texts(fact)]


def context_weights(count: int) -> Tensor:
    """Weights of a fact's contexts: half for the first, which is the bare prompt, and half for all others together."""
    return torch.tensor([0.5, *(0.5 / (count - 1) for _ in range(count - 1))] if count > 1 else [1.0], dtype=torch.float64)


def sample_contexts(model: Transformer, tokenizer: Tokenizer, *, count: int, length: int, seed: int) -> Contexts:
    """`count` prefixes of `length` new tokens, sampled at addresses of the seed."""
    openings = [tokenizer.encode(OPENINGS[i % len(OPENINGS)]) for i in range(count)]
    if not count:
        return Contexts((BARE,))
    sampling = Sampling(max_new=length, temperature=1.0, top_k=5, seed=derive(seed, "edit", "prefixes"))
    made = sample(model, openings, (), sampling)
    texts = [tokenizer.decode([*opening, *c.ids], special=False) for opening, c in zip(openings, made, strict=True)]
    return Contexts((BARE, *(f"{text.strip()}. " for text in texts)))


def context_keys(model: Transformer, spans: Sequence[Sequence[SubjectSpan]], layer: int, top: int) -> tuple[list[Tensor], Tensor]:
    """(each fact's keys, one a row for each of its contexts; states_Dn of the bare prompts after block `top`), float64 on the CPU."""
    flat = [span for of_fact in spans for span in of_fact]
    at_once = _ROWS.get(model.embed.weight.device.type, _MANY)
    batches = [flat[start : start + at_once] for start in range(0, len(flat), at_once)]
    parts = [keys_and_state(model, [span.ids for span in batch], [span.last for span in batch], layer, top) for batch in batches]
    counts = [len(of_fact) for of_fact in spans]
    keys, states = (torch.cat(tensors).double().cpu().split(counts) for tensors in zip(*parts, strict=True))
    return list(keys), torch.stack([of_fact[0] for of_fact in states], 1)


def averaged_keys(model: Transformer, spans: Sequence[Sequence[SubjectSpan]], layer: int, top: int) -> tuple[Tensor, Tensor]:
    """(keys_Fn averaged over contexts, states_Dn)"""
    keys, states_Dn = context_keys(model, spans, layer, top)
    return torch.stack([context_weights(len(of_fact)) @ of_fact for of_fact in keys], 1), states_Dn


def weighed_keys(model: Transformer, spans: Sequence[Sequence[SubjectSpan]], layer: int, top: int) -> tuple[Tensor, Tensor]:
    """(keys_Fm, a column for each context of each fact, times the root of its weight; states_Dn)"""
    keys, states_Dn = context_keys(model, spans, layer, top)
    return torch.cat([context_weights(len(of_fact)).sqrt()[:, None] * of_fact for of_fact in keys]).T, states_Dn
