"""A squeezed file is opened, shown and proven as every other form is; one that is not what it says is refuted by name."""

import json

import pytest
import torch

from assay.cli import run as assay
from assay.guard.proof import ProofRequest, examine_artifact
from assay.store import assayz as format
from assay.store.artifact import build_model, open_artifact
from assay.store.assayz import read_assayz, write_assayz
from assay.testing.tiny_models import nudge, save_model, tiny_model
from assay.verdict import Outcome

TOKENS = torch.arange(30)[None]


@pytest.fixture
def squeezed(tmp_path):
    """(the file, the folder it was made of)"""
    folder = save_model(tmp_path / "model", nudge(tiny_model("mixed"), 0.1)).folder
    write_assayz(open_artifact(folder), tmp_path / "model.assayz", 80_000)
    return tmp_path / "model.assayz", folder


def verdicts(path, against=None):
    return {verdict.check: verdict for verdict in examine_artifact(ProofRequest(str(path), None if against is None else str(against)))}


def test_it_opens_as_a_model(squeezed):
    file, _ = squeezed
    opened, read = open_artifact(file), read_assayz(file)
    assert read.facts["levels"] < 127
    assert opened.config == read.config
    assert all(torch.equal(tensor, read.tensors[name]) for name, tensor in build_model(opened).state_dict().items())
    assert opened.tokenizer.digest == read.tokenizer.digest


def test_in_a_fresh_process_it_is_proven_against_its_source(squeezed, capsys):
    file, source = squeezed
    assert assay(["prove", str(file), "--against", str(source), "--strict"]) == 0
    said = capsys.readouterr().out
    assert "each of its 5 sections has the sha256 of its sealed header" in said
    assert f"rounded to {read_assayz(file).facts['levels']} levels, to the last bit" in said
    assert "model.assayz: PROVEN" in said


def test_alone_it_is_whole_and_finite_but_not_proven(squeezed):
    found = verdicts(squeezed[0])
    assert {check for check, one in found.items() if one.outcome is Outcome.PROVEN} == {
        "whole", "architecture", "hashes", "loaded", "values", "fields"}
    assert not any(one.outcome is Outcome.REFUTED for one in found.values())
    assert f"made of the weights {open_artifact(squeezed[1]).digest[:12]}" in found["lineage"].reason


def test_against_other_weights_it_is_refuted(squeezed, tmp_path):
    other = save_model(tmp_path / "other", nudge(tiny_model("mixed"), 0.1, seed=1)).folder
    found = verdicts(squeezed[0], other)["lineage"]
    assert found.outcome is Outcome.REFUTED
    assert "its header names the weights" in found.reason


@pytest.mark.parametrize(("broken", "name"), [("blocks.1.attn.mix.weight", "blocks.1.attn.mix.weight"),
                                              ("blocks.2.attn.gate.weight", "blocks.2.attn.gate.weight")])
def test_a_tensor_that_rounding_did_not_make_of_the_source_is_named(squeezed, tmp_path, broken, name):
    """The header tells the truth about where it comes from; one tensor went astray on the way."""
    artifact = open_artifact(squeezed[1])
    artifact.tensors[broken] = artifact.tensors[broken] * 1.02
    write_assayz(artifact, tmp_path / "astray.assayz", 80_000)
    found = verdicts(tmp_path / "astray.assayz", squeezed[1])["lineage"]
    assert (found.outcome, found.evidence["tensors"]) == (Outcome.REFUTED, [name])


def test_damage_is_refused_by_prove_and_inspect(squeezed, capsys):
    file, source = squeezed
    data = bytearray(file.read_bytes())
    data[-50] ^= 4
    file.write_bytes(data)
    assert verdicts(file, source)["whole"].outcome is Outcome.REFUTED
    assert assay(["inspect", str(file)]) == 3
    assert "the bytes of 'matrices' are not those that were written" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refuted(squeezed, tmp_path, monkeypatch):
    """No file of ours can hold one: here the reader lets it through."""
    whole = format._read_vectors
    monkeypatch.setattr(format, "_read_vectors", lambda *given: {name: t * float("nan") for name, t in whole(*given).items()})
    assert "NaN or infinite values" in verdicts(squeezed[0])["values"].reason


def test_inspect_shows_what_it_holds(squeezed, capsys):
    file, source = squeezed
    assert assay(["inspect", str(file), "--json"]) == 0
    facts, levels = json.loads(capsys.readouterr().out), read_assayz(file).facts["levels"]
    assert (facts["kind"], facts["architecture"]["family"], facts["bytes"]) == ("squeezed", "assay", file.stat().st_size)
    assert facts["tensors"]["blocks.0.attn.gate.weight"] == {"dtype": f"±{levels}", "shape": [4, 64]}
    assert facts["tensors"]["embed.weight"]["dtype"] == f"±{min(127, 2 * levels)}"
    assert facts["tensors"]["blocks.2.attn.mix.weight"] == {"dtype": "F16", "shape": [2]}
    assert facts["parameters"] == sum(t.numel() for t in read_assayz(file).tensors.values())
    assert facts["lineage"]["source"] == f"weights {open_artifact(source).digest[:12]}"
    assert assay(["inspect", str(file), "--tensors"]) == 0
    assert "blocks.1.mlp.down.weight" in capsys.readouterr().out
