"""A student made of its teacher: some of the teacher's layers, evenly spaced, and everything around them as it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.model.transformer import ModelConfig
from assay.recipes.beginning import require_proven, write_proven
from assay.store.artifact import Artifact, assemble_model, merged_tensors
from assay.store.checkpoint import open_checkpoint
from assay.store.saving import Lineage, model_contents


def make_student(where: Path, teacher: Artifact, layers: int, say: Callable[[str], None]) -> None:
    """A checkpoint at `where`, proven, that says whose layers it has. One that an earlier sitting made must be the same."""
    kept = kept_layers(teacher.config.depth, layers)
    made = {"made_of": {"weights": teacher.digest, "path": str(teacher.path.resolve()), "layers": kept}}
    if where.exists():
        facts = open_checkpoint(where).facts["run_config"] or {}
        if facts.get("made_of", {}).get("weights") != teacher.digest or facts["made_of"]["layers"] != kept:
            raise UsageError(f"{where} is another student: made of {facts.get('made_of')}, asked for are layers {kept} of "
                             f"{teacher.digest[:12]}; give another --out")
        require_proven(where)
        return
    config, tensors = shrunk(teacher.config, merged_tensors(teacher, torch.float32), kept)
    model = assemble_model(config, tensors, torch.float32).eval()
    write_proven(where, model_contents(model, teacher.tokenizer, teacher.stops, Lineage("new"), run_config=made))
    say(f"{where}: layers {', '.join(map(str, kept))} of the {teacher.config.depth} of {teacher.path.name}, proven")


def kept_layers(depth: int, layers: int) -> list[int]:
    """Evenly spaced, the first and the last among them."""
    if not 2 <= layers < depth:
        if depth < 3:
            raise UsageError(f"--student-layers {layers} of a teacher with {depth}: its first and its last stay, so it has none to spare; "
                             "name a student with --student")
        raise UsageError(f"--student-layers {layers} of a teacher with {depth}: expected 2 to {depth - 1}, so that the first and the last "
                         "stay and one at least goes")
    return [round(place * (depth - 1) / (layers - 1)) for place in range(layers)]


def shrunk(config: ModelConfig, tensors: dict[str, Tensor], kept: list[int]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The geometry and the tensors, under our names, of the model that has these layers alone."""
    place = {str(layer): str(at) for at, layer in enumerate(kept)}
    taken = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] != "blocks":
            taken[name] = tensor
        elif parts[1] in place:
            taken[".".join(["blocks", place[parts[1]], *parts[2:]])] = tensor
    return replace(config, depth=len(kept), windows=tuple(config.windows[layer] for layer in kept)), taken
