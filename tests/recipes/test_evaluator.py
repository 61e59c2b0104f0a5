"""Evaluation during a run: comparable from one time to the next, remembered across sessions, and silent about a gap that cannot be."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from assay.evaluation.held_out_loss import score_corpus
from assay.recipes import run as run_module
from assay.recipes.evaluator import EvalHistory, HeldOutEvaluator
from assay.recipes.run import Run
from assay.testing.tiny_models import nudge, tiny_model
from assay.testing.tiny_training import NoProver, tiny_corpus
from tests.recipes.sittings import events, options, rows
from tests.refusals import stopped_by


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(run_module, "Prover", NoProver)
    return Run(tmp_path / "run", options(tmp_path / "run"), say=said.append)


def evaluator_of(run: Run, repeats_from: int = 100) -> HeldOutEvaluator:
    three = partial(score_corpus, corpus=tiny_corpus(), rows=8, length=32, count=3)
    return HeldOutEvaluator(run, three, repeats_from=repeats_from, device="cpu")


def test_a_look_scores_the_same_documents_each_time_and_writes_them_down(run: Run, said: list[str]):
    evaluator = evaluator_of(run)
    found = evaluator.evaluate(tiny_model(), 10, [5.0, 4.0])
    evaluator.evaluate(tiny_model(), 20, [])
    assert np.array_equal(evaluator.history.losses[0], evaluator.history.losses[1])
    assert evaluator.history.train == [4.5, pytest.approx(found.loss)]  # without a step between, there is no training loss to tell
    row, again = rows(run.folder / "eval.jsonl")
    assert (row["step"], row["train"], len(row["per_document"])) == (10, 4.5, 3)
    assert again["per_document"] == row["per_document"]
    assert rows(run.metrics_file)[0] | {"eval_loss": 0} == {
        "step": 9, "eval_loss": 0, "eval_bits_per_byte": found.bits_per_byte.mean, "eval_low": found.bits_per_byte.low,
        "eval_high": found.bits_per_byte.high, "eval_documents": 3}
    assert "step 10: held-out" in said[0]


def test_the_best_is_the_lowest_and_not_the_last(run: Run):
    evaluator = evaluator_of(run)
    for step, model in ((10, nudge(tiny_model(), 0.3)), (20, tiny_model()), (30, nudge(tiny_model(), 0.3, seed=1))):
        evaluator.evaluate(model, step, [])
    assert evaluator.best_step() == 20
    assert evaluator.best_checkpoint().name == "step-000020"
    assert "is the best; the last" in evaluator.best_in_words()


def test_a_resumed_run_remembers_what_it_saw_up_to_its_step_and_since_its_last_look(run: Run):
    evaluator = evaluator_of(run)
    for step in (2, 4, 6):
        for taken in (step - 2, step - 1):
            run.record(taken, loss=float(taken))
        evaluator.evaluate(tiny_model(), step, [float(step - 2), float(step - 1)])
    run.rewind(5)
    later = evaluator_of(run)
    later.recall()
    assert later.history.steps == [2, 4]
    assert later.history.train == evaluator.history.train[:2]
    assert all(np.array_equal(a, b) for a, b in zip(later.history.losses, evaluator.history.losses[:2], strict=True))
    later.evaluate(tiny_model(), 6, [5.0])
    assert later.history.train == evaluator.history.train  # step 4 was taken before the interruption, step 5 after it


@pytest.mark.parametrize(("repeats_from", "said_so"), [(0, True), (1000, False)])
def test_a_gap_is_spoken_of_only_once_text_is_read_again(repeats_from: int, said_so: bool, run: Run, said: list[str]):
    evaluator = evaluator_of(run, repeats_from)
    for look in range(1, 9):
        evaluator.evaluate(tiny_model(), 10 * look, [5.0 - 0.5 * look])  # learned by heart, while held-out loss stays where it is
    run.ledger.close()
    assert bool(events(run.config, "gap")) is said_so
    assert any("learned by heart" in line or "over-fitting" in line for line in said) is said_so


def test_other_documents_than_the_last_time_stop_the_run_before_anything_is_decided(run: Run):
    counts = iter([3, 3, 4])
    evaluator = HeldOutEvaluator(run, lambda model: score_corpus(model, tiny_corpus(), rows=8, length=32, count=next(counts)),
                                 repeats_from=100, device="cpu")
    for step in (10, 20):
        evaluator.evaluate(tiny_model(), step, [])
    with stopped_by("held_out_set"):
        evaluator.evaluate(tiny_model(), 30, [])
    run.ledger.close()
    assert evaluator.history.steps == [10, 20]
    assert len({row["held_out"] for row in rows(run.folder / "eval.jsonl")}) == 1
    assert [event["verdicts"][0]["outcome"] for event in events(run.config, "held out")] == ["PROVEN", "REFUTED"]


def test_what_is_recalled_must_be_of_one_set_and_old_lines_may_say_nothing(run: Run):
    evaluator_of(run).history.add(1, np.zeros(3), 0.0, None)
    for step, digest in ((2, "a" * 64), (3, "b" * 64)):
        EvalHistory(run).add(step, np.zeros(3), 0.0, digest)
    run.going_on_from = 2
    evaluator = evaluator_of(run)
    evaluator.recall()
    assert evaluator.history.digest == "a" * 64
    EvalHistory(run).add(3, np.zeros(3), 0.0, "b" * 64)
    run.going_on_from = 3
    with stopped_by("held_out_set"):
        evaluator_of(run).recall()
