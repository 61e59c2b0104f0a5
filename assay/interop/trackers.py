"""Tracker exports of metrics.jsonl: transformers' trainer_state.json, TensorBoard, W&B, trackio."""

import importlib
import json
from pathlib import Path
from typing import Any

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
    """What can be drawn. A value that was not finite stands in metrics.jsonl as a word, and is no point on a curve."""
    return {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)}


def trainer_state(run: Path) -> dict[str, Any]:
    """A run as transformers' TrainerState has it: `log_history` with steps from 1."""
    rows = _steps_of(run)
    history = [{**numbers(row), "step": row["step"] + 1} for row in rows]
    losses = [row for row in history if "eval_loss" in row]
    best = min(losses, key=lambda row: row["eval_loss"]) if losses else None
    last = max((row["step"] for row in history), default=0)
    return {"best_metric": None if best is None else best["eval_loss"], "best_global_step": None if best is None else best["step"],
            "best_model_checkpoint": None if best is None else str(run / "checkpoints" / f"step-{best['step']:06d}"),
            "epoch": next((row["epoch"] for row in reversed(history) if "epoch" in row), 0), "global_step": last, "max_steps": last,
            "is_hyper_param_search": False, "is_local_process_zero": True, "is_world_process_zero": True, "log_history": history,
            "logging_steps": 1, "eval_steps": None, "save_steps": None, "num_train_epochs": 1, "num_input_tokens_seen": 0,
            "total_flos": 0, "train_batch_size": None, "trial_name": None, "trial_params": None, "stateful_callbacks": {}}


def write_trainer_state(run: Path, where: Path) -> Path:
    durable.replace_file(where, (json.dumps(trainer_state(run), indent=2) + "\n").encode())
    return where


def to_tensorboard(run: Path, where: Path) -> int:
    """Event files in `where`; returns how many points they hold."""
    rows = _steps_of(run)
    durable.make_folder(where)
    writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(where))
    points = 0
    for row in rows:
        for name, value in numbers(row).items():
            writer.add_scalar(f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}", value, row["step"] + 1)
            points += 1
    writer.close()
    return points


def to_service(run: Path, service: str, project: str) -> int:
    """W&B and trackio have the same three calls: init, log, finish."""
    tracker = _module(service, service)
    tracker.init(project=project, name=run.name, config=_config(run))
    rows = _steps_of(run)
    for row in rows:
        tracker.log(numbers(row), step=row["step"] + 1)
    tracker.finish()
    return len(rows)


def _config(run: Path) -> dict[str, Any]:
    file = run / "config.yaml"
    return parse_yaml(read_small_file(file), where=str(file)) if file.exists() else {}


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{package} is not installed; pip install {package}") from None
