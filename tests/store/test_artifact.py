"""Opened and built: every parameter in the dtype asked for, and nothing else rounded with it."""

from pathlib import Path

import pytest
import torch

from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import save_adapter, save_model, tiny_model


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_in_fewer_bits_keeps_its_rotary_frequencies(adapter: bool, tmp_path: Path):
    save_model(tmp_path / "base", tiny_model("llama"))
    where = save_adapter(tmp_path / "adapter", tmp_path / "base").folder if adapter else tmp_path / "base"
    whole, coarse = (build_model(open_artifact(where), dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in coarse.parameters()} == {torch.bfloat16}
    assert torch.equal(whole.frequencies, coarse.frequencies)
    assert coarse.frequencies.dtype is torch.float32
