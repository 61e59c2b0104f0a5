"""Witness of a GRPO run's evaluations on a GPU: what was sampled in bf16 is no fault to the plain model in fp32, and other weights are."""

from pathlib import Path

import pytest

from assay.recipes import grpo, hand_over, run
from assay.recipes.witness_records import pending_looks
from assay.testing.tiny_training import RecordingProver
from assay.verdict import Outcome, proven
from assay.witness.due_looks import judge_look
from tests.recipes.sums import options, taught

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("samples", [0, 2])
def test_evaluations_in_bf16_are_proven(samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "taught").mkdir()
    parent = taught(tmp_path / "taught", steps=10)
    monkeypatch.setattr(run, "Prover", RecordingProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    grpo.grpo(options(parent, tmp_path / "run", max_steps=2, witness="0", eval_prompts=4, num_generations_eval=samples, device="cuda"),
              lambda _: None)
    said = [judge_look(folder, device) for folder in pending_looks(tmp_path / "run", 2) for device in ("cuda", "cpu")]
    assert [each.outcome for each in said] == [Outcome.PROVEN] * 4, "\n".join(map(str, said))
