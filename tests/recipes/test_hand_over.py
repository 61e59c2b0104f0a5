"""Handing over: the best, once, as it was scored, and again where a longer run found better."""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.errors import ArtifactError, GuardStop, StoreError, UsageError
from assay.guard import proof
from assay.recipes import hand_over
from assay.recipes.hand_over import check_evaluated, check_weight_set, handed_over_before
from assay.recipes.options import Sft
from assay.recipes.starting_model import given
from assay.store import durable
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint, quarantine_checkpoint, step_folder
from assay.testing.tiny_models import rewrite_tensors
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, Verdict, proven, refuted
from tests.recipes import sittings
from tests.recipes.sittings import LENGTH, ROWS, events, options, sit


@pytest.fixture(autouse=True)
def unproven_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave exports unproven: what a fresh process says of one is the matter of tests/guard/test_proof.py."""
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])


def handed(config, **options) -> list:
    found = sit(config, handing_over=True, **options)
    assert found.interrupted is None
    assert all(verdict.outcome is Outcome.PROVEN for verdict in found.verdicts), str(found)
    return found.verdicts


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_what_is_handed_over_is_the_set_that_was_scored(ema: float, tmp_path: Path):
    config = options(tmp_path / "run", tokens=6 * ROWS * LENGTH, save_steps=3, ema=ema)
    checks = [verdict.check for verdict in handed(config)]
    assert checks.count("score") == 2
    best = step_folder(tmp_path / "run" / "checkpoints", 6)
    assert check_weight_set(best, tmp_path / "run" / "model").outcome is Outcome.PROVEN
    raw, out = open_artifact(best).tensors, open_artifact(tmp_path / "run" / "model").tensors
    assert all(torch.equal(raw[name], out[name]) for name in raw) is (ema == 0)


@pytest.mark.parametrize(("ema", "times"), [(0.0, 1), (0.9, 2)])
def test_exported_weights_are_scored_again_unless_they_are_those_that_were_scored(ema, times, tmp_path, monkeypatch):
    scored, usual = [], hand_over.rescore
    monkeypatch.setattr(hand_over, "rescore", lambda artifact, *how: (scored.append(artifact.digest), usual(artifact, *how))[1])
    verdicts = handed(options(tmp_path / "run", tokens=6 * ROWS * LENGTH, ema=ema))
    assert len(scored) == times
    assert any("by digest" in verdict.reason for verdict in verdicts) is (times == 1)


def test_an_export_of_other_weights_is_scored_and_refuted(tmp_path, monkeypatch):
    usual, first = hand_over.write_export, step_folder(tmp_path / "run" / "checkpoints", 1)
    monkeypatch.setattr(hand_over, "write_export", lambda best, *rest: usual(first, *rest))
    verdicts = sit(options(tmp_path / "run", tokens=6 * ROWS * LENGTH), handing_over=True).verdicts
    assert [verdict.check for verdict in verdicts if verdict.outcome is Outcome.REFUTED] == ["score"]


def test_the_same_weights_under_another_config_are_scored_again(tmp_path, monkeypatch):
    seen, usual = [], hand_over.check_exported
    monkeypatch.setattr(hand_over, "check_exported", lambda *given: (seen.append(given), usual(*given))[1])
    handed(options(tmp_path / "run", tokens=6 * ROWS * LENGTH))
    exported, *rest = seen[0]
    assert usual(exported, *rest).outcome is Outcome.PROVEN
    turned = replace(exported, config=replace(exported.config, rope=replace(exported.config.rope, base=7.0)))
    assert usual(turned, *rest).outcome is Outcome.REFUTED


def test_a_finished_run_hands_over_once_and_a_longer_one_again(tmp_path: Path):
    config = options(tmp_path / "run", tokens=6 * ROWS * LENGTH)
    handed(config)
    first = open_artifact(tmp_path / "run" / "model").digest
    assert "weight set" in [verdict.check for verdict in handed(config)]
    assert open_artifact(tmp_path / "run" / "model").digest == first
    handed(options(tmp_path / "run", tokens=12 * ROWS * LENGTH))
    assert open_artifact(tmp_path / "run" / "model").digest != first
    assert open_artifact(tmp_path / "run" / "earlier-1-model").digest == first
    assert [event["checkpoint"] for event in events(config, "hand over")] == ["step-000006", "step-000006", "step-000012"]


def test_a_model_without_a_hallmark_or_damaged_is_made_again(tmp_path: Path):
    config = options(tmp_path / "run", tokens=6 * ROWS * LENGTH)
    handed(config)
    best, model = step_folder(tmp_path / "run" / "checkpoints", 6), tmp_path / "run" / "model"
    assert handed_over_before(best, model)
    (model / "hallmark.json").unlink()
    assert not handed_over_before(best, model)
    handed(config)
    assert handed_over_before(best, model)
    rewrite_tensors(model / "model.safetensors", lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1})
    assert not handed_over_before(best, model)
    assert not handed_over_before(best, tmp_path / "run" / "nothing")


def test_a_checkpoint_that_is_not_what_was_scored_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list = []
    monkeypatch.setattr(hand_over, "check_evaluated", lambda *given: (seen.append(given), check_evaluated(*given))[1])
    handed(options(tmp_path / "run", tokens=6 * ROWS * LENGTH))
    evaluator, best, _ = seen[0]
    assert check_evaluated(evaluator, best).outcome is Outcome.PROVEN
    other = step_folder(tmp_path / "run" / "checkpoints", 1)
    assert check_evaluated(evaluator, other).outcome is Outcome.REFUTED
    evaluator.history.losses[-1] = evaluator.history.losses[-1] * 1.001
    found = check_evaluated(evaluator, best)
    assert found.outcome is Outcome.REFUTED
    assert "what was saved is not what was scored" in found.reason


def test_a_hand_over_that_is_refuted_takes_the_hallmark_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder was proven by itself before the scores were compared; after that nothing says PROVEN of it, nor trains on it."""
    config, model = options(tmp_path / "run", tokens=6 * ROWS * LENGTH, ema=0.5), tmp_path / "run" / "model"
    monkeypatch.setattr(hand_over, "SAME_SCORE", -1.0)
    assert sit(config, handing_over=True).exit_code == 3
    assert not (model / "hallmark.json").exists()
    assert "exported bytes score" in str(open_checkpoint(model).quarantined)
    monkeypatch.setattr(proof, "prove", lambda *_, **__: [proven("whole", "not looked at")])
    with pytest.raises(ArtifactError, match="is quarantined"):
        proof.prove_checkpoint(model)
    with pytest.raises(UsageError, match="is quarantined: exported bytes score"):
        given(Sft(model=str(model), data=("rows.jsonl",), out=str(tmp_path / "tuned")))
    monkeypatch.setattr(hand_over, "SAME_SCORE", 1e-4)
    handed(config)  # the next session sets it aside, and makes a good one
    assert open_checkpoint(model).hallmark is not None
    assert open_checkpoint(tmp_path / "run" / "earlier-1-model").quarantined


def test_a_model_that_is_gone_or_unmarked_when_the_run_ends_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, usual = tmp_path / "run" / "model", hand_over.check_forgetting

    def ends(damage: Callable[[], object]) -> list[str]:
        monkeypatch.setattr(hand_over, "check_forgetting", lambda *given: (usual(*given), damage())[0])
        found = sit(options(tmp_path / "run", tokens=6 * ROWS * LENGTH), handing_over=True)
        return [verdict.reason for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED]

    assert ends(lambda: None) == []
    assert "no such folder" in ends(lambda: shutil.rmtree(model))[0]
    assert "config.json" in ends(lambda: (model / "config.json").unlink())[0]
    assert "has no hallmark" in ends(lambda: (model / "hallmark.json").unlink())[0]


class SlowProver(NoProver):
    """Ends its proofs once RUN/model is written: a hand-over that waited for them first would never be. `refuting` the last one."""

    refuting, model = False, Path()

    def __init__(self) -> None:
        self.started: list[Path] = []

    def start(self, folder: Path, **_: Any) -> None:
        self.started.append(folder)

    def close(self) -> list[tuple[Path, list[Verdict]]]:  # type: ignore[override]
        started, self.started = self.started, []
        until = time.monotonic() + 60
        while started and not (self.model / "manifest.json").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        return [(folder, [(refuted if self.refuting else proven)("answers", "probe logits")]) for folder in started[-1:]]


@pytest.mark.parametrize("refuting", [False, True])
def test_the_model_is_written_while_the_last_proofs_go_on_and_removed_where_one_refutes(refuting: bool, tmp_path: Path,
                                                                                       monkeypatch: pytest.MonkeyPatch):
    config, model = options(tmp_path / "run", tokens=6 * ROWS * LENGTH), tmp_path / "run" / "model"
    monkeypatch.setattr(sittings, "NoProver", SlowProver)
    monkeypatch.setattr(SlowProver, "model", model)
    monkeypatch.setattr(SlowProver, "refuting", refuting)
    if not refuting:
        handed(config)
        assert open_checkpoint(model).hallmark is not None
        return
    with pytest.raises(GuardStop, match="was refuted by its proof"):
        sit(config, handing_over=True)
    assert not model.exists()
    assert events(config, "stopped")


def test_a_disk_that_cannot_remove_the_model_does_not_hide_the_proof_that_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said, model, usual = list[str](), tmp_path / "run" / "model", durable.remove_folder

    def remove(path: Path) -> None:
        if path == model:
            raise StoreError("no space is left")
        usual(path)

    monkeypatch.setattr(sittings, "NoProver", SlowProver)
    monkeypatch.setattr(SlowProver, "model", model)
    monkeypatch.setattr(SlowProver, "refuting", True)
    monkeypatch.setattr(durable, "remove_folder", remove)
    with pytest.raises(GuardStop, match="was refuted by its proof"):
        sit(options(tmp_path / "run", tokens=6 * ROWS * LENGTH), handing_over=True, say=said.append)
    assert any("could not be removed: no space is left" in sentence for sentence in said)


@pytest.mark.parametrize("refuting", [False, True])
def test_what_is_made_of_a_checkpoint_that_was_not_proven_itself_has_no_hallmark(refuting: bool, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch):
    """Its proof was late or died, or has refuted it and nobody heard: that the export is the same says nothing."""
    class Unheard(NoProver):
        proves = True

        def start(self, folder: Path, **_: Any) -> None:
            if refuting:
                quarantine_checkpoint(open_checkpoint(folder), [refuted("answers", "probe logits")])

    monkeypatch.setattr(sittings, "NoProver", Unheard)
    monkeypatch.setattr(hand_over, "prove", lambda _: [proven("lineage", "the same")])
    outcome = sit(options(tmp_path / "run", tokens=6 * ROWS * LENGTH), handing_over=True)
    due = Outcome.REFUTED if refuting else Outcome.UNPROVEN
    assert [verdict.outcome for verdict in outcome.verdicts if verdict.check == "checkpoint"] == [due]
    assert outcome.exit_code == 3
    model = open_checkpoint(tmp_path / "run" / "model")
    assert (model.hallmark, bool(model.quarantined)) == (None, refuting)


def test_a_model_that_is_refuted_has_no_hallmark_while_its_forgetting_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A suite may take an hour, and whoever interrupts it must not be left with what looks proven."""
    seen = list[bool]()
    monkeypatch.setattr(hand_over, "prove", lambda _: [proven("lineage", "the same")])
    monkeypatch.setattr(hand_over, "check_exported", lambda *_: refuted("score", "another one"))
    monkeypatch.setattr(hand_over, "check_forgetting", lambda _, place, __: seen.append(open_checkpoint(place).hallmark is None) or [])
    assert sit(options(tmp_path / "run", tokens=6 * ROWS * LENGTH), handing_over=True).exit_code == 3
    assert seen == [True]
