"""Compressed-tensors folders: codes and scales stand for the source's weights, and what is not as the config says is refused."""

import json
from dataclasses import replace

import pytest
import torch

from assay.cli import run as cli_run
from assay.errors import ArtifactError, UsageError
from assay.guard.compressed_checks import check_compressed, check_rounding, judge_rounded_texts
from assay.guard.llama_cpp_checks import planned_reading
from assay.model.families import hf_layout, to_foreign
from assay.store.artifact import open_artifact
from assay.store.checkpoint import write_hallmark
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
from assay.verdict import Outcome, proven

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


@pytest.mark.parametrize("change", [
    lambda said, weights: weights.update(symmetric=False), lambda said, weights: weights.update(actorder="group"),
    lambda said, weights: weights.update(num_bits=3), lambda said, weights: said.update(kv_cache_scheme={"num_bits": 8}),
    lambda said, weights: said.update(sparsity_config={"format": "dense"}), lambda said, weights: said.update(quantization_status="frozen"),
    lambda said, weights: said.update(format="dense"), lambda said, weights: said["config_groups"].update(group_1={}),
    lambda said, weights: said["config_groups"]["group_0"].update(targets=["re:.*q_proj"]),
])
def test_another_kind_of_quantisation_is_refused_by_name(change):
    said = quantization_config(COMPRESSED["fp8"], None)
    plain_weights({"quantization_config": said}, {}, "here")
    change(said, said["config_groups"]["group_0"]["weights"])
    with pytest.raises(UsageError, match="does not read"):
        plain_weights({"quantization_config": said}, {}, "here")


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda held, said: held.update({f"{LAYER}.weight_shape": torch.tensor([1, 2])}), "its weight_shape says"),
    (lambda held, said: held.pop(f"{LAYER}.weight_shape"), "its weight_shape says nothing"),
    (lambda held, said: said["config_groups"]["group_0"]["weights"].update(group_size=0), "names the group size 0"),
    (lambda held, said: said["config_groups"]["group_0"]["weights"].update(group_size=40), "are no groups of 40"),
    (lambda held, said: said.update(ignore="lm_head"), "expected a list of layers"),
])
def test_groups_and_shapes_of_packed_codes_must_be_those_of_the_config(change, sentence, source):
    held, said = compressed_weights(to_foreign(hf_layout(source.config), source.tensors), COMPRESSED["w4a16"], torch.float32)
    change(held, said)
    with pytest.raises(ArtifactError, match=sentence):
        plain_weights({"quantization_config": said}, held, "here")


@pytest.mark.parametrize("ignored", [LAYER, "re:.*layers.0.mlp.down.*"])
def test_a_layer_that_the_config_leaves_out_is_read_as_it_is(ignored, source):
    plain = to_foreign(hf_layout(source.config), source.tensors)
    held, said = compressed_weights(plain, COMPRESSED["fp8"], torch.float32)
    del held[f"{LAYER}.weight_scale"]
    held[f"{LAYER}.weight"] = plain[f"{LAYER}.weight"]
    said["ignore"].append(ignored)
    assert torch.equal(plain_weights({"quantization_config": said}, held, "here")[f"{LAYER}.weight"], plain[f"{LAYER}.weight"])


# ---------------------------------------------------------------- how far rounding may lead


def moved_source(source, by):
    """The source with one weight of a layer elsewhere: `by` takes its row and says how far."""
    [name] = [ours for ours, pieces in hf_layout(source.config).items() if [one.name for one in pieces] == [f"{LAYER}.weight"]]
    matrix = source.tensors[name].clone()
    place = int(matrix[0, :8].abs().argmax())
    matrix[0, place] += by(matrix[0], matrix[0, place])
    return replace(source, tensors={**source.tensors, name: matrix})


@pytest.mark.parametrize(("by", "outcome"), [(0.02, Outcome.PROVEN), (1.3, Outcome.REFUTED)])
def test_a_weight_more_than_half_a_step_from_the_sources_is_refuted(by, outcome, written, source):
    """In steps by hand: of integers the largest weight over the largest code, of 8-bit floats an eighth of the weight."""
    scheme, where = written
    steps = {"fp8": lambda row, weight: weight.abs() / 8, "w8a8": lambda row, weight: row.abs().max() / 127,
             "w4a16": lambda row, weight: row[:8].abs().max() / 7}[scheme.name]
    found = open_artifact(where)
    verdict = check_rounding(found, moved_source(source, lambda row, weight: by * steps(row, weight)), scheme)
    if by < 0.1:  # where the weight lies within its step is chance: near is what the codes stand for
        due = plain_weights(found.raw.fields, found.raw.tensors, "here")[f"{LAYER}.weight"]
        verdict = check_rounding(found, moved_source(source, lambda row, weight: due[0, int(row[:8].abs().argmax())] - weight), scheme)
    assert verdict.outcome is outcome, verdict
    assert outcome is Outcome.PROVEN or "not the source's, rounded" in verdict.reason


def test_codes_that_leave_half_of_their_range_unused_are_refuted(source, tmp_path):
    export_artifact(source, "w8a8", tmp_path / "m", "float32")
    found = open_artifact(tmp_path / "m")
    held, plain = found.raw.tensors, to_foreign(hf_layout(source.config), source.tensors)
    scales = held[f"{LAYER}.weight_scale"] * 2
    wide = {f"{LAYER}.weight": (plain[f"{LAYER}.weight"] / scales).round().to(torch.int8), f"{LAYER}.weight_scale": scales}
    verdict = check_rounding(replace(found, raw=replace(found.raw, tensors={**held, **wide})), source, COMPRESSED["w8a8"])
    assert verdict.outcome is Outcome.REFUTED
    assert "leave a part of their range unused" in verdict.reason
    for ignored in (["re:.*"], ["lm_head", LAYER]):  # all of it, or one of its layers, is not in codes
        said = found.raw.fields | {"quantization_config": found.raw.fields["quantization_config"] | {"ignore": ignored}}
        verdict = check_rounding(replace(found, raw=replace(found.raw, fields=said)), source, COMPRESSED["w8a8"])
        assert verdict.outcome is Outcome.REFUTED
        assert "are not in codes" in verdict.reason


def test_a_model_that_reads_and_says_otherwise_is_refuted_by_its_texts(source):
    sure, other = tiny_model(), tiny_model()
    with torch.no_grad():
        sure.embed.weight.mul_(8)
        other.embed.weight.mul_(8)
        other.norm.weight.neg_()  # the likeliest token is the unlikeliest now
    reading = planned_reading(source, source.tokenizer)
    assert [verdict.outcome for verdict in judge_rounded_texts(reading, source, sure, sure, COMPRESSED["fp8"])] == [Outcome.PROVEN] * 2
    assert [verdict.outcome for verdict in judge_rounded_texts(reading, source, sure, other, COMPRESSED["fp8"])] == [Outcome.REFUTED] * 2


def test_models_whose_layers_are_no_linear_ones_are_refused(tmp_path):
    source = open_artifact(save_hf_folder(tmp_path / "m", tiny_model("gpt2")))
    with pytest.raises(UsageError, match="gpt2"):
        export_artifact(source, "fp8", tmp_path / "out")


def test_the_verb_writes_and_proves_a_folder(tmp_path, capsys):
    write_hallmark(save_model(tmp_path / "m", tiny_model()), [proven("whole", "in this test")])
    assert cli_run(["export", str(tmp_path / "m"), "--to", "fp8", "--out", str(tmp_path / "fp8"), "--json"]) == 0
    found = {verdict["check"]: verdict["outcome"] for verdict in json.loads(capsys.readouterr().out)["verdicts"]}
    assert {found[name] for name in ("rounding", "perplexity", "greedy texts", "lineage")} == {"PROVEN"}
    assert (tmp_path / "fp8" / "hallmark.json").exists()
    assert [file.name for file in (tmp_path / "fp8").glob("*.safetensors")] == ["model.safetensors"]  # vLLM opens all that it finds
    assert cli_run(["inspect", str(tmp_path / "fp8")]) == 0
    assert "PROVEN" in capsys.readouterr().out
