"""Contexts of a fact: the bare prompt, and the prompt after prefixes that the model itself sampled.

A key or a value that holds after any text, and not after this one alone, is an average over them: half of it the bare
prompt, half the prefixes, the same weights wherever an average is taken.
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
        others = len(self.prefixes) - 1
        halves = [0.5, *(0.5 / others for _ in range(others))] if others else [1.0]
        return torch.tensor(halves, dtype=torch.float64)

    def spans(self, tokenizer: Tokenizer, fact: Fact) -> list[SubjectSpan]:
        return [locate_subject(tokenizer, prefix + fact.prompt, len(prefix) + fact.start, fact.subject, fact.name)
                for prefix in self.prefixes]


def sample_contexts(model: Transformer, tokenizer: Tokenizer, *, count: int, length: int, seed: int) -> Contexts:
    """`count` prefixes of `length` new tokens, sampled at addresses of the seed."""
    openings = [tokenizer.encode(OPENINGS[i % len(OPENINGS)]) for i in range(count)]
    if not count:
        return Contexts((BARE,))
    sampling = Sampling(max_new=length, temperature=1.0, top_k=5, seed=derive(seed, "edit", "prefixes"))
    made = sample(model, openings, (), sampling)
    texts = [tokenizer.decode([*opening, *c.ids], special=False) for opening, c in zip(openings, made, strict=True)]
    return Contexts((BARE, *(f"{text.strip()}. " for text in texts)))


def averaged_keys(model: Transformer, spans: Sequence[Sequence[SubjectSpan]], weights: Tensor, layer: int, top: int) -> tuple[Tensor,
                                                                                                                              Tensor]:
    """(keys_Fn averaged over contexts, states_Dn of the bare prompts after block `top`), float64 on the CPU."""
    flat = [span for of_fact in spans for span in of_fact]
    at_once = _ROWS.get(model.embed.weight.device.type, _MANY)
    batches = [flat[start : start + at_once] for start in range(0, len(flat), at_once)]
    parts = [keys_and_state(model, [span.ids for span in batch], [span.last for span in batch], layer, top) for batch in batches]
    keys, states = (torch.cat(tensors).double().cpu().unflatten(0, (len(spans), -1)) for tensors in zip(*parts, strict=True))
    return torch.einsum("ncf,c->fn", keys, weights), states[:, 0].T
