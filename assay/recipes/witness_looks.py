"""Witness records of GRPO's evaluations: a few answers of every evaluation during the run, and of the gain at its end.

What was evaluated at a step lies in that step's checkpoint, with whose proof the witness looks at it (assay/witness/due_looks.py).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.generate.generation_request import Sampling
from assay.guard.proof import ask_witness
from assay.model.transformer import parameter_count
from assay.recipes.prompts import Prompt
from assay.recipes.rewards import Answered
from assay.recipes.run import Run
from assay.recipes.starting_model import AdapterModel, StartingModel
from assay.recipes.witness_records import local_copies, look_folder
from assay.store import durable
from assay.store.checkpoint import step_folder
from assay.verdict import Verdict, unproven
from assay.witness.due_evaluation import LONGEST, SAMPLES_OF_ONE
from assay.witness.due_looks import LOOKS
from assay.witness.replay import RECORD, SAID

MOST_LOOK_WORK = {"cpu": 3e12, "cuda": 1e14}  # floating-point operations of all that is scored again
MOST_LOOK_PARAMETERS = {"cpu": 2e9, "cuda": 16e9}  # of a model that is opened once more, in fp32


class LookRecords:
    """Witness records of one run's evaluations. `rewards` know how far apart two answers about one completion may be."""

    def __init__(self, run: Run, start: StartingModel, device: str, rewards: Any):
        self.run, self.start, self.device, self.rewards = run, start, device, rewards
        self.base = start.weights.base.path if isinstance(start.weights, AdapterModel) else None
        self.parameters = parameter_count(start.model)
        self.keeps = run.witnesses and run.config.witness != "off"

    def keep_step(self, step: int, found: Answered, asked: Sequence[Prompt], sampling: Sampling) -> None:
        """An evaluation after so many updates; of none, the parent is what was evaluated."""
        where = self._of_the_parent() if step == 0 else (step_folder(self.run.checkpoints, step), self.base)
        self._keep(f"{step:06d}", found, asked, sampling, *where, whole=False)

    def ask_of_gain(self, answered: Mapping[str, Answered], model: Path, asked: Sequence[Prompt], sampling: Sampling) -> list[Verdict]:
        """Keep what the parent and the handed-over model answered to every held-out prompt, and let the witness judge it now."""
        if not self.keeps:
            return []
        if why := next((why for found in answered.values() if (why := self._left_out(found)) is not None), None):
            return [unproven(LOOKS, f"the gain was not looked at again: {why}", optional=True)]
        own = (model, self.base if model.name == "adapter" else None)
        folders = [self._keep(name, found, asked, sampling, *(self._of_the_parent() if name == "parent" else own), whole=True)
                   for name, found in answered.items()]
        return ask_witness([folder for folder in folders if folder is not None], self.run.probing.device)

    def _of_the_parent(self) -> tuple[Path, str | None]:
        parent = self.start.parent
        return Path(parent.path), None if parent.base is None else str(parent.base.path)

    def _keep(self, name: str, found: Answered, asked: Sequence[Prompt], sampling: Sampling, model: Path, base: str | Path | None, *,
              whole: bool) -> Path | None:
        if not self.keeps:
            return None
        parent, folder = self.start.parent, look_folder(self.run.folder, name)
        facts = {"model": str(model.absolute()), "base": None if base is None else str(Path(base).absolute()),
                 "held": parent.held or (parent.base and parent.base.held), "device": self.device.partition(":")[0],
                 "parameters": self.parameters, "temperature": sampling.temperature, "whole": whole,
                 "asked": [prompt.id for prompt in asked], "items": list(found.kept), "noise": getattr(self.rewards, "noise", 0.0),
                 "left_out": self._left_out(found), "local": local_copies(self.run.config)}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SAID).unlink(missing_ok=True)
        durable.replace_file(folder / RECORD, json.dumps(facts).encode())
        return folder

    def _left_out(self, found: Answered) -> str | None:
        if not found.kept:
            return "episodes are an environment's to score"
        kind = "cpu" if self.device == "cpu" else "cuda"
        tokens = sum(len(item["ids"]) * SAMPLES_OF_ONE + sum(min(LONGEST, len(said["ids"])) for said in item["samples"][:SAMPLES_OF_ONE])
                     for item in found.kept)
        if self.parameters > MOST_LOOK_PARAMETERS[kind] or 2.0 * self.parameters * tokens > MOST_LOOK_WORK[kind]:
            return f"{self.parameters:.1e} parameters and {tokens:,} tokens are more than a second reading on {kind} may take"
        return None
