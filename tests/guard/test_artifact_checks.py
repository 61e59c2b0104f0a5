"""Exports are their source, rounded; merges hold the adapter once; live parameters are the bytes of the files."""

from pathlib import Path

import pytest
import torch

from assay.guard.artifact_checks import check_loaded
from assay.guard.proof_subject import ProofSubject
from assay.guard.resume_checks import check_kept_checkpoints, check_newest_checkpoint
from assay.store.artifact import open_artifact
from assay.store.checkpoint import step_folder
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import examine_folder, save_adapter, save_model, tiny_model
from assay.verdict import Outcome, Verdict


def verdict(check: str, verdicts: list[Verdict]) -> Verdict:
    return next(v for v in verdicts if v.check == check)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_a_merge_is_rounded_once_to_the_dtype_asked_for(tmp_path: Path, dtype: str, base_dtype: torch.dtype):
    base = save_model(tmp_path / "base", tiny_model().to(base_dtype), dtype=base_dtype).folder
    adapter = save_adapter(tmp_path / "adapter", base).folder
    bound = export_artifact(open_artifact(adapter), "merged", tmp_path / "merged", dtype)
    found = verdict("lineage", examine_folder(tmp_path / "merged", against=str(adapter), expect="same", bound=bound))
    assert found.outcome is Outcome.PROVEN, found.reason


def test_an_export_is_the_source_rounded_bit_for_bit(tmp_path: Path):
    source = save_model(tmp_path / "source", tiny_model()).folder
    other = tiny_model()
    with torch.no_grad():
        other.get_parameter("norm.weight")[3] += 1e-2  # less than the answers' bound for bfloat16 can see
    bound = export_artifact(open_artifact(save_model(tmp_path / "other", other).folder), "hf", tmp_path / "export", "bfloat16")
    (tmp_path / "export" / "manifest.json").unlink()
    (tmp_path / "export" / "probes.safetensors").unlink()
    found = verdict("lineage", examine_folder(tmp_path / "export", against=str(source), expect="same", bound=bound))
    assert found.outcome is Outcome.REFUTED
    assert "norm.weight" in found.reason


def test_every_live_parameter_is_accounted_for_in_adapters_with_biases(tmp_path: Path):
    base = save_model(tmp_path / "base", tiny_model("qwen2")).folder
    artifact = open_artifact(save_adapter(tmp_path / "adapter", base).folder)
    assert check_loaded(ProofSubject(artifact.raw, artifact)).outcome is Outcome.PROVEN


def test_check_loaded_sees_a_parameter_that_changed_in_shared_memory(tmp_path: Path):
    artifact = open_artifact(save_model(tmp_path / "checkpoint", tiny_model()).folder)
    subject = ProofSubject(artifact.raw, artifact)
    with torch.no_grad():
        subject.model.get_parameter("norm.weight")[0] += 1
    assert "norm.weight" in check_loaded(subject).reason
    assert check_loaded(subject).outcome is Outcome.REFUTED


@pytest.mark.parametrize("family", ["llama3", "gpt2", "qwen3"])
def test_a_model_of_short_context_is_asked_the_same_question_twice(tmp_path: Path, family: str):
    found = verdict("generations", examine_folder(save_model(tmp_path / "checkpoint", tiny_model(family, max_length=48)).folder))
    assert found.outcome is Outcome.PROVEN, found.reason


def test_an_empty_run_has_nothing_to_resume(tmp_path: Path):
    assert check_newest_checkpoint(tmp_path).outcome is Outcome.UNPROVEN
    assert check_kept_checkpoints([]).outcome is Outcome.UNPROVEN


def test_a_run_whose_only_checkpoint_is_bad_says_that_none_is_left(tmp_path: Path):
    folder = save_model(step_folder(tmp_path, 1), tiny_model(), trainer={"step": 1}).folder
    assert check_newest_checkpoint(tmp_path).outcome is Outcome.PROVEN
    (folder / "config.json").unlink()
    found = check_newest_checkpoint(tmp_path)
    assert found.outcome is Outcome.REFUTED
    assert "none to resume from" in found.reason
