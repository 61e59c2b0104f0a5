"""Steering: a vector moves the model towards the chosen answers of pairs that made no part of it, costs what is said, and is gone."""

import contextlib
import json
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
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{n} comes before {n + 1}."}) + "\n" for n in range(12)))
    return folder


def asked(home: Path, out: Path, *more: str) -> list[str]:
    return ["steer", str(home / "model"), "--data", str(home / "pairs.jsonl"), "--out", str(out), "--device", "cpu", "--text",
            str(home / "text.jsonl"), *more]


def said(out: Path) -> dict[str, str]:
    return {verdict["check"]: verdict["outcome"] for verdict in json.loads((out / "steering.json").read_text())["verdicts"]}


def test_a_vector_moves_towards_the_chosen_and_leaves_nothing(home: Path, tmp_path: Path):
    assert assay(asked(home, tmp_path / "a", "--scale", "0.5", "--max-cost", "1")) == 0
    assert said(tmp_path / "a") == {"steering": "PROVEN", "steering cost": "PROVEN", "passing": "PROVEN"}
    assert assay(asked(home, tmp_path / "b", "--scale", "-0.5", "--max-cost", "1")) == 3
    assert said(tmp_path / "b")["steering"] == "REFUTED"
    assert assay(asked(home, tmp_path / "c", "--scale", "50", "--max-cost", "0.01")) == 3
    assert said(tmp_path / "c")["steering cost"] == "REFUTED"


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
