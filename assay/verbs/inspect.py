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
    """Description of an artifact without loading a weight. Damaged bytes raise ArtifactError."""
    found = place.format.describe(place.path)
    return {
        "path": str(place.path), "kind": place.kind, "holds": "adapter" if place.adapter else "model", "architecture": found.architecture,
        "parameters": sum(math.prod(t["shape"]) for t in found.tensors.values()), "tensors": found.tensors,
        "dtypes": dict(Counter(t["dtype"] for t in found.tensors.values())), "bytes": _bytes(place.path),
        "lineage": found.lineage, "verdict": found.verdict,
    }


def description_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The description as name and value, for people."""
    geometry = ", ".join(f"{name} {value}" for name, value in facts["architecture"].items())
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in facts["dtypes"].items())
    rows = [("path", facts["path"]), ("kind", f"{facts['kind']} ({facts['holds']})"), ("architecture", geometry),
            ("parameters", f"{facts['parameters']:,}"), ("tensors", f"{len(facts['tensors'])} ({dtypes})"),
            ("bytes", f"{facts['bytes']:,}")]
    return rows + [(name, str(value)) for name, value in facts["lineage"].items()] + [("verdict", facts["verdict"])]


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
