"""Tracker exports of metrics.jsonl: transformers' trainer_state.json, TensorBoard, W&B, trackio, MLflow."""

import importlib
import json
import time
from pathlib import Path
from typing import Any, Protocol

from assay.errors import DataError, UsageError
from assay.store import durable
from assay.strict_json import NATURAL, parse_yaml, read_json_lines, read_small_file


def _steps_of(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, as far as they are whole."""
    file = run / "metrics.jsonl"
    if not file.exists():
        raise UsageError(f"{run}: no metrics.jsonl is here; give the folder of a run")
    return read_json_lines(file, {"step": NATURAL}, error=DataError)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Numbers of a row that can be drawn. A value that was not finite stands in metrics.jsonl as a word, and is no point on a curve."""
    return {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)}


def trainer_state(run: Path) -> dict[str, Any]:
    """A run as transformers' TrainerState has it: `log_history` with steps from 1. The best is the best of the checkpoints that are there;
    where none is, the best evaluation."""
    rows = _steps_of(run)
    history = [{**numbers(row), "step": row["step"] + 1} for row in rows]
    losses = [row for row in history if "eval_loss" in row]
    saved = [row for row in losses if _checkpoint(run, row["step"]).is_dir()]
    best = min(saved or losses, key=lambda row: row["eval_loss"]) if losses else None
    last = max((row["step"] for row in history), default=0)
    return {"best_metric": None if best is None else best["eval_loss"], "best_global_step": None if best is None else best["step"],
            "best_model_checkpoint": str(_checkpoint(run, best["step"])) if best is not None and saved else None,
            "epoch": next((row["epoch"] for row in reversed(history) if "epoch" in row), 0), "global_step": last, "max_steps": last,
            "is_hyper_param_search": False, "is_local_process_zero": True, "is_world_process_zero": True, "log_history": history,
            "logging_steps": 1, "eval_steps": None, "save_steps": None, "num_train_epochs": 1, "num_input_tokens_seen": 0,
            "total_flos": 0, "train_batch_size": None, "trial_name": None, "trial_params": None, "stateful_callbacks": {}}


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def write_trainer_state(run: Path, where: Path) -> Path:
    durable.replace_file(where, (json.dumps(trainer_state(run), indent=2) + "\n").encode())
    return where


PROJECT = "assay"


class MetricsTracker(Protocol):
    """Tracker of metrics: takes rows of metrics.jsonl, steps from 1 on its page, and is finished once."""

    def log(self, row: dict[str, Any]) -> None: ...

    def hand_over(self, checkpoint: Path) -> None:
        """A proven checkpoint as an artifact of the run."""
        ...

    def finish(self) -> None: ...

    def words(self) -> str:
        """Message about what the tracker was handed."""
        ...


def open_tracker(name: str, run: Path, project: str, where: Path | None = None) -> MetricsTracker:
    if name == "tensorboard":
        return TensorBoardEvents(where or run / "tensorboard")
    return MlflowRun(run, project) if name == "mlflow" else ServiceRun(name, run, project)


class TensorBoardEvents:
    """Event files in `where`. What an earlier session wrote there of these steps and later ones is void from the first on."""

    def __init__(self, where: Path) -> None:
        self._writer = _module("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events = _module("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _module("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self.where, self.points = where, 0
        self._file: Any = None  # made with the first row

    def log(self, row: dict[str, Any]) -> None:
        if self._file is None:
            durable.make_folder(self.where)
            self._file = self._writer.EventFileWriter(str(self.where))
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(row["step"] + 1, session_log=start)
        for name, value in numbers(row).items():
            tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
            self._add(row["step"] + 1, summary=self._summaries.Summary(value=[self._summaries.Summary.Value(tag=tag, simple_value=value)]))
            self.points += 1
        self._file.flush()

    def _add(self, step: int, **what: Any) -> None:
        self._file.add_event(self._events.Event(wall_time=time.time(), step=step, **what))

    def hand_over(self, checkpoint: Path) -> None:
        raise UsageError("tensorboard keeps no artifacts; --track-checkpoints is for wandb, trackio and mlflow")

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()

    def words(self) -> str:
        return f"{self.points} points in {self.where}"


class ServiceRun:
    """W&B and trackio have the same three calls: init, log, finish."""

    def __init__(self, service: str, run: Path, project: str) -> None:
        self._service, self._run, self._project, self._begun = _module(service, service), run, project, False
        self._name, self._rows, self._handed = service, 0, list[str]()

    def log(self, row: dict[str, Any]) -> None:
        self._begin()
        self._rows += 1
        self._service.log(numbers(row), step=row["step"] + 1)

    def _begin(self) -> None:
        """Begin the tracker's run with the first row: the run's options are written by then."""
        if not self._begun:
            self._service.init(project=self._project, name=self._run.name, config=_config(self._run))
            self._begun = True

    def hand_over(self, checkpoint: Path) -> None:
        self._begin()
        self._service.log_artifact(str(checkpoint), name=f"{self._run.name}-{checkpoint.name}", type="model")
        self._handed.append(checkpoint.name)

    def finish(self) -> None:
        self._begin()
        self._service.finish()

    def words(self) -> str:
        return f"{self._rows} steps{_and_artifacts(self._handed)} handed to {self._name}"


class MlflowRun:
    """An MLflow run in the experiment of the project's name, where MLFLOW_TRACKING_URI says."""

    def __init__(self, run: Path, project: str) -> None:
        self._mlflow, self._run, self._project, self._begun = _module("mlflow", "mlflow"), run, project, False
        self._rows, self._handed = 0, list[str]()

    def log(self, row: dict[str, Any]) -> None:
        self._begin()
        self._rows += 1
        self._mlflow.log_metrics(numbers(row), step=row["step"] + 1)

    def _begin(self) -> None:
        if not self._begun:
            self._mlflow.set_experiment(self._project)
            self._mlflow.start_run(run_name=self._run.name)
            self._mlflow.log_params({name: str(value)[:500] for name, value in _config(self._run).items()})
            self._begun = True

    def hand_over(self, checkpoint: Path) -> None:
        self._begin()
        self._mlflow.log_artifacts(str(checkpoint), artifact_path=checkpoint.name)
        self._handed.append(checkpoint.name)

    def finish(self) -> None:
        self._begin()
        self._mlflow.end_run()

    def words(self) -> str:
        return f"{self._rows} steps{_and_artifacts(self._handed)} handed to mlflow"


def _and_artifacts(names: list[str]) -> str:
    return f" and {', '.join(names)}" if names else ""


def hand_over_metrics(run: Path, tracker: MetricsTracker) -> str:
    """Hand over all rows that are there; returns in words what was handed over."""
    for row in _steps_of(run):
        tracker.log(row)
    tracker.finish()
    return tracker.words()


def _config(run: Path) -> dict[str, Any]:
    file = run / "config.yaml"
    return parse_yaml(read_small_file(file), where=str(file)) if file.exists() else {}


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{package} is not installed; pip install {package}") from None
