"""Compressed-tensors folders: codes and scales stand for the source's weights, and what is not as the config says is refused."""

import json

import pytest
import torch

from assay.cli import run as cli_run
from assay.errors import ArtifactError, UsageError
from assay.guard.compressed_checks import check_compressed
from assay.model.families import hf_layout, to_foreign
from assay.store.artifact import open_artifact
from assay.store.compressed_tensors import (
    COMPRESSED,
    compressed_weights,
    packed_nibbles,
    plain_weights,
    quantization_config,
    rounded_codes,
    unpacked_nibbles,
)
from assay.store.export_artifact import export_artifact
from assay.store.safetensors_files import read_tensors
from assay.testing.tiny_models import save_hf_folder, save_model, tiny_model
from assay.verdict import Outcome

LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_artifact(save_hf_folder(tmp_path_factory.mktemp("source") / "m", tiny_model()))


@pytest.fixture(scope="module", params=sorted(COMPRESSED))
def written(request, source, tmp_path_factory):
    where = tmp_path_factory.mktemp("written") / request.param
    export_artifact(source, request.param, where, "bfloat16")
    return COMPRESSED[request.param], where


def test_what_is_written_reads_as_the_source_rounded(written, source):
    scheme, where = written
    assert [verdict.outcome for verdict in check_compressed(where, source)] == [Outcome.PROVEN] * 3
    due, found = to_foreign(hf_layout(source.config), source.tensors), open_artifact(where)
    said = json.loads((where / "config.json").read_text())["quantization_config"]
    assert (said["format"], said["quantization_status"]) == (scheme.format, "compressed")
    stored = read_tensors(where / "model.safetensors")
    name = f"{LAYER}.weight_packed" if scheme.name == "w4a16" else f"{LAYER}.weight"
    assert stored[name].dtype == {"fp8": torch.float8_e4m3fn, "w8a8": torch.int8, "w4a16": torch.int32}[scheme.name]
    matrix = plain_weights(found.raw.fields, stored, "here")[f"{LAYER}.weight"]
    assert float((matrix - due[f"{LAYER}.weight"]).norm() / due[f"{LAYER}.weight"].norm()) < {"fp8": 0.04, "w8a8": 0.02, "w4a16": 0.15}[
        scheme.name]


def test_the_first_of_eight_codes_lies_in_the_lowest_bits():
    assert packed_nibbles(torch.tensor([[-8.0, 7, 0, 0, 0, 0, 0, 0]])).tolist() == [[0x888888F0 - 2**32]]
    codes = torch.randint(-8, 8, (3, 16)).float()
    assert torch.equal(unpacked_nibbles(packed_nibbles(codes)), codes)


def test_codes_are_the_nearest_ones():
    """By hand: a row whose largest weight is 448 has the scale 1, and between 16 and 18, the neighbours of 17, the even one is taken."""
    codes, scales = rounded_codes(torch.tensor([[448.0, 17.0, -3.1, 0.0]]), COMPRESSED["fp8"], None, torch.float32)
    assert codes.tolist() == [[448.0, 16.0, -3.0, 0.0]]
    assert scales.tolist() == [[1.0]]
    codes, scales = rounded_codes(torch.tensor([[254.0, 3.0, -1.1, 5.0]]), COMPRESSED["w8a8"], None, torch.float32)
    assert (codes.tolist(), scales.tolist()) == ([[127.0, 2.0, -1.0, 2.0]], [[2.0]])


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda held: {f"{LAYER}.weight": held[f"{LAYER}.weight"].float()}, "not quantised as stated"),
    (lambda held: {f"{LAYER}.weight_scale": held[f"{LAYER}.weight_scale"].T}, "transposed"),
    (lambda held: {f"{LAYER}.weight_scale": None}, "lost in the export"),
    (lambda held: {f"{LAYER}.weight_scale": held[f"{LAYER}.weight_scale"] * 0}, "never filled"),
    (lambda held: {"model.norm.weight_scale": torch.ones(1)}, "belongs to no layer"),
])
def test_a_layer_that_is_not_as_the_config_says_is_refused(change, sentence, source):
    held, said = compressed_weights(to_foreign(hf_layout(source.config), source.tensors), COMPRESSED["fp8"], torch.float32)
    changed = {name: tensor for name, tensor in (held | change(held)).items() if tensor is not None}
    with pytest.raises(ArtifactError, match=sentence):
        plain_weights({"quantization_config": said}, changed, "here")


def test_another_kind_of_quantisation_is_refused_by_name():
    said = quantization_config(COMPRESSED["fp8"], None)
    said["config_groups"]["group_0"]["weights"]["symmetric"] = False
    with pytest.raises(UsageError, match="does not read"):
        plain_weights({"quantization_config": said}, {}, "here")


def test_models_whose_layers_are_no_linear_ones_are_refused(tmp_path):
    source = open_artifact(save_hf_folder(tmp_path / "m", tiny_model("gpt2")))
    with pytest.raises(UsageError, match="gpt2"):
        export_artifact(source, "fp8", tmp_path / "out")


def test_the_verb_writes_and_proves_a_folder(tmp_path, capsys):
    save_model(tmp_path / "m", tiny_model())
    assert cli_run(["export", str(tmp_path / "m"), "--to", "fp8", "--out", str(tmp_path / "fp8"), "--json"]) == 0
    found = {verdict["check"]: verdict["outcome"] for verdict in json.loads(capsys.readouterr().out)["verdicts"]}
    assert {found[name] for name in ("rounding", "perplexity", "greedy texts", "lineage")} == {"PROVEN"}
    assert (tmp_path / "fp8" / "hallmark.json").exists()
    assert [file.name for file in (tmp_path / "fp8").glob("*.safetensors")] == ["model.safetensors"]  # vLLM opens all that it finds
    assert cli_run(["inspect", str(tmp_path / "fp8")]) == 0
    assert "PROVEN" in capsys.readouterr().out
