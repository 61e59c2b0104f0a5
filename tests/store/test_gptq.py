"""GPTQ folders: llm-compressor's codes, taken over where they are what was asked for, and judged by text that they were not fitted to."""

import importlib.util
import json

import pytest
import torch

from assay.cli import run as cli_run
from assay.guard.compressed_checks import check_fitted
from assay.store import llm_compressor
from assay.store.artifact import open_artifact
from assay.store.compressed_tensors import COMPRESSED
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import save_hf_folder, tiny_model
from assay.verdict import Outcome

needs_llm_compressor = pytest.mark.skipif(importlib.util.find_spec("llmcompressor") is None, reason="llm-compressor is not installed")
HELD_OUT = [[(7 * place + 13 * row) % 250 for place in range(24)] for row in range(3)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    model = tiny_model(width=128, head_dim=32, hidden=256)
    with torch.no_grad():
        model.embed.weight.mul_(3)
    return save_hf_folder(tmp_path_factory.mktemp("source") / "m", model)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "sums.txt"
    file.write_text(" ".join(f"{a} and {b} make {a + b}." for a in range(40) for b in range(40)))
    return file


def test_without_llm_compressor_it_is_refused_and_nothing_is_written(source, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(llm_compressor, "llm_compressor_installed", lambda: False)
    assert cli_run(["export", str(source), "--to", "gptq", "--text", str(text), "--out", str(tmp_path / "m")]) == 2
    assert "llm-compressor is not installed (pip install 'assay[gptq]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "said"), [
    (("--to", "gptq"), "--text is what --to gptq is fitted to: give both, or neither"),
    (("--to", "w4a16", "--text", "x.txt"), "--text x.txt has no effect without --to gptq")])
def test_text_and_gptq_belong_together(source, tmp_path, capsys, words, said):
    assert cli_run(["export", str(source), *words, "--out", str(tmp_path / "m")]) == 2
    assert said in capsys.readouterr().err


def test_too_little_text_is_refused(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(llm_compressor, "llm_compressor_installed", lambda: True)
    (tmp_path / "short.txt").write_text("Two words. " * 9)
    assert cli_run(["export", str(source), "--to", "gptq", "--text", str(tmp_path / "short.txt"), "--out", str(tmp_path / "m")]) == 2
    assert "expected 16 at least" in capsys.readouterr().err


@pytest.mark.parametrize(("form", "outcome"), [("w8a8", Outcome.PROVEN), ("w4a16", Outcome.UNPROVEN)])
def test_fitted_codes_must_answer_nearer_to_the_source_than_the_nearest_codes(source, tmp_path, form, outcome):
    """Eight bits stand for a fit that gained much; the nearest codes themselves for one that gained nothing."""
    export_artifact(open_artifact(source), form, tmp_path / "m", "float32")
    verdict = check_fitted(open_artifact(tmp_path / "m"), open_artifact(source), COMPRESSED["w4a16"], HELD_OUT)
    assert verdict.outcome is outcome, verdict
    assert verdict.evidence["n"] == 3


@pytest.mark.slow
@needs_llm_compressor
def test_a_model_is_rounded_by_llm_compressor_and_proven(source, text, tmp_path, capsys):
    where = tmp_path / "gptq"
    code = cli_run(["export", str(source), "--to", "gptq", "--text", str(text), "--dtype", "bfloat16", "--out", str(where), "--json"])
    verdicts = {verdict["check"]: verdict for verdict in json.loads(capsys.readouterr().out)["verdicts"]}
    print(json.dumps(verdicts, indent=1))
    assert {verdicts[name]["outcome"] for name in ("lineage", "fitted", "perplexity", "greedy texts")} == {"PROVEN"}
    assert code == 0
    assert verdicts["fitted"]["evidence"]["fitted"] < 0.8 * verdicts["fitted"]["evidence"]["nearest"]
    said = json.loads((where / "config.json").read_text())["quantization_config"]
    assert (said["format"], said["config_groups"]["group_0"]["weights"]["num_bits"]) == ("pack-quantized", 4)
    assert (where / "hallmark.json").exists()
