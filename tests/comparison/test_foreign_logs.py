"""Logs of other tools are compared as they come, and what is unknown in them is never 0."""

import csv
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from assay.cli import run
from assay.comparison.read_results import Arm, Series, read_results
from assay.errors import DataError, UsageError


def lm_eval_rows(right: int, n: int = 30, **more: Any) -> list[dict[str, Any]]:
    return [{"doc_id": i, "doc": {}, "filter": "none", "metrics": ["acc"], "doc_hash": f"h{i}", "acc": float(i < right), **more}
            for i in range(n)]


def write_lm_eval(folder: Path, rows: list[dict[str, Any]], task: str = "arc_easy", date: str = "2026-01-31T10-00-00.000001") -> Path:
    place = folder / "org__model"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"samples_{task}_{date}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def inspect_log(right: int, **more: Any) -> dict[str, Any]:
    samples = [{"id": i, "epoch": epoch, "scores": {"match": {"value": "C" if i < right else "I"}}} for i in range(20) for epoch in (1, 2)]
    return {"version": 2, "status": "success", "eval": {"task": "sums", "model": "org/model"}, "samples": samples} | more


def only(path: Path, **options: Any) -> Arm | Series:
    [found] = read_results(path, **options)
    return found


def test_lm_eval_output_is_paired_by_question_and_the_arms_keep_their_names(tmp_path, capsys):
    before, after = write_lm_eval(tmp_path / "a", lm_eval_rows(10)), write_lm_eval(tmp_path / "b", lm_eval_rows(25))
    for folder, right in ((before, 3), (after, 4)):
        write_lm_eval(folder, lm_eval_rows(right), task="gsm8k")
    assert run(["compare", f"base={before}", f"tuned={after}", "--json"]) == 0
    found = {one["group"]: one for one in json.loads(capsys.readouterr().out)["comparisons"]}
    assert found["arc_easy"]["effect"]["mean"] == pytest.approx(0.5)
    assert (found["arc_easy"]["claim"], found["gsm8k"]["claim"]) == ("shown better", "not shown")
    assert {one["after"] for one in found.values()} == {"tuned"}


def test_each_filter_and_metric_of_lm_eval_is_a_result_of_its_own(tmp_path):
    rows = [row | {"filter": name, "metrics": ["em", "f1"], "em": float(name == "strict"), "f1": 0.5}
            for name in ("strict", "flexible") for row in lm_eval_rows(0)]
    file = write_lm_eval(tmp_path, rows) / "org__model" / "samples_arc_easy_2026-01-31T10-00-00.000001.jsonl"
    found = read_results(file, metric="em")
    assert [(one.group, one.runs[0].score) for one in found] == [("arc_easy, strict", 1.0), ("arc_easy, flexible", 0.0)]
    with pytest.raises(UsageError, match="--metric"):
        read_results(file)


def test_what_lm_eval_cannot_mean_is_refused(tmp_path):
    write_lm_eval(tmp_path / "twice", lm_eval_rows(1))
    with pytest.raises(UsageError, match="two evaluations of one task"):
        read_results(write_lm_eval(tmp_path / "twice", lm_eval_rows(1), date="2026-02-01T10-00-00.000001"))
    with pytest.raises(DataError, match="stands twice"):
        read_results(write_lm_eval(tmp_path / "rows", lm_eval_rows(1) + lm_eval_rows(1)))
    with pytest.raises(DataError, match="expected a number"):
        read_results(write_lm_eval(tmp_path / "none", lm_eval_rows(1, acc=None)))
    other = [row | {"doc_hash": "x"} for row in lm_eval_rows(5)]
    arms = {"a": write_lm_eval(tmp_path / "a", lm_eval_rows(5)), "b": write_lm_eval(tmp_path / "b", other)}
    assert run(["compare", *(f"{name}={path}" for name, path in arms.items())]) == 2


def test_inspect_logs_in_json_and_as_archives_say_the_same(tmp_path):
    log = inspect_log(15)
    (tmp_path / "log.json").write_text(json.dumps(log))
    with zipfile.ZipFile(tmp_path / "plain.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members(log):
            archive.writestr(name, data)
    write_zstandard(tmp_path / "zstd.eval", members(log))
    found = [only(tmp_path / name) for name in ("log.json", "plain.eval", "zstd.eval")]
    assert [one.runs[0].score for one in found] == [0.75] * 3
    assert found[0].runs[0].scores == found[1].runs[0].scores == found[2].runs[0].scores
    assert (found[0].name, found[0].metric, found[0].runs[0].scores["3"]) == ("org/model", "match", (1.0, 1.0))


def test_logs_that_inspect_ai_itself_wrote_are_paired_by_sample_over_their_epochs(capsys):
    """inspect_logs/make.py made them: 3 and 8 of 8 sums are right, each asked twice."""
    logs = Path(__file__).parent / "inspect_logs"
    assert run(["compare", f"before={logs}/3-of-8.eval", f"after={logs}/8-of-8.eval", "--metric", "match", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["comparisons"]
    assert found["effect"]["mean"] == pytest.approx(5 / 8)
    assert found["n"] == 8
    arm = only(logs / "3-of-8.eval", metric="includes")
    assert arm.runs[0].scores["sum-2"] == (1.0, 1.0)
    assert arm.runs[0].scores["sum-3"] == (0.0, 0.0)
    with pytest.raises(UsageError, match="has the metrics includes, match; choose one"):
        read_results(logs / "3-of-8.eval")
    with pytest.raises(UsageError, match="2 logs of inspect-ai are here"):
        read_results(logs)


def test_a_folder_with_a_log_in_json_is_read(tmp_path):
    (tmp_path / "2026-11-16T17-01-09-00-00_sums_VRgydHByXvkwQrHDvPYEkM.json").write_text(json.dumps(inspect_log(15)))
    assert only(tmp_path).runs[0].score == pytest.approx(0.75)


def test_an_inspect_log_that_failed_or_lacks_a_score_is_refused(tmp_path):
    log, file = inspect_log(3), tmp_path / "log.json"
    for changed, words in (({"status": "error"}, "ended as 'error'"), ({"samples": []}, "no samples"),
                           ({"samples": [*log["samples"], {"id": 99, "scores": {}, "error": {"message": "x"}}]}, "ended in an error")):
        file.write_text(json.dumps(log | changed))
        with pytest.raises(DataError, match=words):
            read_results(file)


def test_a_damaged_archive_is_refused(tmp_path):
    file = tmp_path / "zstd.eval"
    write_zstandard(file, members(inspect_log(3)), checksum=1)
    with pytest.raises(DataError, match="checksum"):
        read_results(file)
    file.write_bytes(b"PK no archive")
    with pytest.raises(DataError, match="no log of inspect-ai"):
        read_results(file)


def test_a_trainers_state_is_a_curve_and_a_folder_gives_its_newest(tmp_path):
    for last in (2, 10):
        place = tmp_path / "out" / f"checkpoint-{last}"
        place.mkdir(parents=True)
        history = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, last + 1)] + [{"step": last, "eval_loss": 1.0}]
        (place / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert (only(tmp_path / "out", metric="loss").steps, only(tmp_path / "out").metric) == (tuple(range(1, 11)), "eval_loss")
    assert only(tmp_path / "out" / "checkpoint-10", metric="loss").name == "out"
    with pytest.raises(UsageError, match="it has step, loss, eval_loss"):
        read_results(tmp_path / "out", metric="reward")


def test_a_state_that_transformers_itself_wrote_is_read(tmp_path):
    callback = pytest.importorskip("transformers.trainer_callback")
    history = [{"step": step, "epoch": step / 4, "loss": 3.0 - step / 10, "grad_norm": 1.0, "learning_rate": 1e-4} for step in range(1, 9)]
    state = callback.TrainerState(log_history=[*history, {"step": 8, "eval_loss": 1.5, "eval_runtime": 2.0}], global_step=8, max_steps=8)
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    found = only(tmp_path / "trainer_state.json", metric="loss")
    assert found.history == tuple((row["loss"],) for row in history)
    assert only(tmp_path / "trainer_state.json").metric == "eval_loss"


def test_exports_of_weights_and_biases_are_one_curve_a_run(tmp_path):
    table = tmp_path / "wandb.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Step", "one - loss", "one - loss__MIN", "one - loss__MAX", "two - loss"])
        writer.writerows([[step, 3 - step / 10, 0, 9, "" if step % 2 else 2.0] for step in range(10)])
    one, two = read_results(table)
    assert (one.name, one.metric, len(one.steps), two.name, two.steps) == ("one", "loss", 10, "two", (0, 2, 4, 6, 8))
    (tmp_path / "history.jsonl").write_text("".join(json.dumps({"_step": step, "loss": 2.0 - step}) + "\n" for step in range(3)))
    assert only(tmp_path / "history.jsonl", metric="loss").history == ((2.0,), (1.0,), (0.0,))


def members(log: dict[str, Any]) -> list[tuple[str, bytes]]:
    head = {key: value for key, value in log.items() if key != "samples"}
    return [("header.json", json.dumps(head).encode())] + [
        (f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample).encode()) for sample in log["samples"]]


def write_zstandard(path: Path, content: list[tuple[str, bytes]], checksum: int = 0) -> None:
    """An archive as inspect-ai writes it: members compressed by method 93, which Python's own writer has from 3.14 on."""
    body, table = b"", b""
    for name, data in content:
        packed = pyarrow.Codec("zstd").compress(data, asbytes=True)
        facts = struct.pack("<HHHHHIIIHH", 63, 0, 93, 0, 33, zlib.crc32(data) ^ checksum, len(packed), len(data), len(name), 0)
        table += b"PK\x01\x02" + struct.pack("<H", 63) + facts + struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + name.encode()
        body += b"PK\x03\x04" + facts + name.encode() + packed
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, len(content), len(content), len(table), len(body), 0)
    path.write_bytes(body + table + end)
