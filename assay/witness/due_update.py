"""Due update: the learning rate of a step, decay groups, AdamW and Muon, as their papers write them, in double precision."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

BETAS, EPSILON, MOMENTUM = (0.9, 0.95), 1e-8, 0.95
TUNING = {"Sft": (3e-5, 3e-4), "Distill": (3e-5, 3e-4), "Grpo": (1e-6, 2e-5), "Dpo": (1e-6, 1e-5),
          "Kto": (1e-6, 1e-5), "RewardModel": (1e-5, 1e-4)}  # peak rates of a whole model and of an adapter
PRETRAINING = {"muon": (0.02, 0.3), "adamw": (0.002, 0.1)}  # peak rate and weight decay of the matrices
POLAR = ((8.28721201814563, -23.595886519098837, 17.300387312530933), (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
         (3.9486908534822946, -2.908902115962949, 0.5518191394370137), (3.3184196573706015, -2.488488024314874, 0.51004894012372),
         (2.300652019954817, -1.6689039845747493, 0.4188073119525673))  # Polar Express, arXiv 2505.16932
SAFETY = 1.01


class Budgeted(NamedTuple):
    """End of a run: known from the options, or decided on the way where time decides."""

    stop_at: int | None
    decay_from: int | None


def rate_share(step: int, options: Mapping[str, Any], steps: int | None, end: Budgeted, *, tuning: bool) -> float:
    """Share of the peak learning rate at `step`, counted from 0: linear warm-up, then half a cosine to a tenth, or flat and linearly to
    0."""
    warmup: int = options["warmup_steps"]
    down: int | None = None
    if tuning and steps:
        warmup = min(warmup, steps // 4)
    if end.stop_at is None:
        return min(1.0, (step + 1) / (warmup + 1))
    if options["lr_scheduler_type"] == "cosine":
        warmup, floor = min(warmup, end.stop_at // 2), 0.1
    else:
        down = max(1, round(options["decay_ratio"] * end.stop_at)) if end.decay_from is None else end.stop_at - end.decay_from
        warmup, floor = min(warmup, end.stop_at - down), 0.0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if down is None:
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (end.stop_at - warmup)))) / 2
    return min(1.0, max(0.0, (end.stop_at - step) / down))


def clipped(gradients: Mapping[str, Tensor], most: float) -> tuple[dict[str, Tensor], float]:
    """Gradients scaled down to one norm together; and the norm they had."""
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    return {name: gradient * min(1.0, most / (norm + 1e-6)) for name, gradient in gradients.items()}, norm


def decays(name: str, tensor: Tensor) -> bool:
    """Matrices do, and a head that is one; embeddings and vectors do not."""
    return tensor.ndim == 2 and name not in ("embed.weight", "position.weight")


def adamw_weight(weight: Tensor, first: Tensor, second: Tensor, taken: int, rate: float, decay: float) -> Tensor:
    """Loshchilov and Hutter: decay apart from the gradient, both averages corrected for their beginning at 0."""
    corrected = first / (1 - BETAS[0] ** taken), second / (1 - BETAS[1] ** taken)
    return weight * (1 - rate * decay) - rate * corrected[0] / (corrected[1].sqrt() + EPSILON)


def muon_weight(weight: Tensor, gradient: Tensor, momentum: Tensor, rows: tuple[int, ...], rate: float, decay: float) -> Tensor:
    """Nesterov momentum, orthogonalised, for each of the matrices that stand one below the other."""
    ahead = gradient + MOMENTUM * (momentum - gradient)
    steps = [orthogonal(part) * max(1.0, part.shape[0] / part.shape[1]) ** 0.5 for part in ahead.split(rows)]
    return weight * (1 - rate * decay) - rate * torch.cat(steps)


def orthogonal(matrix: Tensor) -> Tensor:
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() * SAFETY + 1e-7)
    for a, b, c in POLAR:
        gram = x @ x.t()
        x = a / SAFETY * x + (b / SAFETY**3 * gram + c / SAFETY**5 * gram @ gram) @ x
    return x.t() if matrix.shape[0] > matrix.shape[1] else x
