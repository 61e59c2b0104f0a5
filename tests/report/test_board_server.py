"""The live board through its real server: rows, curves and verdicts as they come, what it refuses, and a run that it stops."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from assay.generate.access import address_of, bind_listener
from assay.report import growing_metrics, live_runs
from assay.report.board_server import board_server
from assay.report.growing_metrics import GrowingMetrics
from assay.report.live_runs import LiveRuns, budget_left, gpu_readings
from assay.report.run_process import LOCKS
from assay.store.ledger import Ledger
from assay.verdict import refuted
from tests.report.crafted import HOSTILE, a_run, metrics

WRITER = """import signal, sys, time
from pathlib import Path
from assay.store.ledger import Ledger
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
ledger = Ledger(Path(sys.argv[1]) / "ledger.jsonl")
ledger.claim()
print("ready", flush=True)
while not stopped:
    time.sleep(0.01)
time.sleep(0.5)  # it saves
ledger.append("consumed", steps=40)
ledger.close()
sys.exit(len(stopped) != 1)"""


@contextlib.contextmanager
def served(folder: Path, *, token: str | None = None, port: int = 0) -> Iterator[httpx.Client]:
    """A real server on a port, for the length of the block."""
    listener = bind_listener("127.0.0.1", port, token)
    server = board_server(LiveRuns([folder]), token)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=address_of(listener), timeout=20) as client:
            while not server.started:
                time.sleep(0.01)
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def events(reply: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def rows_until(client: httpx.Client, wanted: Any) -> list[dict[str, Any]]:
    """The rows as a page has them, once `wanted` holds of them."""
    known: dict[str, dict[str, Any]] = {}
    with client.stream("GET", "/api/events") as reply:
        for name, told in events(reply):
            if name == "runs":
                known |= {row["id"]: row for row in told["changed"]}
                for id in told["gone"]:
                    known.pop(id)
                if wanted(list(known.values())):
                    return list(known.values())
    raise AssertionError("the stream ended")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_runs, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(live_runs, "LOOK_AROUND", 0.1)
    monkeypatch.setattr("assay.report.board_server.PAUSE", 0.05)


def test_rows_curves_and_verdicts_come_as_they_are_written(tmp_path: Path):
    run = a_run(tmp_path / "runs" / "a", ending="none", config={"max_steps": 100, "model": "base"})
    with served(tmp_path / "runs") as client:
        [row] = rows_until(client, lambda rows: len(rows) == 1)
        assert (row["run"], row["steps"], row["left"]) == ("a", 40, ["60 of 100 steps left"])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 49, "loss": 0.25, "num_tokens": 9}) + "\n" + '{"step": 50, "lo')
        [row] = rows_until(client, lambda rows: rows[0]["steps"] == 50)
        a_run(tmp_path / "runs" / "b")
        rows = rows_until(client, lambda rows: len(rows) == 2)
        drawn = client.get("/api/curves", params={"run": [one["id"] for one in rows]}).json()["curves"]
        assert [curve["x"][-1] for curve in drawn["loss"]] == [50, 40]
        assert drawn["loss"][0]["y"][-1] == 0.25
        scored, = (curve for curve in drawn["eval_nats_per_token"] if curve["run"] == row["id"])
        assert scored["low"][0] < scored["y"][0] < scored["high"][0], "an interval on record is the band"

        ledger = Ledger(run / "ledger.jsonl")
        ledger.append("stopped", reason="loss is nan", exit_code=4, stands=None)
        ledger.append("account", verdicts=[refuted("movement", "three tensors stood still", tensors=3).to_json()])
        ledger.close()
        rows_until(client, lambda rows: any(one["headline"] == "stopped" for one in rows))
        first = client.get(f"/api/runs/{row['id']}").json()["verdicts"][0]
        assert (first["check"], first["outcome"], '"tensors": 3' in first["evidence"]) == ("movement", "REFUTED", True)


def test_a_server_that_was_restarted_shows_the_same_runs_under_the_same_names(tmp_path: Path):
    a_run(tmp_path / "a")
    with served(tmp_path) as client:
        before, port = rows_until(client, lambda rows: len(rows) == 1), client.base_url.port
    assert port is not None
    with served(tmp_path, port=port) as client:
        [again] = rows_until(client, lambda rows: len(rows) == 1)
    assert again["id"] == before[0]["id"]


def test_samples_stand_beside_those_of_the_parent_run(tmp_path: Path):
    parent = a_run(tmp_path / "parent")
    child = a_run(tmp_path / "child", config={"model": str(parent / "model")})
    for run, text in ((parent, "old answer"), (child, "new answer")):
        (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "2+2=", "text": text}) + "\n")
    runs = LiveRuns([tmp_path])
    runs.look()
    one = next(run for run in runs.shown() if run.name == "child")
    [group] = one.details(runs.parent_of(one))["samples"]
    assert [side["text"] for side in group["examples"][0]["sides"]] == ["old answer", "new answer"]


@pytest.mark.skipif(not LOCKS.exists(), reason="this system has no /proc/locks")
def test_a_run_is_stopped_once_and_only_its_own_process(tmp_path: Path):
    run = a_run(tmp_path / "a", ending="none")
    a_run(tmp_path / "idle", ending="none")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()
    if not any(str(writer.pid) in line.split() for line in LOCKS.read_text().splitlines()):
        writer.kill()
        pytest.skip("this system's /proc/locks does not name the processes of a container")
    with served(tmp_path) as client, contextlib.ExitStack() as stack:
        stack.callback(writer.kill)
        by_name = {row["run"]: row for row in rows_until(client, lambda rows: any(row["running"] for row in rows))}
        assert by_name["a"]["headline"] == "running"
        stop = f"/api/runs/{by_name['a']['id']}/stop"
        for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Origin": "http://evil.example"}):
            assert client.post(stop, headers=headers).status_code == 403
        refusal = client.post(f"/api/runs/{by_name['idle']['id']}/stop", json={})
        assert (refusal.status_code, "is not running" in refusal.json()["error"]) == (409, True)
        assert writer.poll() is None
        assert client.post(stop, json={}).json() == {"asked": writer.pid}
        assert "already" in client.post(stop, json={}).json().get("error", ""), "a second signal would end it without a save"
        assert writer.wait(20) == 0
        rows_until(client, lambda rows: {row["run"]: row["state"] for row in rows}["a"] == "interrupted")


def test_only_local_names_are_answered_and_a_token_is_asked_for(tmp_path: Path):
    a_run(tmp_path / "a")
    with served(tmp_path) as client:
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
        page = client.get("/")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "http" not in page.text, "nothing is fetched from elsewhere"
        assert client.get("/assets/..%2fboard.py").status_code == 404
        assert client.get("/api/runs/none").status_code == 404
    with served(tmp_path, token="a-long-enough-token") as client:
        assert [client.get(path).status_code for path in ("/", "/api/curves", "/assets/board.js")] == [401] * 3
        assert client.get("/?token=wrong", follow_redirects=True).status_code == 401
        assert client.get("/?token=a-long-enough-token", follow_redirects=True).status_code == 200
        assert client.get("/api/curves").status_code == 200, "the cookie is enough from now on"


def test_hostile_names_and_texts_stay_json(tmp_path: Path):
    name = "<img src=x onerror=alert(1)>"
    run = a_run(tmp_path / name, recipe=HOSTILE, config={"model": HOSTILE.encode("utf-8", "replace").decode().replace("\x00", "")})
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "text": HOSTILE}) + "\n[1]\nno json\n")
    with served(tmp_path) as client:
        [row] = rows_until(client, lambda rows: len(rows) == 1)
        details = client.get(f"/api/runs/{row['id']}")
    assert (row["run"], details.headers["content-type"]) == (name, "application/json")
    assert "\\u202e" in details.json()["samples"][0]["examples"][0]["prompt"], "what would turn the text around is written out"


def test_a_million_lines_are_read_once_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Forty thousand, in parts of a hundredth of the usual."""
    monkeypatch.setattr(growing_metrics, "AT_ONCE", 40_000)
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "loss": step % 7, "num_tokens": step}) + "\n" for step in range(40_000)))
    growing, parts = GrowingMetrics(file), 0
    while growing.read_on():
        parts += 1
    drawn = growing.curves["loss"].to_json()
    assert parts > 40
    assert (growing.rows, drawn["x"][-1]) == (40_000, 40_000)
    assert len(drawn["x"]) <= growing_metrics.MOST_BUCKETS
    assert (min(drawn["low"]), max(drawn["high"])) == (0, 6)
    with file.open("a") as more:
        more.write('{"step": 40000, "loss": 9}\nnot json\n{"step": 40001')
    assert growing.read_on()
    assert (growing.rows, growing.known().remarks) == (40_001, ["1 lines of metrics.jsonl are no JSON objects and were left out"])
    file.write_text('{"step": 0, "loss": 1}\n')
    assert growing.read_on()
    assert growing.rows == 1, "a file that was written anew is read anew"


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in "abc":
        a_run(tmp_path / name)
    runs, read = LiveRuns([tmp_path]), []
    real = live_runs.read_run
    monkeypatch.setattr(live_runs, "read_run", lambda folder, lines: read.append(folder.name) or real(folder, lines))
    runs.look()
    runs.look()
    assert sorted(read) == ["a", "b", "c"]


def test_gpus_are_told_as_nvidia_smi_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_readings() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H200, 97, 81000, 143771, 61, 640.10'\n")
    program.chmod(0o755)
    assert gpu_readings() == [{"index": "0", "name": "NVIDIA H200", "busy": "97", "used": "81000", "total": "143771", "celsius": "61",
                               "watts": "640.10"}]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_readings() is None


def test_what_is_left_is_told_of_what_is_bounded():
    newest = {"step": 9, "seconds": 90.0, "num_tokens": 5000}
    assert budget_left({"max_steps": 40, "minutes": 2, "tokens": None}, newest) == ["30 of 40 steps left", "0.5 of 2 minutes left"]
    assert budget_left({"minutes": 2}, {}) == ["2 minutes, none on record yet"]
    assert budget_left({}, metrics(1)[0]) == []


def test_the_verb_listens_and_says_where(tmp_path: Path):
    a_run(tmp_path / "a")
    board = subprocess.Popen([sys.executable, "-m", "assay", "board", str(tmp_path), "--port", "0"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, env={**os.environ, "ASSAY_TOKEN": ""})
    assert board.stdout is not None
    address = board.stdout.readline().split()[2]
    with httpx.Client(base_url=address, timeout=20) as client, client.stream("GET", "/api/events") as reply:
        stream = events(reply)  # held open, as a page does
        assert next(stream)[1]["all"]
        board.terminate()
        _, complaints = board.communicate(timeout=20)
    assert "Traceback" not in complaints, "a page that is open is no reason to complain"
