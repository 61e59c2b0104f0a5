"""The board finds every run and says how each stands, from its files alone."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from assay.report import board as module
from assay.report import run_process
from assay.report.board import board
from assay.report.page import render_report
from assay.report.run_record import RunRecord, read_run
from assay.store.checkpoint import quarantine_checkpoint
from assay.store.ledger import Ledger
from assay.testing.tiny_models import save_model, tiny_model
from assay.verbs import report as report_verb
from assay.verbs import runs as runs_verb
from assay.verdict import proven, refuted
from tests.report.crafted import a_checkpoint, a_run, rollouts


def test_every_way_a_run_can_stand(tmp_path: Path):
    a_run(tmp_path / "done")
    a_run(tmp_path / "halted", ending="stopped")
    a_run(tmp_path / "left", ending="consumed")
    a_run(tmp_path / "cut", ending="none")
    a_run(tmp_path / "seeds" / "seed-1")
    again = Ledger(a_run(tmp_path / "wrong", ending="none") / "ledger.jsonl")
    again.append("hand over", verdicts=[refuted("score", "exported bytes score worse").to_json()])
    again.close()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ledger.jsonl").write_text("{}\n")
    rows = {row.run: row for row in board(tmp_path)}
    assert {name: row.state for name, row in rows.items()} == {
        "done": "done and proven", "halted": "stopped", "left": "interrupted", "cut": "no end on record", "seeds/seed-1": "done and proven",
        "wrong": "done, refuted", "broken": "ledger damaged"}
    assert rows["halted"].reason.startswith("loss is nan at step 7. step-000040 stands")
    assert "exported bytes score worse" in rows["wrong"].reason
    done = rows["done"]
    assert (done.steps, done.held_out, done.last_proven) == (40, "0.5 [0.4, 0.6] (n=90) nats per token", "step-000040")
    assert rows["broken"].steps is None


@pytest.mark.parametrize(("since", "state", "words"), [
    ("quarantined", "done, refuted", "model is quarantined: it talks nonsense"), ("cut", "done, refuted", "model is damaged"),
    ("edited", "done, refuted", "model is damaged"), ("gone", "done, not proven", "model is not there any more")])
def test_what_became_of_a_model_since_it_was_handed_over_is_said_first(tmp_path: Path, since: str, state: str, words: str):
    run = a_run(tmp_path / "run", ending="none")
    again, place = Ledger(run / "ledger.jsonl"), proven("handed over", "every file is there", places=["model"])
    again.append("hand over", verdicts=[proven("score", "as recorded").to_json(), place.to_json()])
    again.close()
    checkpoint = save_model(run / "model", tiny_model())
    assert board(tmp_path)[0].state == "done and proven"
    if since == "quarantined":
        quarantine_checkpoint(checkpoint, [refuted("generations", "it talks nonsense")])
    elif since == "gone":
        shutil.rmtree(run / "model")
    else:
        file = run / "model" / ("model.safetensors" if since == "cut" else "manifest.json")
        file.write_bytes(file.read_bytes()[:-1] if since == "cut" else file.read_bytes().replace(b"1", b"2", 1))
    row = board(tmp_path)[0]
    assert (row.state, words in row.reason, "artifact proven" in row.headline) == (state, True, False)
    assert words in render_report(read_run(run))


def test_a_run_that_may_not_be_read_is_a_row_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever runs the tests may be allowed to read everything: the refusal is the one thing here that is not real."""
    a_run(tmp_path / "mine")
    theirs = a_run(tmp_path / "theirs")

    def denied(folder: Path) -> RunRecord:
        if folder == theirs:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / "ledger.jsonl"))
        return read_run(folder)

    monkeypatch.setattr(module, "read_run", denied)
    mine, other = board(tmp_path)
    assert (mine.state, other.state) == ("done and proven", "unreadable")
    assert "Permission denied" in other.reason


def test_a_resumed_run_stands_as_its_last_session_ended(tmp_path: Path):
    ledger = Ledger(a_run(tmp_path / "run") / "ledger.jsonl")
    ledger.append("resume", recipe="Sft")
    ledger.append("retire", checkpoint="step-000040")
    ledger.close()
    [row] = board(tmp_path)
    assert (row.state, row.last_proven) == ("no end on record", None)


def test_before_the_end_the_best_look_counts_with_its_interval(tmp_path: Path):
    [row] = board(a_run(tmp_path / "loss", ending="none"))
    assert row.held_out == "0.6268 [0.5268, 0.7268] (n=90) nats per token at step 40"
    run = a_run(tmp_path / "answers", ending="none")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts(20)))
    [row] = board(run)
    assert row.held_out == "0.49 [0.39, 0.69] (n=64) answer at step 20"


def test_a_run_that_is_being_written_is_running_and_looking_does_not_disturb_it(tmp_path: Path):
    if not run_process.LOCKS.exists():
        pytest.skip("this system has no table of locks")
    ledger = Ledger(a_run(tmp_path / "run", ending="none") / "ledger.jsonl")
    ledger.append("save", step=41, checkpoint="step-000041")
    if not any(str(os.getpid()) in line.split() for line in run_process.LOCKS.read_text().splitlines()):
        pytest.skip("this system's table of locks does not show our own")
    assert board(tmp_path)[0].state == "running"
    ledger.append("save", step=42, checkpoint="step-000042")
    ledger.close()
    assert board(tmp_path)[0].state == "no end on record"


def test_the_parent_is_named_by_digest_once_a_manifest_does(tmp_path: Path):
    run = a_run(tmp_path / "run")
    assert board(run)[0].parent == "base"
    a_checkpoint(run / "checkpoints" / "step-000040", 1.0, parent={"weights": "a" * 64, "path": "models/base"}, step=40)
    a_checkpoint(run / "model", 1.0, parent={"weights": "b" * 64, "path": "run/checkpoints/step-000040"}, change="same")
    assert board(run)[0].parent == "models/base (aaaaaaaaaaaa)"
    assert "<dd>models/base (aaaaaaaaaaaa)</dd>" in render_report(read_run(run))


def test_the_verbs_print_tables_json_and_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = a_run(tmp_path / "[bold]run", ending="stopped")
    assert runs_verb.run(runs_verb.FLAGS(str(tmp_path))) == 0
    shown = capsys.readouterr().out
    assert "[bold]run" in shown
    assert "loss is nan at step 7" in shown
    assert runs_verb.run(runs_verb.FLAGS(str(tmp_path), json=True)) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "stopped"
    assert report_verb.run(report_verb.FLAGS(str(run), json=True)) == 0
    said = json.loads(capsys.readouterr().out)
    assert Path(said["report"]) == run / "report.html"
    assert Path(said["report"]).exists()
    assert said["outcome"] == "REFUTED"


def test_a_table_of_runs_loads_no_torch(tmp_path: Path):
    run = a_run(tmp_path / "run")
    a_checkpoint(run / "checkpoints" / "step-000040", 1.0, parent={"weights": "a" * 64, "path": "models/base"}, step=40)
    code = (f"import sys; from assay.verbs import runs; runs.run(runs.FLAGS({str(tmp_path)!r}, json=True)); "
            "print('torch' in sys.modules, file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"
