"""assay inspect: show what a checkpoint, folder or file holds: architecture, tensors, lineage, verdict."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import argument, option

if TYPE_CHECKING:
    from assay.store.artifact import ArtifactPlace
    from assay.store.checkpoint import Checkpoint


@dataclass(frozen=True)
class FLAGS:
    """Show architecture, tensors, sizes, dtypes, lineage and verdict. Reads headers and hashes, runs no model: see assay prove."""

    path: str = argument("checkpoint, Hugging Face or PEFT folder, GGUF or squeezed file, or fetched name")
    tensors: bool = option("list every tensor", default=False)
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay inspect runs/a/checkpoints/step-000500
  assay inspect smollm2-135m --tensors
  assay inspect runs/a/model.assayz
  assay inspect ./some-hf-folder --json"""


def run(flags: FLAGS) -> int:
    from assay.store.artifact import locate_artifact

    facts = describe_artifact(locate_artifact(flags.path))
    if flags.json:
        print(json.dumps(facts, indent=1, default=str))
        return 0
    print("\n".join(f"{name:13} {value}" for name, value in description_lines(facts)))
    if flags.tensors:
        print("\n".join(f"  {name:60} {t['dtype']:6} {t['shape']}" for name, t in sorted(facts["tensors"].items())))
    return 0


def describe_artifact(place: "ArtifactPlace") -> dict[str, Any]:
    """Everything there is to say without loading a weight. Damaged bytes raise ArtifactError."""
    from assay.store.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(place.path) if place.kind == "checkpoint" else None
    if place.kind == "squeezed":
        return _squeezed(place)
    tensors, geometry = _gguf_contents(place.path) if place.kind == "gguf" else _folder_contents(place)
    return _facts(place, tensors, geometry, _lineage(checkpoint), _verdict(checkpoint))


def _facts(place: "ArtifactPlace", tensors: dict[str, Any], geometry: dict[str, Any], lineage: dict[str, Any], verdict: str) -> dict[str,
                                                                                                                                     Any]:
    return {
        "path": str(place.path), "kind": place.kind, "holds": "adapter" if place.adapter else "model", "architecture": geometry,
        "parameters": sum(math.prod(t["shape"]) for t in tensors.values()), "tensors": tensors,
        "dtypes": dict(Counter(t["dtype"] for t in tensors.values())), "bytes": _bytes(place.path),
        "lineage": lineage, "verdict": verdict,
    }


def description_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The description as name and value, for people."""
    geometry = ", ".join(f"{name} {value}" for name, value in facts["architecture"].items())
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in facts["dtypes"].items())
    rows = [("path", facts["path"]), ("kind", f"{facts['kind']} ({facts['holds']})"), ("architecture", geometry),
            ("parameters", f"{facts['parameters']:,}"), ("tensors", f"{len(facts['tensors'])} ({dtypes})"),
            ("bytes", f"{facts['bytes']:,}")]
    return rows + [(name, str(value)) for name, value in facts["lineage"].items()] + [("verdict", facts["verdict"])]


def _folder_contents(place: "ArtifactPlace") -> tuple[dict[str, Any], dict[str, Any]]:
    from assay.model.families import config_from_hf
    from assay.store.artifact import read_json_object
    from assay.store.safetensors_files import folder_shards, inside, read_safetensors_header

    stem = "adapter_model" if place.adapter else "model"
    headers = [read_safetensors_header(inside(place.path, shard)) for shard in folder_shards(place.path, stem=stem)]
    tensors = {name: {"dtype": info.dtype, "shape": list(info.shape)} for header in headers for name, info in header.items()}
    if place.adapter:
        fields = read_json_object(place.path / "adapter_config.json")
        shown = ("base_model_name_or_path", "r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save")
        return tensors, {"family": "LoRA"} | {name: fields[name] for name in shown if fields.get(name)}
    config = config_from_hf(read_json_object(place.path / "config.json"), tensors.keys(), str(place.path / "config.json"))
    return tensors, _geometry(config)


def _gguf_contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from assay.store.gguf import describe_gguf

    config, tensors = describe_gguf(path)
    return tensors, _geometry(config)


def _squeezed(place: "ArtifactPlace") -> dict[str, Any]:
    """A matrix is shown by its levels, of which some steps of a row's own size go up and as many down."""
    from assay.model.families import parameter_shapes
    from assay.store.assayz import describe_assayz, levels_of

    config, header = describe_assayz(place.path)
    tensors = {name: {"dtype": f"±{levels_of(name, header['levels'])}" if len(shape) == 2 else "F16", "shape": list(shape)}
               for name, shape in parameter_shapes(config).items()}
    sections = ", ".join(f"{name} {section['bytes']:,}" for name, section in header["sections"].items())
    lineage = {"source": f"weights {header['source'][:12]}", "tokenizer": header["tokenizer"][:12], "sections": sections}
    return _facts(place, tensors, _geometry(config), lineage,
                  "UNPROVEN: every section has its recorded hash; assay prove --against its source shows the rest")


def _geometry(config: Any) -> dict[str, Any]:
    return {"family": config.family, "layers": config.depth, "width": config.width,
            "heads": f"{config.heads}/{config.kv_heads} of {config.head_dim}", "mlp": config.hidden, "vocabulary": config.vocab,
            "context": config.max_length, "rope base": config.rope.base if config.rope else "none",
            "head": "tied" if config.tied else "separate"}


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def _lineage(checkpoint: "Checkpoint | None") -> dict[str, Any]:
    if checkpoint is None:
        return {}
    from assay.store.digests import recorded_digest

    facts = checkpoint.facts
    ancestors = {role: f"weights {facts[role]['weights'][:12]} at {facts[role]['path']}" for role in ("parent", "base") if facts.get(role)}
    return {"checkpoint": checkpoint.digest[:12], "weights": recorded_digest(checkpoint.manifest)[:12], "step": checkpoint.step,
            "change": facts.get("change"), **ancestors, "code": str(facts.get("code"))[:12], "environment": facts.get("environment")}


def _verdict(checkpoint: "Checkpoint | None") -> str:
    if checkpoint is None:
        return "UNPROVEN: another tool wrote it; assay prove shows what can be proven"
    if reasons := checkpoint.quarantined:
        return "REFUTED: quarantined: " + "; ".join(v["reason"] for v in reasons["verdicts"] if v["outcome"] == "REFUTED")
    if mark := checkpoint.hallmark:
        return f"PROVEN: hallmarked on {len(mark['verdicts'])} checks"
    return "UNPROVEN: every hash is right, but no fresh process has proven it yet; run assay prove"
