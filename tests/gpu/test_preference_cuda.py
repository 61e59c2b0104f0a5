"""Preference objectives on a GPU: what the CPU gives, in fp32, in bf16 and through a CUDA graph; and a run of the recipe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.data.batch import Batch
from assay.data.preferences import pair_rows
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import accumulated
from assay.learn.objectives import averages
from assay.learn.policy import token_logprobs
from assay.learn.preference import PreferenceSettings, preference
from assay.model.transformer import Transformer
from assay.recipes import hand_over, run
from assay.recipes.dpo import dpo
from assay.recipes.dpo_options import Dpo
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, proven
from tests.learn.test_preference import tiny_pairs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
LOSSES = [PreferenceSettings(), PreferenceSettings("ipo"), PreferenceSettings("hinge", 0.05), PreferenceSettings("robust", 0.1, 0.2),
          PreferenceSettings("simpo", 2.0), PreferenceSettings("orpo", 0.3)]


def pairs_of_two_models() -> Batch:
    """Pairs with another model's reference."""
    pairs = tiny_pairs(8)
    batch = pair_rows([pairs[:2], pairs[2:4], pairs[4:6], pairs[6:]], 64)
    with torch.no_grad():
        return replace(batch, reference=token_logprobs(tiny_model("llama", 7), batch)[0])


def step(model: Transformer, settings: PreferenceSettings, batch: Batch, accumulate=accumulated):
    found = accumulate(model, preference(settings), batch, 2, batch.divisor)
    gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
    model.zero_grad()
    return float(found.loss), gradient, averages(found.metrics)


@pytest.mark.parametrize("settings", LOSSES, ids=lambda settings: settings.loss)
@pytest.mark.parametrize(("dtype", "bound"), [(None, 1e-3), (torch.bfloat16, 5e-2)])
def test_it_is_what_the_cpu_gives(settings: PreferenceSettings, dtype: torch.dtype | None, bound: float):
    batch, there = pairs_of_two_models(), tiny_model("llama").cuda()
    there.compute_dtype = dtype
    due, found = step(tiny_model("llama"), settings, batch), step(there, settings, batch)
    assert found[0] == pytest.approx(due[0], rel=bound)
    assert float((found[1] - due[1]).norm()) <= bound * float(due[1].norm())


@pytest.mark.parametrize("settings", LOSSES, ids=lambda settings: settings.loss)
def test_a_graph_gives_what_eager_gives(settings: PreferenceSettings):
    model, batch, graphed = tiny_model("llama").cuda(), pairs_of_two_models(), GraphedAccumulate()
    model.compute_dtype = torch.bfloat16
    due = step(model, settings, batch)
    for _ in range(3):
        found = step(model, settings, batch, graphed)
        assert found[0] == pytest.approx(due[0], rel=1e-4)
        assert float((found[1] - due[1]).norm()) <= 1e-2 * float(due[1].norm())
        assert found[2] == pytest.approx(due[2], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_run_learns_what_is_preferred(lora_r: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    save_model(tmp_path / "base", tiny_model("llama"))
    rows = [{"prompt": f"{a}+{b}=", "chosen": f"yes {a + b}", "rejected": f"no {a + b + 1}"} for a in range(12) for b in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = dpo(Dpo(model=str(tmp_path / "base"), data=(str(tmp_path / "pairs.jsonl"),), out=str(tmp_path / "run"), max_length=24,
                    batch_tokens=384, num_train_epochs=4, learning_rate=1e-2, save_steps=3, held_out=0.2, max_steps=6, lora_r=lora_r,
                    device="cuda", warmup_steps=1))
    assert not [verdict for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED], str(found)
    assert found.results["accuracy"]["mean"] > 0.8
