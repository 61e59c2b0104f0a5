"""Streamed model: a model that one process computes with alone and never holds whole: each matrix is fetched for its product and released.

The matrices of the blocks' layers are fetched when their layer is called, in the backward pass once more (activations are recomputed
there), and their gradients leave as soon as they are made. Embedding, head, norms and whatever is small stay. In between a matrix is not a
number: what used it without its layer would show.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from assay.model.transformer import Transformer

Fetch = Callable[[str], Tensor]  # a parameter by its name, whole
TakeGradient = Callable[[str, Tensor], None]

HELD_BYTES = 1 << 20  # a matrix of no more costs more to fetch than to hold
HELD_LAYERS = ("attn.gate",)  # whose matrices a preflight writes to


def streamed_names(model: Transformer) -> list[str]:
    """Matrices that their own layers alone multiply with, and that are worth a fetch."""
    layers = {f"{path}.weight": layer for path, layer in model.blocks.named_modules(prefix="blocks")
              if isinstance(layer, nn.Linear) and not path.removesuffix(".base").endswith(HELD_LAYERS)}
    return [name for name, layer in layers.items() if layer.weight.numel() * layer.weight.element_size() > HELD_BYTES]


class Streaming:
    """The model's parameters from here until `end`: those that are streamed have a shape and no memory, the others are fetched now."""

    def __init__(self, model: Transformer, device: str, fetch: Fetch, take: TakeGradient | None = None):
        self.model, self.device, self.fetch, self.take = model, device, fetch, take
        self.names = streamed_names(model)
        self._recompute, self._hooks = model.recompute, list[Any]()
        model.recompute = True
        with torch.no_grad():
            replace_parameters(model, self._begun)
        for name in self.names:
            self._follow(name, model.get_submodule(name.removesuffix(".weight")))

    def _begun(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name in self.names:
            nothing = torch.full((), math.nan, dtype=parameter.dtype, device=self.device)
            return nn.Parameter(nothing.expand(parameter.shape), requires_grad=parameter.requires_grad)
        return nn.Parameter(self._fetched(name, parameter.dtype), requires_grad=parameter.requires_grad)

    def _fetched(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.fetch(name).detach().to(device=self.device, dtype=dtype)

    def _follow(self, name: str, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight")
        nothing = weight.data

        def fill(*_: Any) -> None:
            weight.data = self._fetched(name, weight.dtype)

        def empty(*_: Any) -> None:
            weight.data = nothing

        self._hooks += [layer.register_forward_pre_hook(fill), layer.register_forward_hook(empty, always_call=True)]
        if self.take is not None and weight.requires_grad:
            take = self.take

            def leave(parameter: Tensor) -> None:
                assert parameter.grad is not None
                take(name, parameter.grad)
                parameter.grad = None

            self._hooks.append(weight.register_post_accumulate_grad_hook(leave))

    def end(self) -> None:
        """The model has shapes alone afterwards."""
        for hook in self._hooks:
            hook.remove()
        self.model.recompute = self._recompute
        replace_parameters(self.model, lambda _, p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad))


def replace_parameters(model: nn.Module, made: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace every parameter of the model by another, under the same name."""
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, made(name, parameter))


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for, one at a time."""

    def __init__(self, names: list[str], made: Fetch):
        self.names, self.made = dict.fromkeys(names), made

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.made(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
