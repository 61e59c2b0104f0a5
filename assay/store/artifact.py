"""Artifact: a model opened wherever it lies: checkpoint, Hugging Face or PEFT folder, GGUF or squeezed file.

Three stages, each refusing what it exists to refuse: `locate_artifact` (what is this?), `read_artifact` (are the bytes whole?),
`interpret_artifact` (do the tensors make the model that the config describes?). `open_artifact` is all three.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.families import config_from_hf, from_foreign, hf_layout
from assay.model.lora import LoraLinear, attach
from assay.model.patch import Patch, patched_tensors
from assay.model.placement import require_device
from assay.model.quantised import hold_quantised, is_code
from assay.model.special_tokens import SpecialTokens, resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Transformer
from assay.store import model_cache
from assay.store.assayz import ASSAYZ
from assay.store.checkpoint import MANIFEST, Checkpoint, open_checkpoint
from assay.store.compressed_tensors import compressed_tensor_bounds, is_compressed, plain_fields, plain_names, plain_weights
from assay.store.digests import recorded_digest, weights_digest
from assay.store.gguf import GGUF
from assay.store.mapped_pages import carried_to
from assay.store.model_formats import Description, FileModel, ModelFormat, shown_geometry
from assay.store.peft import LoraAdapter, config_with, read_adapter
from assay.store.quantised_base import BASE_DTYPES, QuantisedReader
from assay.store.remote import local_path
from assay.store.safetensors_files import inside, read_folder_headers, read_folder_tensors
from assay.store.trainer_output import trainer_checkpoints
from assay.strict_json import read_json

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class ArtifactPlace:
    """Place on disk that claims to be a model. `adapter` says what the files hold; a checkpoint may hold either."""

    path: Path
    format: ModelFormat
    adapter: bool

    @property
    def kind(self) -> str:
        return self.format.name


@dataclass(frozen=True)
class RawArtifact:
    """Contents of an artifact's files, byte-checked but not yet interpreted. Tensors have their foreign names."""

    place: ArtifactPlace
    fields: dict[str, Any]  # config.json, adapter_config.json or GGUF metadata
    generation: dict[str, Any]  # generation_config.json
    tensors: dict[str, Tensor]
    checkpoint: Checkpoint | None = None
    whole: FileModel | None = None  # where one file holds everything

    @property
    def compressed(self) -> bool:
        """Whether its matrices are codes with scales, which other tensors stand for."""
        return not self.place.adapter and self.whole is None and is_compressed(self.fields)


@dataclass(frozen=True)
class Artifact:
    """A model in memory with all that says what it is. `tensors` are the base's; `patch` has not been applied to them."""

    raw: RawArtifact
    config: ModelConfig  # with the patch applied
    tensors: dict[str, Tensor]  # under our names, in the dtype they were stored in
    digest: str  # of the tensors in the files, under their foreign names
    tokenizer: Tokenizer | None
    stops: SpecialTokens
    patch: Patch | None = None
    adapter: LoraAdapter | None = None
    base: "Artifact | None" = None
    held: str | None = None  # "nf4", "int8" or "bf16" where its matrices are rounded to that and its digest is of what came of them
    rounding: float = 0.0  # how far that is from the file: the norm of all differences over the norm of the weights
    notes: list[str] = field(default_factory=list)  # what the files do not agree on, in words

    @property
    def path(self) -> Path:
        return self.raw.place.path


@dataclass(frozen=True)
class Destination:
    """Destination of a model's tensors as they are opened, one after the other, and those that may lie there already, under our names.

    One that is there, of the same dtype and bit for bit what the file holds, is shared: then a model that was opened anew, and
    compared in every bit with the live one, takes no memory of its own.
    """

    device: str
    held: Mapping[str, Tensor] = field(default_factory=dict)
    digest: str | None = None  # of a quantised base, where `held` has all of it

    def moved(self, tensor: Tensor) -> Tensor:
        return carried_to(tensor, self.device)

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        there = self.held.get(name)
        same = there is not None and there.dtype == tensor.dtype and there.device == tensor.device and torch.equal(there, tensor)
        return there if same and there is not None else tensor


def straight_to(device: str, held: Mapping[str, Tensor] | None = None) -> Destination | None:
    """A GPU, which has memory of its own; on a CPU a mapped file is where it shall be."""
    return Destination(require_device(device), held or {}) if device.startswith("cuda") else None


def open_artifact(path: str | Path, *, base: str | Path | None = None, to: Destination | None = None,
                  opened: "OpenBase | None" = None, held: str | None = None) -> Artifact:
    """Open and verify an artifact; there is no unverified load. `base` names an adapter's base where the adapter does not, or names one
    that moved. `to` takes the tensors to a device as they are read; without it they stay what the file maps.

    `opened` is asked for that base: whoever opens many adapters on one base may keep it. `held` rounds a model's matrices to nf4, int8
    or bf16, and its digest is of what came of them; an adapter's base is held as its manifest says, unless `held` is "file". With `to`
    they stay codes, a live layer makes its matrix when it is used; without, they are what the codes stand for.
    """
    found = interpret_artifact(read_artifact(locate_artifact(path)), base=base, to=to, opened=opened, held=held)
    refuse_other_rounding(found, held)
    return found


def refuse_quarantined(source: Artifact) -> Artifact:
    """Refuse to make anything of a model that was refuted, or of an adapter on one: what is made of it would have a hallmark of its own."""
    for sentence in quarantines(source):
        raise UsageError(f"{sentence}. Name another model, or remove its quarantine.json on purpose")
    return source


def quarantines(source: Artifact) -> list[str]:
    """What was found against the model, and against its base, for whoever reads it all the same."""
    found = [one.raw.checkpoint for one in (source, source.base) if one is not None and one.raw.checkpoint is not None]
    marks = {checkpoint.folder: mark for checkpoint in found if (mark := checkpoint.quarantined) is not None}
    reasons = {where: [one["reason"] for one in mark["verdicts"] if one["outcome"] == "REFUTED"] for where, mark in marks.items()}
    return [f"{where} is quarantined: {'; '.join(against) or 'no reason is recorded'}" for where, against in reasons.items()]


def refuse_other_rounding(found: Artifact, held: str | None) -> None:
    """Refuse a model whose weights were rounded though nobody asked for it, or were not though somebody did. Of an adapter its base was
    asked."""
    if found.base is not None:
        return
    due, written = held if held in BASE_DTYPES else None, found.raw.checkpoint
    as_stored = found.held is None and not found.rounding and (written is None or found.digest == recorded_digest(written.manifest))
    in_bf16 = as_stored and all(tensor.dtype == torch.bfloat16 for tensor in found.raw.tensors.values())
    if not (as_stored if due is None else found.held == due or (due == "bf16" and in_bf16)):
        raise ArtifactError(f"{found.path}: opened with weights in {found.held or 'the dtype of the file'}, {found.digest[:12]}, "
                            f"{found.rounding:.1e} (relative) from the file's; asked for was {due or 'the file as it is'}: this is a fault "
                            "of the reader, not of the file")


class OpenBase(Protocol):
    def __call__(self, path: Path, /, *, held: str | None = None) -> Artifact: ...


def locate_artifact(path: str | Path) -> ArtifactPlace:
    name, path = str(path), model_cache.cached_model(str(path)) or local_path(path)
    if path.is_file():
        if (format := next((one for one in FORMATS.values() if one.suffix == path.suffix), None)) is not None and path.suffix:
            return ArtifactPlace(path, format, adapter=False)
        hint = "a pickle runs code when opened; convert it with the tool that wrote it" if path.suffix in PICKLES else \
               "give the folder that holds it, or a .gguf or .assayz file"
        raise UsageError(f"{path}: a single {path.suffix or 'nameless'} file is not a model; {hint}")
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or folder{model_cache.fetch_hint(name)}")
    names = {child.name for child in path.iterdir()}
    adapter = "adapter_config.json" in names
    if "manifest.json" in names:
        return ArtifactPlace(path, FORMATS["checkpoint"], adapter)
    if adapter or "config.json" in names:
        return ArtifactPlace(path, FORMATS["peft" if adapter else "hf"], adapter)
    if "checkpoints" in names:
        found = sorted(child.name for child in (path / "checkpoints").iterdir() if child.is_dir() and not child.name.startswith("."))
        raise UsageError(f"{path} is a run; name one of its checkpoints: {', '.join(found[-4:]) or 'it has none'}")
    if places := trainer_checkpoints(path):
        raise UsageError(f"{path} is a trainer's output; name one of its checkpoints: {', '.join(place.name for place in places[:4])}")
    if "steering.safetensors" in names:
        raise UsageError(f"{path}: a steering vector, which is no model; add it to its own: assay sample MODEL --steer {path}")
    raise UsageError(f"{path}: neither manifest.json, config.json nor adapter_config.json is here; this is not a model folder")


def read_artifact(place: ArtifactPlace, *, every_byte: bool = False) -> RawArtifact:
    """The bytes: hashes where a manifest records them, strict headers everywhere. Raises ArtifactError.

    What is read is checked as it is read; `every_byte` also checks what a model does not need, such as optimizer state.
    """
    if place.format.read is not None:
        whole = place.format.read(place.path)
        return RawArtifact(place, whole.facts, {}, whole.tensors, whole=whole)
    checkpoint = open_checkpoint(place.path, verify=every_byte) if place.kind == "checkpoint" else None
    for name in () if checkpoint is None else checkpoint.manifest["files"]:
        if not name.endswith(".safetensors"):
            checkpoint.read(name)  # type: ignore[union-attr]  # config, tokenizer and the like are read below by other readers
    for file in place.path.glob("*.j*"):  # config, tokenizer and template: no link may fetch them from elsewhere
        inside(place.path, file.name)
    fields = read_json(place.path / ("adapter_config.json" if place.adapter else "config.json"))
    generation_file = place.path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    if checkpoint is not None:
        return RawArtifact(place, fields, generation, checkpoint.weights(), checkpoint)
    _refuse_pickles(place.path)
    return RawArtifact(place, fields, generation, read_folder_tensors(place.path, stem="adapter_model" if place.adapter else "model"))


def interpret_artifact(raw: RawArtifact, *, base: str | Path | None = None, to: Destination | None = None,
                       opened: "OpenBase | None" = None, held: str | None = None) -> Artifact:
    """The model that the tensors make. Raises ArtifactError where they do not fit, UsageError where we know no such model."""
    if raw.place.adapter:
        return _adapted(raw, base, opened or partial(open_artifact, to=to), held)
    if base is not None:
        raise UsageError(f"{raw.place.path} is a whole model; --base is for adapters")
    if held not in (None, "file", *BASE_DTYPES):
        raise ArtifactError(f"{raw.place.path}: a base in {held!r} is not known; expected one of: {', '.join(BASE_DTYPES)}")
    if held in BASE_DTYPES and not _lies_in(raw, held):
        return _held(raw, to, held)
    if (whole := raw.whole) is not None:
        return Artifact(raw, whole.config, whole.tensors, weights_digest(whole.tensors), whole.tokenizer, whole.stops,
                        notes=list(whole.stops.disagreements))
    where = str(raw.place.path)
    held_in = plain_weights(raw.fields, raw.tensors, where) if raw.compressed else raw.tensors
    config = config_from_hf(plain_fields(raw.fields), held_in.keys(), str(raw.place.path / "config.json"))
    digest = _digest(raw)  # of what is then carried: each tensor is hashed before it travels
    layout = hf_layout(config)
    tensors = from_foreign(config, layout, held_in, where) if to is None else \
        from_foreign(config, layout, held_in, where, to.moved, to.kept)
    tokenizer = read_tokenizer(raw.place.path)
    stops = read_artifact_stops(tokenizer, raw.fields, raw.generation)
    return Artifact(raw, config, tensors, digest, tokenizer, stops, notes=list(stops.disagreements))


def _lies_in(raw: RawArtifact, held: str) -> bool:
    """Whether the file is in this dtype already, so that nothing is rounded."""
    return held == "bf16" and raw.whole is None and all(tensor.dtype == torch.bfloat16 for tensor in raw.tensors.values())


def _held(raw: RawArtifact, to: Destination | None, held: str) -> Artifact:
    """Artifact with its matrices rounded one after the other as they are read; the digest is of what the codes stand for."""
    if raw.whole is not None:
        raise UsageError(f"{raw.place.path}: a base in {held} is made of a folder; write this {raw.place.kind} file as one with assay "
                         "export --to hf")
    plain = to or Destination("cpu")
    config, where = config_from_hf(raw.fields, raw.tensors.keys(), str(raw.place.path / "config.json")), str(raw.place.path)
    reader = QuantisedReader(held, hf_layout(config), plain.kept, dense=to is None)
    read = from_foreign(config, reader.layout, raw.tensors, where, plain.moved if to else lambda tensor: tensor, reader.kept)
    tensors, tokenizer = reader.tensors(read), read_tokenizer(raw.place.path)
    stops = read_artifact_stops(tokenizer, raw.fields, raw.generation)
    known = plain.digest if reader.all_shared(tensors, plain.held) else None
    return Artifact(raw, config, tensors, known or reader.digest(tensors), tokenizer, stops, held=held, rounding=reader.rounding,
                    notes=list(stops.disagreements))


def build_model(artifact: Artifact, dtype: torch.dtype | None = torch.float32) -> Transformer:
    """The live model, its adapter attached as live layers. Every parameter comes from the files: none is initialised.

    With no `dtype` each has that of its file and shares its memory; the model computes in fp32 until it is placed.
    """
    tensors = dict(artifact.tensors)
    if artifact.patch is not None:
        tensors = with_untied_head(tensors, artifact.config) | artifact.patch.replaced
    model = assemble_model(artifact.config, tensors, dtype)
    if artifact.patch is not None:
        attach(model, replace(artifact.patch, replaced={}))
        for layer in model.modules() if dtype is not None else ():
            if isinstance(layer, LoraLinear):
                layer.to(dtype)  # not the whole model: rotary frequencies stay in fp32
    if dtype is None:
        model.compute_dtype = torch.float32
    return model.eval()


def merged_tensors(artifact: Artifact, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The base's tensors with the patch applied. What it changes is rounded once, to `dtype` or to the base's own."""
    if artifact.patch is None or artifact.base is None:
        return artifact.tensors
    tensors = with_untied_head(artifact.tensors, artifact.config)
    touched = {name: tensors[name].to(dtype or tensors[name].dtype) for name in artifact.patch.names()}
    return tensors | patched_tensors(touched, artifact.patch, artifact.base.digest)


def with_untied_head(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A tied base whose adapter brings a head of its own gets a head to be replaced."""
    untied = not config.tied and "head.weight" not in tensors
    return tensors | ({"head.weight": tensors["embed.weight"]} if untied else {})


def assemble_model(config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    hold_quantised(model, tensors)
    as_asked = {name: tensor if is_code(name) else tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
    model.load_state_dict(as_asked, strict=True, assign=True)
    return model


def read_tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def read_artifact_stops(tokenizer: Tokenizer | None, config: dict[str, Any], generation: dict[str, Any]) -> SpecialTokens:
    """Special tokens of an artifact; without a tokenizer only config and generation config speak."""
    for fields, name in itertools.product((config, generation), ("bos_token_id", "eos_token_id")):
        if not all(id is None or type(id) is int for id in _listed(fields.get(name))):
            raise ArtifactError(f"{name} is {fields[name]!r}; expected a token id, or a list of them")
    if tokenizer is not None:
        return resolve_special_tokens(tokenizer, config, generation)
    named = {file: _listed(ids) for file, ids in (
        ("config.json", config.get("eos_token_id")), ("generation_config.json", generation.get("eos_token_id"))) if ids is not None}
    stop_ids = tuple(sorted({id for ids in named.values() for id in ids}))
    apart = len(named) == 2 and not set.intersection(*map(set, named.values()))
    disagreements = (f"config.json and generation_config.json name different stop ids: {named}",) if apart else ()
    return SpecialTokens(config.get("bos_token_id"), stop_ids[0] if stop_ids else None, stop_ids, None, disagreements)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _digest(raw: RawArtifact) -> str:
    """A checkpoint's tensors were hashed when it was written, and its bytes were just checked against that."""
    return weights_digest(raw.tensors) if raw.checkpoint is None else recorded_digest(raw.checkpoint.manifest)


def _adapted(raw: RawArtifact, base: str | Path | None, opened: OpenBase, held: str | None) -> Artifact:
    where, facts = raw.place.path, raw.checkpoint.facts if raw.checkpoint else {}
    recorded, foundation = facts.get("base") or {}, open_adapter_base(raw, base, opened, held)
    elsewhere = held == "file" and recorded.get("held")  # asked for on other weights than it was trained on
    if not elsewhere and recorded.get("weights") not in (None, foundation.digest):
        raise ArtifactError(f"{where}: the adapter was trained on weights {recorded['weights'][:12]}, {foundation.path} holds "
                            f"{foundation.digest[:12]}; name the right base with --base")
    adapter = read_adapter(foundation.config, foundation.tensors, raw.fields, raw.tensors, str(where),
                           parent=foundation.digest if elsewhere else recorded.get("weights"), may_be_idle=facts.get("change") == "new")
    tokenizer = read_tokenizer(where) or foundation.tokenizer
    stops = read_artifact_stops(tokenizer, foundation.raw.fields, raw.generation or foundation.raw.generation)
    return Artifact(raw, config_with(foundation.config, adapter.patch), foundation.tensors, _digest(raw), tokenizer, stops,
                    adapter.patch, adapter, foundation, notes=list(stops.disagreements))


def open_adapter_base(raw: RawArtifact, given: str | Path | None, opened: OpenBase, held: str | None = None) -> Artifact:
    """Open an adapter's base: the one that was named, else that of the manifest, else that of the adapter itself; in the dtype that the
    manifest names."""
    recorded = raw.checkpoint.facts.get("base") or {} if raw.checkpoint else {}
    as_trained = partial(opened, held=held or recorded.get("held"))
    return _open_base(raw.place.path, given, recorded.get("path"), raw.fields.get("base_model_name_or_path"), as_trained)


def _open_base(adapter: Path, given: str | Path | None, recorded: str | None, named: str | None,
               opened: Callable[[Path], Artifact]) -> Artifact:
    for candidate in (given, recorded, named):
        if candidate is None:
            continue
        if not isinstance(candidate, str | Path):
            raise ArtifactError(f"{adapter}: names {candidate!r} as its base; expected a path")
        beside = adapter / str(candidate)  # a relative name may be meant from the adapter's own folder
        for path in (model_cache.cached_model(str(candidate)) or Path(candidate), beside):
            if path.exists():
                artifact = opened(path)
                if artifact.patch is not None:
                    raise UsageError(f"{path}: the base of {adapter} is an adapter itself; merge it first")
                return artifact
        if candidate is given:
            raise UsageError(f"--base {given}: no such file or folder{model_cache.fetch_hint(str(given))}")
    raise UsageError(f"{adapter}: an adapter needs its base, and {named!r} is not here; name it with --base PATH"
                     f"{model_cache.fetch_hint(str(named))}")


def _refuse_pickles(folder: Path) -> None:
    has_safetensors = any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))
    pickles = sorted(child.name for child in folder.iterdir() if child.suffix in PICKLES)
    if pickles and not has_safetensors:
        raise UsageError(f"{folder}: the weights are pickled ({pickles[0]}), which runs code when opened; save them as safetensors")

# ---------------------------------------------------------------- folders, described


def _describe_folder(path: Path) -> Description:
    """Headers and config of a folder; of a checkpoint also its lineage and what was proven, once every byte has its hash."""
    checkpoint = open_checkpoint(path) if (path / MANIFEST).exists() else None
    adapter = (path / "adapter_config.json").exists()
    headers = read_folder_headers(path, "adapter_model" if adapter else "model")
    tensors = {name: {"dtype": info.dtype, "shape": list(info.shape)} for name, info in headers.items()}
    if adapter:
        fields = read_json(path / "adapter_config.json")
        shown = ("base_model_name_or_path", "r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save")
        kind = fields.get("peft_type")
        geometry = {"family": "LoRA" if kind in (None, "LORA") else str(kind)} | {name: fields[name] for name in shown if fields.get(name)}
    else:
        fields = read_json(path / "config.json")
        geometry = shown_geometry(config_from_hf(plain_fields(fields), plain_names(tensors), str(path / "config.json")))
    if checkpoint is None:
        return Description(geometry, tensors)
    return Description(geometry, tensors, _lineage(checkpoint), _verdict(checkpoint))


def _lineage(checkpoint: Checkpoint) -> dict[str, Any]:
    facts = checkpoint.facts
    ancestors = {role: f"weights {found['weights'][:12]} at {found['path']}" + (f" in {found['held']}" if found.get("held") else "")
                 for role in ("parent", "base") if (found := facts.get(role))}
    return {"checkpoint": checkpoint.digest[:12], "weights": recorded_digest(checkpoint.manifest)[:12], "step": checkpoint.step,
            "change": facts.get("change"), **ancestors, "code": str(facts.get("code"))[:12], "environment": facts.get("environment")}


def _verdict(checkpoint: Checkpoint) -> str:
    if reasons := checkpoint.quarantined:
        return "REFUTED: quarantined: " + "; ".join(v["reason"] for v in reasons["verdicts"] if v["outcome"] == "REFUTED")
    if mark := checkpoint.hallmark:
        return f"PROVEN: hallmarked on {len(mark['verdicts'])} checks"
    return "UNPROVEN: every hash is right, but no fresh process has proven it yet; run assay prove"


FORMATS = {name: ModelFormat(name, _describe_folder, tensor_bounds=compressed_tensor_bounds) for name in ("checkpoint", "hf", "peft")} \
    | {one.name: one for one in (GGUF, ASSAYZ)}
