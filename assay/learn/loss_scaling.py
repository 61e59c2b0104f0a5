"""Loss scaling for fp16: gradients are those of the loss times a scale, which is taken out again in fp32; the scale finds its own size.

As in Micikevicius et al. (arXiv 1710.03740), but for one thing: where a gradient overflows, the batch is computed again at half the scale
instead of being skipped. So every batch is learned from once, a step is a step, and the result depends on nothing but what was computed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from assay.data.batch import Batch
from assay.errors import GuardStop
from assay.learn.loop import Accumulate, Accumulated
from assay.learn.objectives import Objective
from assay.model.transformer import Transformer

FIRST_SCALE, LARGEST_SCALE, SMALLEST_SCALE = 2.0**16, 2.0**24, 1.0
CLEAN_STEPS = 2000  # after so many without an overflow the scale is doubled, as in torch's gradient scaler


class ScaledAccumulate:
    """`inner` at a scale. What it remembers belongs into a checkpoint: `state`, and `restore`."""

    def __init__(self, inner: Accumulate):
        self.inner = inner
        self.restore(None)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the loss scale from a checkpoint's state; None: as at the start of a run."""
        known = state or {"scale": FIRST_SCALE, "clean": 0, "recomputed": 0}
        self.scale, self.clean, self.recomputed = float(known["scale"]), int(known["clean"]), int(known["recomputed"])

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean": self.clean, "recomputed": self.recomputed}

    def __call__(self, model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> Accumulated:
        """The mean is taken by one division: the scale is part of the divisor, and so exact, being a power of two."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        while True:
            loss, metrics = self.inner(model, objective, batch, micro, weight / self.scale)
            gradients = [p.grad for p in parameters if p.grad is not None]
            finite, overflow = _finite(loss, gradients)
            if finite or not overflow:
                break
            self._halve()
            for parameter in parameters:
                parameter.grad = None
        if not finite:
            raise GuardStop(f"the loss is {float(loss) / self.scale} in fp16, whatever the scale of its gradients: a value of the forward "
                            "pass exceeds 65,504, or the weights have diverged; the step was not taken. Train with --dtype bf16 or fp32, "
                            "or lower the learning rate")
        torch._foreach_div_(gradients, self.scale)
        found = Accumulated(loss / self.scale, metrics)
        self.clean += 1
        if self.clean >= CLEAN_STEPS:
            self.scale, self.clean = min(LARGEST_SCALE, 2 * self.scale), 0
        return found

    def _halve(self) -> None:
        self.recomputed, self.clean = self.recomputed + 1, 0
        self.scale /= 2
        if self.scale < SMALLEST_SCALE:
            raise GuardStop(f"gradients overflow fp16 even unscaled, after {self.recomputed} computations that were repeated at half the "
                            "scale; the step was not taken. Train with --dtype bf16 or fp32, or lower the learning rate")


def _finite(loss: Tensor, gradients: list[Tensor]) -> tuple[bool, bool]:
    """Whether all is finite, and whether the loss is while a gradient is not: one wait for both."""
    loss_good = torch.isfinite(loss)
    good = loss_good & torch.isfinite(nn.utils.get_total_norm(gradients)) if gradients else loss_good
    all_good, forward_good = torch.stack([good, loss_good]).tolist()
    return bool(all_good), bool(forward_good)
