"""Fine-tuning on a base in few bits: its manifest, a run that goes on, proof and witness on that base, and what a merge changes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli import run as assay
from assay.errors import UsageError
from assay.guard.base_difference import state_base_difference
from assay.model.families import hf_layout, to_foreign
from assay.model.quantised import QuantisedLinear
from assay.model.transformer import parameter_count
from assay.recipes import hand_over, run, sft
from assay.recipes.memory_plan import PlannedWork, plan_memory, planned_model
from assay.recipes.options import Sft
from assay.recipes.starting_model import load_start
from assay.recipes.trainer import Trainer
from assay.store import artifact
from assay.store.artifact import Destination, open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.testing.tiny_models import examine_folder, nudge, save_hf_folder, tiny_model
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, overall, proven, without_optional
from assay.witness.due_base import due_base
from assay.witness.due_gradient import read_safetensors


def options(home: Path, **changed: Any) -> Sft:
    usual: dict[str, Any] = {"data": (str(home / "sums.jsonl"),), "model": str(home / "base"), "out": str(home / "run"), "max_length": 32,
                             "batch_tokens": 256, "micro_batch_tokens": 128, "learning_rate": 3e-3, "held_out": 0.1, "max_steps": 3,
                             "num_train_epochs": 9, "lora_r": 4, "base_dtype": "nf4", "save_steps": 3, "device": "cpu"}
    return Sft(**(usual | changed))


def tuned(config: Sft, stop_after: int | None = None) -> tuple[Any, list[str]]:
    said, over = list[str](), Trainer.over

    def struck(trainer: Trainer) -> bool:
        if trainer.done == stop_after:
            trainer.run.interrupted = signal.SIGTERM
        return over(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "over", struck)
        patch.setattr(run, "Prover", NoProver)
        patch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
        return sft.sft(config, said.append), said


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    save_hf_folder(folder / "base", nudge(tiny_model(), 0.05))
    sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return folder


@pytest.fixture(scope="module")
def ran(home: Path) -> tuple[Any, list[str]]:
    """Two steps, and then the third of the same run, with moments in 8 bits."""
    tuned(options(home, optim="adamw_8bit"), stop_after=2)
    return tuned(options(home, optim="adamw_8bit"))


def test_the_manifest_names_the_weights_that_were_trained_on(home: Path, ran: tuple[Any, list[str]]):
    outcome, said = ran
    assert outcome.exit_code == 0
    assert any("the base is held in nf4" in line for line in said)
    assert any("resuming from step 2" in line for line in said)
    assert any("adamw_8bit at" in line for line in said)
    recorded = open_checkpoint(home / "run" / "adapter").facts["base"]
    assert recorded == {"weights": open_artifact(home / "base", held="nf4").digest, "path": str(home / "base"), "held": "nf4"}
    assert recorded["weights"] != open_artifact(home / "base").digest


def test_a_proof_computes_on_those_weights(home: Path, ran: tuple[Any, list[str]]):
    verdicts = examine_folder(home / "run" / "adapter")
    assert overall(without_optional(verdicts)) is Outcome.PROVEN, [str(v) for v in verdicts]
    assert {v.check for v in verdicts if v.outcome is Outcome.PROVEN} >= {"answers", "lineage", "consumer"}


def test_the_run_says_what_the_file_s_weights_would_change(home: Path, ran: tuple[Any, list[str]]):
    (verdict,) = [v for v in ran[0].verdicts if v.check == "file base"]
    assert verdict.outcome is Outcome.UNPROVEN
    assert 0 < verdict.evidence["kl"] < 0.1
    assert 1e-3 < verdict.evidence["answers"] < 0.5
    assert state_base_difference(home / "run" / "model") == []


def test_a_merge_into_the_file_is_another_model_and_says_so(home: Path, ran: tuple[Any, list[str]], tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]):
    adapter, merged = home / "run" / "adapter", tmp_path / "merged"
    assert assay(["export", str(adapter), "--to", "merged", "--onto", "file", "--out", str(merged)]) == 0
    said = capsys.readouterr()
    assert "merged into base as its file holds it, and not in nf4" in said.out + said.err
    facts = open_checkpoint(merged).facts["rebased"]
    assert facts["trained_on"] == "nf4"
    assert facts["merged_into"] == open_artifact(home / "base").digest
    assert facts["answers"] > 1e-3
    verdicts = examine_folder(merged)
    assert overall(without_optional(verdicts)) is Outcome.PROVEN, "proven again, against the adapter on the file"


@pytest.mark.parametrize("dtype", ["nf4", "int8", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_witness_makes_the_same_weights_from_its_own_table(dtype: str, family: str, tmp_path: Path):
    folder = save_hf_folder(tmp_path / "base", nudge(tiny_model(family), 0.05))
    base = open_artifact(folder, held=dtype)
    due = due_base(read_safetensors(folder), dtype, transposed=family == "gpt2")
    for name, tensor in to_foreign(hf_layout(base.config), base.tensors).items():
        assert torch.equal(due[name], tensor), name


def test_a_base_that_lies_in_bf16_already_is_carried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An 8B was carried twice, and did not fit into 24 GiB."""
    folder, carried = save_hf_folder(tmp_path / "base", tiny_model().bfloat16()), list[torch.Tensor]()
    monkeypatch.setattr(artifact, "carried_to", lambda tensor, device: (carried.append(tensor), tensor)[1])
    opened = open_artifact(folder, to=Destination("cpu"), held="bf16")
    assert len(carried) == len(opened.raw.tensors)
    assert (opened.held, opened.digest) == (None, open_artifact(folder).digest)


def test_what_is_frozen_takes_few_bits_and_is_planned_so(home: Path, tmp_path: Path):
    start = load_start(options(home, out=str(tmp_path)), "cpu", lambda _: None)
    assert any(isinstance(module, QuantisedLinear) for module in start.model.modules())
    held = sum(p.numel() * p.element_size() for p in start.model.parameters() if not p.requires_grad)
    model, work = planned_model(home / "base"), PlannedWork(1, 32, 4, compute=4, base_dtype="nf4")
    assert plan_memory(model, work).parts["weights"] == pytest.approx(held, rel=0.01)
    assert parameter_count(start.model) == model.parameters + sum(p.numel() for p in start.model.parameters() if p.requires_grad)
    whole = plan_memory(model, PlannedWork(1, 32, 4, compute=4))
    assert held < 0.6 * whole.parts["weights"]


@pytest.mark.parametrize(("changed", "why"), [
    ({"lora_r": 0}, "for a frozen base, and the whole model is trained here"),
    ({"model": "run/adapter", "base_dtype": "int8", "lora_r": 0}, "trained on a base in nf4, and goes on there"),
])
def test_what_makes_no_sense_is_refused(home: Path, ran: tuple[Any, list[str]], changed: dict[str, Any], why: str, tmp_path: Path):
    if "model" in changed:
        changed = changed | {"model": str(home / changed["model"])}
    with pytest.raises(UsageError, match=why):
        load_start(options(home, out=str(tmp_path), **changed), "cpu", lambda _: None)


def test_a_fork_of_an_adapter_goes_on_on_its_base(home: Path, ran: tuple[Any, list[str]], tmp_path: Path):
    start = load_start(options(home, out=str(tmp_path), model=str(home / "run" / "adapter"), base_dtype=None, lora_r=0), "cpu",
                       lambda _: None)
    assert start.weights.base.held == "nf4"
    assert start.weights.base.weights == open_artifact(home / "base", held="nf4").digest
