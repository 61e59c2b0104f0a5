"""Difference of two sets of weights, tensor by tensor: distance, direction, rank, and how much of it moved at all."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.seeds import generator

SKETCH = 128  # directions in which a large difference is looked at; a rank below it is found exactly
WHOLE = 512  # matrices with no more rows or columns than this get all their singular values
SPARE = 8  # directions beyond the rank, without which a sketch is not believed


class Rank(NamedTuple):
    """How many directions of a difference stand out from rounding; `at_least`: there are more than were looked at."""

    value: int
    at_least: bool
    most: float  # share of the squared difference in its first direction

    def __str__(self) -> str:
        return f"{'≥ ' if self.at_least else ''}{self.value}"


@dataclass(frozen=True)
class TensorDiff:
    name: str
    shape: tuple[int, ...]
    norm_a: float
    norm_b: float
    relative: float  # ‖b − a‖ / ‖a‖
    cosine: float
    moved: float  # share of elements that differ at all
    largest: float  # of any element
    rank: Rank | None  # None: no matrix, or nothing moved


@dataclass(frozen=True)
class WeightsDiff:
    tensors: list[TensorDiff]  # those that moved furthest first
    only_a: list[str]
    only_b: list[str]
    other_shape: list[str]

    @property
    def same(self) -> bool:
        return not (self.only_a or self.only_b or self.other_shape) and all(tensor.moved == 0 for tensor in self.tensors)


def diff_weights(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> WeightsDiff:
    """Compare two sets of weights under whatever names the caller gives them; a name that only one has is listed, and so is a different
    shape."""
    both = [name for name in a if name in b]
    fitting = [name for name in both if a[name].shape == b[name].shape]
    found = sorted((tensor_diff(name, a[name], b[name]) for name in fitting), key=lambda one: (-one.relative, one.name))
    return WeightsDiff(found, sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys()), sorted(set(both) - set(fitting)))


def tensor_diff(name: str, a: Tensor, b: Tensor) -> TensorDiff:
    wide_a, wide_b = a.detach().double().flatten(), b.detach().double().flatten()
    change = wide_b - wide_a
    norms = float(wide_a.norm()), float(wide_b.norm())
    relative = 0.0 if not change.any() else float(change.norm()) / norms[0] if norms[0] else math.inf
    cosine = float(wide_a @ wide_b) / (norms[0] * norms[1]) if all(norms) else math.nan
    finite = bool(change.isfinite().all())
    rank = rank_of(change.view(a.shape), _rounding(wide_a, wide_b, a, b)) if a.dim() == 2 and finite and change.any() else None
    moved = float((change != 0).double().mean())  # a NaN differs from everything, itself included
    return TensorDiff(name, tuple(a.shape), *norms, relative, cosine, moved, float(change.abs().max()) if change.numel() else 0.0, rank)


def rank_of(change: Tensor, rounding: float) -> Rank:
    """Singular values above what rounding each element by about `rounding` would make: that times √rows + √columns.

    A large matrix is sketched: its products with random directions span its range, unless it has more ranks than directions.
    """
    rows, columns = change.shape
    noise = rounding * (math.sqrt(rows) + math.sqrt(columns))
    if min(rows, columns) <= WHOLE:
        values, cut = torch.linalg.svdvals(change.float()).double(), False
    else:
        directions = torch.randn(columns, SKETCH, generator=generator(0, "diff", rows, columns)).to(change.device)
        basis, _ = torch.linalg.qr(change.float() @ directions)
        values, cut = torch.linalg.svdvals(basis.T @ change.float()).double(), True
    threshold = max(noise, float(values[0]) * torch.finfo(torch.float32).eps * max(rows, columns))
    value = max(1, int((values > threshold).sum()))
    return Rank(value, cut and value > SKETCH - SPARE, float(values[0].square() / change.double().square().sum()))


def weights_diff_json(found: WeightsDiff) -> dict[str, Any]:
    tensors = [asdict(one) | {"rank": None if one.rank is None else one.rank._asdict()} for one in found.tensors]
    return {"same": found.same, "tensors": tensors, "only_a": found.only_a, "only_b": found.only_b, "other_shape": found.other_shape}


def _rounding(wide_a: Tensor, wide_b: Tensor, a: Tensor, b: Tensor) -> float:
    """Rounding error of storing an element, root mean square, in the coarser of the two dtypes."""
    unit = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps) / 2
    return unit * float(torch.maximum(wide_a.abs(), wide_b.abs()).square().mean().sqrt())
