"""Live tracking: a tracker is handed every row while a run goes on, and whatever it does, the run is as it would be without it."""

import errno
import json
import os
from pathlib import Path

import pytest

from assay.cli import run as assay
from assay.interop import live_tracking
from assay.interop.live_tracking import GrowingRows
from assay.store import durable
from assay.store.checkpoint import HALLMARK
from assay.strict_json import read_json_lines

STAND_IN = """
import os
from pathlib import Path
def init(project, name, config):
    Path(os.environ["TOLD"]).write_text(f"{project} {name} {config['learning_rate']}\\n")
def log(values, step):
    if os.environ["FAILS"] == "log" and step == 2:
        raise ConnectionError("no route to the tracker")
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{step} {values.get('loss')}\\n")
def log_artifact(folder, name, type):
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"artifact {name} {type} {(Path(folder) / 'hallmark.json').exists()} None\\n")
def finish():
    if os.environ["FAILS"] == "finish":
        import time
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "sums"
    assert assay(["tiny", "sums", "--out", str(folder)]) == 0
    return folder


def sft(tiny: Path, out: Path, *more: str) -> int:
    words = f"sft --model {tiny}/model --data {tiny}/learned.jsonl --max-steps 3 --learning-rate 3e-3 --max-length 32 --batch-tokens 512 " \
            f"--probe-samples 0 --witness off --device cpu --save-steps 3 --out {out}"
    return assay([*words.split(), *more])


def test_tensorboard_has_every_step_of_a_run_that_just_ended(tiny, tmp_path, capsys):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code = sft(tiny, tmp_path / "run", "--track", "tensorboard", "--json")
    shown = capsys.readouterr()
    assert code == json.loads(shown.out)["exit_code"]  # stdout is JSON and nothing else
    assert json.loads(shown.out)["headline"]
    assert f"points in {tmp_path}/run/tensorboard" in shown.err
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    rows = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == \
        [(row["step"] + 1, pytest.approx(row["loss"])) for row in rows if "loss" in row]
    assert len(events.Scalars("train/loss")) == 3


@pytest.mark.parametrize("fails", ["", "log", "finish"])
def test_a_tracker_that_fails_or_hangs_costs_a_line_and_no_run(tiny, tmp_path, capsys, monkeypatch, fails):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "trackio.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told.txt"))
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setattr(live_tracking, "LAST_SECONDS", 2.0 if fails == "finish" else 20.0)
    code = sft(tiny, tmp_path / "run", "--track", "trackio", "--quiet", *(() if fails else ("--track-checkpoints",)))
    shown = capsys.readouterr()
    assert code in (0, 3)
    assert "REFUTED" not in shown.out
    assert "step 3 of 3" not in shown.out  # --quiet
    assert (tmp_path / "run" / "model" / "hallmark.json").exists()
    told = (tmp_path / "told.txt").read_text().splitlines()
    assert told[0] == "assay run 0.003"
    if fails == "log":
        assert "trackio was not handed everything: ConnectionError: no route to the tracker; the run is not touched" in shown.err
    elif fails == "finish":
        assert "took more than 2 s" in shown.err
    else:
        handed = [line.split()[1].removeprefix("run-") for line in told if line.startswith("artifact")]
        assert [line for line in told if line.startswith("artifact")] == [f"artifact run-{name} model True None" for name in handed]
        assert f"steps and {', '.join(handed)} handed to trackio" in shown.err
        judge_handed_over(tmp_path / "run", handed)
        assert not list((tmp_path / "run").rglob(".partial-*"))
        assert [line.split()[0] for line in told[1:] if "None" not in line] == ["1", "2", "3"]


def judge_handed_over(run: Path, handed: list[str]) -> None:
    """All that has a hallmark in the end, and of what was retired meanwhile nothing but what was proven; each once, in order."""
    events = read_json_lines(run / "ledger.jsonl")
    proven = {event["checkpoint"] for event in events if event["kind"] == "proof" and event["outcome"] == "PROVEN"}
    retired = {event["checkpoint"] for event in events if event["kind"] == "retire"}
    left = [folder.name for folder in live_tracking.proven_checkpoints(run)]
    assert left[-2:] == ["step-000003", "model"]
    assert [name for name in handed if name in left] == left
    assert set(handed) - set(left) <= proven & retired
    assert handed == [*sorted(set(handed) - {"model"}), "model"]


class Reading:
    """A tracker beside a run that retires a checkpoint as it is handed over."""

    def __init__(self, checkpoints):
        self.checkpoints, self.read = checkpoints, {}

    def hand_over(self, folder):
        durable.remove_folder(self.checkpoints / folder.name)
        self.read[folder.name] = {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_that_is_retired_while_it_is_handed_over_arrives_whole(tmp_path, monkeypatch, links):
    def refused(*_):
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(durable.disk, "link", refused)
    folder = tmp_path / "step-000001"
    folder.mkdir()
    for name in ("model.safetensors", HALLMARK):
        (folder / name).write_text(name)
    tracker = Reading(tmp_path)
    live_tracking.hand_over_whole(folder, tracker)
    assert tracker.read == {"step-000001": {"model.safetensors": "model.safetensors", HALLMARK: HALLMARK}}
    live_tracking.hand_over_whole(folder, tracker)  # gone: nothing is handed over
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_for_trackers_that_keep_artifacts(tiny, tmp_path, capsys):
    assert sft(tiny, tmp_path / "run", "--track", "tensorboard", "--track-checkpoints") == 2
    assert "which keep artifacts; found --track tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rows_that_a_resumed_run_takes_again_are_handed_over_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = GrowingRows(file)
    assert list(rows.unread()) == []
    lines = [json.dumps(row) + "\n" for row in ({"step": 0, "loss": 3}, {"step": 0, "eval_loss": 2}, {"step": 1, "loss": 2})]
    file.write_text("".join(lines) + '{"step": 2, "lo')
    assert [row["step"] for row in rows.unread()] == [0, 0, 1]
    (tmp_path / "anew").write_text("".join(lines[:2]))
    os.replace(tmp_path / "anew", file)
    assert list(rows.unread()) == []
    with file.open("a") as grown:
        grown.write(lines[2] + json.dumps({"step": 2, "loss": 1}) + "\n")
    assert [row["step"] for row in rows.unread()] == [2]
