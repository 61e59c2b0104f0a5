"""assay track: hand a run's metrics to TensorBoard, W&B, trackio, MLflow or transformers, once or while it goes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assay.config import argument, option


@dataclass(frozen=True)
class FLAGS:
    """Send a run's metrics.jsonl to a tracker: transformers' trainer_state.json, TensorBoard, W&B, trackio or MLflow. Recipes do the
    same during the run with --track."""

    run: str = argument("folder of a run")
    to: Literal["hf", "tensorboard", "wandb", "trackio", "mlflow"] = option("tracker or format: transformers' trainer_state.json (hf), "
                                                                            "TensorBoard, W&B, trackio or MLflow", default="hf")
    out: str | None = option("path to write to", metavar="PATH", default=None,
                             default_text="RUN/trainer_state.json for hf, RUN/tensorboard for tensorboard")
    project: str = option("with wandb, trackio and mlflow: name of the project", default="assay")
    follow: bool = option("keep reading until the run's process ends", default=False)


EXAMPLES = """  assay track runs/a                      # writes runs/a/trainer_state.json
  assay track runs/a --to tensorboard     # then: tensorboard --logdir runs/a/tensorboard
  assay track runs/a --to wandb --follow  # beside a run that goes on"""


def run(flags: FLAGS) -> int:
    from assay.errors import UsageError
    from assay.interop import trackers
    from assay.interop.live_tracking import follow_run, run_ended

    folder = Path(flags.run)
    if flags.to == "hf":
        if flags.follow:
            raise UsageError("--follow is for tensorboard, wandb, trackio and mlflow; trainer_state.json is written once, afterwards")
        print(trackers.write_trainer_state(folder, Path(flags.out) if flags.out else folder / "trainer_state.json"))
        return 0
    tracker = trackers.open_tracker(flags.to, folder, flags.project, Path(flags.out) if flags.out else None)
    print(follow_run(folder, tracker, run_ended(folder)) if flags.follow else trackers.hand_over_metrics(folder, tracker))
    return 0
