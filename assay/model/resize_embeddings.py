"""Resizing embeddings for new tokens: ids in the tokenizer, and rows in the embedding and the head.

A new token takes the next id, as in transformers. Its row is the mean of the rows of the pieces that its text was before, in the
embedding and, where it is not tied, in the head: the model starts from something it knows. The rows a vocabulary was padded
with (GPT-2's 50257 to 50303) are used first; only what lies beyond them makes the matrices longer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenizers
import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig

THINKING_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_TABLES = ("embed.weight", "head.weight")  # with one row a token


@dataclass(frozen=True)
class ResizedModel:
    """`rows` are the ids whose rows are new; `tensors` those of the whole model, of which only the tables are new."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    rows: tuple[int, ...]

    def tables(self) -> dict[str, Tensor]:
        """Resized tables, which an adapter must carry, for Patch.replaced."""
        return {name: self.tensors[name] for name in _TABLES if name in self.tensors}


def with_new_tokens(tokenizer: Tokenizer, tokens: Sequence[str], *, special: bool = False) -> Tokenizer:
    """The tokenizer with `tokens` as single ids. What it has as single ids already stays as it is.

    They are not `special` unless asked: a special token vanishes from text that is decoded without them, and a reward that
    looks for <answer> in that text would never find it.
    """
    if len(set(tokens)) < len(tokens) or not all(isinstance(token, str) and token.strip() for token in tokens):
        raise UsageError(f"new tokens are {list(tokens)}; expected different texts, none of them empty")
    known = {tokenizer.tokens[id] for id in tokenizer.added_ids}
    new = [token for token in tokens if token not in known]
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_tokens([tokenizers.AddedToken(token, special=special, **FLAGS) for token in new])
    ids = {token: backend.token_to_id(token) for token in new}
    added: list[dict[str, Any]] = [{"id": ids[token], "content": token, "special": special, **FLAGS} for token in new]
    document = tokenizer.document | {"added_tokens": [*tokenizer.document["added_tokens"], *added]}
    grown = Tokenizer(document, tokenizer.settings, tokenizer.templates, tokenizer.conflicts)
    if wrong := [token for token in tokens if grown.encode(token) != [grown.ids[token]]]:
        raise ArtifactError(f"{wrong[0]!r} becomes {grown.encode(wrong[0])} and not one id: another token of the tokenizer overlaps it")
    return grown


def resize_embeddings(config: ModelConfig, tensors: Mapping[str, Tensor], before: Tokenizer, after: Tokenizer, *,
                      multiple: int = 1) -> ResizedModel:
    """Rows for the tokens that `after` has and `before` has not. `multiple` rounds a vocabulary that must grow up, for speed."""
    new = sorted(set(after.tokens) - set(before.tokens))
    if missing := set(before.tokens.items()) - set(after.tokens.items()):
        raise UsageError(f"the new tokenizer gives {len(missing)} old ids another meaning or none, such as {min(missing)}; "
                         "rows can only be added")
    if before.size > config.vocab:
        raise ArtifactError(f"the tokenizer has ids up to {before.size - 1}, the model only {config.vocab} rows")
    vocab = config.vocab if after.size <= config.vocab else -(-after.size // multiple) * multiple
    pieces = {id: before.encode(after.tokens[id]) for id in new}
    tables = {name: _extended(tensors[name], vocab, before.size, pieces) for name in _TABLES if name in tensors}
    return ResizedModel(replace(config, vocab=vocab), dict(tensors) | tables, tuple(new))


def _extended(table: Tensor, vocab: int, known: int, pieces: Mapping[int, Sequence[int]]) -> Tensor:
    """Embedding table with new rows, which are means, in fp32. Rows that only fill the matrix up are the mean of all: no token has them,
    and a row of zeros would win against tokens whose logits are negative."""
    longer = torch.empty(vocab, table.shape[1], dtype=table.dtype, device=table.device)
    longer[: len(table)] = table
    if vocab > len(table):
        longer[len(table) :] = table[:known].float().mean(0).to(table.dtype)
    for id, parts in pieces.items():
        longer[id] = table[list(parts)].float().mean(0).to(table.dtype)
    return longer
