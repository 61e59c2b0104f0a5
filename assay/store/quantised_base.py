"""Quantised base: a model's matrices rounded to nf4, int8 or bf16 as they are read, each compared with its file; and their digest."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from assay.model.families import ForeignTensor, to_foreign
from assay.model.quantised import QuantisedMatrix, dequantised, is_quantisable, quantise, refuse_far_codes
from assay.store.digests import combined_digest, tensor_facts

BASE_DTYPES = ("bf16", "int8", "nf4")


class QuantisedReader:
    """Reader that quantises a model's tensors one by one. `dense`: each matrix as the codes stand for it, else codes and scales in its
    place; `shared` says of a tensor whether it lies where it shall be already."""

    def __init__(self, held: str, layout: dict[str, list[ForeignTensor]], shared: Callable[[str, Tensor], Tensor], *, dense: bool):
        self.held, self.layout, self.dense, self._shared = held, layout, dense, shared
        self._codes: dict[str, Tensor] = {}
        self._apart = self._total = 0.0

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        if self.held == "bf16":
            made = tensor.to(torch.bfloat16)
            if made.dtype != tensor.dtype:  # else the file's own bits, and nothing to measure
                self._count(tensor, float((made.float() - tensor.float()).square().sum()))
            return self._shared(name, made)
        if not is_quantisable(name, tensor.shape):
            return self._shared(name, tensor)
        kind = "nf4" if self.held == "nf4" else "int8"
        matrix = quantise(tensor, kind)  # type: ignore[arg-type]
        made = dequantised(matrix)
        self._count(tensor, refuse_far_codes(name, tensor, made, kind))  # type: ignore[arg-type]
        if self.dense:
            return self._shared(name, made)
        for leaf, part in matrix._asdict().items():
            place = f"{name.removesuffix('.weight')}.{leaf}"
            self._codes[place] = self._shared(place, part)
        return torch.empty_like(tensor, device="meta")  # nothing of it is held

    def _count(self, tensor: Tensor, apart: float) -> None:
        self._apart += apart
        self._total += float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2

    @property
    def rounding(self) -> float:
        """The norm of all differences from the file, over the norm of what was rounded."""
        return (self._apart / self._total) ** 0.5 if self._total else 0.0

    def tensors(self, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in read.items() if not tensor.is_meta} | self._codes

    def all_shared(self, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> bool:
        """Whether everything that was read is, bit for bit, what lies there already."""
        return bool(held) and all(held.get(name) is tensor for name, tensor in tensors.items())

    def digest(self, tensors: Mapping[str, Tensor]) -> str:
        """Digest of the weights that the codes stand for, under their foreign names; one matrix at a time is made."""
        facts: dict[str, Any] = {}
        for name, pieces in self.layout.items():
            facts |= tensor_facts(to_foreign({name: pieces}, {name: weight_in(tensors, name)}))
        return combined_digest(facts)


def weight_in(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of a model by its name where nothing is quantised."""
    if name in tensors:
        return tensors[name]
    stem = name.removesuffix(".weight")
    return dequantised(QuantisedMatrix(tensors[f"{stem}.codes"], tensors[f"{stem}.scale"]))
