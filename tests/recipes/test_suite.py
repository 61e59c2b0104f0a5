"""The before-after suite: a model that collapsed to arithmetic is REFUTED, by the verb and at the end of a run; a sound child is not."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from assay.cli import run as assay
from assay.comparison.pairwise import Comparison
from assay.comparison.read_results import Arm, ScoredRun
from assay.config import parse
from assay.data.chat import TrainingExample as Example
from assay.data.packing import packed_rows
from assay.errors import UsageError
from assay.learn import loop
from assay.learn.objectives import next_token
from assay.learn.optim import adamw
from assay.model.transformer import Transformer
from assay.recipes import hand_over, run, sft, starting_model
from assay.recipes.conversations import refuse_unbudgeted
from assay.recipes.options import Sft
from assay.recipes.suite import PROBES, Suite, judge_suite, read_suite, room_to_lose
from assay.statistics.estimate import Estimate
from assay.store.checkpoint import QUARANTINE
from assay.testing.tiny_facts import fact_sentences
from assay.testing.tiny_models import save_model, tiny_model, tiny_tokenizer
from assay.testing.tiny_training import NoProver
from assay.verbs import eval as eval_verb
from assay.verdict import Outcome, Verdict, proven

SUITE = """
tasks:
  facts: {task: text, data: facts.jsonl, margin: 0.2}
probes: {n: 1, max_new_tokens: 8}
"""


def taught_model(sentences: list[str]) -> Transformer:
    """Model that has read these texts a few times, and is far better at them than an untaught one."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(template=False)
    rows = [[Example(text, ids, (0,) + (1,) * (len(ids) - 1), (text,), 1)] for text in sentences if (ids := tokenizer.encode(text))]
    batch = packed_rows(rows, 64, 0)
    for _ in loop.train(model, adamw(model.named_parameters(), 1e-2), iter([batch] * 40), next_token, micro=len(rows)):
        pass
    return model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parent that knows facts, what it knows, and sums to forget it by."""
    folder = tmp_path_factory.mktemp("suite")
    save_model(folder / "parent", taught_model(fact_sentences()), tokenizer=tiny_tokenizer(template=False))
    rows = {"facts": [{"text": sentence} for sentence in fact_sentences()],
            "sums": [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(12) for b in range(12)]}
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (folder / "suite.yaml").write_text(SUITE)
    return folder


def trained(home: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> list[Verdict]:
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    monkeypatch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])
    usual: dict[str, Any] = {"model": str(home / "parent"), "out": str(out), "max_length": 32, "batch_tokens": 512, "held_out": 0.1,
                             "num_train_epochs": 20, "max_steps": 15, "warmup_steps": 2, "save_steps": 100, "device": "cpu",
                             "witness": "off", "suite": str(home / "suite.yaml")}
    return [verdict for verdict in sft.sft(Sft(**usual | changed), lambda _: None).verdicts if verdict.check == "forgetting"]


@pytest.fixture(scope="module")
def collapsed(home: Path) -> Path:
    """A run that learned sums alone; its own suite refuted it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        (said,) = trained(home, home / "collapsed", monkeypatch, data=(str(home / "sums.jsonl"),), learning_rate=1e-2)
    assert said.outcome is Outcome.REFUTED, said
    assert "facts: bits per byte +" in said.reason
    return home / "collapsed" / "model"


def test_a_run_that_collapsed_to_arithmetic_hands_over_nothing_that_counts(collapsed: Path):
    assert (collapsed / QUARANTINE).exists()


def test_a_sound_child_is_not_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (said,) = trained(home, tmp_path / "sound", monkeypatch, data=(f"{home / 'sums.jsonl'}:0.5", f"{home / 'facts.jsonl'}:0.5"),
                      learning_rate=1e-4, num_train_epochs=50, max_steps=6)
    assert said.outcome is not Outcome.REFUTED, said
    assert "facts" in said.evidence


def test_the_verb_gives_one_verdict_and_its_numbers(home: Path, collapsed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (collapsed / QUARANTINE).unlink(missing_ok=True)
    ask = ["eval", str(collapsed), "--against", str(home / "parent"), "--suite", str(home / "suite.yaml"), "--device", "cpu", "--json"]
    assert assay([*ask, "--out", str(tmp_path / "out")]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"]["outcome"] == "REFUTED"
    assert {each["group"] for each in said["comparisons"]} == {"facts", "probes"}
    assert (tmp_path / "out" / "child" / "facts" / "scores.jsonl").exists()
    same = [*ask[:1], str(home / "parent"), *ask[2:], "--out", str(tmp_path / "same")]
    assert assay(same) == 0


@pytest.mark.parametrize(("text", "words"), [("tasks: {a: {task: text, dta: x}}", "a has dta"), ("probes: false", "nothing to ask"),
                                             ("taks: {}", "the file has taks"), ("tasks: {probes: {task: arithmetic}}", "another name"),
                                             ("level: 5.0", "level is 5.0; expected the chance"), ("probes: {margin: .nan}", "margin is"),
                                             ("tasks: {a: {task: text, margin: -1}}", "a: margin is -1"), ("1: 2", "the file has 1"),
                                             ("tasks: {1: {task: arithmetic}}", "cannot be called 1"),
                                             ("tasks: {a/../../b: {task: arithmetic}}", "cannot be called 'a/../../b'"),
                                             ("tasks: {'': {task: arithmetic}}", "cannot be called ''")])
def test_a_suite_is_read_strictly(text: str, words: str, tmp_path: Path):
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_suite(tmp_path / "suite.yaml")
    with pytest.raises(UsageError, match="no such file"):
        read_suite(tmp_path / "none.yaml")


@pytest.mark.parametrize(("text", "words"), [
    ("tasks: {a: {task: arithmetic, limit: 4, k: 0}}", "-k 0"), ("tasks: {a: {task: arithmetic, limit: 4, k: 2}}", "temperature above 0"),
    ("tasks: {a: {task: arithmetic, limit: 1}}", "one example alone"), ("probes: {n: 0}", "n is 0"),
    ("tasks: {a: {task: arithmetic, limit: 4, temperature: .nan}}", "temperature nan"), ("probes: {max_new_tokens: 0}", "max_new 0"),
    ("probes: {prompts: nowhere.txt}", "nowhere.txt")])
def test_what_a_suite_cannot_ask_is_said_before_training(text: str, words: str, tmp_path: Path):
    (tmp_path / "suite.yaml").write_text(text)
    asked = ["--model", "m", "--data", "d.jsonl", "--max-steps", "1", "--out", "run", "--suite", str(tmp_path / "suite.yaml")]
    with pytest.raises(UsageError, match=words):
        refuse_unbudgeted(parse(Sft, asked, prog="assay sft"))


@pytest.mark.parametrize("option", [("--limit", "3"), ("-k", "4"), ("--temperature", "0.5"), ("--dtype", "bfloat16"), ("--raw",)])
def test_an_option_of_one_task_is_refused_beside_a_suite(option: tuple[str, ...]):
    asked = ["model", "--against", "parent", "--suite", "suite.yaml", "--out", "out", *option]
    with pytest.raises(UsageError, match="has no effect without --task"):
        parse(eval_verb.FLAGS, asked, prog="assay eval")


def test_what_the_parent_cannot_do_proves_nothing():
    """A task on which it scores 1 in 50 cannot be forgotten by more than a margin of 0.05, nor can healthy text where it has none."""
    suite = Suite({"sums": {"task": "arithmetic"}}, {}, 0.05, Path())
    kept = Comparison("parent", "child", "accuracy", "sums", False, Estimate(0.0, -0.01, 0.01, 50), 1.0, "problems", "not shown", None, (),
                      None)
    arm = lambda score, lower, group: Arm("parent", "", (ScoredRun("parent", {"a": (score,), "b": (score,)}),), lower, group)
    rooms = [room_to_lose(arm(0.02, False, "sums")), room_to_lose(arm(0.4, False, "sums")), room_to_lose(arm(1.2, True, "wiki")),
             room_to_lose(arm(0.75, True, PROBES))]
    assert rooms == [0.02, 0.4, math.inf, 0.25]
    assert judge_suite(suite, [kept], {"sums": rooms[1]}).outcome is Outcome.PROVEN
    idle = judge_suite(suite, [kept], {"sums": rooms[0]})
    assert (idle.outcome, "sums (0.02, margin 0.05)" in idle.reason) == (Outcome.UNPROVEN, True)


def test_a_suite_that_cannot_be_asked_leaves_the_run_unproven_and_whole(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "suite.yaml").write_text("tasks: {sums: {task: arithmetic, limit: 4, max_new_tokens: 9999}}\nprobes: false\n")
    (said,) = trained(home, tmp_path / "run", monkeypatch, data=(str(home / "sums.jsonl"),), max_steps=1,
                      suite=str(tmp_path / "suite.yaml"))
    assert said.outcome is Outcome.UNPROVEN
    assert "could not be asked: the longest prompt" in said.reason
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
