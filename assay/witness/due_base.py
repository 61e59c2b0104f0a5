"""Due base: the weights that an adapter's frozen base comes to in nf4, int8 or bf16, from the file and a table of 16 numbers alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.witness.due_texts import NotWitnessed, read_fields

SHARING_A_SCALE = 64
# Quantiles of the normal distribution (QLoRA, arXiv 2305.14314, appendix E).
LEVELS = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
                   -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
                   0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)
FIXED = ("embed", "wte", "wpe", "lm_head", "norm", "ln_")  # of these names no part is rounded to codes


def asked_base_dtype(options: Mapping[str, Any], parent: Path) -> str | None:
    """Base dtype by the options; of an adapter that is trained on, by its manifest."""
    earlier = read_fields(parent / "manifest.json").get("facts", {}) if (parent / "adapter_config.json").is_file() else {}
    return (earlier.get("base") or {}).get("held") if earlier else options.get("base_dtype")


def due_base(weights: Mapping[str, Tensor], dtype: str | None, *, transposed: bool) -> dict[str, Tensor]:
    """`transposed`: the files hold matrices as (in, out), as GPT-2's do."""
    if dtype is None:
        return dict(weights)
    if dtype == "bf16":
        return {name: tensor.bfloat16() for name, tensor in weights.items()}
    if dtype not in ("nf4", "int8"):
        raise NotWitnessed(f"a base in {dtype} is not made again here")
    return {name: tensor if tensor.ndim != 2 or any(part in name for part in FIXED) else rounded_matrix(tensor, dtype, transposed)
            for name, tensor in weights.items()}


def rounded_matrix(weight: Tensor, dtype: str, transposed: bool) -> Tensor:
    rows = (weight.t() if transposed else weight).float().numpy()
    made = np.empty_like(rows)
    for start in range(0, rows.shape[1], SHARING_A_SCALE):
        block = rows[:, start : start + SHARING_A_SCALE]
        most = np.abs(block).max(1, keepdims=True)
        unit = most if dtype == "nf4" else most / np.float32(127)
        share = np.divide(block, unit, out=np.zeros_like(block), where=unit > 0)
        level = nearest_level(share) if dtype == "nf4" else np.rint(share)
        made[:, start : start + SHARING_A_SCALE] = level * unit
    found = torch.from_numpy(made).bfloat16()
    return found.t() if transposed else found


def nearest_level(share: np.ndarray) -> np.ndarray:
    """The level next to each, one level after the other."""
    best, apart = np.full_like(share, LEVELS[0]), np.abs(share - LEVELS[0])
    for level in LEVELS[1:]:
        closer = np.abs(share - level) < apart
        best, apart = np.where(closer, level, best), np.minimum(apart, np.abs(share - level))
    return best
