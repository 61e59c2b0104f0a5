"""Unpacking of quantised weights: codes and scales to a bf16 matrix in one pass, at the memory's speed.

PyTorch's own operators take five passes in fp32 and int32, some twenty bytes a weight where three must be moved.

Shapes: O rows, I columns, S scales a row, one for BLOCK columns.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

_ENTRIES = 2048  # weights that a program takes
_WARPS = 8


def unpacked(codes: Tensor, scale_OS: Tensor, levels: Tensor | None, per_scale: int, entries: int = _ENTRIES,
             warps: int = _WARPS) -> Tensor:
    """(O, I) in bf16: level · scale. With `levels` two codes share a byte, the first in its upper half; without, a code is its own level.

    On CUDA, or in Triton's interpreter.
    """
    codes, scale_OS = codes.contiguous(), scale_OS.contiguous()
    columns = codes.shape[1] * (1 if levels is None else 2)
    made_OI = torch.empty(len(codes), columns, dtype=torch.bfloat16, device=codes.device)
    jitted(_unpack)[(math.ceil(made_OI.numel() / entries),)](
        codes, scale_OS, codes if levels is None else levels, made_OI.view(torch.int16), made_OI.numel(), I=columns, S=scale_OS.shape[1],
        BLOCK=per_scale, PAIRS=levels is not None, ENTRIES=entries, num_warps=warps)
    return made_OI


def _unpack(codes_ptr, scale_ptr, levels_ptr, made_ptr, total, I: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
            PAIRS: tl.constexpr, ENTRIES: tl.constexpr):
    """Triton: ENTRIES weights, wherever rows begin."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    real = entry < total
    row = entry // I
    scale = tl.load(scale_ptr + row * S + (entry - row * I) // BLOCK, mask=real, other=0.0)
    if PAIRS:
        byte = tl.load(codes_ptr + entry // 2, mask=real, other=0).to(tl.int32)
        code = tl.where(entry % 2 == 0, byte >> 4, byte & 15)
        level = tl.load(levels_ptr + code, mask=real, other=0.0)
    else:
        level = tl.load(codes_ptr + entry, mask=real, other=0).to(tl.float32)
    bits = (level * scale).to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # bf16, ties to even: written out, since a digest rests on it
    tl.store(made_ptr + entry, nearest.to(tl.int16), mask=real)
