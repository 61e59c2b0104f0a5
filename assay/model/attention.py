"""Attention and its one masking rule: a query sees keys of its own document, not later than itself, within the window.

Padding is the document -1: it sees only padding and nothing sees it. Packing, left and right padding are the same rule with
other `documents`; cached decoding is too, one document a slot (see kv_cache.py).

Shapes: B rows, T queries, S keys, H heads, K key/value heads, d head size.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from assay.errors import UsageError

PADDING = -1


class AttentionMask(NamedTuple):
    """Keys that the queries of one layer may attend to: all before them, those of `mask_BTS`, or those of their own document."""

    mask_BTS: Tensor | None = None
    starts: Tensor | None = None  # where documents begin in the flattened rows, for kernels that take variable lengths
    window: int | None = None
    longest: int | None = None  # no document is longer, where that is known to be less than a row


class AttentionRule(NamedTuple):
    """Rule by which a layer turns products of queries and keys into attention weights; the default is what most models do."""

    scale: float | None = None  # of the products; None: 1 / √d
    softcap: float | None = None  # scores → cap · tanh(scores / cap), before the mask
    sinks_H: Tensor | None = None  # a score a head that takes its share of attention and gives nothing

    @property
    def plain(self) -> bool:
        """Whether PyTorch's fused attention computes it: it knows neither caps nor sinks."""
        return self.softcap is None and self.sinks_H is None


PLAIN_RULE = AttentionRule()


class TokenLayout(NamedTuple):
    """Position of each token, and what it attends to, for each window that occurs in the model."""

    documents: Tensor  # (B, T)
    positions: Tensor  # (B, T), or (1, T) where every row counts alike
    masks: dict[int | None, AttentionMask]


def token_layout(tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
          starts: Tensor | None = None) -> TokenLayout:
    """Positions and masks of a batch's tokens. `starts` repeats `documents` in the form that a variable-length kernel takes."""
    B, T = tokens_BT.shape
    plain = documents is None and positions is None
    if documents is None:
        documents = torch.zeros_like(tokens_BT)
    if positions is None:
        positions = torch.arange(T, device=tokens_BT.device)[None] if plain else positions_in_document(documents)
    if plain and all(window is None or window >= T for window in windows):
        return TokenLayout(documents, positions, dict.fromkeys(windows, AttentionMask()))
    if starts is not None and variable_length_kernel() is not None:
        return TokenLayout(documents, positions, {window: AttentionMask(None, starts, window) for window in windows})
    positions = positions.expand(B, T)
    return TokenLayout(documents, positions, {w: AttentionMask(document_causal_mask(documents, positions, documents, positions, w))
                                              for w in windows})


def document_causal_mask(query_documents: Tensor, query_positions: Tensor, key_documents: Tensor, key_positions: Tensor,
            window: int | None) -> Tensor:
    """(B, T, S): whether a query may attend to a key, which is of its document, not later than itself, and within the window."""
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    seen = (query_documents[:, :, None] == key_documents[:, None, :]) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def positions_in_document(documents: Tensor) -> Tensor:
    """Each token's index in its run of equal document ids; 0 for padding, whose states nobody reads."""
    T = documents.shape[1]
    index = torch.arange(T, device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    start = torch.where(begins, index, 0).cummax(1).values
    return torch.where(documents == PADDING, 0, index - start)


def attend(q_BTHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, mask: AttentionMask, rule: AttentionRule = PLAIN_RULE) -> Tensor:
    if mask.starts is not None and rule.plain:
        return attend_documents(q_BTHd, k_BSKd, v_BSKd, mask.starts, mask.window, mask.longest, rule.scale)
    assert mask.starts is None, "a kernel of variable length knows neither soft caps nor sinks"
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BSKd, v_BSKd))
    mask_B1TS = None if mask.mask_BTS is None else mask.mask_BTS[:, None]
    if not rule.plain:
        return ruled_attention(q, k, v, mask_B1TS, rule).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TS, is_causal=mask_B1TS is None, scale=rule.scale,
                                         enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def ruled_attention(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """(B, H, T, d) with a soft cap or sinks, every score held in fp32. Without a mask it is causal."""
    if has_torch_function_unary(q_BHTd):  # a trace looks on, as it does at PyTorch's own
        return handle_torch_function(ruled_attention, (q_BHTd,), q_BHTd, k_BKSd, v_BKSd, mask, rule)
    (B, H, T, d), (K, S) = q_BHTd.shape, k_BKSd.shape[1:3]
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q_BHTd.device).tril_(S - T)
    scores = (q_BHTd.reshape(B, K, H // K * T, d) @ k_BKSd.mT).view(B, H, T, S).float() * (rule.scale or d**-0.5)
    scores = (scores if rule.softcap is None else rule.softcap * torch.tanh(scores / rule.softcap)).masked_fill(~mask, -torch.inf)
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.float().view(1, H, 1, 1).expand(B, H, T, 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    return (shares.to(v_BKSd.dtype).view(B, K, H // K * T, S) @ v_BKSd).view(B, H, T, d)


def attend_documents(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, starts: Tensor, window: int | None, longest: int | None,
                     scale: float | None = None) -> Tensor:
    """Attention within each document of the flattened rows: work grows with the documents' lengths, not with the row's square."""
    (B, T, H, d), kernel = q_BTHd.shape, variable_length_kernel()
    assert kernel is not None
    if scale is not None and not kernel_takes_scale():
        q_BTHd, scale = q_BTHd * (scale * d**0.5), None
    q, k, v = (x.reshape(B * T, -1, d) for x in (q_BTHd, k_BTKd, v_BTKd))
    most = longest or T
    options = {} if scale is None else {"scale": scale}
    return kernel(q, k, v, starts, starts, most, most, window_size=(-1 if window is None else window - 1, 0), **options).view(B, T, H, d)


def mix_values(v_BTKd: Tensor, first_BTKd: Tensor, shares: Tensor) -> Tensor:
    """Mix of each token's own values and those that the first layer gave it, by two shares. A cache keeps what comes out."""
    return v_BTKd * shares[0] + first_BTKd * shares[1]


def gate_heads(attended_BTHd: Tensor, gates_BTH: Tensor) -> Tensor:
    """Attention gate: each head between nothing and twice what it attended to: a gate of 0 leaves it as it is, and begins near there."""
    return attended_BTHd * (2 * gates_BTH.sigmoid())[..., None]


@functools.cache
def variable_length_kernel() -> Callable[..., Any] | None:
    """torch's flash attention over stretches of different length: from 2.10 on, and on CUDA alone."""
    if not torch.cuda.is_available():
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters  # later releases ask for leave, earlier ones just do it
    return functools.partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn


@functools.cache
def kernel_takes_scale() -> bool:
    """Whether that kernel takes a scale of its own: the first releases have 1 / √d alone."""
    from torch.nn.attention.varlen import varlen_attn

    return "scale" in inspect.signature(varlen_attn).parameters


def document_starts(documents: Tensor) -> Tensor:
    """int32, on the CPU: where each run of equal ids begins in the flattened rows, then the end, repeated up to a power of two that
    leaves room for an eighth more.

    Few different lengths, so that few graphs are captured; a stretch of no tokens costs a kernel next to nothing.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = begins.flatten().nonzero().flatten()
    size = max(32, 1 << (len(found) + len(found) // 8).bit_length())
    return torch.cat([found, found.new_full((size - len(found) + 1,), documents.numel())]).int()


def documents_from_lengths(lengths: list[int], width: int, *, left: bool = False) -> Tensor:
    """The `documents` of rows that each hold one sequence and padding on one side."""
    if max(lengths) > width:
        raise UsageError(f"a row of {max(lengths)} tokens does not fit a width of {width}")
    index, length = torch.arange(width)[None], torch.tensor(lengths)[:, None]
    real = index >= width - length if left else index < length
    return torch.where(real, 0, PADDING)
