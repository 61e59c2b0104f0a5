"""Hand-over of GRPO: written while the last proofs go on, removed where one refutes, and what answers is what was read from the disk."""

from pathlib import Path

import pytest

from assay.errors import GuardStop
from assay.recipes import hand_over
from assay.recipes.prompt_evaluator import PromptEvaluator
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint, write_checkpoint
from assay.store.saving import Lineage, model_contents
from assay.testing.tiny_models import tiny_model
from assay.verdict import Outcome
from tests.recipes.sums import Believer, events, options, reinforced, unproven
from tests.recipes.test_hand_over import SlowProver

ANSWERED = "that answered, by digest"


@pytest.mark.parametrize("refuting", [False, True])
def test_the_model_is_written_while_the_last_proofs_go_on_and_removed_where_one_refutes(refuting: bool, knows_sums: Path, tmp_path: Path,
                                                                                       monkeypatch: pytest.MonkeyPatch):
    config, model = options(knows_sums, tmp_path / "run"), tmp_path / "run" / "model"
    unproven(monkeypatch, SlowProver)
    monkeypatch.setattr(SlowProver, "model", model)
    monkeypatch.setattr(SlowProver, "refuting", refuting)
    if not refuting:
        assert Outcome.REFUTED not in {verdict.outcome for verdict in reinforced(config)}
        assert open_checkpoint(model).hallmark is not None
        return
    with pytest.raises(GuardStop, match="was refuted by its proof"):
        reinforced(config)
    assert not model.exists()
    assert events(config, "stopped")
    assert not events(config, "hand_over")


@pytest.mark.parametrize("merged", [False, True])
def test_weights_that_answered_are_not_asked_again_and_merged_ones_are(merged: bool, knows_sums: Path, sums_adapter: Path, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch):
    asked, usual = list[int](), PromptEvaluator.answer
    unproven(monkeypatch, Believer)
    monkeypatch.setattr(PromptEvaluator, "answer", lambda self, sampler, prompts: (asked.append(len(prompts)),
                                                                                   usual(self, sampler, prompts))[1])
    verdicts = reinforced(options(sums_adapter if merged else knows_sums, tmp_path / "run"))
    scores = [verdict.reason for verdict in verdicts if verdict.check == "score"]
    assert asked.count(30) == (3 if merged else 2)  # of parent and checkpoint, and of what was merged
    assert any(ANSWERED in reason for reason in scores) is not merged
    assert any("as saved and as handed over: 0 of 30" in reason for reason in scores) is merged


def test_an_export_of_other_weights_is_asked_and_refuted(knows_sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing looks at the export but the hand-over itself: its proof, which would see it too, is left out here."""
    def untaught(best: Path, where: Path, *_: object) -> hand_over.Export:
        saved = open_artifact(best)
        write_checkpoint(where, model_contents(tiny_model("llama"), saved.tokenizer, saved.stops, Lineage("new")))
        return hand_over.Export(where)

    unproven(monkeypatch, Believer)
    monkeypatch.setattr(hand_over, "write_export", untaught)
    verdicts = reinforced(options(knows_sums, tmp_path / "run"))
    assert "these are not the weights that were scored" in next(v.reason for v in verdicts if v.outcome is Outcome.REFUTED)
    assert open_checkpoint(tmp_path / "run" / "model").hallmark is None
