"""One new token a slot: store its key and value in the slot's cache and attend to all that the slot holds.

Shapes: S slots, L capacity, H heads, K key/value heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def cached_attention(q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, positions_S: Tensor,
                     window: int | None, horizon: int) -> Tensor:
    """(S, H, d). Row s is stored at positions[s]; it sees the keys at 0 … positions[s], the last `window` of them where given.

    No position is at or beyond `horizon`, which lets the plain twin read less; the kernel reads each slot's own length.
    """
    return plain_cached_attention(q_SHd, k_SKd, v_SKd, keys_SLKd, values_SLKd, positions_S, window, horizon)


def plain_cached_attention(q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, positions_S: Tensor,
                           window: int | None, horizon: int) -> Tensor:
    """What a slot does not see must still be finite: 0 · NaN is NaN."""
    slots = torch.arange(len(positions_S), device=positions_S.device)
    keys_SLKd[slots, positions_S], values_SLKd[slots, positions_S] = k_SKd, v_SKd
    keys, values = keys_SLKd[:, :horizon].transpose(1, 2), values_SLKd[:, :horizon].transpose(1, 2)
    distance_SL = positions_S[:, None] - torch.arange(horizon, device=positions_S.device)
    seen_SL = (distance_SL >= 0) if window is None else (distance_SL >= 0) & (distance_SL < window)
    out = F.scaled_dot_product_attention(q_SHd[:, :, None], keys, values, attn_mask=seen_SL[:, None, None],
                                         enable_gqa=q_SHd.shape[1] != keys.shape[1])
    return out[:, :, 0]
