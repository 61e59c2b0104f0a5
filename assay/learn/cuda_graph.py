"""CUDA graphs of a micro-batch: forward and backward as one graph, and forward alone.

A small model's kernels are shorter than the time a CPU needs to launch them: on an H200 a step of a 135M model took 62 ms of
launching for 44 ms of arithmetic. A graph is launched once. It computes what `loop.accumulated` computes, with the same kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.learn.loop import Accumulated
from assay.learn.objectives import Objective, combined
from assay.learn.policy import token_logprobs
from assay.model.placement import capture_graph, is_uncompiled
from assay.model.transformer import Transformer

_WARM_UP = 3  # passes before capture: compilation, library handles and autotuning must not be captured; uncompiled, one makes them all
_SEEN = {"tokens", "documents", "positions", "starts"}  # of a batch, what a model sees


class GraphedAccumulate:
    """A twin of `loop.accumulated` for CUDA: a graph for the first micro-batch of a step, whose gradients replace those of the
    step before, and one for the others, whose gradients are added; each for every dtype and shape of micro-batch there is, compiled or not.

    They run one after the other, and so share one pool of memory: activations of all shapes take no more than those of the largest.
    """

    def __init__(self) -> None:
        self._first: dict[tuple, _Captured] = {}
        self._more: dict[tuple, _Captured] = {}
        self._most_starts: dict[tuple, int] = {}  # of documents, by the shape of a micro-batch
        self._pool: Any = None

    def keep_only(self, compute: torch.dtype | None) -> None:
        """Drop the graphs of other dtypes and the eager ones: a preflight's, and the gradients that they hold, serve no step."""
        self._first = {key: graph for key, graph in self._first.items() if key[:2] == (compute, False)}
        self._more = {key: graph for key, graph in self._more.items() if key[:2] == (compute, False)}

    def forget(self) -> None:
        """Drop every graph, and the memory that all share; a batch that comes later is captured anew."""
        self._first, self._more, self._pool = {}, {}, None

    def held_bytes(self) -> int:
        """Bytes that the graphs hold for their activations: they stay theirs, but torch counts them as used only while a graph is
        captured."""
        pools = [segment for segment in torch.cuda.memory_snapshot() if self._pool is not None
                 and tuple(segment["segment_pool_id"]) == tuple(self._pool)]
        return sum(segment["total_size"] - segment["allocated_size"] for segment in pools)

    def __call__(self, model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> Accumulated:
        device = model.embed.weight.device
        total, metrics = torch.zeros((), device=device), dict[str, Tensor]()
        opening: tuple | None = None
        for part in batch.split(micro):
            on_device = self._with_known_starts(part.to(device, non_blocking=True))
            shapes = ((name, tuple(tensor.shape)) for name, tensor in batch_tensors(on_device).items())
            shape = (model.compute_dtype, is_uncompiled(), *shapes)
            if opening is None:
                graphs, key, opening = self._first, shape, shape
            else:  # it adds to the buffers that belong to this step's first graph
                graphs, key = self._more, (*opening, *shape)
            if key not in graphs:
                graphs[key] = _Captured(model, objective, on_device, self._pool, adding=graphs is self._more)
                self._pool = graphs[key].graph.pool()
            found = graphs[key].replay(on_device, weight)
            total += found.loss
            # Copied, because the next replay writes to the same addresses.
            metrics = combined(metrics, {name: value.clone() for name, value in found.metrics.items()})
        return Accumulated(total, metrics)

    def _with_known_starts(self, part: Batch) -> Batch:
        """The micro-batch with as many starts as one of its shape had before, where those are up to twice as many: it needs no graph of
        its own then."""
        if part.starts is None:
            return part
        shape, count = tuple(part.tokens.shape), len(part.starts)
        most = self._most_starts[shape] = max(count, self._most_starts.get(shape, 0))
        if most > 2 * count:
            return part
        return replace(part, starts=torch.cat([part.starts, part.starts[-1:].expand(most - count)]))


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    return batch.streams() | ({} if batch.starts is None else {"starts": batch.starts})


class _Captured:
    """One graph and the fixed addresses it reads from and writes to."""

    def __init__(self, model: Transformer, objective: Objective, part: Batch, pool: Any, *, adding: bool):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.inputs = {name: tensor.clone() for name, tensor in batch_tensors(part).items()}
        self.weight = torch.ones((), device=model.embed.weight.device)
        fixed = replace(part, **self.inputs)  # type: ignore[arg-type]

        def once() -> Accumulated:
            found = objective(model, fixed)
            loss = found.total / self.weight
            loss.backward()
            return Accumulated(loss.detach(), found.metrics or {})

        held = [p.grad for p in self.parameters]
        _warm_up(self._into_nothing(once))
        for parameter, gradient in zip(self.parameters, held, strict=True):
            parameter.grad = gradient if adding else None
        with capture_graph(pool) as self.graph:
            self.found = once()
        self.gradients = [p.grad for p in self.parameters]

    def _into_nothing(self, once: Callable[[], object]) -> Callable[[], None]:
        """Gradients that are thrown away."""
        def run() -> None:
            for parameter in self.parameters:
                parameter.grad = None
            once()

        return run

    def replay(self, part: Batch, weight: float) -> Accumulated:
        for name, tensor in batch_tensors(part).items():
            self.inputs[name].copy_(tensor, non_blocking=True)
        self.weight.fill_(weight)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient  # the loop let go of it after the step before
        return self.found


class GraphedLogprobs:
    """A twin of `policy.token_logprobs` for CUDA where nothing learns: a graph of one model for every shape there is.

    A graph reads the addresses that the weights had when it was made: where a model's weights have moved, it is made anew.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple, _Scored] = {}
        self._addresses: list[int] = []

    def __call__(self, model: Transformer, part: Batch, temperature: float, *, entropy: bool = False) -> tuple[Tensor, None]:
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses
        seen = {name: tensor for name, tensor in batch_tensors(part).items() if name in _SEEN}
        key = model.compute_dtype, is_uncompiled(), temperature, entropy, *((name, tuple(tensor.shape)) for name, tensor in seen.items())
        if key not in self._graphs:
            self._graphs[key] = _Scored(model, part, seen, temperature, entropy)
        return self._graphs[key].replay(seen), None


class _Scored:
    def __init__(self, model: Transformer, part: Batch, seen: dict[str, Tensor], temperature: float, entropy: bool):
        self.inputs = {name: tensor.clone() for name, tensor in seen.items()}
        fixed = replace(part, **self.inputs)  # type: ignore[arg-type]

        def once() -> Tensor:
            return token_logprobs(model, fixed, temperature, entropy=entropy)[0]

        with torch.no_grad():
            _warm_up(once)
            with capture_graph() as self.graph:
                self.found = once()

    def replay(self, seen: dict[str, Tensor]) -> Tensor:
        """A copy, because the next replay writes to the same address."""
        for name, tensor in seen.items():
            self.inputs[name].copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.found.clone()


def _warm_up(once: Callable[[], object]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(1 if is_uncompiled() else _WARM_UP):
            once()
    torch.cuda.current_stream().wait_stream(stream)
