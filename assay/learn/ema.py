"""EMA: the exponential moving average of a model's weights, kept beside the raw weights that are trained.

    average = Ema(model, 0.999)
    for step in train(model, …):
        average.update(step.index)
    with average.swapped():
        score(model)            # scores the average; afterwards the model has its raw bits again

A checkpoint saves the raw set as its model and the average in the optimizer's file, under "ema/NAME": neither replaces
the other, and which of the two was scored stands in the manifest.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.learn.optim import load_strictly

EMA_PREFIX = "ema/"


class Ema:
    """Moving average of the weights. It covers every parameter, trained or not, so that it is a whole model by itself."""

    def __init__(self, model: nn.Module, decay: float):
        if not 0 < decay < 1:
            raise UsageError(f"ema: decay is {decay}; expected a number between 0 and 1, such as 0.999")
        self.decay = decay
        self._live = dict(model.named_parameters())
        for name, parameter in self._live.items():
            if parameter.dtype != torch.float32:
                raise UsageError(f"ema: {name} is {parameter.dtype}; an average is kept of float32 weights, because "
                                 "rounding would swallow its small steps")
        self._average = {name: parameter.detach().clone() for name, parameter in self._live.items()}
        self._swapped = False

    def decay_at(self, step: int) -> float:
        """A pure function of the step, so that nothing but the average needs to be saved.

        It grows to `decay` as (1 + step) / (10 + step), TensorFlow's rule for `num_updates`: the first weights, which
        are random, are soon forgotten.
        """
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after optimizer step `step`, counted from 0, without waiting for the GPU."""
        assert not self._swapped, "the model holds the average now: averaging it with itself would lose a step"
        torch._foreach_lerp_(list(self._average.values()), list(self._live.values()), 1 - self.decay_at(step))

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """The model holds the average inside, and its own saved bits again afterwards, whatever happened.

        Values are copied, not exchanged: a CUDA graph reads its parameters at fixed addresses.
        """
        assert not self._swapped, "the average is already in the model"
        raw = {name: parameter.detach().clone() for name, parameter in self._live.items()}
        self._swapped = True
        try:
            self._fill(self._average)
            yield
        finally:
            self._fill(raw)
            self._swapped = False

    def averaged(self) -> Mapping[str, Tensor]:
        """The weights that are averaged."""
        return self._live

    def tensors(self) -> dict[str, Tensor]:
        """The average, live, under the names it has in the optimizer's file."""
        return {EMA_PREFIX + name: tensor for name, tensor in self._average.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a saved average back, bit for bit."""
        load_strictly(self.tensors(), tensors, "ema", "the run was saved without an average, or for another model")

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._live.items():
            parameter.copy_(values[name])


def split_ema_state(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a checkpoint's optimizer file into (the optimizer's own state, the average's tensors)."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(EMA_PREFIX)}
    return own, {name: tensor for name, tensor in tensors.items() if name.startswith(EMA_PREFIX)}


def ema_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averaged model in a checkpoint's optimizer file, under the model's own names."""
    return {name.removeprefix(EMA_PREFIX): tensor for name, tensor in split_ema_state(tensors)[1].items()}
