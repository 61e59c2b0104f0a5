"""Real trackers (make trackers): W&B offline, MLflow on SQLite and trackio are handed a run's metrics and its proven checkpoints."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.cli import run as assay
from assay.strict_json import read_json_lines

pytestmark = pytest.mark.trackers


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "sums"
    assert assay(["tiny", "sums", "--out", str(folder)]) == 0
    return folder


def tracked(sums: Path, folder: Path, tracker: str, **variables: str) -> tuple[list[dict], str]:
    """(rows of metrics.jsonl, what was said of the tracker) of a short run beside which the tracker was handed everything."""
    words = f"sft --model {sums}/model --data {sums}/learned.jsonl --max-steps 3 --learning-rate 3e-3 --max-length 32 --batch-tokens 512 " \
            f"--probe-samples 0 --witness off --device cpu --save-steps 3 --out {folder}/run --quiet --track {tracker} --track-checkpoints"
    found = subprocess.run([sys.executable, "-m", "assay", *words.split()], cwd=folder, env=os.environ | variables, capture_output=True,
                           text=True, timeout=170)
    assert found.returncode in (0, 3), found.stderr[-2000:]
    assert (folder / "run" / "model" / "hallmark.json").exists()
    said = next(line for line in found.stderr.splitlines() if f"handed to {tracker}" in line or "was not handed" in line)
    print(said)
    return read_json_lines(folder / "run" / "metrics.jsonl"), said


def due_losses(rows: list[dict]) -> list[tuple[int, float]]:
    return [(row["step"] + 1, pytest.approx(row["loss"])) for row in rows if "loss" in row]


def test_mlflow_has_every_step_and_the_model(sums, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    rows, said = tracked(sums, tmp_path, "mlflow", MLFLOW_TRACKING_URI=uri)
    assert "step-000003, model handed to mlflow" in said
    client = mlflow.tracking.MlflowClient(uri)
    run = client.search_runs([client.get_experiment_by_name("assay").experiment_id])[0]
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")] == due_losses(rows)
    assert "hallmark.json" in {Path(one.path).name for one in client.list_artifacts(run.info.run_id, "model")}
    assert run.data.params["learning_rate"] == "0.003"


def test_trackio_has_every_step_and_the_model(sums, tmp_path):
    pytest.importorskip("trackio")
    rows, said = tracked(sums, tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    assert "step-000003, model handed to trackio" in said
    code = "import json; from trackio.sqlite_storage import SQLiteStorage as S; print(json.dumps(S.get_logs('assay', 'run'), default=str))"
    found = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}, capture_output=True,
                           text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-1500:]
    history = json.loads(found.stdout.splitlines()[-1])
    assert [(row["step"], row["loss"]) for row in history if row.get("loss") is not None] == due_losses(rows)


def test_wandb_offline_has_every_step_and_the_model(sums, tmp_path):
    pytest.importorskip("wandb")
    rows, said = tracked(sums, tmp_path, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true",
                         WANDB_DATA_DIR=str(tmp_path / "data"), WANDB_CACHE_DIR=str(tmp_path / "cache"))
    assert "step-000003, model handed to wandb" in said
    records = list(offline_records(next(tmp_path.glob("wandb/offline-run-*/*.wandb"))))
    assert sorted(offline_losses(records)) == due_losses(rows)
    artifacts = {one.artifact.name: one.artifact.manifest.contents for one in records if one.WhichOneof("record_type") == "artifact"}
    assert [f"run-{name}" for name in said.partition(" and ")[2].removesuffix(" handed to wandb").split(", ")] == list(artifacts)
    assert {file.path: Path(file.local_path).read_bytes() for file in artifacts["run-model"]} == \
        {file.name: file.read_bytes() for file in (tmp_path / "run" / "model").iterdir()}
    for files in artifacts.values():  # those that the run has retired since are whole too
        assert all(Path(file.local_path).stat().st_size == file.size for file in files)
        assert {"hallmark.json", "manifest.json", "model.safetensors"} <= {file.path for file in files}


def offline_records(file: Path) -> Iterator[Any]:
    """Records of the log that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2

    for data in logged(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def offline_losses(records: list[Any]) -> list[tuple[int, float]]:
    found = list[tuple[int, float]]()
    for record in records:
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "loss" in items:
            found.append((int(items["_step"]), float(items["loss"])))
    return found


def logged(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, after W&B's seven bytes: blocks of 32 KiB, each part with checksum, length and kind."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block has no room for a header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        record += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""
