"""Second moments: no padding in them, the same as one row at a time, and remembered under what they are of."""

from pathlib import Path

import pytest
import torch

from assay.editing import moments
from assay.editing.block_hooks import down_projection
from assay.editing.moments import compute_moments, read_text, second_moments, split_text, tokenized_text
from assay.errors import ArtifactError, DataError
from assay.model.transformer import Transformer, initialised
from assay.testing.tiny_models import tiny_config, tiny_tokenizer

ROWS = ((5, 9, 11, 200, 3), (7, 8), (4, 4, 4, 4, 4, 4, 250, 1), (99,), *(tuple(range(i, 2 * i)) for i in range(5, 12)))


def naive(model: Transformer, rows: tuple, layer: int) -> torch.Tensor:
    """Every row by itself, its keys as they enter the projection."""
    keys: list[torch.Tensor] = []
    handle = down_projection(model, layer).register_forward_pre_hook(lambda _, inputs: keys.append(inputs[0][0].detach().double()))
    for row in rows:
        model.hidden(torch.tensor([row]))
    handle.remove()
    whole = torch.cat(keys)
    return whole.T @ whole / len(whole)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_they_are_those_of_every_row_by_itself(family: str):
    model = initialised(tiny_config(family), 0)
    for layer, found in compute_moments(model, ROWS, [0, 1]).items():
        due = naive(model, ROWS, layer)
        assert float((found - due).norm() / due.norm()) < 1e-6
        assert float(torch.linalg.eigvalsh(found).min()) > -1e-12 * float(found.trace())


def test_they_are_remembered_and_only_the_first_rows_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    model, reading = initialised(tiny_config(), 0), tokenized_text(ROWS)
    first = second_moments(model, reading, [0], "a model")
    computed, whole = [], compute_moments

    def counting(model, rows, layers):
        computed.append((rows, layers))
        return whole(model, rows, layers)

    monkeypatch.setattr(moments, "compute_moments", counting)
    assert torch.equal(second_moments(model, reading, [0], "a model")[0], first[0])
    assert computed == [(ROWS[:8], [0])]


def test_those_of_another_model_under_this_ones_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    reading = tokenized_text(ROWS)
    second_moments(initialised(tiny_config(), 1), reading, [0, 1], "a model")
    with pytest.raises(ArtifactError, match=r"not this model's: layer 0's differ by .* delete "):
        second_moments(initialised(tiny_config(), 0), reading, [0, 1], "a model")


@pytest.mark.parametrize("when", ["compute", "write"])
def test_another_process_that_was_quicker_is_no_error(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It computes the same while this one computes, or writes."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    model, reading, ours = initialised(tiny_config(), 0), tokenized_text(ROWS), []
    name = "compute_moments" if when == "compute" else "write_tensors"
    function = getattr(moments, name)

    def quicker(*arguments, **options):
        monkeypatch.setattr(moments, name, function)
        ours.append(second_moments(model, reading, [0], "a model")[0])
        return function(*arguments, **options)

    monkeypatch.setattr(moments, name, quicker)
    assert torch.equal(second_moments(model, reading, [0], "a model")[0], ours[0])
    assert len(list((tmp_path / "moments").iterdir())) == 1


@pytest.mark.parametrize("other", ["layer", "text", "model"])
def test_another_question_has_another_answer(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    model, reading = initialised(tiny_config(), 0), tokenized_text(ROWS)
    second_moments(model, reading, [0], "a model")
    layer, rows, name = {"layer": (1, ROWS, "a model"), "text": (0, ROWS[:-1], "a model"), "model": (0, ROWS, "another")}[other]
    second_moments(model, tokenized_text(rows), [layer], name)
    assert len(list((tmp_path / "moments").iterdir())) == 2


def test_a_damaged_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    model, reading = initialised(tiny_config(), 0), tokenized_text(ROWS)
    second_moments(model, reading, [0], "a model")
    file = next(tmp_path.rglob("moment.safetensors"))
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match="hash"):
        second_moments(model, reading, [0], "a model")


def test_text_is_read_to_the_token_and_parted(tmp_path: Path):
    (tmp_path / "text.txt").write_text("one two three\n" * 40)
    reading = read_text(tmp_path / "text.txt", tiny_tokenizer(), 100, length=16)
    assert reading.tokens == 100
    assert max(map(len, reading.rows)) == 16
    scored, rest = split_text(reading, 40)
    assert (scored.tokens, rest.tokens) == (48, 52)
    assert scored.rows + rest.rows == reading.rows
    with pytest.raises(DataError, match="cannot be parted"):
        split_text(reading, 100)
