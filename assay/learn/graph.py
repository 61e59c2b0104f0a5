"""Forward and backward of a micro-batch as one CUDA graph.

A small model's kernels are shorter than the time a CPU needs to launch them: on an H200 a step of a 135M model took 62 ms of
launching for 44 ms of arithmetic. A graph is launched once. It computes what `loop.accumulate` computes, with the same kernels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.learn.objectives import Objective
from assay.model.transformer import Transformer

WARM_UP = 3  # eager passes before capture: compilation, library handles and autotuning must not be captured


class GraphedAccumulate:
    """A twin of `loop.accumulate` for CUDA: one graph per shape of micro-batch, gradients summed into buffers of its own."""

    def __init__(self) -> None:
        self._graphs: dict[tuple, _Captured] = {}
        self._gradients: dict[int, Tensor] = {}

    def __call__(self, model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> Tensor:
        self._attach_gradients(model)
        total = torch.zeros((), device=model.embed.weight.device)
        for part in batch.split(micro):
            inputs = tensors(part.to(total.device, non_blocking=True))
            key = tuple((name, tuple(tensor.shape)) for name, tensor in inputs.items())
            if key not in self._graphs:
                self._graphs[key] = _Captured(model, objective, part.to(total.device), self._restore)
            total += self._graphs[key].replay(inputs, weight)
        return total

    def _attach_gradients(self, model: Transformer) -> None:
        """The graph writes to fixed addresses: the same buffers become the gradients of every step, zeroed."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = self._gradients.setdefault(id(parameter), torch.zeros_like(parameter))
        torch._foreach_zero_(list(self._gradients.values()))

    def _restore(self, work: Callable[[], None]) -> None:
        """Do something that adds to the gradients, and take it back."""
        buffers = list(self._gradients.values())
        kept = [buffer.clone() for buffer in buffers]
        work()
        torch._foreach_copy_(buffers, kept)


def tensors(batch: Batch) -> dict[str, Tensor]:
    return batch.streams() | ({} if batch.starts is None else {"starts": batch.starts})


class _Captured:
    def __init__(self, model: Transformer, objective: Objective, part: Batch, restore: Callable[[Callable[[], None]], None]):
        device = model.embed.weight.device
        self.inputs = tensors(part)
        self.weight = torch.ones((), device=device)

        def once() -> Tensor:
            loss = objective(model, part).total / self.weight
            loss.backward()
            return loss.detach()

        def warm_up() -> None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    once()
            torch.cuda.current_stream().wait_stream(stream)

        restore(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = once()

    def replay(self, inputs: dict[str, Tensor], weight: float) -> Tensor:
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor, non_blocking=True)
        self.weight.fill_(weight)
        self.graph.replay()
        return self.loss
