"""Who may look at whom. One law: a query sees a key of its own document, not later than itself, within the window.

Padding is the document -1: it sees only padding and nothing sees it. Packing, left and right padding and cached decoding
are all the same law with other `documents` and `positions`.

Shapes: B rows, T queries, S keys, H heads, K key/value heads, d head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.errors import UsageError
from assay.model.cache import Cache

PADDING = -1


class Sight(NamedTuple):
    """What the queries of one layer see: everything before them (mask None) or what the mask says."""

    mask_BTS: Tensor | None


class Placement(NamedTuple):
    """Where each token stands, and what it sees, for each window that occurs in the model."""

    documents: Tensor  # (B, T)
    positions: Tensor  # (B, T), or (1, T) where every row counts alike
    sights: dict[int | None, Sight]


def place(tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, cache: Cache | None,
          windows: set[int | None]) -> Placement:
    B, T = tokens_BT.shape
    plain = documents is None and positions is None and cache is None
    if documents is None:
        documents = torch.zeros_like(tokens_BT)
    if positions is None:
        start = 0 if cache is None else cache.lengths[:, None]
        positions = torch.arange(T, device=tokens_BT.device)[None] if plain else start + within_document(documents)
    if plain and all(window is None or window >= T for window in windows):
        return Placement(documents, positions, dict.fromkeys(windows, Sight(None)))
    positions = positions.expand(B, T)
    keys = (documents, positions) if cache is None else cache.with_new(documents, positions)
    return Placement(documents, positions, {w: Sight(visible(documents, positions, *keys, w)) for w in windows})


def visible(query_documents: Tensor, query_positions: Tensor, key_documents: Tensor, key_positions: Tensor,
            window: int | None) -> Tensor:
    """The law as a (B, T, S) mask."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    seen = (query_documents[:, :, None] == key_documents[:, None, :]) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def within_document(documents: Tensor) -> Tensor:
    """Each token's index in its run of equal document ids; 0 for padding, whose states nobody reads."""
    T = documents.shape[1]
    index = torch.arange(T, device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    start = torch.where(begins, index, 0).cummax(1).values
    return torch.where(documents == PADDING, 0, index - start)


def attend(q_BTHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, sight: Sight) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BSKd, v_BSKd))
    mask = None if sight.mask_BTS is None else sight.mask_BTS[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def documents_from_lengths(lengths: list[int], width: int, *, left: bool = False) -> Tensor:
    """The `documents` of rows that each hold one sequence and padding on one side."""
    if max(lengths) > width:
        raise UsageError(f"a row of {max(lengths)} tokens does not fit a width of {width}")
    index, length = torch.arange(width)[None], torch.tensor(lengths)[:, None]
    real = index >= width - length if left else index < length
    return torch.where(real, 0, PADDING)
