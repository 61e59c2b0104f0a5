"""Exports are their source, rounded; merges hold the adapter once; live parameters are the bytes of the files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.cli import run as assay
from assay.errors import UsageError
from assay.guard import proof
from assay.guard.artifact_checks import check_loaded, check_tokenizer
from assay.guard.proof_subject import ProofSubject
from assay.guard.resume_checks import check_kept_checkpoints, check_newest_checkpoint
from assay.guard.tokenizer_comparison import compare_tokenizers
from assay.model.tokenizer import Tokenizer
from assay.store import export_artifact as export_module
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint, step_folder, write_hallmark
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import examine_folder, save_adapter, save_model, tiny_model, tiny_tokenizer
from assay.verdict import Outcome, Verdict, proven


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


@pytest.mark.parametrize(("empty", "outcome"), [("mlp.up.bias", Outcome.PROVEN), ("mlp.down.bias", Outcome.PROVEN),
                                                ("mlp.up.weight", Outcome.REFUTED), ("mlp.down.weight", Outcome.REFUTED)])
def test_an_expert_without_weights_is_a_hole_and_one_without_biases_is_not(tmp_path: Path, empty: str, outcome: Outcome):
    """gpt-oss has one tensor for all experts' matrices, and one for all their biases, which begin at 0."""
    model = tiny_model("gpt_oss")
    assert model.config.experts is not None
    with torch.no_grad():
        parameter = model.get_parameter(f"blocks.1.{empty}")
        parameter.chunk(model.config.experts.count)[-1].zero_()
        if empty.endswith("bias"):
            parameter.zero_()
    found = verdict("values", examine_folder(save_model(tmp_path / "checkpoint", model).folder))
    assert found.outcome is outcome, found.reason


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


@pytest.mark.parametrize(("kept", "outcome"), [(0.16, Outcome.PROVEN), (0.0, Outcome.REFUTED)])
def test_a_model_that_was_trained_hard_is_its_parents_without_a_manifest_too(tmp_path: Path, kept: float, outcome: Outcome):
    parent, child, other = tiny_model(), tiny_model(), tiny_model(seed=5)
    with torch.no_grad():
        for name, parameter in child.named_parameters():
            if parameter.dim() == 2:
                noise = other.get_parameter(name) * parameter.norm() / other.get_parameter(name).norm()
                parameter.mul_(kept).add_((1 - kept**2) ** 0.5 * noise)
    folders = [save_model(tmp_path / name, model).folder for name, model in (("parent", parent), ("child", child))]
    (folders[1] / "manifest.json").unlink()
    found = verdict("lineage", examine_folder(folders[1], against=str(folders[0])))
    assert found.outcome is outcome, found.reason

# ---------------------------------------------------------------- the tokenizer of a copy


def with_rule(words: Tokenizer) -> Tokenizer:
    """Ligatures are written out: no hard text has one."""
    rule = {"type": "Replace", "pattern": {"String": "ﬄ"}, "content": "ffl"}
    return Tokenizer(words.document | {"normalizer": rule}, words.settings, words.templates)


def without_generation_prompt(words: Tokenizer) -> Tokenizer:
    assert words.template is not None
    return Tokenizer(words.document, words.settings, {"default": words.template.partition("{%- if add_generation_prompt")[0]})


def with_another_branch(words: Tokenizer) -> Tokenizer:
    return Tokenizer(words.document, words.settings, {"default": f"{words.template}{{% if tools %}}!{{% endif %}}"})


@pytest.mark.parametrize(("change", "words"), [
    (with_rule, "normalizer differ"), (without_generation_prompt, "with its generation prompt"), (with_another_branch, "is not that of x")])
def test_a_copy_has_the_tokenizer_and_the_template_of_its_source(change: Callable[[Tokenizer], Tokenizer], words: str):
    source = tiny_tokenizer()
    found = compare_tokenizers(change(source), source, "x", same=True, exact=True)
    assert found.outcome is Outcome.REFUTED
    assert words in found.reason
    assert compare_tokenizers(change(source), source, "x", same=False).outcome is Outcome.PROVEN  # training may bring a template


def test_a_template_that_is_not_the_recorded_one_is_refuted(tmp_path: Path):
    artifact = open_artifact(save_model(tmp_path / "checkpoint", tiny_model()).folder)
    assert artifact.tokenizer is not None
    assert check_tokenizer(ProofSubject(artifact.raw, artifact)).outcome is Outcome.PROVEN
    other = replace(artifact, tokenizer=with_another_branch(artifact.tokenizer))
    assert "records the chat template" in check_tokenizer(ProofSubject(artifact.raw, other)).reason


def test_a_copy_that_another_tool_wrote_in_another_form_is_the_same():
    source = tiny_tokenizer()
    document = json.loads(source.backend.to_str())
    document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    document["added_tokens"] = document["added_tokens"][::-1]
    document["decoder"] = document["decoder"] | {"use_regex": False}  # of no effect on ids
    again = Tokenizer(document, source.settings, {"default": f"{source.template}\n"})
    assert again.digest != source.digest
    assert compare_tokenizers(again, source, "x", same=True).outcome is Outcome.PROVEN


def test_a_rule_that_shows_in_no_hard_text_is_found_by_its_characters():
    source = tiny_tokenizer()
    rule = {"type": "Replace", "pattern": {"String": "ß"}, "content": "ss"}
    other = Tokenizer(source.document | {"normalizer": rule}, source.settings, source.templates)
    assert "'aßb ßß1' becomes" in compare_tokenizers(other, source, "x", same=True).reason


def test_export_refutes_a_changed_tokenizer_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    source, usual = save_model(tmp_path / "source", tiny_model()).folder, export_module.model_contents
    monkeypatch.setattr(export_module, "model_contents",
                        lambda model, words, *given, **named: usual(model, with_rule(words), *given, **named))
    assert assay(["export", str(source), "--to", "hf", "--out", str(tmp_path / "out")]) == 3
    assert "normalizer differ" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "out").hallmark is None


def test_an_export_of_what_nobody_proved_has_no_hallmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]):
    """It is the same as its source, and nobody knows what that is."""
    source = save_model(tmp_path / "source", tiny_model())
    monkeypatch.setattr(proof, "prove", lambda _: [proven("whole", "not looked at")])
    assert assay(["export", str(source.folder), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    assert "has no hallmark: nothing has proven it; run assay prove" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "out").hallmark is None
    write_hallmark(source, [proven("whole", "not looked at")])
    assert assay(["export", str(source.folder), "--to", "hf", "--out", str(tmp_path / "again")]) == 0
    assert open_checkpoint(tmp_path / "again").hallmark is not None


def test_an_export_that_cannot_be_proven_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object, **__: object) -> list[Verdict]:
        raise UsageError("the request makes no sense")

    source = save_model(tmp_path / "source", tiny_model()).folder
    monkeypatch.setattr(proof, "prove", refused)
    for form, name in (("hf", "out"), ("gguf", "out.gguf")):
        assert assay(["export", str(source), "--to", form, "--out", str(tmp_path / name)]) == 2
        assert not (tmp_path / name).exists()
