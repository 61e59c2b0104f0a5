"""Evaluations of a GRPO run, looked at again from its options and files: clean ones are proven, and each part that is changed is seen."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.recipes import grpo, hand_over, run
from assay.recipes.witness_records import look_folder, looks_verdicts, pending_looks
from assay.testing.tiny_training import RecordingProver
from assay.verdict import Outcome, Verdict, proven, refuted, unproven
from assay.witness.due_looks import LOOKS, judge_look, judge_looks, looks_summary
from tests.recipes.sums import options, taught


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("taught"), steps=10)


def kept_run(parent: Path, out: Path, **changed: Any) -> list[Verdict]:
    """A run whose evaluations are kept; whoever asks looks at them. What is said of the gain comes back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Prover", RecordingProver)
        patch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
        found = grpo.grpo(options(parent, out, **{"max_steps": 2, "witness": "0", "eval_prompts": 4, "num_generations_eval": 2} | changed),
                          lambda _: None)
    return [verdict for verdict in found.verdicts if verdict.check == LOOKS]


@pytest.fixture(scope="module")
def run_folder(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("looks") / "run"
    said = kept_run(parent, out)
    assert [verdict.outcome for verdict in said] == [Outcome.UNPROVEN, Outcome.PROVEN], "\n".join(map(str, said))
    assert "eval-model: " in said[1].reason
    assert "score as recorded" in said[1].reason
    return out


def test_clean_evaluations_are_proven_and_said(run_folder: Path):
    looks = pending_looks(run_folder, 2)
    assert [folder.name for folder in looks] == ["eval-000000", "eval-000002"]
    assert [folder.name for folder in pending_looks(run_folder, 1)] == ["eval-000000"], "a checkpoint is proven with what led to it"
    said = judge_looks(looks)
    assert (said.outcome, "and they score as recorded" in said.reason) == (Outcome.PROVEN, True), str(said)
    assert looks_verdicts(run_folder)[0].outcome is Outcome.PROVEN
    for folder in looks:
        (folder / "verdict.json").unlink()


def first_sample(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts["items"][0]["samples"][0].update(changed)


def another_id(facts: dict[str, Any]) -> None:
    sample = facts["items"][0]["samples"][0]
    sample["ids"] = [*sample["ids"][:-1], 97]


def a_training_prompt(facts: dict[str, Any]) -> None:
    facts["asked"][0] = "sums.jsonl:1:0000000000000000"


@pytest.mark.parametrize(("change", "words"), [
    (first_sample(text="7 or 8"), "its ids are"), (another_id, "its ids are"),
    (lambda facts: facts["items"][0]["samples"][0].update(logprob=-30.0), "nats a token from what was recorded"),
    (lambda facts: facts["items"][0].update(wanted=0.25), "counts 0.25"),
    (lambda facts: [facts["items"][0].update(wanted=3.0)] + [said.update(score=3.0) for said in facts["items"][0]["samples"]],
     "is recorded with 3, due is"),
    (lambda facts: facts["items"][0]["ids"].append(49), "do not have the ids that they are rendered to"),
    (lambda facts: facts.update(temperature=0.5), "it was drawn at temperature 0.5"),
    (a_training_prompt, "are not among the 30 that are held out"),
    (lambda facts: facts.update(whole=True), "4 prompts were asked, 30 are held out"),
    (lambda facts: facts["asked"].append(facts["asked"][0]), "1 of 5 prompts were asked twice"),
    (lambda facts: facts["items"][0]["samples"].pop(), "[1, 2] completions of a prompt, 2 were asked for"),
])
def test_what_was_changed_is_refuted(change: Callable[[dict[str, Any]], object], words: str, run_folder: Path, tmp_path: Path):
    shutil.copytree(run_folder / "witness", tmp_path / "run" / "witness")
    shutil.copy(run_folder / "config.yaml", tmp_path / "run")
    folder = look_folder(tmp_path / "run", "000002")
    facts = json.loads((folder / "record.json").read_text())
    change(facts)
    (folder / "record.json").write_text(json.dumps(facts))
    said = judge_look(folder)
    assert (said.outcome, words in said.reason) == (Outcome.REFUTED, True), str(said)


@pytest.mark.parametrize(("change", "words"), [
    ({"left_out": "it was too dear"}, "was not looked at again: it was too dear"),
    ({"model": "nowhere/step-000002"}, "step-000002, the checkpoint that was evaluated, is no longer there")])
def test_what_cannot_be_looked_at_is_unproven_and_says_why(change: dict[str, Any], words: str, run_folder: Path, tmp_path: Path):
    folder = look_folder(tmp_path / "run", "000002")
    shutil.copytree(look_folder(run_folder, "000002"), folder)
    shutil.copy(run_folder / "config.yaml", tmp_path / "run")
    (folder / "record.json").write_text(json.dumps(json.loads((folder / "record.json").read_text()) | change))
    said = judge_look(folder)
    assert (said.outcome, words in said.reason) == (Outcome.UNPROVEN, True), str(said)


def test_one_look_that_is_refuted_refutes_them_all():
    good, bad = proven(LOOKS, "fine", look="a"), refuted(LOOKS, "b: other texts", look="b")
    assert looks_summary([good, bad]).outcome is Outcome.REFUTED
    assert looks_summary([good, unproven(LOOKS, "c was not looked at", optional=True)]).reason.endswith("; 1 not: c was not looked at")
    assert looks_summary([]).outcome is Outcome.UNPROVEN


def test_greedy_answers_and_a_users_function(parent: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def kind(prompt, completion, row):\n    return float(row['gold'] in completion) / 2\n")
    kept_run(parent, tmp_path / "run", num_generations_eval=0, metric=f"{tmp_path / 'mine.py'}:kind", witness="0", lora_r=2)
    said = [judge_look(folder) for folder in pending_looks(tmp_path / "run", 2)]
    assert [(each.outcome, "score as recorded" in each.reason) for each in said] == [(Outcome.PROVEN, True)] * 2, said
    (tmp_path / "mine.py").write_text("def kind(prompt, completion, row):\n    return 0.25\n")
    assert judge_look(look_folder(tmp_path / "run", "000002")).outcome is Outcome.REFUTED
    (tmp_path / "mine.py").write_text("def kind(prompt, completion, row):\n    raise RuntimeError('closed')\n")
    assert "not graded again: " in judge_look(look_folder(tmp_path / "run", "000002")).reason


def test_without_a_witness_nothing_is_kept(parent: Path, tmp_path: Path):
    assert kept_run(parent, tmp_path / "run", witness="off") == []
    assert pending_looks(tmp_path / "run", 2) == []
