"""Opened and built: every parameter in the dtype asked for, and nothing else rounded with it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.cli import run as assay
from assay.errors import ArtifactError, UsageError
from assay.model.lora import lora_sites
from assay.model.patch import LowRank
from assay.reward.model_reward import reward_artifact
from assay.store import artifact
from assay.store.artifact import build_model, open_artifact
from assay.store.checkpoint import quarantine_checkpoint
from assay.store.peft_whole import AdapterFile, adapted_embedding, whole_matrices
from assay.testing.tiny_models import save_adapter, save_hf_folder, save_model, tiny_model
from assay.verdict import refuted


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_in_fewer_bits_keeps_its_rotary_frequencies(adapter: bool, tmp_path: Path):
    save_model(tmp_path / "base", tiny_model("llama"))
    where = save_adapter(tmp_path / "adapter", tmp_path / "base").folder if adapter else tmp_path / "base"
    whole, coarse = (build_model(open_artifact(where), dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in coarse.parameters()} == {torch.bfloat16}
    assert torch.equal(whole.frequencies, coarse.frequencies)
    assert coarse.frequencies.dtype is torch.float32


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_whole_tensors_of_an_adapter_are_made_where_its_base_lies(fields: dict):
    """A base on another device, here one without values, and an adapter's file, which is read on the host."""
    model = tiny_model("llama", tied=False)
    site = lora_sites(model.config)["model.layers.0.self_attn.k_proj"]
    width, vocab = model.config.width, model.config.vocab
    with torch.no_grad():
        base = {name: torch.empty(parameter.shape, device="meta") for name, parameter in model.named_parameters()}
        named = {f"{site.foreign}.lora_magnitude_vector": torch.empty(site.stop - site.start),
                 "model.embed_tokens.lora_embedding_A": torch.empty(4, vocab),
                 "model.embed_tokens.lora_embedding_B": torch.empty(width, 4)}
        part = LowRank(site.start, site.stop, torch.empty(site.stop - site.start, 4), torch.empty(4, width), 2.0)
        made = whole_matrices(AdapterFile(model.config, base, fields, named, "here"), [(site, part)])[0]
        made |= adapted_embedding(AdapterFile(model.config, base, {}, named, "here"), 4, 2.0)[0]
    assert {name: tensor.device.type for name, tensor in made.items()} == {site.parameter: "meta", "embed.weight": "meta"}


def test_a_model_that_is_rounded_otherwise_than_asked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_model(tmp_path / "checkpoint", tiny_model("llama"))
    save_hf_folder(tmp_path / "folder", tiny_model("llama"))
    save_hf_folder(tmp_path / "bf16", tiny_model("llama").to(torch.bfloat16))
    places = [tmp_path / name for name in ("checkpoint", "folder", "bf16")]
    for place in places:
        assert [open_artifact(place, held=held).held for held in (None, "int8", "nf4")] == [None, "int8", "nf4"]
    assert [open_artifact(place, held="bf16").held for place in places] == ["bf16", "bf16", None]
    usual = artifact.interpret_artifact
    for due, came in ((None, "int8"), (None, "bf16"), ("int8", None), ("nf4", "int8"), ("bf16", None)):
        monkeypatch.setattr(artifact, "interpret_artifact", lambda raw, *, held, came=came, **given: usual(raw, held=came, **given))
        for place in places[:2]:
            with pytest.raises(ArtifactError, match=f"asked for was {due or 'the file as it is'}"):
                open_artifact(place, held=due)
    made = artifact._held
    monkeypatch.setattr(artifact, "interpret_artifact", lambda raw, **_: replace(made(raw, None, "nf4"), held=None))  # and nobody says so
    for place in places[:2]:
        with pytest.raises(ArtifactError, match="from the file's; asked for was the file as it is"):
            open_artifact(place)


@pytest.fixture(scope="module")
def condemned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bad` is quarantined, `adapter` lies on it, `good` is neither."""
    home = tmp_path_factory.mktemp("condemned")
    for name in ("bad", "good"):
        save_model(home / name, tiny_model("llama"))
    save_adapter(home / "adapter", home / "bad")
    quarantine_checkpoint(open_artifact(home / "bad").raw.checkpoint, [refuted("values", "it talks nonsense")])
    (home / "pairs.jsonl").write_text('{"prompt": "1", "chosen": "a", "rejected": "b"}\n' * 2)
    (home / "text.txt").write_text("words\n" * 9)
    (home / "texts.jsonl").write_text('{"text": "some words"}\n{"text": "and others"}\n')
    return home


@pytest.mark.parametrize("command", [
    "export bad --to hf", "export bad --to gguf", "export adapter --to merged", "merge bad good", "merge good --base bad --method task",
    "prune bad --drop 0", "steer bad --data pairs.jsonl", "edit bad --facts pairs.jsonl --text text.txt",
    "sft --model bad --data pairs.jsonl", "sft --model adapter --data pairs.jsonl", "serve bad --train --port 0"])
def test_nothing_is_made_of_a_model_that_was_refuted(condemned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str], command: str):
    monkeypatch.chdir(condemned)
    assert assay([*command.split(), "--out", str(tmp_path / "out")]) == 2
    assert "bad is quarantined: it talks nonsense. Name another model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_reward_model_that_was_refuted_rewards_nobody(condemned: Path):
    with pytest.raises(UsageError, match="bad is quarantined: it talks nonsense"):
        reward_artifact(str(condemned / "bad"))


def test_whoever_reads_a_model_that_was_refuted_is_told(condemned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(condemned)
    asked = ["--data", "texts.jsonl", "--out", str(tmp_path / "scores"), "--device", "cpu", "--witness", "0"]
    assert assay(["eval", "bad", "--task", "text", *asked]) == 0
    assert assay(["sample", "adapter", "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert (said.err + said.out).count("bad is quarantined: it talks nonsense") == 2
