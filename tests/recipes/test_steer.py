"""Steering: a vector moves the model towards the chosen answers of pairs that made no part of it, costs what is said, and is gone."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli import run as assay
from assay.editing.steering import SteeringVector, read_steering, steered
from assay.errors import ArtifactError
from assay.recipes import steer as recipe
from assay.store.artifact import build_model, open_artifact
from assay.testing.fault_injection import swap
from assay.testing.tiny_models import save_model, tiny_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chosen answers are written in one kind of letters, rejected ones in another."""
    folder = tmp_path_factory.mktemp("steer")
    save_model(folder / "model", tiny_model("llama"))
    rows = [{"prompt": f"{n}: ", "chosen": "aa bb"[n % 2:] * 3, "rejected": "XX ZZ"[n % 2:] * 3} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"XX ZZ {n}"}) + "\n" for n in range(12)))
    return folder


def asked(home: Path, out: Path, *more: str) -> list[str]:
    return ["steer", str(home / "model"), "--data", str(home / "pairs.jsonl"), "--out", str(out), "--device", "cpu", "--text",
            str(home / "text.jsonl"), *more]


def said(out: Path) -> dict[str, str]:
    return {verdict["check"]: verdict["outcome"] for verdict in json.loads((out / "steering.json").read_text())["verdicts"]}


def test_a_vector_moves_towards_the_chosen_and_leaves_nothing(home: Path, tmp_path: Path):
    assert assay(asked(home, tmp_path / "a", "--scale", "0.5", "--max-cost", "1")) == 0
    assert said(tmp_path / "a") == dict.fromkeys(("statistics", "contrast", "steering", "steering cost", "passing"), "PROVEN")
    assert assay(asked(home, tmp_path / "b", "--scale", "-0.5", "--max-cost", "1")) == 3
    assert said(tmp_path / "b")["steering"] == "REFUTED"
    assert assay(asked(home, tmp_path / "c", "--scale", "50", "--max-cost", "0.01")) == 3
    assert said(tmp_path / "c")["steering cost"] == "REFUTED"


def test_a_vector_that_is_not_the_pairs_is_seen(home: Path, tmp_path: Path):
    made = recipe.contrast_vector
    with swap(recipe, "contrast_vector", lambda *given: replace(right := made(*given), vector=3 * right.vector)):
        assert assay(asked(home, tmp_path / "run", "--scale", "0.15", "--max-cost", "1")) == 3
    assert said(tmp_path / "run")["contrast"] == "REFUTED"


def test_a_vector_that_stays_is_seen(home: Path, tmp_path: Path):
    with swap(recipe, "steered", lambda model, steering, scale, digest: kept(model, steering)):
        assert assay(asked(home, tmp_path / "run", "--max-cost", "1")) == 3
    assert said(tmp_path / "run")["passing"] == "REFUTED"


def kept(model: Any, steering: SteeringVector) -> Any:
    """The hook is never taken away."""
    model.blocks[steering.layer].register_forward_hook(lambda _, __, output: output + steering.vector)
    return contextlib.nullcontext(model)


def test_a_vector_belongs_to_one_model(home: Path, tmp_path: Path):
    assert assay(asked(home, tmp_path / "a", "--max-cost", "9")) in (0, 3)
    artifact, vector = open_artifact(home / "model"), read_steering(tmp_path / "a")
    model, tokens = build_model(artifact).eval(), torch.arange(8)[None]
    plain = model(tokens)
    with pytest.raises(ArtifactError, match="another model's directions"), steered(model, vector, 1.0, "f" * 64):
        pass
    with contextlib.suppress(RuntimeError), steered(model, vector, 1.0, artifact.digest):
        assert not torch.equal(model(tokens), plain)
        raise RuntimeError
    assert torch.equal(model(tokens), plain)
    deeper = SteeringVector(vector.parent, 9, vector.vector)
    with pytest.raises(ArtifactError, match="of layer 9"), steered(model, deeper, 1.0, vector.parent):
        pass
    (tmp_path / "odd").write_bytes(b"no")
    with pytest.raises(ArtifactError, match="expected what assay steer wrote"):
        read_steering(tmp_path / "odd")


# ---------------------------------------------------------------- in use


@pytest.fixture(scope="module")
def vector(home: Path) -> Path:
    assert assay(asked(home, home / "vector", "--scale", "0.5", "--max-cost", "1")) == 0
    return home / "vector"


def sampled(home: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert assay(["sample", str(home / "model"), "--prompt", "3: ", "--raw", "--n", "3", "--max-new-tokens", "12", "--device", "cpu",
                  "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_samples_are_draws_of_the_steered_model_and_say_so(home: Path, vector: Path, capsys: pytest.CaptureFixture[str]):
    """What is drawn is checked against the steered model by the verb itself; here, against a pass with the vector added by hand."""
    plain, steered_ones, none = (sampled(home, capsys, *more) for more in ((), ("--steer", str(vector)), ("--steer", f"{vector}:0")))
    assert [row["ids"] for row in none] == [row["ids"] for row in plain] != [row["ids"] for row in steered_ones]
    assert "steering" not in plain[0]
    assert steered_ones[0]["steering"] == {"path": str(vector), "layer": 1, "scale": 0.5}
    model, said = build_model(open_artifact(home / "model")).eval(), steered_ones[0]
    tokens = torch.tensor([said["prompt_ids"] + said["ids"]])
    with torch.no_grad(), steered(model, read_steering(vector), 0.5, open_artifact(home / "model").digest):
        logp = (model(tokens)[0, :-1] / 0.7).log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
    assert logp[len(said["prompt_ids"]) - 1:].tolist() == pytest.approx(said["logprobs"], abs=1e-4)


def test_what_was_measured_is_printed_and_what_was_not_is_said(home: Path, vector: Path, tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]):
    sampled(home, capsys)
    for more, words in ((str(vector), "PROVEN steering: chosen over rejected"), (f"{vector}:4", "measured at scale 0.5 and used at 4"),
                        (str(bare := tmp_path / "bare"), "neither its effect nor its cost is known")):
        if not bare.exists():
            bare.mkdir()
            (bare / "steering.safetensors").write_bytes((vector / "steering.safetensors").read_bytes())
        assert assay(["sample", str(home / "model"), "--raw", "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu", "--steer",
                      more]) == 0
        assert words in capsys.readouterr().out


def test_a_vector_of_other_weights_a_wrong_scale_and_other_verbs_are_refused(home: Path, vector: Path, tmp_path: Path,
                                                                             capsys: pytest.CaptureFixture[str]):
    save_model(tmp_path / "other", tiny_model("llama", 3))
    for command, words in ((["sample", str(tmp_path / "other"), "--steer", str(vector)], "another model's directions mean nothing here"),
                           (["sample", str(home / "model"), "--steer", f"{vector}:much"], "'much' is no number"),
                           (["sample", str(home / "model"), "--steer", str(tmp_path / "none")], "none: no such file"),
                           (["probe", str(vector)], "a steering vector, which is no model")):
        assert assay([*command, "--device", "cpu", *(["--prompt", "a", "--raw"] if command[0] == "sample" else [])]) in (2, 3, 4)
        assert words in capsys.readouterr().err


def test_a_conversation_is_steered_beside_its_plain_twin(home: Path, vector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch):
    model, saved = str(home / "model"), tmp_path / "talk.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello\n/save {saved}\n"))
    assert assay(["chat", model, "--against", model, "--steer", f"{vector}:30", "--temperature", "0", "--max-new-tokens", "8",
                  "--max-length", "64", "--device", "cpu"]) == 0
    steered_one, plain = (json.loads(line) for line in saved.read_text().splitlines())
    assert steered_one["steering"]["scale"] == 30
    assert "steering" not in plain
    assert steered_one["messages"] != plain["messages"]
    assert "measured at scale 0.5 and used at 30" in capsys.readouterr().err
