"""Stochastic rounding from fp32 to bf16: up or down by a draw, so that the mean of many roundings is the number itself.

A step that is smaller than half the distance between two bf16 numbers is lost to the nearest one, every time; here it comes through as
often as its size says. The draw is a function of the seed, the tensor, the step and the element: the same after a resume and on every
device.
"""

import torch
from torch import Tensor

from assay.kernels.draw_tokens import uniforms

_PART = 1 << 24  # elements drawn for at a time: the draws take several times the memory of what is rounded
_STEP = 1 << 40  # numbers that a step may draw for one tensor
_DROPPED = 1 << 16  # what the bits are worth that bf16 has less than fp32


def stochastically_rounded(values: Tensor, key: int, step: Tensor) -> Tensor:
    """Values rounded stochastically to bf16. `key` is the tensor's; `step` the optimizer's count, on the device. What bf16 holds exactly
    stays as it is."""
    flat, made = values.contiguous().view(-1), torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART]
        counter = torch.arange(start, start + part.numel(), device=values.device) + step.to(values.device, torch.int64) * _STEP
        draws = (uniforms(torch.full_like(counter, key), counter) * _DROPPED).to(torch.int32)
        bits = (part.view(torch.int32) + draws) & -_DROPPED  # sign and magnitude: away from 0 where the sum carries
        made.view(-1)[start : start + _PART] = bits.view(torch.float32).to(torch.bfloat16)
    return made
