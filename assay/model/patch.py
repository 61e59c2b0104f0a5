"""Patches: a change to a model's parameters, with the digest of the weights that it belongs to.

LoRA learns one, MEMIT solves for one, test-time training makes one for a document. A patch is undone by restoring saved bits,
never by subtraction: `w += d; w -= d` is not the identity in bf16.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from assay.errors import ArtifactError


@dataclass(frozen=True)
class LowRank:
    """weight[start:stop] += scale · left @ right."""

    start: int
    stop: int
    left: Tensor  # (stop - start, r)
    right: Tensor  # (r, in)
    scale: float

    def delta(self) -> Tensor:
        """Weight change in fp32: the product of two bf16 factors has more digits than bf16 can hold."""
        return self.scale * (self.left.float() @ self.right.float())


@dataclass(frozen=True)
class Patch:
    """`parent` is the weights digest of the model it changes; None where whoever wrote it did not say."""

    parent: str | None
    low_rank: dict[str, tuple[LowRank, ...]] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)

    def names(self) -> set[str]:
        return self.low_rank.keys() | self.replaced.keys()


def patched_tensors(tensors: Mapping[str, Tensor], patch: Patch, digest: str | None = None) -> dict[str, Tensor]:
    """Tensors with a patch applied: new ones for the changed names, in their own dtype. `digest` is the tensors' own: a patch fits one
    parent only."""
    if patch.parent is not None and digest is not None and patch.parent != digest:
        raise ArtifactError(f"the patch belongs to weights {patch.parent[:12]}, these are {digest[:12]}: it is for another base, "
                            "or it is merged already; apply it to the parent it names")
    changed = {name: tensor.to(tensors[name].dtype) for name, tensor in patch.replaced.items()}
    for name, parts in patch.low_rank.items():
        changed[name] = changed.get(name, tensors[name]).clone()
        for part in parts:
            rows = changed[name][part.start:part.stop]
            rows.copy_(rows.float() + part.delta().to(rows.device))
    return changed


@contextlib.contextmanager
def patched(model: nn.Module, patch: Patch) -> Iterator[nn.Module]:
    """The patch applies for the length of the block; afterwards the model has its old bits, even after an error."""
    parameters = dict(model.named_parameters())
    saved = {name: parameters[name].detach().clone() for name in patch.names()}
    try:
        with torch.no_grad():
            for name, tensor in patched_tensors(saved, patch).items():
                parameters[name].copy_(tensor)
        yield model
    finally:
        with torch.no_grad():
            for name, tensor in saved.items():
                parameters[name].copy_(tensor)
