"""KTO, reward models and on-policy distillation on a GPU: what the CPU gives, through a CUDA graph too; and a run of each recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.data.batch import Batch
from assay.data.preferences import pair_rows
from assay.learn.bradley_terry import RewardModelSettings, reward_objective
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import accumulated
from assay.learn.objectives import Objective
from assay.learn.unpaired import KtoSettings, kto_objective
from assay.model.transformer import Transformer
from assay.outcome import RunOutcome
from assay.recipes import hand_over, run
from assay.recipes.distill import distill
from assay.recipes.kto import kto
from assay.recipes.kto_options import Kto
from assay.recipes.options import Distill
from assay.recipes.reward_model import reward_model
from assay.recipes.reward_model_options import RewardModel
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, proven
from tests.learn.test_kto import examples, policy, ready
from tests.learn.test_preference import tiny_pairs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def of_kto() -> tuple[Objective, Batch]:
    made = examples()
    return kto_objective(KtoSettings()), ready(policy(), [made[:2], made[2:4], made[4:], made[:2]], 40)


def of_rewards() -> tuple[Objective, Batch]:
    pairs = tiny_pairs(8)
    return reward_objective(RewardModelSettings(70, 0.01)), pair_rows([pairs[:2], pairs[2:4], pairs[4:6], pairs[6:]], 64)


def step(model: Transformer, objective: Objective, batch: Batch, accumulate: Any = accumulated) -> tuple[float, torch.Tensor]:
    found = accumulate(model, objective, batch, 2, batch.divisor)
    gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
    model.zero_grad()
    return float(found.loss), gradient


@pytest.mark.parametrize("made", [of_kto, of_rewards])
@pytest.mark.parametrize(("dtype", "bound"), [(None, 1e-3), (torch.bfloat16, 8e-2)])
def test_it_is_what_the_cpu_gives_and_a_graph_gives_the_same(made: Any, dtype: torch.dtype | None, bound: float):
    (objective, batch), there = made(), tiny_model("llama").cuda()
    there.compute_dtype = dtype
    due, found = step(tiny_model("llama"), objective, batch), step(there, objective, batch)
    assert found[0] == pytest.approx(due[0], rel=bound)
    assert float((found[1] - due[1]).norm()) <= bound * float(due[1].norm())
    graphed = GraphedAccumulate()
    for _ in range(3):
        again = step(there, objective, batch, graphed)
        assert again[0] == pytest.approx(found[0], rel=1e-4)
        assert float((again[1] - found[1]).norm()) <= 1e-2 * float(found[1].norm())


def write(file: Path, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (str(file),)


def test_a_run_of_each_is_refuted_by_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    save_model(tmp_path / "base", tiny_model("llama"))
    save_model(tmp_path / "teacher", tiny_model("llama", 5))
    sums = [(a, b) for a in range(12) for b in range(8)]
    answers = write(tmp_path / "answers.jsonl", [{"prompt": f"{a}+{b}=", "completion": f"{'yes' if (a + b) % 2 else 'no'} {a + b}",
                                                  "label": bool((a + b) % 2)} for a, b in sums])
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": f"{a}+{b}=", "chosen": f"yes {a + b}", "rejected": f"no {a}"} for a, b in sums])
    common: dict[str, Any] = {"model": str(tmp_path / "base"), "max_length": 24, "batch_tokens": 384, "num_train_epochs": 4,
                              "save_steps": 3, "held_out": 0.2, "max_steps": 6, "device": "cuda", "warmup_steps": 1, "learning_rate": 5e-3}
    outcomes: list[RunOutcome] = [
        kto(Kto(data=answers, out=str(tmp_path / "kto"), **common)),
        reward_model(RewardModel(data=pairs, out=str(tmp_path / "reward"), **common))]
    monkeypatch.setattr("assay.recipes.distill.preflight_distill", lambda *_: [])  # a teacher that knows nothing would be refused
    outcomes.append(distill(Distill(data=answers, out=str(tmp_path / "own"), teacher=str(tmp_path / "teacher"), on_policy=0.5,
                                    divergence="reverse", max_new_tokens=8, **common)))
    for found in outcomes:
        assert not [verdict for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED], str(found)
