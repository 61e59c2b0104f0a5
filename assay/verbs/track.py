"""assay track: hand a run's metrics to TensorBoard, W&B, trackio or transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assay.config import argument, option


@dataclass(frozen=True)
class FLAGS:
    """Hand a run's metrics.jsonl to another tool's page: transformers' trainer_state.json, TensorBoard, W&B or trackio."""

    run: str = argument("folder of a run")
    to: Literal["hf", "tensorboard", "wandb", "trackio"] = option("whose page", default="hf")
    out: str | None = option("where to write", metavar="PATH", default=None,
                             default_text="RUN/trainer_state.json for hf, RUN/tensorboard for tensorboard")
    project: str = option("name of the project, for wandb and trackio", default="assay")


EXAMPLES = """  assay track runs/a                      # writes runs/a/trainer_state.json
  assay track runs/a --to tensorboard     # then: tensorboard --logdir runs/a/tensorboard"""


def run(flags: FLAGS) -> int:
    from assay.interop import trackers

    folder = Path(flags.run)
    if flags.to == "hf":
        print(trackers.write_trainer_state(folder, Path(flags.out) if flags.out else folder / "trainer_state.json"))
    elif flags.to == "tensorboard":
        where = Path(flags.out) if flags.out else folder / "tensorboard"
        print(f"{trackers.to_tensorboard(folder, where)} points in {where}")
    else:
        print(f"{trackers.to_service(folder, flags.to, flags.project)} steps handed to {flags.to}")
    return 0
