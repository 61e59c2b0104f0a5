"""Training loop, a generator: split, accumulate sums, divide once, check finite before the step, step, yield.

It never evaluates, saves, prints or knows the method; whoever iterates does. Nothing in it waits for a GPU: a step whose loss
or gradient is not finite is skipped on the device, all later ones with it, and the loop raises as soon as the host learns
of it, with the weights as they were before the bad step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from assay.data.batch import Batch
from assay.errors import DataError, GuardStop
from assay.learn.objectives import Objective, combined
from assay.model.transformer import Transformer


class Accumulated(NamedTuple):
    """Loss and metrics of all micro-batches together, on the device."""

    loss: Tensor  # the mean
    metrics: Mapping[str, Tensor]  # as in Loss: still sums


# (model, objective, batch, rows a micro-batch, the batch's weight) → Accumulated; the gradients are left on the parameters.
Accumulate = Callable[[Transformer, Objective, Batch, int, float], Accumulated]


@dataclass(frozen=True)
class Step:
    """Record of one training step. `loss`, `grad_norm` and `metrics` may still be on their way from the GPU; reading them waits."""

    index: int
    loss: Tensor
    grad_norm: Tensor
    weight: float  # how many (weighted) tokens were learned from
    tokens: int
    multiplier: float  # of the schedule
    ids: tuple = ()
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # as in Loss: `averages` divides them


def constant(_: int) -> float:
    return 1.0


def train(model: Transformer, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], objective: Objective, *, micro: int,
          schedule: Callable[[int], float] = constant, clip: float = 1.0, start: int = 0,
          accumulate: Accumulate | None = None) -> Iterator[Step]:
    """Yield after every optimizer step. `micro` rows at a time go through the model; it never changes a result."""
    accumulate = accumulate or accumulated
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # the peak, under torch's own name for it: stepping twice must not scale twice
    alarm = Alarm(parameters[0].device)
    for index, batch in enumerate(batches, start):
        weight = float(batch.weight.sum())
        if weight <= 0:
            raise DataError(f"step {index}: every token has weight 0, there is nothing to learn from; look at the data and its masks")
        multiplier = schedule(index)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier
        loss, metrics = accumulate(model, objective, batch, micro, weight if batch.divisor is None else batch.divisor)
        grad_norm = clip_gradients(optimizer, parameters, clip)
        alarm.watch(index, loss, grad_norm)
        guarded_step(optimizer, alarm)
        optimizer.zero_grad(set_to_none=True)
        yield Step(index, loss, grad_norm, weight, batch.tokens.numel(), multiplier, batch.ids, metrics)
    alarm.settle()


def accumulated(model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> Accumulated:
    """Gradients of the batch's mean loss, summed over micro-batches: sums travel, the mean is taken once."""
    device = model.embed.weight.device
    total, metrics = torch.zeros((), device=device), dict[str, Tensor]()
    for part in batch.split(micro):
        found = objective(model, part.to(device, non_blocking=True))
        loss = found.total / weight
        loss.backward()
        total += loss.detach()
        metrics = combined(metrics, found.metrics or {})
    return Accumulated(total, metrics)


class Alarm:
    """Flag on the device that says whether anything was not finite. The host asks only for what has already arrived."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.bad = torch.zeros((), device=device)  # 0 or 1, and never 0 again
        self.arriving: list[tuple[int, Tensor, Tensor, torch.cuda.Event | None]] = []

    def watch(self, index: int, loss: Tensor, grad_norm: Tensor) -> None:
        values = torch.stack([loss, grad_norm.to(loss.dtype)])
        self.bad = torch.maximum(self.bad, (~torch.isfinite(values)).any().to(self.bad.dtype))
        if not self.on_gpu:
            _raise_if_bad(index, values)
            return
        copy = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.arriving.append((index, copy, values, event))
        while self.arriving and self.arriving[0][3].query():  # type: ignore[union-attr]
            _raise_if_bad(*self.arriving.pop(0)[:2])

    def settle(self) -> None:
        """Wait for what is still on its way."""
        for index, copy, _, event in self.arriving:
            event.synchronize()  # type: ignore[union-attr]
            _raise_if_bad(index, copy)
        self.arriving.clear()


def clip_gradients(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float) -> Tensor:
    """The norm of all gradients, which count as at most `clip`: scaled here, or by torch's fused AdamW while it reads them anyway.

    An optimizer whose gradients lie in several processes (learn/sharded.py) does it with all of them.
    """
    if (with_all := getattr(optimizer, "clip_gradients", None)) is not None:
        return with_all(clip)
    if not (isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)):
        return nn.utils.clip_grad_norm_(parameters, clip)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    optimizer.grad_scale = ((norm + 1e-6) / clip).clamp(min=1.0)  # type: ignore[attr-defined]
    return norm


def guarded_step(optimizer: torch.optim.Optimizer, alarm: Alarm) -> None:
    """Take an optimizer step; on a GPU the optimizers skip their update where `found_inf` is 1, as they do for torch's gradient scaler."""
    if alarm.on_gpu:
        optimizer.found_inf = alarm.bad  # type: ignore[attr-defined]
    optimizer.step()


def _raise_if_bad(index: int, values: Tensor) -> None:
    if not torch.isfinite(values).all():
        raise GuardStop(f"step {index}: loss {float(values[0])}, gradient norm {float(values[1])}: not finite; the step was not "
                        "taken and the weights are as they were before it. Lower the learning rate, or look at this step's data")
