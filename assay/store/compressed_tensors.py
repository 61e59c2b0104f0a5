"""Compressed-tensors folders: matrices in FP8 or few-bit integers with their scales, as vLLM and transformers load them.

Weights are rounded to the nearest code, with one scale for each row (fp8, w8a8) or for each group of a row (w4a16); nothing is calibrated.
Norms, embeddings, biases and the head stay as they are. What a folder says of its matrices in `quantization_config` is compared with what
it stores: a layer that is not in codes, or whose scales are lost or of another shape, is refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.families import config_from_hf, hf_layout
from assay.model.transformer import ModelConfig
from assay.store.safetensors_files import read_folder_tensors
from assay.strict_json import read_json

METHOD = "compressed-tensors"
GROUP_SIZES = (128, 64, 32, 16, 8)  # sizes of a group, the first that divides every row
FP8_LARGEST, FP8_STEP, FP8_FINEST = 448.0, 2.0**-4, 2.0**-10  # of e4m3: largest value; half a step, of a value and of the smallest ones
CODE_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale")
_MATRIX = re.compile(r"model\.layers\.\d+\..*\.weight")
_SLACK = 1.01  # scales are rounded too


@dataclass(frozen=True)
class CompressedScheme:
    """`answers` is how far (relative) the rounded model may answer from its source, and a library that rounds activations too from it;
    `nats` is how much its mean surprise may change."""

    name: str
    format: str
    bits: int
    kind: str  # float or int
    grouped: bool
    activations: bool
    answers: float
    nats: float

    @property
    def largest(self) -> float:
        return FP8_LARGEST if self.kind == "float" else 2.0 ** (self.bits - 1) - 1


COMPRESSED = {one.name: one for one in (
    CompressedScheme("fp8", "float-quantized", 8, "float", False, True, 0.5, 0.1),
    CompressedScheme("w8a8", "int-quantized", 8, "int", False, True, 0.5, 0.1),
    CompressedScheme("w4a16", "pack-quantized", 4, "int", True, False, 1.0, 0.5))}

# ---------------------------------------------------------------- written


def compressed_weights(weights: Mapping[str, Tensor], scheme: CompressedScheme, dtype: torch.dtype) -> tuple[dict[str, Tensor],
                                                                                                            dict[str, Any]]:
    """Compress weights under Hugging Face names: the tensors of the folder, and its quantization_config."""
    chosen = [name for name, tensor in weights.items() if is_linear(name, tensor)]
    if not chosen:
        raise UsageError(f"no matrix of these weights is a linear layer's; {scheme.name} has nothing to round: export it --to hf")
    group = _group_size([weights[name].shape[1] for name in chosen]) if scheme.grouped else None
    made = {name: tensor.to(dtype) for name, tensor in weights.items() if name not in chosen}
    for name in chosen:
        codes, scales = rounded_codes(weights[name], scheme, group, dtype)
        made |= _stored(name.removesuffix(".weight"), codes, scales, scheme)
    return made, quantization_config(scheme, group)


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor under its Hugging Face name is the matrix of a linear layer of a block: those are what is rounded."""
    return _MATRIX.fullmatch(name) is not None and tensor.dim() == 2


def rounded_codes(matrix: Tensor, scheme: CompressedScheme, group: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of the matrix's shape, in float32, and scales of shape (rows, groups)."""
    parts = matrix.float().reshape(matrix.shape[0], -1, group or matrix.shape[1])
    largest = parts.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / scheme.largest, torch.ones_like(largest)).to(dtype)
    codes = (parts / scales.float()).clamp(-scheme.largest, scheme.largest)
    codes = codes.to(torch.float8_e4m3fn).float() if scheme.kind == "float" else codes.round()
    return codes.reshape(matrix.shape), scales[..., 0]


def _stored(module: str, codes: Tensor, scales: Tensor, scheme: CompressedScheme) -> dict[str, Tensor]:
    if scheme.format == "pack-quantized":
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return {f"{module}.weight_packed": packed_nibbles(codes), f"{module}.weight_scale": scales, f"{module}.weight_shape": shape}
    stored = codes.to(torch.float8_e4m3fn if scheme.kind == "float" else torch.int8)
    return {f"{module}.weight": stored, f"{module}.weight_scale": scales}


def packed_nibbles(codes: Tensor) -> Tensor:
    """Eight codes of four bits in 32, the first in the lowest, each 8 more than it is."""
    nibbles = (codes.to(torch.int64) + 8).reshape(codes.shape[0], -1, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpacked_nibbles(words: Tensor) -> Tensor:
    nibbles = (words.to(torch.int64)[..., None] >> (4 * torch.arange(8))) & 15
    return (nibbles - 8).reshape(words.shape[0], -1).float()


def _group_size(widths: Iterable[int]) -> int:
    found = sorted(set(widths))
    for size in GROUP_SIZES:
        if all(width % size == 0 for width in found):
            return size
    raise UsageError(f"rows of {found} weights have no common group; expected widths that {GROUP_SIZES[-1]} divides: choose fp8 or w8a8")


def quantization_config(scheme: CompressedScheme, group: int | None) -> dict[str, Any]:
    weights = {"num_bits": scheme.bits, "type": scheme.kind, "symmetric": True, "strategy": "group" if group else "channel",
               "group_size": group, "dynamic": False}
    inputs = {"num_bits": scheme.bits, "type": scheme.kind, "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs if scheme.activations else None}}
    return {"quant_method": METHOD, "format": scheme.format, "quantization_status": "compressed", "config_groups": groups,
            "ignore": ["lm_head"]}

# ---------------------------------------------------------------- read


@dataclass(frozen=True)
class CompressedRecipe:
    """Contents of a quantization_config, where it is one that Assay reads."""

    scheme: CompressedScheme
    group: int | None
    ignored: tuple[str, ...]

    def covers(self, module: str) -> bool:
        return not any(re.fullmatch(one[3:], module) if one.startswith("re:") else one == module for one in self.ignored)


def is_compressed(fields: Mapping[str, Any]) -> bool:
    said = fields.get("quantization_config")
    return isinstance(said, dict) and said.get("quant_method") == METHOD


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as it was before its weights were rounded."""
    return {name: value for name, value in fields.items() if name != "quantization_config" or not is_compressed(fields)}


def plain_names(names: Iterable[str]) -> set[str]:
    """Names of the tensors that the codes and scales stand for."""
    return {name.replace(".weight_packed", ".weight") for name in names if name.rpartition(".")[2] not in CODE_PARTS[1:]}


def recipe_of(fields: Mapping[str, Any], where: str) -> CompressedRecipe:
    said = fields["quantization_config"]
    groups = list((said.get("config_groups") or {}).values())
    weights = groups[0].get("weights") or {} if len(groups) == 1 and isinstance(groups[0], dict) else {}
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True), weights.get("actorder"))
    known: dict[Any, CompressedScheme] = {
        (one.kind, one.bits, "group" if one.grouped else "channel", True, None): one for one in COMPRESSED.values()}
    scheme = known.get(kind)
    if scheme is None or groups[0].get("targets") != ["Linear"] or said.get("format", scheme.format) != scheme.format \
            or said.get("quantization_status", "compressed") != "compressed" or said.get("kv_cache_scheme") or said.get("sparsity_config"):
        raise UsageError(f"{where}: a quantization_config that Assay does not read: {str(said)[:200]}; expected one group of all Linear "
                         f"layers, {', '.join(COMPRESSED)}, symmetric, compressed, nothing else")
    group = weights.get("group_size")
    if scheme.grouped and not (type(group) is int and group > 0):
        raise ArtifactError(f"{where}: quantization_config names the group size {group!r}; expected a number of weights")
    ignored = said.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(one, str) for one in ignored):
        raise ArtifactError(f"{where}: quantization_config ignores {ignored!r:.80}; expected a list of layers")
    return CompressedRecipe(scheme, group if scheme.grouped else None, tuple(ignored))


def plain_weights(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Every tensor under its plain name, codes times scales as float32. Raises ArtifactError where a layer is not what the config says."""
    recipe, made, used = recipe_of(fields, where), dict[str, Tensor](), set[str]()
    for module, codes, scales, names in _layers(recipe, tensors, where):
        made[f"{module}.weight"] = _product(codes, scales)
        used |= names
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    if stray := sorted(name for name in rest if name.rpartition(".")[2] in CODE_PARTS):
        raise ArtifactError(f"{where}: {stray[0]} belongs to no layer that config.json says is in {recipe.scheme.name}")
    return rest | made


def _product(codes: Tensor, scales: Tensor) -> Tensor:
    rows, groups = scales.shape
    return (codes.reshape(rows, groups, -1) * scales.float()[..., None]).reshape(codes.shape)


def _layers(recipe: CompressedRecipe, tensors: Mapping[str, Tensor], where: str) -> Iterator[tuple[str, Tensor, Tensor, set[str]]]:
    """(module, codes in float32, scales, the names of its tensors) of every linear layer."""
    suffix = "weight_packed" if recipe.scheme.format == "pack-quantized" else "weight"
    for name in sorted(plain_names(tensors)):
        module = name.removesuffix(".weight")
        there = tensors.get(f"{module}.{suffix}", tensors.get(name))
        if not name.endswith(".weight") or not recipe.covers(module) or there is None or there.dim() != 2 or "embed" in module:
            continue
        codes = _codes(module, tensors, recipe, where)
        scales = tensors.get(f"{module}.weight_scale")
        width = recipe.group or codes.shape[1]
        due = (codes.shape[0], codes.shape[1] // width)
        if scales is None:
            raise ArtifactError(f"{where}: {module} is in {recipe.scheme.name}, and its weight_scale is not there: lost in the export")
        if tuple(scales.shape) != due:
            raise ArtifactError(f"{where}: the scales of {module} have shape {list(scales.shape)}, expected {list(due)}: transposed, or "
                                "another layer's")
        if not bool((scales.float() > 0).all()) or not bool(torch.isfinite(scales.float()).all()):
            raise ArtifactError(f"{where}: scales of {module} are not all positive numbers: they were never filled")
        yield module, codes, scales, {f"{module}.{part}" for part in (suffix, "weight_scale", "weight_shape")}


def _codes(module: str, tensors: Mapping[str, Tensor], recipe: CompressedRecipe, where: str) -> Tensor:
    scheme = recipe.scheme
    plain, words = tensors.get(f"{module}.weight"), tensors.get(f"{module}.weight_packed")
    due = torch.int32 if scheme.format == "pack-quantized" else torch.float8_e4m3fn if scheme.kind == "float" else torch.int8
    stored = words if scheme.format == "pack-quantized" else plain
    if stored is None or stored.dtype != due:
        found = next(one for one in (stored, plain, words) if one is not None)
        raise ArtifactError(f"{where}: config.json says that {module} is in {scheme.name}, and it is stored as {found.dtype}: it was not "
                            "quantised as stated")
    if scheme.format != "pack-quantized":
        return stored.float()
    shape, codes = tensors.get(f"{module}.weight_shape"), unpacked_nibbles(stored)
    if shape is None or shape.tolist() != list(codes.shape):
        raise ArtifactError(f"{where}: {module} has codes for {list(codes.shape)} weights; its weight_shape says "
                            f"{'nothing' if shape is None else shape.tolist()}")
    if codes.shape[1] % (recipe.group or 1):
        raise ArtifactError(f"{where}: rows of {codes.shape[1]} weights in {module} are no groups of {recipe.group}")
    return codes

# ---------------------------------------------------------------- how far rounding may lead


def half_steps(codes: Tensor, scales: Tensor, scheme: CompressedScheme) -> Tensor:
    """How far rounding to the nearest code moves each weight at the most."""
    steps = (codes.abs() * FP8_STEP).clamp_min(FP8_FINEST) if scheme.kind == "float" else torch.full_like(codes, 0.5)
    return _product(steps, scales) * _SLACK


def layers_with_steps(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(plain name, weights, how far each may be from the source's, codes) of every layer in codes."""
    recipe = recipe_of(fields, where)
    for module, codes, scales, _ in _layers(recipe, tensors, where):
        yield f"{module}.weight", _product(codes, scales), half_steps(codes, scales, recipe.scheme), codes


def compressed_tensor_bounds(path: Path) -> dict[str, float]:
    """How far each tensor of a folder, under our name, may be from its source, relative to itself; nothing for plain folders."""
    fields = read_json(path / "config.json") if (path / "config.json").exists() else {}
    if not is_compressed(fields):
        return {}
    tensors = read_folder_tensors(path, stem="model")
    bounds = {name: float(steps.norm() / matrix.norm().clamp_min(1e-30))
              for name, matrix, steps, _ in layers_with_steps(fields, tensors, str(path))}
    config: ModelConfig = config_from_hf(plain_fields(fields), plain_names(tensors), str(path / "config.json"))
    return {ours: max(bounds.get(piece.name, 0.0) for piece in pieces) for ours, pieces in hf_layout(config).items()}
