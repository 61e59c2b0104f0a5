"""Opened and built: every parameter in the dtype asked for, and nothing else rounded with it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.errors import ArtifactError
from assay.store import artifact
from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import save_adapter, save_hf_folder, save_model, tiny_model


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_in_fewer_bits_keeps_its_rotary_frequencies(adapter: bool, tmp_path: Path):
    save_model(tmp_path / "base", tiny_model("llama"))
    where = save_adapter(tmp_path / "adapter", tmp_path / "base").folder if adapter else tmp_path / "base"
    whole, coarse = (build_model(open_artifact(where), dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in coarse.parameters()} == {torch.bfloat16}
    assert torch.equal(whole.frequencies, coarse.frequencies)
    assert coarse.frequencies.dtype is torch.float32


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
