"""A headline says first whether the purpose was reached, then whether the artifact is proven; page and board begin with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.report.board import board
from assay.report.headline import headline
from assay.report.page import render_report
from assay.report.run_record import read_run
from assay.store.ledger import Ledger
from assay.verbs import runs as runs_verb
from assay.verdict import Verdict, proven, refuted, unproven
from tests.report.crafted import a_run
from tests.report.test_page import seen

LOSSES = [3.0, 3.1, 2.9, 3.2, 3.05, 2.95]


def ended(folder: Path, kind: str, verdicts: list[Verdict], **facts: Any) -> Path:
    run = a_run(folder, ending="none")
    ledger = Ledger(run / "ledger.jsonl")
    ledger.append(kind, verdicts=[verdict.to_json() for verdict in [proven("whole", "every file is there"), *verdicts]], **facts)
    ledger.close()
    return run


def gain(made: Any, change: float, low: float, high: float) -> Verdict:
    return made("gain", "in words", change=change, low=low, high=high, prompts=200, **({"optional": True} if made is unproven else {}))


@pytest.mark.parametrize(("verdict", "begins", "ends"), [
    (gain(unproven, 0.011, -0.017, 0.038), "no gain shown: +0.011 [−0.017, 0.038] answer (n=200); ", "artifact proven"),
    (gain(proven, 0.208, 0.143, 0.27), "gain shown: +0.208 [0.143, 0.270] answer (n=200); ", "artifact proven"),
    (gain(refuted, -0.1, -0.2, -0.05), "the score fell: −0.100 [−0.200, −0.050] answer (n=200); ", "artifact refuted"),
    (proven("gain", "it rose", change="nan"), "gain shown: it rose; ", "artifact proven")])
def test_reinforcement_learning_is_headed_by_its_gain(verdict: Verdict, begins: str, ends: str, tmp_path: Path):
    run = ended(tmp_path / "run", "hand over", [verdict], metric="answer", checkpoint="step-000040")
    assert str(headline(read_run(run))) == begins + ends


def test_a_run_that_gained_nothing_is_headed_so_on_its_page_and_on_the_board(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = ended(tmp_path / "run", "hand over", [gain(unproven, 0.011, -0.017, 0.038)], metric="answer", checkpoint="step-000040",
                score={"mean": 0.5, "low": 0.4, "high": 0.6, "n": 90})
    text = seen(render_report(read_run(run))).text
    assert text.index("no gain shown: +0.011 [−0.017, 0.038]") < text.index("done and proven")
    [row] = board(tmp_path)
    assert row.held_out == "0.5 [0.4, 0.6] (n=90) answer", "its own metric, no loss"
    assert row.headline == "no gain shown: +0.011 [−0.017, 0.038] answer (n=200); artifact proven"
    assert row.reached == "UNPROVEN"
    assert runs_verb.run(runs_verb.FLAGS(str(tmp_path))) == 0
    assert "no gain shown" in capsys.readouterr().out


def test_test_time_training_and_edits_are_headed_by_what_they_are_for(tmp_path: Path):
    saved = {"bits per byte, saved": {"mean": 0.0986, "low": 0.0663, "high": 0.1308, "n": 10}}
    ttt = ended(tmp_path / "ttt", "ttt", [proven("gain", "it helps", gain=0.0986)], estimates=saved)
    assert str(headline(read_run(ttt))) == "gain shown: +0.099 [0.066, 0.131] bits per byte saved (n=10); artifact proven"
    few = ended(tmp_path / "few", "ttt", [unproven("gain", "not shown", gain=0.0986, p=0.5)], estimates=saved)
    assert str(headline(read_run(few))).endswith(", 0.131] bits per byte saved (n=10), but p = 0.5 by the exact test; artifact proven")
    torn = ended(tmp_path / "torn", "ttt", [unproven("gain", "not shown"), unproven("restored", "did not run")], estimates=saved)
    assert str(headline(read_run(torn))).endswith("; artifact not proven"), "another check speaks against it"
    edit = ended(tmp_path / "edit", "edits", [proven("efficacy", "likelier"), refuted("generated", "0.500 [0.158, 0.900] (n=4), goal 0.8")])
    assert str(headline(read_run(edit))) == "facts not said: 0.500 [0.158, 0.900] (n=4), goal 0.8; artifact refuted"


@pytest.mark.parametrize(("verdict", "words"), [
    (proven("direction", "0.81 of 64 margins rose"), "preference learned: 0.81 of 64 margins rose; artifact proven"),
    (unproven("direction", "0.52 of 64 margins rose", optional=True), "no preference shown: 0.52 of 64 margins rose; artifact proven"),
    (refuted("direction", "0.10 of 64 margins rose"), "the rejected is preferred: 0.10 of 64 margins rose; artifact refuted")])
def test_preferences_are_headed_by_what_was_learned_to_be_preferred(verdict: Verdict, words: str, tmp_path: Path):
    run = ended(tmp_path / "run", "hand over", [verdict], checkpoint="step-000040")
    assert str(headline(read_run(run))) == words


def test_a_reward_model_is_headed_by_how_well_it_ranks(tmp_path: Path):
    verdicts = [proven("direction", "margins rose"), proven("reward head", "it moved"), unproven("accuracy", "0.53 of 30 pairs")]
    run = ended(tmp_path / "run", "hand over", verdicts, checkpoint="step-000040")
    assert str(headline(read_run(run))) == "not shown better than a coin: 0.53 of 30 pairs; artifact proven"


@pytest.mark.parametrize(("fell", "words"), [
    ({"mean": 0.4, "low": 0.31, "high": 0.48, "n": 10}, "nearer to the teacher: the KL fell by +0.400 [0.310, 0.480] of what it was"),
    ({"mean": 0.02, "low": -0.1, "high": 0.12, "n": 10}, "not shown nearer to the teacher: the KL fell by +0.020"),
    ({"mean": -0.2, "low": -0.3, "high": -0.1, "n": 10}, "farther from the teacher: the KL fell by −0.200"),
    ({"mean": "nan"}, "no lower loss shown"), (None, "no lower loss shown")])
def test_distillation_is_headed_by_its_way_towards_the_teacher(fell: Any, words: str, tmp_path: Path):
    run = ended(tmp_path / "run", "hand over", [], checkpoint="step-000040", kl_fell_by=fell)
    assert str(headline(read_run(run))).startswith(words)


def test_every_recipe_ends_with_its_headline():
    from assay.cli import _RECIPES

    verbs = Path(__file__).parents[2] / "assay" / "verbs"
    texts = {verb: (verbs / f"{verb.replace('-', '_')}.py").read_text() for verb in _RECIPES}
    ends = ("print_headline(outcome.folder)", "run_recipe(")
    assert [verb for verb, text in sorted(texts.items()) if not any(end in text for end in ends)] == []
    assert "print_headline(outcome.folder)" in (verbs / "recipe_command.py").read_text()


@pytest.mark.parametrize(("after", "words"), [
    ([loss - 1 + 0.01 * i for i, loss in enumerate(LOSSES)], "loss lowered: −0.975 ["),
    ([loss + 1 - 0.01 * i for i, loss in enumerate(LOSSES)], "the loss rose: +0.975 ["),
    ([loss + (-0.1) ** (1 + i % 2) for i, loss in enumerate(LOSSES)], "no lower loss shown: −0.045 ["),
    (None, "no lower loss shown: no held-out losses"), ([0.1], "no lower loss shown: no held-out losses"),
    (["nan"] * 6, "no lower loss shown: no held-out losses")])
def test_training_is_headed_by_its_held_out_loss(after: list[float] | None, words: str, tmp_path: Path):
    run = a_run(tmp_path / "run")
    rows = [{"step": 0, "per_document": LOSSES}, *([] if after is None else [{"step": 40, "per_document": after}])]
    (run / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = str(headline(read_run(run)))
    assert told.startswith(words)
    assert told.endswith("; artifact proven")


def test_the_best_of_many_evaluations_must_be_better_by_more(tmp_path: Path):
    slightly = [loss - change for loss, change in zip(LOSSES, (0.02, 0.1, 0.12, -0.01, 0.07, 0.09), strict=True)]
    said = []
    for steps in (1, 500):
        run = a_run(tmp_path / f"{steps}", steps=steps)
        rows = [{"step": step, "per_document": slightly if step == steps else LOSSES} for step in range(steps + 1)]
        (run / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        said.append(str(headline(read_run(run))).partition(":")[0])
    assert said == ["loss lowered", "no lower loss shown"]


@pytest.mark.parametrize(("ending", "words"), [("stopped", "stopped"), ("consumed", "interrupted"), ("none", "no end on record")])
def test_before_a_result_is_on_record_only_the_status_is_told(ending: str, words: str, tmp_path: Path):
    told = headline(read_run(a_run(tmp_path / "run", ending=ending)))
    assert told.purpose is None
    assert str(told) == words


def test_a_first_evaluation_that_was_handed_over_shows_no_lower_loss(tmp_path: Path):
    run = ended(tmp_path / "run", "hand over", [], checkpoint="step-000000")
    (run / "eval.jsonl").write_text(json.dumps({"step": 0, "per_document": LOSSES}) + "\n")
    assert str(headline(read_run(run))).startswith("no lower loss shown: the first evaluation, at step 0,")
