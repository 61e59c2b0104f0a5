"""Proofs and snapshots on a GPU: the verdicts of the CPU, and copies that later steps cannot touch."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.data.batch import Batch
from assay.guard.kept_artifacts import KeptArtifacts
from assay.guard.proof import ProofRequest, examine_artifact
from assay.guard.proof_subject import ProofSampling
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.objectives import next_token
from assay.model.placement import capture_graph, place_for_training
from assay.recipes import sft, witness_records
from assay.recipes.options import Sft
from assay.recipes.run import Run
from assay.store.artifact import open_artifact
from assay.store.checkpoint import Contents, open_checkpoint
from assay.store.export_artifact import export_artifact
from assay.store.saving import BackgroundSaver, owned_contents
from assay.testing.tiny_models import save_adapter, save_model, tiny_model
from assay.verdict import Outcome

pytestmark = pytest.mark.gpu


def test_a_proof_on_the_gpu_has_the_verdicts_of_one_on_the_cpu(tmp_path: Path):
    base = save_model(tmp_path / "base", tiny_model()).folder
    adapter = save_adapter(tmp_path / "adapter", base).folder
    bound = export_artifact(open_artifact(adapter), "merged", tmp_path / "merged", "float32")
    asked = {"adapter": {"against": str(base)}, "merged": {"against": str(adapter), "expect": "same", "bound": bound}, "base": {}}
    kept = KeptArtifacts()
    for name, options in [*asked.items(), ("adapter", asked["adapter"])]:
        here, there = (examine_artifact(ProofRequest(str(tmp_path / name), **options, probing=ProofSampling(4, device)), of)
                       for device, of in (("cpu", None), ("cuda", kept)))
        assert [(v.check, v.outcome) for v in here] == [(v.check, v.outcome) for v in there], (here, there)
        assert there[0].evidence["device"] == "cuda", there[0]


def test_a_snapshot_on_the_gpu_is_what_was_there_when_it_was_asked_for(tmp_path: Path):
    weight = torch.arange(4_000_000.0, device="cuda")
    before = weight.cpu()
    contents = Contents("model", {"w": weight}, optimizer={"m": weight}, trainer={"step": 1})
    assert owned_contents(contents).weights["w"].is_cuda
    with BackgroundSaver() as saver:
        saver.save(tmp_path / "c", contents)
        for _ in range(50):
            weight.mul_(1.5)
    found = open_checkpoint(tmp_path / "c")
    assert torch.equal(found.weights()["w"], before)
    assert torch.equal((found.optimizer() or {})["m"], before)


def test_a_graph_is_captured_while_a_save_leaves_the_gpu(tmp_path: Path):
    """In torch's default mode of capture anything that another thread asks of the GPU may invalidate the graph."""
    large = {"w": torch.ones(100_000_000, device="cuda")}
    model, objective = place_for_training(tiny_model(), "cuda"), next_token
    batch = Batch(torch.randint(0, 250, (4, 16)), torch.ones(4, 16).index_fill(1, torch.tensor([0]), 0.0))
    with BackgroundSaver() as saver:
        for number in range(4):
            saver.save(tmp_path / str(number), Contents("model", large, trainer={"step": 1}))
            found = GraphedAccumulate()(model, objective, batch, 2, float(batch.weight.sum()))
            assert torch.isfinite(found.loss)


def test_nothing_is_collected_while_a_graph_is_captured():
    """A dead graph that the collector frees meanwhile invalidates the capture."""
    with capture_graph():
        assert not gc.isenabled()
        torch.ones(8, device="cuda").mul(2)
    assert gc.isenabled()


def test_the_witness_replays_a_run_of_the_gpu_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Records leave the GPU beside the loop; more operations than a CPU may take are replayed where the run was."""
    monkeypatch.setitem(witness_records.MOST_WORK, "cpu", 0.0)
    save_model(tmp_path / "base", tiny_model())
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(8) for b in range(6)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = sft.sft(Sft(model=str(tmp_path / "base"), data=(str(tmp_path / "chat.jsonl"),), out=str(tmp_path / "run"), max_length=32,
                        batch_tokens=96, max_steps=3, learning_rate=3e-3, held_out=0.1, probe_samples=0, device="cuda"), lambda _: None)
    (said,) = [verdict for verdict in found.verdicts if verdict.check == "witness"]
    assert said.outcome is Outcome.PROVEN, str(said)
    assert {1, 3} <= set(said.evidence["steps"])


def test_when_the_loop_is_over_its_activations_are_free_for_proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Memory that a loop's graphs share is nobody's afterwards: a proof that found none left would take minutes on the CPU."""
    save_model(tmp_path / "base", tiny_model(max_length=2048))
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(8) for b in range(6)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held, end = list[int](), Run.end_loop

    def looked_at(run: Run, *given: Any) -> None:
        held.extend((torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()))
        end(run, *given)

    monkeypatch.setattr(Run, "end_loop", looked_at)
    torch.cuda.reset_peak_memory_stats()
    sft.sft(Sft(model=str(tmp_path / "base"), data=(str(tmp_path / "chat.jsonl"),), out=str(tmp_path / "run"), max_length=2048,
                batch_tokens=64 * 2048, micro_batch_tokens=64 * 2048, max_steps=2, num_train_epochs=100, packing=False, held_out=0.1,
                probe_samples=0, device="cuda"), lambda _: None)
    most, left = held
    assert left < most / 2, (most, left)
