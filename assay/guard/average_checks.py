"""Average checks: a few numbers of the weights' moving average, worked out again by its definition from what each step left."""

from collections.abc import Mapping

import torch
from torch import Tensor

from assay.verdict import Verdict, proven, refuted

TENSORS, ENTRIES = 32, 8  # how many tensors are followed, and entries of each
ROUNDING = 2 * torch.finfo(torch.float32).eps  # of a step's update, relative to the largest weight it has seen


class FollowedAverage:
    """Entries of a moving average, followed in float64. Nothing waits for the GPU before `check`."""

    def __init__(self, live: Mapping[str, Tensor], average: Mapping[str, Tensor], decay: float):
        assert len(live) == len(average), "an average has the tensors of its model"
        places = sorted({round(place) for place in torch.linspace(0, len(live) - 1, min(TENSORS, len(live))).tolist()})
        self.live, self.average = ([list(tensors.values())[place] for place in places] for tensors in (live, average))
        self.decay, self.steps = decay, 0
        self.due = _entries(self.average)
        self.largest = self.due.abs()

    def update(self, step: int) -> None:
        """Follow the weights after optimizer step `step`, counted from 0. At the n-th the average keeps n / (n + 9) of itself, `decay` at
        most."""
        number = step + 1
        kept, weights = min(self.decay, number / (number + 9)), _entries(self.live)
        self.due = kept * self.due + (1 - kept) * weights
        self.largest = torch.maximum(self.largest, weights.abs())
        self.steps += 1

    def check(self) -> Verdict:
        """Whether the average is what the weights make of it; what rounding in float32 can add up to is allowed."""
        remembered = min(self.steps, 1 / (1 - self.decay))
        apart = (_entries(self.average) - self.due).abs()
        wrong = ~(apart <= ROUNDING * remembered * self.largest)
        if wrong.any():
            worst = int(torch.where(apart.isfinite(), apart / self.largest.clamp(min=1e-30), torch.inf).argmax())
            return refuted("average", f"{int(wrong.sum())} of {wrong.numel()} numbers of the moving average are not what the weights of "
                           f"{self.steps} steps make of it at a decay of {self.decay:g}: one is off by {float(apart[worst]):.3g}, where "
                           f"rounding explains {float(ROUNDING * remembered * self.largest[worst]):.2g}")
        return proven("average", f"{wrong.numel()} numbers of the moving average are what the weights of {self.steps} steps make of it")


def _entries(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1)[:ENTRIES] for tensor in tensors]).double()
