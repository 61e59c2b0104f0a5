"""assay data check shows what is supervised and exits with what the audit says."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.config import parse
from assay.data.chat import TemplateWriter
from assay.testing.fault_injection import swap
from assay.testing.tiny_models import save_model, tiny_model
from assay.verbs import data
from assay.verdict import Outcome
from assay.zoo.chat_faults import questions_and_answers, worked_answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", tiny_model()).folder


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def checked(*flags: object) -> int:
    return data.run(parse(data.FLAGS, ["check", *map(str, flags)], prog="assay data"))


def test_clean_rows_are_shown_and_proven(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "rows.jsonl", [row | {"source": "made"} for row in questions_and_answers()])
    assert checked(path, "--model", model, "--show", 1) == 0
    out = capsys.readouterr().out
    assert "24 rows, layout messages" in out
    assert "columns left alone: source (24 rows)" in out
    assert "«t|h|e| |r|i|v|er| |0|<|im_end|>|»" in out
    assert "REFUTED" not in out


def test_no_control_character_of_the_data_reaches_the_terminal(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\x1b[2J\r"}]
    assert checked(written(tmp_path / "rows.jsonl", [{"messages": talk}]), "--model", model) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "b|\\x1b|[|2|J|\\r|" in out


def test_json_says_ids_weights_and_verdicts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "rows.jsonl", worked_answers())
    flags = ("--model", model, "--gsm8k", "think", "--new-tokens", "<think>", "</think>", "<answer>", "</answer>", "--json")
    other = written(tmp_path / "test.jsonl", [{"question": "Why?", "answer": "So.\n#### 4"}])
    assert checked(path, *flags, "--show", 2, "--held-out", other) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["counts"]["kept"] == 24
    assert len(facts["rows"]) == 2
    row = facts["rows"][0]
    assert len(row["ids"]) == len(row["weight"]) == len(row["tokens"])
    supervised = [token for token, weight in zip(row["tokens"], row["weight"], strict=True) if weight]
    assert (supervised[0], supervised[-1]) == ("<think>", "<|im_end|>")
    assert {verdict["outcome"] for verdict in facts["verdicts"]} == {"PROVEN"}


def test_a_refuted_audit_exits_with_3(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "rows.jsonl", questions_and_answers())
    with swap(TemplateWriter, "until_stop", lambda writer, tail: ""):
        assert checked(path, "--model", model) == 3
    assert f"{Outcome.REFUTED}   stop: 48 of 48 completions" in capsys.readouterr().out
    assert checked(path, "--model", model, "--held-out", path) == 3
    assert "held-out examples are trained on" in capsys.readouterr().out
