"""Each recipe once with its real proofs: every save and every export is judged by a fresh process, which knows the bytes alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.outcome import RunOutcome
from assay.recipes.distill import distill
from assay.recipes.grpo import grpo
from assay.recipes.options import Distill, Pretrain, Sft
from assay.recipes.pretrain import pretrain
from assay.recipes.sft import sft
from assay.store.checkpoint import open_checkpoint, step_folders
from assay.store.ledger import Ledger
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import tiny_corpus
from assay.verdict import Outcome
from tests.recipes.sums import options


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proofs")
    save_model(folder / "base", tiny_model("llama"))
    sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return folder


@pytest.fixture(scope="module")
def parent(knows_sums: Path) -> Path:
    """A checkpoint that can add, more or less."""
    return knows_sums


def tuning(home: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(home / "base"), "data": (str(home / "sums.jsonl"),), "out": str(out), "max_length": 32, "batch_tokens": 256,
            "max_steps": 1, "learning_rate": 3e-3, "held_out": 0.1, "probe_samples": 1, "device": "cpu", **more}


def require_proven(found: RunOutcome, places: list[str]) -> None:
    """Nothing was left to chance: all that was saved was sent to a proof, and each came back."""
    assert found.exit_code == 0, str(found)
    assert found.model == found.folder / "model"
    saved = step_folders(found.folder / "checkpoints")
    for artifact in (*saved, *(found.folder / place for place in places)):
        assert open_checkpoint(artifact).hallmark is not None, artifact.name
    proofs = {event["checkpoint"]: event["outcome"] for event in Ledger(found.folder / "ledger.jsonl").events() if event["kind"] == "proof"}
    assert proofs == {checkpoint.name: "PROVEN" for checkpoint in saved}
    assert len(proofs) == 2  # before the first step, and after it
    (witness,) = [verdict for verdict in found.verdicts if verdict.check == "witness"]
    assert witness.outcome is Outcome.PROVEN, str(witness)
    assert witness.evidence["steps"] == [1]


@pytest.mark.parametrize(("lora_r", "places"), [(0, ["model"]), (4, ["adapter", "model"])])
def test_sft(lora_r: int, places: list[str], home: Path, tmp_path: Path):
    require_proven(sft(Sft(**tuning(home, tmp_path / "run", lora_r=lora_r)), lambda _: None), places)


def test_distill(home: Path, parent: Path, tmp_path: Path):
    config = Distill(**tuning(home, tmp_path / "run", teacher=str(parent)))
    require_proven(distill(config, lambda _: None), ["model"])


def test_pretrain(tmp_path: Path):
    config = Pretrain(corpus=str(tiny_corpus().folder), out=str(tmp_path / "run"), depth=1, tokens=256, max_length=16, batch_tokens=256,
                      warmup_steps=0,
                      eval_documents=4, probe_samples=1, device="cpu")
    require_proven(pretrain(config, lambda _: None), ["model"])


def test_grpo(parent: Path, tmp_path: Path):
    found = grpo(options(parent, tmp_path / "run", max_steps=1, probe_samples=1), lambda _: None)
    require_proven(found, ["model"])
    assert {verdict.check for verdict in found.verdicts} >= {"gain", "score", "hashes"}
