"""PEFT adapters that are more than low-rank products: DoRA, PiSSA, biases, embeddings and single tokens, computed with the base.

Each gives whole tensors of ours, as PEFT's live model has them; the base's own values are needed for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.families import hf_layout
from assay.model.lora import LoraSite
from assay.model.patch import LowRank
from assay.model.transformer import ModelConfig

EMBED, HEAD = "embed.weight", "head.weight"
MAGNITUDES = ("lora_magnitude_vector", "lora_magnitude_vector.weight")  # today's name in a file, and that of a live model
NO_CHANGE = 1e-6  # relative: rounding of a matrix that was taken apart and put together again


@dataclass(frozen=True)
class AdapterFile:
    """Inputs of every step of reading an adapter: the base's geometry and tensors, and the file's fields and tensors."""

    config: ModelConfig
    base: Mapping[str, Tensor]  # under our names
    fields: Mapping[str, Any]
    named: Mapping[str, Tensor]  # without PEFT's prefix
    where: str

    @property
    def untied(self) -> ModelConfig:
        """PEFT adapts embedding and head apart, also where the base ties them."""
        return replace(self.config, tied=False)

    @property
    def embedding(self) -> str:
        """The embedding's name elsewhere."""
        return hf_layout(self.config)[EMBED][0].name.removesuffix(".weight")

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of the file, where the base lies."""
        found = self.named.get(name)
        if found is None or tuple(found.shape) != tuple(shape):
            told = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise ArtifactError(f"{self.where}: {name} {told}; its adapter_config.json and this base need it with {list(shape)}")
        return found.to(self.base[EMBED].device)


def needs_whole_matrices(fields: Mapping[str, Any]) -> bool:
    """DoRA scales the rows of base and product together; PiSSA took the product's first value out of the base."""
    return bool(fields.get("use_dora")) or fields.get("init_lora_weights") == "pissa"


def whole_matrices(file: AdapterFile, parts: Sequence[tuple[LoraSite, LowRank]]) -> tuple[dict[str, Tensor], set[str]]:
    """The adapted matrices, and the names in the file that went into them beside the factors."""
    found, used = dict[str, Tensor](), set[str]()
    for site, part in parts:
        weight = found.setdefault(site.parameter, base_matrix(file, site.parameter).float().clone())
        rows = weight[part.start : part.stop]
        if file.fields.get("init_lora_weights") == "pissa":
            rows -= principal_part(rows, part.right.shape[0])
        rows += part.delta().to(rows.device)
        if file.fields.get("use_dora"):
            name = next((f"{site.foreign}.{one}" for one in MAGNITUDES if f"{site.foreign}.{one}" in file.named),
                        f"{site.foreign}.{MAGNITUDES[0]}")
            rows *= (file.take(name, (len(rows),)).float() / rows.norm(dim=1))[:, None]
            used.add(name)
    return found, used


def principal_part(weight: Tensor, rank: int) -> Tensor:
    """Part that PiSSA takes out of a base matrix to begin with: its product of so many largest singular values."""
    left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def base_matrix(file: AdapterFile, parameter: str) -> Tensor:
    return file.base[EMBED if parameter == HEAD and file.config.tied else parameter]


def adapted_embedding(file: AdapterFile, rank: int, scale: float) -> tuple[dict[str, Tensor], set[str]]:
    """The embedding and its product. The head of a tied base stays as it was, as in PEFT's live model."""
    vocab, width = file.base[EMBED].shape
    names = [f"{file.embedding}.lora_embedding_{side}" for side in "AB"]
    right, left = file.take(names[0], (rank, vocab)), file.take(names[1], (width, rank))
    if file.fields.get("use_dora"):
        raise UsageError(f"{file.where}: DoRA of an embedding is not supported; merge it with the tool that wrote it")
    found = {EMBED: file.base[EMBED].float() + scale * (left.float() @ right.float()).T}
    return found | ({HEAD: file.base[EMBED]} if file.config.tied else {}), set(names)


def saved_base_layers(file: AdapterFile) -> set[str]:
    """Names of base matrices that PEFT saves beside an adapted embedding or head: they must be the base's."""
    whole = {f"{pieces[0].name.removesuffix('.weight')}.base_layer.weight": ours for ours, pieces in hf_layout(file.untied).items()
             if ours in (EMBED, HEAD)}
    names = whole.keys() & file.named.keys()
    for name in names:
        due = base_matrix(file, whole[name])
        if file.named[name].shape != due.shape or not torch.equal(file.named[name].to(due), due):
            raise ArtifactError(f"{file.where}: {name} is not the base's; the adapter belongs to another base, or to one that was "
                                "resized. Name the right one with --base, or merge with the tool that wrote it")
    return names


def adapted_biases(file: AdapterFile, planned: Sequence[LoraSite]) -> tuple[dict[str, Tensor], set[str]]:
    """bias = all: every bias of the base is in the file; lora_only: those of the adapted layers."""
    kind = file.fields.get("bias") or "none"
    if kind not in ("none", "all", "lora_only"):
        raise UsageError(f"{file.where}: bias = {kind!r} is not supported; expected 'none', 'all' or 'lora_only'")
    found, used, adapted = dict[str, Tensor](), set[str](), {site.foreign for site in planned}
    for ours, pieces in hf_layout(file.config).items():
        start = 0
        for piece in pieces if ours.endswith(".bias") and kind != "none" else ():
            layer, stop = piece.name.removesuffix(".bias"), start + (piece.rows or len(file.base[ours]))
            if kind == "all" or layer in adapted:
                name = f"{layer}.base_layer.bias" if layer in adapted else piece.name
                name = name if name in file.named else piece.name  # as PEFT wrote it before 0.7
                found.setdefault(ours, file.base[ours].float().clone())[start:stop] = file.take(name, (stop - start,)).float()
                used.add(name)
            start = stop
    return found, used


def trained_tokens(file: AdapterFile) -> tuple[dict[str, Tensor], set[str]]:
    """Rows of the embedding that were trained by themselves; where the base ties its head, they are the head's as well."""
    asked = file.fields.get("trainable_token_indices")
    if not asked:
        return {}, set()
    layer = file.embedding.rpartition(".")[2]
    rows = asked if isinstance(asked, list) else asked.get(layer) if isinstance(asked, dict) and set(asked) == {layer} else None
    if not isinstance(rows, list) or not all(type(row) is int and 0 <= row < file.config.vocab for row in rows):
        raise UsageError(f"{file.where}: trainable_token_indices = {asked!r} is not supported; expected ids of tokens within {layer!r}")
    name, weight = f"{file.embedding}.token_adapter.trainable_tokens_delta", file.base[EMBED].float().clone()
    weight[rows] = file.take(name, (len(rows), weight.shape[1])).float()
    return {EMBED: weight}, {name}


def is_idle(file: AdapterFile, replaced: Mapping[str, Tensor]) -> bool:
    """Whether whole tensors are the base's, but for rounding."""
    return all(float((tensor.float() - base_matrix(file, name).float()).norm()) <= NO_CHANGE * float(base_matrix(file, name).float().norm())
               for name, tensor in replaced.items())
