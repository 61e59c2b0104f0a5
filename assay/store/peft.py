"""PEFT LoRA adapters, read and written strictly.

An adapter that is unknown, incomplete, not finite, without effect or for another base is refused by name; the loaders of
today take all of these in silence.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.families import hf_layout, parameter_shapes
from assay.model.lora import LoraSite, linear_layers, lora_sites
from assay.model.patch import LowRank, Patch
from assay.model.transformer import ModelConfig
from assay.store.peft_experts import STACKED, factor_names, read_stacked, stacked_parameter, stacked_sites, write_stacked
from assay.store.peft_whole import (
    AdapterFile,
    adapted_biases,
    adapted_embedding,
    is_idle,
    needs_whole_matrices,
    saved_base_layers,
    trained_tokens,
    whole_matrices,
)

PEFT_PREFIX = "base_model.model."
# Fields whose other values change the arithmetic; anything not listed here and not read below says nothing about the result.
SUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "lora_bias": (False, None), "megatron_config": (None,), "use_qalora": (False, None),
    "layer_replication": (None,), "alora_invocation_tokens": (None,), "arrow_config": (None,),
    "use_bdlora": (False, None), "kasa": (False, None),
}
# Initialisations that also rewrite the base weights, so that the adapter is meant for a base that no file holds. What PiSSA took
# out of the base is computed again, as PEFT does when it loads one; the others draw at random, or need data.
REWRITES_BASE = ("pissa_niter", "olora", "loftq", "corda")


@dataclass(frozen=True)
class LoraAdapter:
    patch: Patch
    rank: int
    scale: float
    rslora: bool
    base_name: str | None  # where the writer says the base is


def read_adapter(config: ModelConfig, base: Mapping[str, Tensor], fields: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str,
                 *, parent: str | None = None, may_be_idle: bool = False) -> LoraAdapter:
    """`base` are the base's tensors. `may_be_idle` accepts an adapter without effect, which only a checkpoint before its first step
    may be."""
    _refuse_unsupported(fields, where)
    rank, alpha, rslora = _positive(fields, "r", where), _positive(fields, "lora_alpha", where), bool(fields.get("use_rslora"))
    named = {_without_prefix(name, where): tensor for name, tensor in tensors.items()}
    _refuse_bad_values(named, where)
    file = AdapterFile(config, base, fields, named, where)
    planned, embedding = _planned(file)
    parts = [(site, _part(site, file, *site_scale(fields, site.foreign, where))) for site in planned]
    stacked, stacked_names = _stacked_parts(file)
    parts += stacked
    saved = _replaced(config, fields, named, where)
    computed, used = _computed(file, parts, embedding)
    known = {f"{site.foreign}.lora_{side}.weight" for site in planned for side in "AB"} | used | stacked_names
    known |= {_foreign(config, ours) for ours in saved}
    if unknown := sorted(named.keys() - known):
        raise ArtifactError(f"{where}: {len(unknown)} tensor(s) belong to no module that target_modules or modules_to_save name: "
                            f"{', '.join(unknown[:3])}; they would be dropped in silence elsewhere")
    low_rank: dict[str, list[LowRank]] = {}
    for site, part in parts:
        if site.parameter not in computed:
            low_rank.setdefault(site.parameter, []).append(part)
    without_effect = all(not part.left.any() or not part.right.any() for of_one in low_rank.values() for part in of_one)
    if not may_be_idle and not saved and without_effect and is_idle(file, computed):
        raise ArtifactError(f"{where}: the adapter has no effect, every product B·A is zero; it was never trained, "
                            "or not gathered before saving")
    patch = Patch(parent, {name: tuple(p) for name, p in low_rank.items()}, computed | saved)
    return LoraAdapter(patch, int(rank), alpha / (math.sqrt(rank) if rslora else rank), rslora, fields.get("base_model_name_or_path"))


def _stacked_parts(file: AdapterFile) -> tuple[list[tuple[LoraSite, LowRank]], set[str]]:
    """LoRA parts of target_parameters, and the names in the file that they came from."""
    found, used = list[tuple[LoraSite, LowRank]](), set[str]()
    chosen = stacked_sites(file.untied, file.fields.get("target_parameters") or [], file.where)
    for parameter, sites in chosen.items():
        names, width = factor_names(parameter, list(chosen)), parameter_shapes(file.untied)[sites[0].parameter][1]
        made = read_stacked(file.untied, parameter, sites, file.named, names, width, *site_scale(file.fields, parameter, file.where),
                            file.where)
        found += zip(sites, made, strict=True)
        used |= set(names)
    return found, used


def _computed(file: AdapterFile, parts: Sequence[tuple[LoraSite, LowRank]], embedding: bool) -> tuple[dict[str, Tensor], set[str]]:
    """Tensors that the adapter makes of the base's, whole, and the names in the file that they came from."""
    made = [adapted_biases(file, [site for site, _ in parts]), trained_tokens(file), ({}, saved_base_layers(file))]
    if needs_whole_matrices(file.fields):
        made.append(whole_matrices(file, parts))
    if embedding:
        made.append(adapted_embedding(file, *site_scale(file.fields, file.embedding, file.where)))
    names = [name for tensors, _ in made for name in tensors]
    if len(set(names)) < len(names):
        raise UsageError(f"{file.where}: tokens and the whole embedding are both adapted, which is not supported; merge it with the tool "
                         "that wrote it")
    return {name: tensor for tensors, _ in made for name, tensor in tensors.items()}, set().union(*(used for _, used in made))


def site_scale(fields: Mapping[str, Any], module: str, where: str) -> tuple[int, float]:
    """Rank and scale of one module: rank_pattern and alpha_pattern hold those that differ from r and lora_alpha."""
    rank = _positive(_by_pattern(fields, "r", "rank_pattern", module, where), "r", where)
    alpha = _positive(_by_pattern(fields, "lora_alpha", "alpha_pattern", module, where), "lora_alpha", where)
    return int(rank), alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _by_pattern(fields: Mapping[str, Any], field: str, patterns: str, module: str, where: str) -> dict[str, Any]:
    """PEFT's own rule: the first key that, as a regular expression, is the module's name or its end."""
    given = fields.get(patterns) or {}
    try:
        found = [value for key, value in given.items() if re.match(rf"(.*\.)?({key})$", module)]
    except (AttributeError, re.error):
        raise ArtifactError(f"{where}: {patterns} is {given!r}; expected names of modules with a number each") from None
    return {field: found[0] if found else fields.get(field)}


def config_with(config: ModelConfig, patch: Patch) -> ModelConfig:
    """The geometry once the patch is applied: a head of its own unties, a saved larger embedding grows the vocabulary."""
    if "head.weight" in patch.names():
        config = replace(config, tied=False)
    if "embed.weight" in patch.replaced:
        config = replace(config, vocab=patch.replaced["embed.weight"].shape[0])
    return config


def write_adapter(config: ModelConfig, patch: Patch, base_name: str, *, rslora: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config.json's fields and the tensors under PEFT's names."""
    by_rows = {(site.parameter, site.start, site.stop): site for site in lora_sites(config).values()}
    tensors: dict[str, Tensor] = {}
    ranks, alphas, stacked = dict[str, int](), dict[str, float](), dict[str, list[LowRank]]()
    for parameter, parts in patch.low_rank.items():
        for part in parts:
            site = by_rows.get((parameter, part.start, part.stop))
            if site is None:
                raise UsageError(f"rows {part.start}:{part.stop} of {parameter} are no layer that PEFT knows; merge the patch instead")
            name = stacked_parameter(site) if site.stacked else site.foreign
            if site.stacked:
                stacked.setdefault(name, []).append(part)
            else:
                tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = part.right
                tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = part.left
            rank = ranks[name] = part.right.shape[0]
            alphas[name] = part.scale * (math.sqrt(rank) if rslora else rank)
    for name, of_experts in stacked.items():
        pair = write_stacked(config, name, of_experts)
        tensors |= {f"{PEFT_PREFIX}{key}": tensor for key, tensor in zip(factor_names(name, list(stacked)), pair, strict=True)}
    if not ranks:
        raise UsageError("the patch has no low-rank part, so that it is no LoRA adapter; merge it instead")
    tensors |= {PEFT_PREFIX + _foreign(config, name): tensor for name, tensor in patch.replaced.items()}
    rank, alpha = Counter(ranks.values()).most_common(1)[0][0], Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name, "r": rank,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank}, "lora_alpha": alpha,
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha}, "use_rslora": rslora, "lora_dropout": 0.0,
        "bias": "none", "target_modules": _shortest([name for name in ranks if name not in stacked], linear_layers(config)),
        **({"target_parameters": sorted(stacked)} if stacked else {}), "fan_in_fan_out": config.family == "gpt2",
        "inference_mode": True,
        "modules_to_save": [_foreign(config, name).removesuffix(".weight") for name in patch.replaced] or None,
    }, tensors


def unsupported_adapter(fields: Mapping[str, Any], where: str) -> str | None:
    """Why an adapter cannot be read here, in words."""
    for name, allowed in SUPPORTED_FIELDS.items():
        if name in fields and fields[name] not in allowed:
            return f"{where}: {name} = {fields[name]!r} is not supported; expected {allowed[0]!r}"
    stacked: Any = fields.get("target_parameters") or []
    if not isinstance(stacked, list) or not all(str(name).endswith(STACKED) for name in stacked):
        return f"{where}: target_parameters = {stacked!r} is not supported; expected matrices of experts, such as mlp.{STACKED[0]}"
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(REWRITES_BASE):
        return (f"{where}: init_lora_weights = {init!r} rewrote the base weights, so the adapter alone does not say what the "
                "model is; merge it with the tool that wrote it")
    return None


def _refuse_unsupported(fields: Mapping[str, Any], where: str) -> None:
    if (why := unsupported_adapter(fields, where)) is not None:
        raise UsageError(why)


def _positive(fields: Mapping[str, Any], name: str, where: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or not math.isfinite(value):
        raise ArtifactError(f"{where}: {name} is {value!r}; expected a positive number")
    return value


def _without_prefix(name: str, where: str) -> str:
    if not name.startswith(PEFT_PREFIX):
        raise ArtifactError(f"{where}: tensor {name!r} does not start with {PEFT_PREFIX!r}; PEFT would ignore it and serve the plain base")
    return name.removeprefix(PEFT_PREFIX)


def _refuse_bad_values(named: Mapping[str, Tensor], where: str) -> None:
    if not named:
        raise ArtifactError(f"{where}: the adapter holds no tensors; it was saved before its weights were gathered")
    for name, tensor in named.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2 or tensor.numel() == 0:
            raise ArtifactError(f"{where}: {name} is {tensor.dtype} of shape {list(tensor.shape)}; expected floating point values")
        if not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise ArtifactError(f"{where}: {name} has {bad} of {tensor.numel()} values that are NaN or infinite")


def _planned(file: AdapterFile) -> tuple[list[LoraSite], bool]:
    """Every layer of the base that target_modules names, and whether the embedding is one: all must be in the file (planned = adapted)."""
    config, fields, where = file.config, file.fields, file.where
    targets, excluded = _modules(fields, "target_modules", where), _modules(fields, "exclude_modules", where)
    layers = fields.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if layers is not None and not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
        raise ArtifactError(f"{where}: layers_to_transform is {layers!r}; expected numbers of layers")
    if not targets and fields.get("target_parameters"):
        return [], False
    if not targets:
        raise ArtifactError(f"{where}: target_modules is {targets!r}; an adapter says which layers it adapts")
    every = {name: site for name, site in lora_sites(file.untied).items() if not site.stacked}
    if targets == "all-linear":
        targets = [name for name in every if name != "lm_head"]
    chosen = [name for name in (*every, file.embedding) if _matches(name, targets) and not _matches(name, excluded)
              and (layers is None or _layer(name) in layers)]
    if not chosen:
        raise ArtifactError(f"{where}: target_modules {targets} match no layer of this {config.family}; "
                            "the adapter is for another architecture")
    return [every[name] for name in chosen if name in every], file.embedding in chosen


def _modules(fields: Mapping[str, Any], field: str, where: str) -> str | list[str]:
    """Names of modules, or a regular expression for them."""
    value: Any = fields.get(field) or []
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    try:
        re.compile(value)
    except (TypeError, re.error):
        raise ArtifactError(f"{where}: {field} is {value!r}; expected names of modules, or a regular expression") from None
    return value


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else None


def _matches(name: str, targets: str | Collection[str]) -> bool:
    """PEFT's own rule: a string is a regular expression, a list holds names or their last parts."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _part(site: LoraSite, file: AdapterFile, rank: int, scale: float) -> LowRank:
    pair, where = [], file.where
    for side, shape in (("A", (rank, parameter_shapes(file.untied)[site.parameter][1])), ("B", (site.stop - site.start, rank))):
        name = f"{site.foreign}.lora_{side}.weight"
        if name not in file.named:
            raise ArtifactError(f"{where}: {PEFT_PREFIX}{name} is missing, though target_modules names this layer; "
                                "the adapter would do less than it says")
        if tuple(file.named[name].shape) != shape:
            raise ArtifactError(f"{where}: {name} has shape {list(file.named[name].shape)}; this base and r = {rank} need {list(shape)}: "
                                "the adapter is for another base or another rank")
        pair.append(file.named[name])
    return LowRank(site.start, site.stop, pair[1], pair[0], scale)


def _replaced(config: ModelConfig, fields: Mapping[str, Any], named: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors saved whole with the adapter: modules_to_save, and embeddings that PEFT adds by itself after a resize."""
    whole = _whole_names(config)
    asked = _modules(fields, "modules_to_save", where)
    for module in [asked] if isinstance(asked, str) else asked:
        if not any(_matches(name.rpartition(".")[0], [module]) for name in named.keys() & whole.keys()):
            raise ArtifactError(f"{where}: modules_to_save names {module!r}, but the file does not hold it")
    replaced = {ours: named[name] for name, ours in whole.items() if name in named}
    for ours, tensor in replaced.items():
        shape = parameter_shapes(replace(config, tied=False))[ours]
        rows_may_grow = ours in ("embed.weight", "head.weight")
        if tuple(tensor.shape[rows_may_grow:]) != shape[rows_may_grow:]:
            raise ArtifactError(f"{where}: {ours} was saved with shape {list(tensor.shape)}; this base needs {list(shape)}")
    _refuse_half_vocabulary(config, replaced, where)
    return replaced


def _refuse_half_vocabulary(config: ModelConfig, replaced: Mapping[str, Tensor], where: str) -> None:
    """Embedding and head change together, or loaders disagree about what the model is."""
    rows = {what: len(replaced.get(name, range(config.vocab))) for what, name in (("embedding", "embed.weight"), ("head", "head.weight"))}
    resized_tied = config.tied and "embed.weight" in replaced and "head.weight" not in replaced
    if resized_tied and rows["embedding"] == config.vocab:
        raise ArtifactError(f"{where}: the embedding was trained, but the base ties its head to it and no head was saved: "
                            "loaders disagree on which one counts; save lm_head too")
    if rows["embedding"] != rows["head"] and not resized_tied:
        raise ArtifactError(f"{where}: embedding and head differ in rows ({rows}); save both after a resize")


def _whole_names(config: ModelConfig) -> dict[str, str]:
    """Foreign tensors that are one whole tensor of ours, head included where the base ties it."""
    return {pieces[0].name: ours for ours, pieces in hf_layout(replace(config, tied=False)).items() if len(pieces) == 1}


def _foreign(config: ModelConfig, ours: str) -> str:
    return next(name for name, mine in _whole_names(config).items() if mine == ours)


def _shortest(adapted: list[str], every: Collection[str]) -> list[str]:
    """Leaf names where they mean exactly the adapted layers, full names otherwise."""
    leaves = sorted({name.rpartition(".")[2] for name in adapted})
    return leaves if {name for name in every if _matches(name, leaves)} == set(adapted) else sorted(adapted)
