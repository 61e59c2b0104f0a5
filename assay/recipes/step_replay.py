"""Step replay: one micro-batch computed twice every so many steps; a chip that computes wrong now and then gives two answers.

Only where computing it again gives the same bits to begin with, which is asked before step 1: some kernels of a GPU add in no fixed order.
"""

from typing import Any

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective
from assay.learn.sharded import ShardedModel
from assay.model.transformer import Transformer
from assay.verdict import Verdict, proven, refuted, unproven

FIRST_TIMES = 3  # before step 1


class StepReplay:
    """Replay of micro-batches within one session, every `every` steps; 0: never. It is off where the first answers already differ."""

    def __init__(self, every: int, accumulate: Accumulate, model: Transformer, objective: Objective, micro: int):
        self.every, self.accumulate, self.model, self.objective, self.micro = every, accumulate, model, objective, micro

    def check_start(self, batch: Batch) -> list[Verdict]:
        if not self.every:
            return []
        first = self._compute(batch)
        if any(unlike(first, self._compute(batch)) for _ in range(FIRST_TIMES - 1)):
            self.every = 0
            return [unproven("replay", "the kernels of this run do not give the same bits twice: a replay would say nothing of the chip, "
                                       "and none is made", optional=True)]
        return [proven("replay", f"one micro-batch, computed {FIRST_TIMES} times, gave the same bits; every {self.every} steps one is "
                                 "computed twice")]

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def check(self, step: int, batch: Batch) -> Verdict:
        if wrong := unlike(self._compute(batch), self._compute(batch)):
            return refuted("replay", f"step {step}: one micro-batch, computed twice with the same weights, gave other bits in {len(wrong)} "
                                     f"tensor(s): {', '.join(wrong[:3])}; before step 1 it gave the same. The chip, its memory or its "
                                     "cooling is at fault: go on from the last checkpoint on another machine", tensors=wrong)
        return proven("replay", f"step {step}: one micro-batch, computed twice, gave the same bits")

    def _compute(self, batch: Batch) -> dict[str, Tensor]:
        """Loss and gradients, which are gone from the model afterwards."""
        part: Any = next(batch.split(self.micro))
        loss = self.accumulate(self.model, self.objective, part, self.micro, max(1.0, float(part.weight.sum()))).loss
        if isinstance(self.accumulate, ShardedModel):
            return self.accumulate.gather_gradients() | {"the loss": loss.detach().cpu()}
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for parameter in self.model.parameters():
            parameter.grad = None
        return found | {"the loss": loss.detach()}


def unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal; such as are not a number in both are."""
    return [name for name in one.keys() | other.keys() if name not in one or name not in other or not torch.equal(
        one[name].nan_to_num(), other[name].nan_to_num())]
