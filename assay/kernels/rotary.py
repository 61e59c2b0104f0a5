"""Rotary positions: both halves of every head are turned by the angle of the token's place.

Shapes: B rows, T time, H heads, d head size.
"""

import torch
from torch import Tensor


def rotate(x_BTHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (x1, x2), the two halves of a head, by the position's angle; in fp32, since bf16 angles drift with length."""
    x1, x2 = x_BTHd.float().chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x_BTHd.dtype)
