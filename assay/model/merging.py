"""Model arithmetic: several fine-tunes of one model become one, tensor by tensor: linear, slerp, task vectors, TIES, DARE.

A task vector is a fine-tune less its base. Everything is computed in fp32 and rounded once, by whoever writes it. `weights` are one number
a model; with a base they scale its task vector, without one they are shares of a mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.seeds import generator

MergeMethod = Literal["linear", "slerp", "task", "ties", "dare"]
WITH_BASE = {"task", "ties", "dare"}
_STRAIGHT = 1e-4  # 1 − |cosine| below which the arc between two tensors is a line


@dataclass(frozen=True)
class Merge:
    """Settings of a merge. `density` is the share of a task vector's entries that stays, with TIES the largest and with DARE at random."""

    method: MergeMethod
    weights: tuple[float, ...]
    density: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in get_args(MergeMethod):
            raise UsageError(f"merging by {self.method!r}; expected one of {', '.join(get_args(MergeMethod))}")
        if not self.weights or not all(math.isfinite(weight) for weight in self.weights) or not 0 < self.density <= 1:
            raise UsageError(f"weights {self.weights} and density {self.density}; expected finite numbers, one a model, and a share")
        if self.method == "slerp" and (len(self.weights) != 2 or not math.isclose(sum(self.weights), 1, abs_tol=1e-6)):
            raise UsageError(f"slerp of {len(self.weights)} models with weights {self.weights}; expected two, whose weights add up to 1")
        if self.method == "linear" and not math.isclose(sum(self.weights), 1, abs_tol=1e-6):
            raise UsageError(f"a linear merge with weights that add up to {sum(self.weights):g}; expected 1, or every norm would be scaled")


def merged_models(asked: Merge, models: Sequence[Mapping[str, Tensor]], base: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """fp32 tensors under the same names. All models have the same names and shapes."""
    return {name: merged_tensor(asked, name, [model[name].float() for model in models], None if base is None else base[name].float())
            for name in models[0]}


def merged_tensor(asked: Merge, name: str, tensors: Sequence[Tensor], base: Tensor | None) -> Tensor:
    if asked.method == "linear":
        return torch.stack([weight * tensor for weight, tensor in zip(asked.weights, tensors, strict=True)]).sum(0)
    if asked.method == "slerp":
        return slerp(tensors[0], tensors[1], asked.weights[1])
    assert base is not None, "task vectors are differences from a base"
    tasks = [tensor - base for tensor in tensors]
    return base + TASK_SUMS[asked.method](asked, name, tasks)


def slerp(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Spherical interpolation along the arc between two tensors, `share` of the way; where they point the same way, along the line."""
    cosine = float((one.double() * other.double()).sum() / (one.double().norm() * other.double().norm()).clamp_min(1e-30))
    if 1 - abs(cosine) < _STRAIGHT:
        return torch.lerp(one, other, share)
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    return (math.sin((1 - share) * angle) * one + math.sin(share * angle) * other) / math.sin(angle)

# ---------------------------------------------------------------- sums of task vectors


def plain_sum(asked: Merge, _: str, tasks: Sequence[Tensor]) -> Tensor:
    return torch.stack([weight * task for weight, task in zip(asked.weights, tasks, strict=True)]).sum(0)


def ties_sum(asked: Merge, _: str, tasks: Sequence[Tensor]) -> Tensor:
    """TIES: of every task vector the largest entries, of every entry the sign with more behind it, and the mean of those that have it."""
    kept = torch.stack([weight * trimmed(task, asked.density) for weight, task in zip(asked.weights, tasks, strict=True)])
    agreeing = torch.where(kept.sign() == kept.sum(0).sign(), kept, 0.0)
    return agreeing.sum(0) / (agreeing != 0).sum(0).clamp(min=1)


def dare_sum(asked: Merge, name: str, tasks: Sequence[Tensor]) -> Tensor:
    """DARE: every entry stays with the chance of `density` and is scaled by its inverse, so that the expectation is the plain sum."""
    drawn = [torch.rand(task.shape, generator=generator(asked.seed, "dare", name, place)).to(task.device) < asked.density
             for place, task in enumerate(tasks)]
    return plain_sum(asked, name, [torch.where(stays, task / asked.density, 0.0) for stays, task in zip(drawn, tasks, strict=True)])


def trimmed(task: Tensor, density: float) -> Tensor:
    """The task vector with all but its largest entries 0."""
    count = max(1, round(density * task.numel()))
    least = task.abs().flatten().kthvalue(task.numel() - count + 1).values
    return torch.where(task.abs() >= least, task, 0.0)


TASK_SUMS: dict[str, Callable[[Merge, str, Sequence[Tensor]], Tensor]] = {"task": plain_sum, "ties": ties_sum, "dare": dare_sum}

# ---------------------------------------------------------------- how far apart models are


def matrices_cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Cosine of all matrices as one vector: near 1 for fine-tunes of one model, near 0 for models that began apart. Norms are left out."""
    product = first = second = 0.0
    for name, tensor in one.items():
        if tensor.ndim >= 2:
            a, b = tensor.double(), other[name].double()
            product, first, second = (product + float((a * b).sum()), first + float(a.square().sum()), second + float(b.square().sum()))
    return product / max(math.sqrt(first * second), 1e-30)
