"""Data parallelism: the V virtual shards of a step, computed by any number of processes and summed in one fixed order.

Process 0 runs the recipe. The others hold the model and the objective, and answer its calls: they are sent the weights that
are trained and the batch, compute the gradients of their shards, and send sums. Shard v is rows v, v + V, v + 2V, … of the batch,
and the sum over shards is a fixed binary tree; so what comes out is a function of the batch and of V, and of nothing else: not of how many
processes there are, and not of what another process remembers from the step before.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from assay.data.batch import Batch
from assay.errors import GuardStop
from assay.learn.loop import Accumulate, Accumulated
from assay.learn.objectives import Objective
from assay.model.transformer import Transformer
from assay.model.world import World
from assay.verdict import refuted

Digests = Callable[[nn.Module], dict[str, str]]  # of every tensor, by name


class ShardSum(NamedTuple):
    """Sum over shards: gradients and the loss as one vector; sums and maxima that were measured; and what was read, counted."""

    gradients: Tensor  # fp32, every trained tensor one after the other, then the loss
    sums: Tensor
    maxima: Tensor
    read: Tensor  # fp64: rows, tokens that count, a checksum of the tokens

    def plus(self, other: "ShardSum") -> "ShardSum":
        return ShardSum(self.gradients + other.gradients, self.sums + other.sums, torch.maximum(self.maxima, other.maxima),
                        self.read + other.read)


class ParallelAccumulate:
    """An Accumulate around an Accumulate, in process 0: every call of the run's own model and objective goes to all processes.

    Other models and objectives (what a preflight compares with) are computed here alone.
    """

    def __init__(self, inner: Accumulate, world: World, shards: int, model: Transformer, objective: Objective):
        self.inner, self.world, self.shards, self.model, self.objective = inner, world, shards, model, objective

    def __call__(self, model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> Accumulated:
        if model is not self.model or objective is not self.objective:
            return self.inner(model, objective, batch, micro, weight)
        share = Share(self.inner, self.world, self.shards, model, objective, micro, weight)
        self.world.announce(described(batch, micro, weight, self.shards, model))
        send_weights(self.world, model)
        send_batch(self.world, batch)
        total = share.total(batch)
        assert total is not None, "process 0 owns the root"
        require_all_read(batch, total.read)
        return share.hand_back(total)


def answer_calls(world: World, inner: Accumulate, model: Transformer, objective: Objective, digests: Digests) -> None:
    """Answer the calls of process 0 until the run ends, in every process but the first."""
    for call in world.calls():
        if call.get("digests"):
            send_weights(world, model)
            world.reply(digests(model))
            continue
        model.compute_dtype = getattr(torch, call["compute"]) if call["compute"] else None
        model.train(call["training"])
        send_weights(world, model)
        batch = send_batch(world, empty_batch(call["streams"]))
        Share(inner, world, call["shards"], model, objective, call["micro"], call["weight"]).total(batch)
        for parameter in model.parameters():
            parameter.grad = None


def replica_digests(world: World, model: Transformer, digests: Digests) -> list[dict[str, str]]:
    """Digests of what every process holds, by rank, once it was sent the weights of this moment. Asked in process 0."""
    world.announce({"digests": True})
    send_weights(world, model)
    return [digests(model), *world.replies()]


class Share:
    """One process's part of one call."""

    def __init__(self, inner: Accumulate, world: World, shards: int, model: Transformer, objective: Objective, micro: int, weight: float):
        self.inner, self.world, self.shards, self.model, self.objective = inner, world, shards, model, objective
        self.micro, self.weight = micro, weight
        self.parameters = trained_parameters(model)
        self.metrics: dict[str, Tensor] = {}  # of the first shard: names and order are the same for all
        self.reached: list[bool] = []  # whether a parameter has a gradient at all

    def total(self, batch: Batch) -> ShardSum | None:
        """The sum over all shards, in process 0; elsewhere nothing is left to return."""
        return self._node(batch, 0, self.shards)

    def _node(self, batch: Batch, low: int, high: int) -> ShardSum | None:
        """The sum of shards low … high - 1, where this process is the one that owns their first."""
        mine, first, last = self.world.rank, self.owner(low), self.owner(high - 1)
        if low >= len(batch) or not first <= mine <= last:  # such shards hold no row, or are not this process's business
            return None
        if high - low == 1:
            return self._leaf(batch, low)
        middle = (low + high) // 2
        left, right = self._node(batch, low, middle), self._node(batch, middle, high)
        if middle >= len(batch):
            return left
        there = self.owner(middle)
        if there == first:
            return left.plus(right) if left is not None and right is not None else None
        if mine == first and left is not None:
            return left.plus(self._receive(left, there))
        if mine == there and right is not None:
            self._send(right, first)
        return None

    def owner(self, shard: int) -> int:
        return shard * self.world.size // self.shards

    def _leaf(self, batch: Batch, shard: int) -> ShardSum:
        for parameter in self.parameters:
            parameter.grad = None
        part = rows_of(batch, shard, self.shards)
        loss, metrics = self.inner(self.model, self.objective, part, self.micro, self.weight)
        gradients = [p.grad for p in self.parameters]
        if not self.metrics:
            self.metrics, self.reached = dict(metrics), [gradient is not None for gradient in gradients]
        flat = [torch.zeros_like(p).float().reshape(-1) if gradient is None else gradient.float().reshape(-1)
                for p, gradient in zip(self.parameters, gradients, strict=True)]
        values = {name: value.float().reshape(1) for name, value in metrics.items()}
        nothing = loss.new_zeros(0, dtype=torch.float32)
        return ShardSum(torch.cat([*flat, loss.float().reshape(1)]),
                        torch.cat([nothing, *(value for name, value in values.items() if not name.endswith("/max"))]),
                        torch.cat([nothing, *(value for name, value in values.items() if name.endswith("/max"))]),
                        count_read(part).to(loss.device))

    def _send(self, value: ShardSum, to: int) -> None:
        for tensor in value:
            if tensor.numel():
                self.world.send(tensor, to)

    def _receive(self, like: ShardSum, source: int) -> ShardSum:
        received = [torch.empty_like(tensor) for tensor in like]
        for tensor in received:
            if tensor.numel():
                self.world.receive(tensor, source)
        return ShardSum(*received)

    def hand_back(self, total: ShardSum) -> Accumulated:
        """Gradients onto the parameters; loss and metrics as one process would have had them."""
        at = 0
        for parameter, reached in zip(self.parameters, self.reached, strict=True):
            piece = total.gradients[at : at + parameter.numel()].view_as(parameter)
            parameter.grad = piece.to(parameter.dtype) if reached else None
            at += parameter.numel()
        sums, maxima = iter(total.sums), iter(total.maxima)
        metrics = {name: next(maxima if name.endswith("/max") else sums).to(value.dtype) for name, value in self.metrics.items()}
        return Accumulated(total.gradients[-1], metrics)


# ---------------------------------------------------------------- what travels


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def send_weights(world: World, model: nn.Module) -> None:
    """Process 0's trained weights become everyone's: no copy can drift, and a resume needs nobody's memory."""
    for parameter in trained_parameters(model):
        world.broadcast(parameter.data)


def described(batch: Batch, micro: int, weight: float, shards: int, model: Transformer) -> dict[str, Any]:
    streams = {name: [list(stream.shape), str(stream.dtype).removeprefix("torch.")] for name, stream in batch.streams().items()}
    compute = None if model.compute_dtype is None else str(model.compute_dtype).removeprefix("torch.")
    return {"streams": streams, "micro": micro, "weight": weight, "shards": shards, "compute": compute, "training": model.training}


def empty_batch(streams: dict[str, Any]) -> Batch:
    made: dict[str, Any] = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in streams.items()}
    return Batch(**made)


def send_batch(world: World, batch: Batch) -> Batch:
    """Process 0's batch, on the CPU, in every process: the data is read once, and ids are those that the plan names."""
    if world.size == 1:
        return batch
    received: dict[str, Any] = {name: stream.to(world.device) for name, stream in batch.streams().items()}
    for stream in received.values():
        world.broadcast(stream)
    return batch if world.rank == 0 else dataclasses.replace(batch, **{name: stream.cpu() for name, stream in received.items()})


def rows_of(batch: Batch, shard: int, shards: int) -> Batch:
    part: dict[str, Any] = {name: stream[shard::shards] for name, stream in batch.streams().items()}
    return dataclasses.replace(batch, **part, ids=batch.ids[shard::shards], starts=None)


def count_read(batch: Batch) -> Tensor:
    """Rows, tokens that count, and a checksum that another row, or one read twice, would change. Whole numbers: fp64 adds them exactly."""
    places = torch.arange(1, batch.tokens.shape[1] + 1, device=batch.tokens.device)
    checksum = ((batch.tokens * places) % 1_000_003).sum()
    return torch.stack([torch.tensor(float(len(batch)), device=batch.tokens.device, dtype=torch.float64),
                        (batch.weight != 0).sum().double(), checksum.double()])


def require_all_read(batch: Batch, read: Tensor) -> None:
    """Require that every row of the batch went through exactly one process."""
    due = count_read(batch).cpu()
    if not torch.equal(due, read.cpu()):
        found = refuted("rows", f"the processes together read {_counted(read)}, the step has {_counted(due)}: a row was left out, read "
                                "twice or changed on its way; the step was not taken")
        raise GuardStop(found.reason, [found])


def _counted(read: Tensor) -> str:
    rows, tokens, checksum = (int(value) for value in read.tolist())
    return f"{rows} rows with {tokens} learned tokens (checksum {checksum})"
