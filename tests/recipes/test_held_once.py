"""A model is held once: while it is opened, from one file or many; beside a run's own base at the hand-over; and where it is trained."""

import gc
import importlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.model.families import hf_layout, to_foreign
from assay.recipes import hand_over, run, sft, starting_model
from assay.recipes.hand_over import OpenedBases
from assay.recipes.options import Sft
from assay.recipes.starting_model import beside_live, load_start
from assay.recipes.trainer import Trainer
from assay.store.artifact import Destination, build_model, open_artifact
from assay.store.safetensors_files import tensor_bytes, write_sharded
from assay.store.saving import model_files
from assay.testing.tiny_models import save_model, tiny_model, tokenizer_and_stops
from assay.testing.tiny_training import NoProver
from assay.verdict import proven
from tests.live_bytes import LiveBytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folder in bf16 and in seven shards."""
    where = tmp_path_factory.mktemp("held") / "model"
    where.mkdir()
    model = tiny_model("qwen3", width=128, depth=4, windows=(None,) * 4, heads=8, kv_heads=4, hidden=384, tied=False)
    weights = to_foreign(hf_layout(model.config), {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()})
    write_sharded(where, weights, 250_000)
    for name, data in model_files(model.config, *tokenizer_and_stops(), torch.bfloat16).items():
        (where / name).write_bytes(data)
    return where


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are carried to memory of their own, and not left where a file maps them."""
    monkeypatch.setattr(starting_model, "straight_to", lambda device, held=None: Destination(device, held or {}))


def options(folder: Path, **more: object) -> Sft:
    return Sft(model=str(folder), data=(), out=str(folder.parent / "never"), device="cpu", **more)  # type: ignore[arg-type]


def stored(folder: Path) -> tuple[int, int]:
    """Bytes of a model, and of its largest tensor as we hold it."""
    sizes = [tensor_bytes(tensor) for tensor in open_artifact(folder).tensors.values()]
    return sum(sizes), max(sizes)


@pytest.mark.parametrize("held", [None, "bf16"])
def test_a_model_is_opened_into_its_own_size(folder: Path, held: str | None):
    """Beside it at the most one tensor, as it is joined."""
    model, largest = stored(folder)
    with LiveBytes() as live:
        opened = open_artifact(folder, to=Destination("cpu"), held=held)
        built = build_model(opened, None)
    assert live.peak <= model + 2 * largest
    assert live.now <= model + 10_000, "tables of positions"
    assert {p.data_ptr() for p in built.parameters()} == {tensor.data_ptr() for tensor in opened.tensors.values()}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("held", [None, "bf16", "nf4"])
def test_a_hand_over_shares_the_base_that_the_run_holds(folder: Path, held: str | None):
    start = load_start(options(folder, lora_r=4, base_dtype=held, dtype="bf16"), "cpu", lambda _: None)
    with LiveBytes() as live:
        opened = OpenedBases(beside_live(start))(folder, held=held)
    own = {parameter.data_ptr() for parameter in start.model.parameters()}
    assert {tensor.data_ptr() for tensor in opened.tensors.values()} <= own
    assert live.now == 0


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_that_is_trained_whole_goes_where_it_is_trained_and_leaves_its_file_behind(folder: Path):
    model, _ = stored(folder)
    with LiveBytes() as live:
        start = load_start(options(folder), "cpu", lambda _: None)
    assert 2 * model <= live.now <= 2 * model + 10_000, "masters in fp32, and nothing of the file's bf16"
    assert live.peak <= 3 * model + 10_000
    assert all(tensor.is_meta for tensor in start.parent.tensors.values())
    assert starting_model.reopen_parent(start).digest == start.parent.digest


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("changed", [{"new_tokens": ("<a>",)}, {"rope_scaling": "linear:2"}], ids=str)
def test_a_model_that_is_changed_first_is_opened_where_it_lies(folder: Path, changed: dict[str, Any]):
    """Its tables are made on the host, and RUN/base is computed with there."""
    for lora_r in (0, 4):
        assert starting_model._destination(options(folder, lora_r=lora_r, **changed), "cpu") is None
        assert starting_model._destination(options(folder, lora_r=lora_r), "cpu") == Destination("cpu")


def test_a_finished_run_lets_its_model_go_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And not when Python next looks for circles: the next run of a notebook would find no room on the GPU."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    save_model(tmp_path / "base", tiny_model("llama"))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1=", "completion": str(a + 1)}) + "\n" for a in range(40)))
    seen, over = list[weakref.ref[Trainer]](), Trainer.over
    monkeypatch.setattr(Trainer, "over", lambda trainer: (seen.append(weakref.ref(trainer)), over(trainer))[1])
    importlib.import_module("torch._dynamo")  # an optimizer imports it, and the first one's import holds the frames that asked for it
    gc.disable()
    try:
        sft.sft(Sft(model=str(tmp_path / "base"), data=(str(tmp_path / "sums.jsonl"),), out=str(tmp_path / "run"), max_length=32,
                    batch_tokens=128, max_steps=1, save_steps=1, held_out=0.2, device="cpu"), lambda _: None)
        assert seen
        assert not any(found() for found in seen)
    finally:
        gc.enable()
