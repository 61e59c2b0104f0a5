"""Quantised GGUF files: proven where they will run, in llama.cpp; where it is missing that is said, and nothing is claimed."""

import importlib.util

import numpy as np
import pytest

from assay.cli import run
from assay.guard import llama_cpp_checks as checks
from assay.store import gguf, llama_cpp
from assay.store.artifact import build_model, open_artifact
from assay.store.export_artifact import export_artifact
from assay.store.gguf_header import read_gguf_header
from assay.testing.fault_injection import observe
from assay.testing.tiny_models import save_hf_folder, tiny_model
from assay.verdict import Outcome
from assay.zoo import catalogue
from tests.store.gguf.gguf_files import changed, made

needs_llama = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None,
                                 reason="llama.cpp is not installed: pip install llama-cpp-python")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Wide enough for blocks of 256."""
    return save_hf_folder(tmp_path_factory.mktemp("source") / "model", tiny_model(width=256, head_dim=64, hidden=512))


@pytest.fixture
def without_llama(monkeypatch):
    for module in (checks, llama_cpp):
        monkeypatch.setattr(module, "llama_cpp_installed", lambda: False)


def test_without_llama_cpp_a_file_is_proven_by_its_bytes_alone_and_that_is_said(source, tmp_path, capsys, without_llama):
    assert run(["export", str(source), "--to", "gguf", "--quant", "q8_0", "--out", str(tmp_path / "m.gguf")]) == 0
    shown = capsys.readouterr().out
    assert "UNPROVEN  llama.cpp: not loaded where it will run: llama-cpp-python is not installed (pip install 'assay[llama]')" in shown
    assert gguf.rounding_in(tmp_path / "m.gguf") == gguf.GGUF_ROUNDING["q8_0"]


def test_k_quants_are_llama_cpps_own_and_refused_without_it(source, tmp_path, capsys, without_llama):
    assert run(["export", str(source), "--to", "gguf", "--quant", "q4_k_m", "--out", str(tmp_path / "m.gguf")]) == 2
    assert "q4_k_m is made by llama.cpp itself, and llama-cpp-python is not installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "said"), [
    (("--to", "hf", "--quant", "q8_0"), "--quant q8_0 has no effect without --to gguf"),
    (("--to", "gguf", "--quant", "q8_0", "--dtype", "f16"), "--quant is for --to gguf, in the place of --dtype")])
def test_quant_is_for_gguf_and_instead_of_dtype(source, tmp_path, capsys, words, said):
    assert run(["export", str(source), *words, "--out", str(tmp_path / "m")]) == 2
    assert said in capsys.readouterr().err


def test_q5_1_is_read_as_the_gguf_package_reads_it(tmp_path):
    """llama.cpp falls back to it where rows are not whole blocks of 256."""
    import gguf as package

    made(tmp_path / "f16.gguf")
    name = "blk.0.attn_k.weight"
    values = np.random.default_rng(0).normal(size=read_gguf_header(tmp_path / "f16.gguf").tensors[name].shape).astype(np.float32)
    rows = package.quants.quantize(values, package.GGMLQuantizationType.Q5_1)
    file = changed(tmp_path / "f16.gguf", tmp_path / "m.gguf", replaced={name: (rows, "Q5_1")})
    tensors = gguf.read_gguf(file).tensors
    assert gguf.rounding_in(file) == gguf.GGUF_ROUNDING["q5_1"]
    bounds = gguf.tensor_rounding_in(file)
    assert bounds["blocks.0.attn.qkv.weight"] == gguf.TENSOR_ROUNDING["q5_1"] > bounds["blocks.1.attn.qkv.weight"]
    assert tensors["blocks.0.attn.qkv.weight"].isfinite().all()


@pytest.fixture(scope="module")
def heard(source, tmp_path_factory):
    """Answers of llama.cpp about a q8_0 file if it computed as Assay does."""
    artifact, file = open_artifact(source), tmp_path_factory.mktemp("file") / "m.gguf"
    export_artifact(artifact, "gguf", file, "q8_0")
    model, rounded = (build_model(one).float().eval() for one in (artifact, open_artifact(file)))
    reading = checks.planned_reading(artifact, artifact.tokenizer)
    said = checks.sample(rounded, [list(prompt) for prompt in reading.prompts], artifact.stops.stop_ids,
                         checks.Sampling(max_new=checks.SAID_TOKENS, temperature=0), graphed=False)
    found = {"texts": [artifact.tokenizer.encode(text) for text in reading.texts], "version": "0", "ends": list(reading.stops),
             "rows": [checks.token_logps(rounded, row).tolist() for row in reading.rows],
             "generations": [list(completion.ids) for completion in said]}
    return artifact, model, rounded, reading, found


def judged(heard, **other):
    artifact, model, rounded, reading, found = heard
    found = found | other
    return [checks.judge_ids(reading, artifact.tokenizer, found, "it"), checks.judge_surprise(reading, model, rounded, found, "q8_0", "it"),
            checks.judge_generations(reading, artifact, model, found, "q8_0", "it")]


def outcomes(verdicts):
    return [verdict.outcome for verdict in verdicts]


def test_what_computes_alike_is_proven(heard):
    assert outcomes(judged(heard)) == [Outcome.PROVEN] * 3


def test_another_token_a_deaf_stop_and_another_models_numbers_are_refuted(heard):
    found, reading = heard[4], heard[3]
    ids = judged(heard, texts=[*found["texts"][:-1], [*found["texts"][-1], 1]])[0]
    assert ids.outcome is Outcome.REFUTED
    assert "reads 1 of" in ids.reason
    assert "does not end a text at token" in judged(heard, ends=[])[0].reason
    assert reading.stops
    worse = judged(heard, rows=[[value - 0.2 for value in row] for row in found["rows"]])[1]
    assert worse.outcome is Outcome.REFUTED
    assert "not the source, rounded" in worse.reason
    noise = [[value + (1 if place % 2 else -1) for place, value in enumerate(row)] for row in found["rows"]]
    assert "computes another model of these bytes" in judged(heard, rows=noise)[1].reason
    unlikely = [[int(checks._logps(heard[1], [*prompt])[-1].argmin())] for prompt in reading.prompts]
    assert "says what the source would not" in judged(heard, generations=unlikely)[2].reason


@pytest.mark.slow
@needs_llama
@pytest.mark.parametrize("quant", ["q8_0", "q6_k", "q5_k_m", "q4_k_m"])
def test_a_quantised_export_is_opened_scored_and_continued_in_llama_cpp(source, tmp_path, capsys, quant):
    file = tmp_path / "m.gguf"
    assert run(["export", str(source), "--to", "gguf", "--quant", quant, "--out", str(file)]) == 0
    shown = capsys.readouterr().out
    for check in ("llama ids", "llama perplexity", "llama generations"):
        assert f"PROVEN    {check}: " in shown
    types = {tensor.type for tensor in read_gguf_header(file).tensors.values()}
    assert {"q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k_m": "Q5_K", "q4_k_m": "Q4_K"}[quant] in types
    assert run(["prove", str(file), "--against", str(source), "--expect", "same"]) == 0
    assert "PROVEN    llama generations: " in capsys.readouterr().out


@pytest.mark.slow
@needs_llama
@pytest.mark.parametrize("name", ["llama.cpp splits numbers", "another model's file in llama.cpp"])
def test_faults_that_show_in_llama_cpp_are_caught(name):
    sighting = observe(catalogue()[name])
    assert sighting.caught, sighting.planted
    assert not sighting.false_alarm, sighting.clean


@pytest.mark.slow
@needs_llama
def test_a_file_that_llama_cpp_does_not_open_is_refuted(source, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(64))
    verdicts = checks.check_in_llama_cpp(tmp_path / "m.gguf", open_artifact(source))
    assert [verdict.check for verdict in verdicts] == ["llama.cpp"]
    assert "does not run m.gguf" in verdicts[0].reason
