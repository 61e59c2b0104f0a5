"""Export of a model to another format: the same numbers under other names, or fewer bits of them. Not yet proven."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.families import FAMILIES, from_foreign, hf_layout, to_foreign
from assay.store import checkpoint, durable, gguf
from assay.store.artifact import Artifact, assemble_model, build_model, merged_tensors
from assay.store.compressed_tensors import COMPRESSED, compressed_weights, plain_weights, recipe_of
from assay.store.gguf import EXPORT_EXACT, GGUF_ROUNDING
from assay.store.llama_cpp import LLAMA_QUANTS, quantise_gguf
from assay.store.llm_compressor import gptq_weights, require_llm_compressor
from assay.store.saving import Ancestor, Lineage, adapter_contents, json_bytes, model_contents
from assay.store.scratch import scratch_folder
from assay.strict_json import parse_json

ExportFormat = Literal["hf", "peft", "gguf", "merged", "fp8", "w8a8", "w4a16", "gptq"]
EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXPORT_ROUNDING = {"float32": EXPORT_EXACT, "float16": GGUF_ROUNDING["f16"], "bfloat16": GGUF_ROUNDING["bf16"]}


def export_artifact(source: Artifact, form: ExportFormat, where: Path, dtype: str | None = None,
                    rebased: Mapping[str, Any] | None = None, rows: list[list[int]] | None = None) -> float:
    """Write and return the bound within which the written model must answer as the source does. `rebased` says, of an adapter that was
    opened on other weights than it was trained on, what that changes; `rows` are the token ids that gptq is fitted to."""
    if form == "gguf":
        return _export_gguf(source, where, dtype or "f16")
    if form in COMPRESSED or form == "gptq":
        return _export_compressed(source, where, form, dtype, rows)
    if form == "peft":
        return _export_adapter(source, where, dtype)
    if form == "hf" and source.patch is not None:
        raise UsageError(f"{source.path} is an adapter; export it --to peft, or --to merged with its base")
    if form == "merged" and source.patch is None:
        raise UsageError(f"{source.path} has no adapter to merge; export it --to hf")
    return _export_model(source, where, dtype, rebased)


def majority_dtype(tensors: dict[str, Tensor]) -> str:
    """The dtype that holds most of the values."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def rounding_bound(artifact: Artifact) -> float:
    """How far an exported copy may answer from its source: as much as the rounding that its manifest records, and its weights show."""
    if artifact.raw.compressed:
        return recipe_of(artifact.raw.fields, str(artifact.path)).scheme.answers
    recorded = artifact.raw.checkpoint.facts.get("rounded") if artifact.raw.checkpoint else None
    return EXPORT_ROUNDING.get(recorded, EXPORT_EXACT) if recorded == majority_dtype(artifact.tensors) else EXPORT_EXACT


def _export_model(source: Artifact, where: Path, dtype: str | None, rebased: Mapping[str, Any] | None) -> float:
    name = dtype or majority_dtype(source.tensors)
    if name not in EXPORT_DTYPES:
        raise UsageError(f"dtype {name!r} is not one for a Hugging Face folder; expected one of: {', '.join(EXPORT_DTYPES)}")
    tensors = merged_tensors(source, EXPORT_DTYPES[name])
    rounded = {key: tensor.to(EXPORT_DTYPES[name]) for key, tensor in tensors.items()}
    # A merge is rounded, and the live model it must equal is not.
    lossless = source.patch is None and all(torch.equal(rounded[key].to(t.dtype), t) for key, t in tensors.items())
    model = assemble_model(source.config, rounded, EXPORT_DTYPES[name])
    lineage = replace(_lineage(source), rounded=None if lossless else name, rebased=rebased)
    contents = model_contents(model, source.tokenizer, source.stops, lineage, dtype=EXPORT_DTYPES[name])
    checkpoint.write_checkpoint(where, contents)
    return EXPORT_EXACT if lossless else EXPORT_ROUNDING[name]


def _export_compressed(source: Artifact, where: Path, form: str, dtype: str | None, rows: list[list[int]] | None) -> float:
    """Codes and scales in the place of the matrices; what the live model of the folder computes with is what they stand for."""
    name, scheme = dtype or majority_dtype(source.tensors), COMPRESSED["w4a16" if form == "gptq" else form]
    if name not in EXPORT_DTYPES:
        raise UsageError(f"dtype {name!r} is not one for a Hugging Face folder; expected one of: {', '.join(EXPORT_DTYPES)}")
    if source.patch is not None:
        raise UsageError(f"{source.path} is an adapter; export it --to merged first, then that --to {form}")
    if source.config.family in ("assay", "gpt2") or source.config.experts is not None:
        kind = "a mixture of experts" if source.config.experts is not None else f"the {source.config.family!r} architecture"
        raise UsageError(f"Assay writes no {form} folder of {kind}, whose layers are no plain Linear ones; export it --to hf or gguf")
    layout = hf_layout(source.config)
    weights, said = compressed_weights(to_foreign(layout, source.tensors), scheme, EXPORT_DTYPES[name])
    if form == "gptq":
        weights = _fitted_weights(source, weights, said, name, rows or [])
    meant = plain_weights({"quantization_config": said}, weights, str(where))
    model = assemble_model(source.config, from_foreign(source.config, layout, meant, str(where)), torch.float32)
    contents = model_contents(model, source.tokenizer, source.stops, replace(_lineage(source), rounded=form), dtype=EXPORT_DTYPES[name])
    fields = parse_json(contents.files["config.json"], where="config.json", shape=dict) | {"quantization_config": said}
    files = {**contents.files, "config.json": json_bytes(fields)}
    checkpoint.write_checkpoint(where, replace(contents, weights=weights, files=files, probes={}))  # vLLM opens every .safetensors there
    return scheme.answers


def _fitted_weights(source: Artifact, nearest: dict[str, Tensor], said: Mapping[str, Any], dtype: str,
                    rows: list[list[int]]) -> dict[str, Tensor]:
    """Weights rounded by llm-compressor's GPTQ: the same tensors as those of nearest rounding."""
    require_llm_compressor()
    group = said["config_groups"]["group_0"]["weights"]["group_size"]
    with scratch_folder() as scratch:
        export_artifact(source, "hf", scratch / "source", dtype)
        fitted = gptq_weights(scratch / "source", scratch / "made", COMPRESSED["w4a16"], group, rows, EXPORT_DTYPES[dtype])
    if apart := sorted(set(fitted) ^ set(nearest)):
        raise ArtifactError(f"llm-compressor wrote other tensors than were asked for: {len(apart)} of them, {apart[0]} for one")
    return {key: tensor.to(nearest[key].dtype) for key, tensor in fitted.items()}


def _export_adapter(source: Artifact, where: Path, dtype: str | None) -> float:
    if source.patch is None or source.base is None or source.adapter is None:
        raise UsageError(f"{source.path} is a whole model, not an adapter; export it --to hf")
    if not source.patch.low_rank:
        raise UsageError(f"{source.path} changes whole tensors of its base, and is no plain LoRA adapter; export it --to merged")
    if dtype is not None:
        raise UsageError("an adapter is exported in the dtype it has; --dtype is for hf, merged and gguf")
    base = Ancestor(source.base.digest, str(source.base.path), source.base.held)
    device = next(iter(source.base.tensors.values())).device
    model = build_model(source, None).to(device)  # over the base's own tensors, where they lie: no copy of a large base is made
    patch = replace(source.patch, parent=source.base.digest)
    checkpoint.write_checkpoint(where, adapter_contents(model, patch, base, source.tokenizer, _lineage(source),
                                                        rslora=source.adapter.rslora))
    return EXPORT_EXACT


def _export_gguf(source: Artifact, where: Path, dtype: str) -> float:
    if source.patch is not None:
        raise UsageError(f"{source.path} is an adapter; export it --to merged first, then that --to gguf")
    if FAMILIES[source.config.family].gguf is None:
        raise UsageError(f"Assay writes no GGUF file of the {source.config.family!r} architecture; export it --to hf")
    if source.tokenizer is None:
        raise UsageError(f"{source.path}: a GGUF file carries its tokenizer, and there is none here; add tokenizer.json")
    if dtype in LLAMA_QUANTS:
        return _quantise(source, where, dtype)
    if dtype not in gguf.FILE_TYPES:
        raise UsageError(f"dtype {dtype!r} is not one for a GGUF file; expected one of: {', '.join((*gguf.FILE_TYPES, *LLAMA_QUANTS))}")
    gguf.write_gguf(where, source.config, source.tensors, source.tokenizer, dtype, source.stops)
    return GGUF_ROUNDING[dtype]


def _quantise(source: Artifact, where: Path, kind: str) -> float:
    """Quantise to GGUF by llama.cpp's own quantiser, from a file of the source's numbers in float32: nothing is rounded twice."""
    assert source.tokenizer is not None
    with scratch_folder() as scratch, durable.new_file(where) as temporary:
        gguf.write_gguf(scratch / "float32.gguf", source.config, source.tensors, source.tokenizer, "f32", source.stops)
        quantise_gguf(scratch / "float32.gguf", temporary, kind)
    return gguf.rounding_in(where)


def _lineage(source: Artifact) -> Lineage:
    """Lineage of the same weights in another form: what is on record of them goes with them."""
    facts = source.raw.checkpoint.facts if source.raw.checkpoint else {}
    return Lineage("same", Ancestor(source.digest, str(source.path)), taught_to_stop=bool(facts.get("taught_to_stop")),
                   weight_set=facts.get("weight_set"), scored_set=facts.get("scored_set"))
