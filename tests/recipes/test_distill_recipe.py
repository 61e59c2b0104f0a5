"""Distillation as a recipe: the student comes nearer to its teacher, by whichever way, and what is told of it is what was handed over.

Saves stay unproven here; tests/recipes/test_sft.py and the toy say what a proof says.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from assay import cli
from assay.data.chat import render_conversations
from assay.data.layouts import read_conversations
from assay.errors import DataError, GuardStop, UsageError
from assay.evaluation.teacher_agreement import Agreement
from assay.guard.proof import Prover
from assay.learn.loop import train
from assay.learn.lr_schedule import Clock
from assay.learn.objectives import next_token
from assay.learn.optim import adamw
from assay.model.resize_embeddings import with_new_tokens
from assay.model.transformer import Transformer
from assay.recipes import distill, hand_over, on_policy, run, sft, starting_model, teacher_text, teachers
from assay.recipes.conversations import Conversations, held_out_batches, load_conversations, refuse_nonsense
from assay.recipes.options import Distill, Sft
from assay.recipes.starting_model import StartingModel
from assay.recipes.trainer import Trainer
from assay.seeds import generator
from assay.statistics.estimate import paired
from assay.store import checkpoint
from assay.store.artifact import build_model, open_artifact
from assay.store.checkpoint import open_checkpoint, quarantine_checkpoint, step_folder
from assay.store.ledger import Ledger
from assay.store.saving import Lineage, model_contents
from assay.testing.tiny_models import nudge, save_model, tiny_model, tokenizer_and_stops
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, Verdict, proven, refuted
from tests.recipes.sittings import rows

ROOT = Path(__file__).parents[2]
LETTERS, LENGTH, K, STEPS = "abcdef", 64, 32, 5
GOES = (0.5, 0.25, 0.1, 0.15)  # one, two or three letters on, or to an end: no single walk shows this, and the teacher knows it

# ---------------------------------------------------------------- a world in which a teacher knows more than a text


def walks(count: int, name: str) -> list[dict[str, str]]:
    chance, found = generator(0, name), []
    for number in range(count):
        at = first = int(torch.randint(6, (), generator=chance))
        said = ""
        while (went := int(torch.multinomial(torch.tensor(GOES), 1, generator=chance))) < 3 and len(said) < 16:
            at = (at + went + 1) % 6
            said += LETTERS[at]
        found.append({"prompt": f"{number} {LETTERS[first]}:", "completion": said or LETTERS[at]})
    return found


def write(file: Path, data: Sequence[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in data))
    return str(file)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of three layers that has read many walks, students that have read none, and a few walks."""
    folder = tmp_path_factory.mktemp("distill")
    tokenizer, stops = tokenizer_and_stops()
    write(folder / "many.jsonl", walks(600, "many"))
    save_model(folder / "teacher", taught(folder, 3))
    save_model(folder / "student", tiny_model("llama", 0, depth=1, windows=(None,)))
    save_model(folder / "ignorant", tiny_model("llama", 7))
    other = with_new_tokens(tokenizer, ("<think>",))
    checkpoint.write_checkpoint(folder / "stranger", model_contents(tiny_model("llama", 2), other, stops, Lineage()))
    write(folder / "walks.jsonl", walks(120, "few"))
    return folder


def taught(folder: Path, depth: int) -> Transformer:
    """A teacher that has read many walks."""
    teacher, (tokenizer, stops) = tiny_model("llama", 1, depth=depth, windows=(None,) * depth), tokenizer_and_stops()
    read = render_conversations(read_conversations(str(folder / "many.jsonl")).rows, tokenizer, stops, length=LENGTH).examples
    batches = held_out_batches(read, LENGTH, 24)
    lessons = (batches[step % len(batches)] for step in range(45))
    for _ in train(teacher, adamw(teacher.named_parameters(), 5e-3), lessons, next_token, micro=24):
        pass
    return teacher


@pytest.fixture(scope="module")
def deep(home: Path) -> Path:
    """A teacher of four layers, for a chain of students."""
    return save_model(home / "deep", taught(home, 4)).folder


def options(home: Path, out: Path, **changed: Any) -> Distill:
    usual: dict[str, Any] = {
        "data": (str(home / "walks.jsonl"),), "out": str(out), "teacher": str(home / "teacher"), "max_length": LENGTH,
        "batch_tokens": 8 * LENGTH, "micro_batch_tokens": 4 * LENGTH, "num_train_epochs": 30, "max_steps": STEPS, "learning_rate": 5e-3,
                             "warmup_steps": 2,
        "save_steps": 3, "held_out": 0.25, "teacher_top_k": K, "max_new_tokens": 24, "device": "cpu"}
    student = {} if "student_layers" in changed else {"model": str(home / "student")}
    return Distill(**(usual | student | changed))


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py and of the toy."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    monkeypatch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])


def distilled(config: Distill, say: Any = lambda _: None) -> list[Verdict]:
    found = distill.distill(config, say)
    assert found.interrupted is None
    # A run of one step, or one that learns from itself, makes no better student: that is said, and judged elsewhere.
    assert all(verdict.outcome is Outcome.PROVEN for verdict in found.verdicts if verdict.check != "improvement"), str(found)
    return found.verdicts


def events(config: Distill, kind: str) -> list[dict[str, Any]]:
    return [event for event in Ledger(Path(config.out) / "ledger.jsonl").events() if event["kind"] == kind]


def metrics(config: Distill) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows(Path(config.out) / "metrics.jsonl")]


def losses(config: Distill) -> list[float]:
    return [row["loss"] for row in metrics(config) if "loss" in row]

# ---------------------------------------------------------------- online


@pytest.mark.arithmetic
def test_the_student_comes_nearer_to_its_teacher_than_by_the_text_alone(home: Path, tmp_path: Path):
    config = options(home, tmp_path / "taught", max_steps=40, save_steps=20, held_out=0.5,
                     num_train_epochs=60)  # 60 walks are soon known by heart
    said: list[str] = []
    verdicts = distilled(config, said.append)
    alone = {field.name: getattr(config, field.name) for field in dataclasses.fields(Sft) if hasattr(config, field.name)}
    sft.sft(Sft(**(alone | {"out": str(tmp_path / "alone")})), lambda _: None)

    handed, = events(config, "hand over")
    assert handed["kl_fell_by"]["low"] > 0.4
    assert handed["agreement"]["kl"]["mean"] < 0.6 * handed["agreement_before"]["kl"]["mean"]
    assert any("down by" in line for line in said)
    taught, untaught = (held_out(home, config, tmp_path / name / "model") for name in ("taught", "alone"))
    assert paired(taught.kl, untaught.kl, (taught.ids, untaught.ids)).high < 0
    assert handed["agreement"]["kl"]["mean"] == pytest.approx(taught.estimates()["kl"].mean, rel=1e-5)
    assert handed["agreement"]["student_ce"]["mean"] == pytest.approx(taught.estimates()["student_ce"].mean, rel=1e-5)

    assert {"result", "score"} <= {verdict.check for verdict in verdicts}
    told, = events(config, "teacher")
    assert told["teacher_ce"]["mean"] < 2 < told["student_ce"]["mean"]
    looked = [row for row in metrics(config) if "eval_teacher_kl" in row]
    assert [row["step"] for row in looked] == [-1, 0, 19, 39]
    for name in ("eval_teacher_kl", "eval_teacher_top1", "eval_ce"):
        assert all(row[f"{name}_low"] <= row[name] <= row[f"{name}_high"] > row[f"{name}_low"] for row in looked)
    assert looked[-1]["eval_teacher_kl"] < 0.6 * looked[0]["eval_teacher_kl"]
    assert looked[-1]["eval_teacher_top1"] > looked[0]["eval_teacher_top1"]
    assert events(config, "teacher unmoved")[0]["verdicts"][0]["outcome"] == "PROVEN"
    assert {"signal", "oneself", "share", "vocabulary", "loss"} <= {v["check"] for v in events(config, "preflight")[0]["verdicts"]}


def held_out(home: Path, config: Distill, model: Path) -> Agreement:
    """Agreement with the teacher on what the run held out, by another way than the run's."""
    start, data = loaded(config)
    teacher = distill.load_teacher(config, start, data, "cpu", lambda _: None)
    return teacher.agreement(build_model(open_artifact(model)), data.held_out_batches(4))


def loaded(config: Distill) -> tuple[StartingModel, Conversations]:
    start = starting_model.load_start(config, "cpu", lambda _: None)
    return start, load_conversations(config, start)


def test_the_share_by_which_kl_fell_is_of_all_tokens():
    before, after = (Agreement(("a", "b", "c"), np.array([1.0, 2, 1]), np.array(kl), np.ones(3), np.ones(3))
                     for kl in ([4.0, 2, 2], [2.0, 1, 0]))
    found = distill.fall(before, after)
    assert found is not None
    assert found.mean == pytest.approx((10 - 4) / 10)
    assert distill.fall(after, after).mean == 0  # type: ignore[union-attr]
    assert distill.fall(dataclasses.replace(after, kl=np.zeros(3)), after) is None


def test_the_last_batchs_loss_is_no_result(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = options(home, tmp_path / "run", max_steps=2)

    def careless(work: run.Run, *_: Any, **__: Any) -> None:
        work.ledger.append("hand over", score={"mean": losses(config)[-1]})

    monkeypatch.setattr(distill, "write_down", careless)
    verdicts = distill.distill(config, lambda _: None).verdicts
    assert (verdicts[-1].check, verdicts[-1].outcome) == ("result", Outcome.REFUTED)
    assert "such as the last batch's" in verdicts[-1].reason
    assert (tmp_path / "run" / "model" / "quarantine.json").is_file()


@pytest.mark.arithmetic
def test_an_adapter_is_taught_as_a_whole_model_is(home: Path, tmp_path: Path):
    config = options(home, tmp_path / "run", lora_r=4, divergence="jsd", temperature=2.0, ce_weight=0.5, max_steps=15, save_steps=15)
    distilled(config)
    assert losses(config)[-1] < 0.95 * losses(config)[0]
    assert (tmp_path / "run" / "adapter").is_dir()


def test_both_terms_of_every_step_are_on_record(home: Path, tmp_path: Path):
    config = options(home, tmp_path / "run", temperature=2.0, kd_weight=0.7, ce_weight=0.3, max_steps=18)
    said: list[str] = []
    distilled(config, said.append)
    taken = [row for row in metrics(config) if "loss" in row]
    assert len(taken) == 18
    assert all(row["loss"] == pytest.approx(0.7 * row["kd"] + 0.3 * row["ce"], rel=1e-5) for row in taken)
    batch = loaded(config)[1].order.batch(0)
    with torch.no_grad():
        text = next_token(build_model(open_artifact(home / "student")), batch)
    assert taken[0]["ce"] == pytest.approx(float(text.total / batch.weight.sum()), rel=1e-5)  # of the first step, before it is taken
    assert any(line.startswith("step 18 of 18  loss ") and "  kd " in line and "  ce " in line for line in said)


def test_a_student_of_some_of_the_teachers_layers(home: Path, tmp_path: Path):
    assert teachers.kept_layers(30, 15) == [0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29]
    config = options(home, tmp_path / "run", student_layers=2, max_steps=1)
    distilled(config)
    teacher, student = open_artifact(home / "teacher"), open_artifact(tmp_path / "run" / "student")
    assert student.config.depth == 2
    assert all(tensor.equal(teacher.tensors[name.replace("blocks.1.", "blocks.2.")]) for name, tensor in student.tensors.items())
    facts = open_checkpoint(tmp_path / "run" / "student").facts["run_config"]["made_of"]
    assert (facts["weights"], facts["layers"]) == (teacher.digest, [0, 2])
    distilled(config)  # a second session finds its student
    with pytest.raises(UsageError, match="expected 2 to 2"):
        distill.distill(options(home, tmp_path / "other", student_layers=3), lambda _: None)


def test_a_student_teaches_a_smaller_one(home: Path, deep: Path, tmp_path: Path):
    """What pipelines/chain.yaml does, within this process: each link comes nearer to its teacher, and is made of the link before it."""
    links = [options(home, tmp_path / "first", student_layers=3, teacher=str(deep), max_steps=8),
             options(home, tmp_path / "second", student_layers=2, teacher=str(tmp_path / "first" / "model"), max_steps=8, on_policy=0.5,
                     divergence="reverse")]
    for link in links:
        assert all(verdict.outcome is Outcome.PROVEN for verdict in distilled(link))
        assert open_artifact(Path(link.out) / "model").config.depth == link.student_layers
        made_of = open_checkpoint(Path(link.out) / "student").facts["run_config"]["made_of"]
        assert made_of["weights"] == open_artifact(str(link.teacher)).digest


def chained(folder: Path) -> Path:
    """pipelines/chain.yaml as it is shipped, but for a teacher that lies in a folder, and for what makes a step small."""
    document = yaml.safe_load((ROOT / "pipelines" / "chain.yaml").read_text())
    del document["stages"]["teacher"]
    small = {"max-length": LENGTH, "batch-tokens": 8 * LENGTH, "learning-rate": 5e-3, "warmup-steps": 2, "num-train-epochs": 30,
             "held-out": 0.25, "device": "cpu"}
    for stage in document["stages"].values():
        stage["options"] |= small
    document["stages"]["first"]["options"]["teacher"] = "${inputs.teacher}"
    document["stages"]["second"]["options"]["max-new-tokens"] = 24
    (folder / "chain.yaml").write_text(json.dumps(document, indent=1))
    return folder / "chain.yaml"


@pytest.mark.slow
def test_the_shipped_chain_of_students_runs_whole_and_is_proven(home: Path, deep: Path, tmp_path: Path):
    command = [sys.executable, "-m", "assay", "pipeline", str(chained(tmp_path)), "--out", str(tmp_path / "out"), "--input",
               f"teacher={deep}", f"data={home / 'walks.jsonl'}", "first-layers=3", "second-layers=2", "steps=12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    for name, layers in (("first", 3), ("second", 2)):
        handed = open_checkpoint(tmp_path / "out" / name / "model")
        assert handed.hallmark is not None
        assert open_artifact(handed.folder).config.depth == layers
    made_of = open_checkpoint(tmp_path / "out" / "second" / "student").facts["run_config"]["made_of"]
    assert made_of["weights"] == open_artifact(tmp_path / "out" / "first" / "model").digest
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert again.stdout.count("unchanged, not run again") == 2


def test_interrupted_and_resumed_is_the_uninterrupted_run_bit_for_bit(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, parted = (options(home, tmp_path / name, ce_weight=0.5) for name in ("whole", "parted"))
    distilled(whole)
    over = Trainer.over

    def struck(trainer: Trainer) -> bool:
        trainer.run.interrupted = 15 if trainer.done == 2 else None
        return over(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", struck)
        assert distill.distill(parted, lambda _: None).interrupted == 15
    distilled(parted)
    ends = [open_checkpoint(step_folder(Path(config.out) / "checkpoints", STEPS)) for config in (whole, parted)]
    assert ends[0].manifest["tensors"] == ends[1].manifest["tensors"]
    assert metrics(whole) == metrics(parted)


# ---------------------------------------------------------------- in the student's own words, and of several teachers


def test_the_student_learns_from_its_teacher_in_its_own_words_and_goes_on_bit_for_bit(home: Path, tmp_path: Path,
                                                                                      monkeypatch: pytest.MonkeyPatch):
    """Interrupted between a step on the data and one on what it says itself."""
    whole, parted = (options(home, tmp_path / name, on_policy=0.5, divergence="reverse", divergence_top_k=16)
                     for name in ("whole", "parted"))
    distilled(whole)
    [preflight] = events(whole, "preflight")
    assert {"own words", "own words' loss", "floor"} <= {verdict["check"] for verdict in preflight["verdicts"]}
    drawn = [(row["on_policy"], row.get("on_policy_completions", 0)) for row in metrics(whole) if "on_policy" in row]
    assert {due for due, _ in drawn} == {0, 1}
    assert all((count > 0) == bool(due) for due, count in drawn)
    kls = [row["eval_teacher_kl"] for row in metrics(whole) if "eval_teacher_kl" in row]
    assert kls[-1] < kls[0]
    over = Trainer.over

    def struck(trainer: Trainer) -> bool:
        trainer.run.interrupted = 15 if trainer.done == 2 else None
        return over(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", struck)
        assert distill.distill(parted, lambda _: None).interrupted == 15
    distilled(parted)
    assert metrics(whole) == metrics(parted)


def test_a_teacher_that_scores_the_neighbours_of_the_students_words_is_stopped(home: Path, tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch):
    """It reads every drawn text one token late; on the data's own text it reads as it should."""
    usual = on_policy.spoken

    def late(example: Any, completion: Any) -> Any:
        made = usual(example, completion)
        return dataclasses.replace(made, weight=np.concatenate([made.weight[1:], [0.0]]) * (np.arange(len(made)) > 0))

    monkeypatch.setattr(on_policy, "spoken", late)
    with pytest.raises(GuardStop, match="own words"):
        distill.distill(options(home, tmp_path / "run", on_policy=1.0), lambda _: None)


def test_two_teachers_teach_by_their_weights_and_one_that_is_a_stranger_is_refused(home: Path, tmp_path: Path):
    second = tmp_path / "second"
    save_model(second, nudge(build_model(open_artifact(home / "teacher")), 2e-3))
    config = options(home, tmp_path / "run", teacher=f"{home / 'teacher'}=0.7,{second}=0.3", max_steps=2, save_steps=2)
    distilled(config)
    [told] = events(config, "teacher")
    one, two = (open_artifact(path).digest for path in (home / "teacher", second))
    assert told["digest"] not in (one, two)
    start, data = loaded(config)
    teacher = teachers.load_online(config, teachers.Student(start.parent.config.vocab, start.tokenizer), "cpu")
    assert isinstance(teacher, teachers.OnlineTeachers)
    batch = data.batch(0)
    parts = [float(each.objective(start.model, batch).total.detach()) for each in teacher.teachers]
    assert float(teacher.objective(start.model, batch).total.detach()) == pytest.approx(0.7 * parts[0] + 0.3 * parts[1], rel=1e-6)
    with pytest.raises(UsageError, match="the same ids are another text to the teacher"):
        distill.distill(options(home, tmp_path / "other", teacher=f"{home / 'teacher'}=0.5,{home / 'stranger'}=0.5"), lambda _: None)


@pytest.mark.parametrize("how", ["online", "stored", "text"])
def test_a_teacher_that_a_proof_refuted_teaches_nobody(how: str, home: Path, tmp_path: Path):
    folder = save_model(tmp_path / "teacher", build_model(open_artifact(home / "teacher"))).folder
    quarantine_checkpoint(open_checkpoint(folder), [refuted("values", "a byte is off")])
    with pytest.raises(UsageError, match="is quarantined: a byte is off"):
        distill.distill(options(home, tmp_path / "run", teacher=str(folder), how=how), lambda _: None)


def shorter(home: Path, folder: Path, name: str, context: int) -> str:
    """The same model with another context in its config."""
    model = build_model(open_artifact(home / name))
    model.config = dataclasses.replace(model.config, max_length=context)
    return str(save_model(folder, model).folder)


@pytest.mark.parametrize("how", ["online", "stored"])
def test_a_teacher_is_not_asked_beyond_its_context(how: str, home: Path, tmp_path: Path):
    """Its positions mean nothing there, and its logits would be learned all the same."""
    teacher = shorter(home, tmp_path / "teacher", "teacher", 16)
    with pytest.raises(UsageError, match=r"a context of 16 tokens, and is to read a text of \d+.*Give --max-length 16"):
        distill.distill(options(home, tmp_path / "run", teacher=teacher, how=how), lambda _: None)
    assert not (tmp_path / "run" / "teacher-logits").exists()


def test_what_the_student_says_itself_ends_with_its_context_and_its_teacher_must_read_all_of_it(home: Path, tmp_path: Path):
    """Rows are longer than the student's context here: they hold several of its texts."""
    student = shorter(home, tmp_path / "student", "student", 40)
    distilled(options(home, tmp_path / "run", model=student, on_policy=1.0, max_steps=2, save_steps=2, max_new_tokens=36))
    with pytest.raises(UsageError, match="a context of 36 tokens, and is to read a text of 40"):
        distill.distill(options(home, tmp_path / "other", model=student, on_policy=1.0, max_new_tokens=36,
                                teacher=shorter(home, tmp_path / "teacher", "teacher", 36)), lambda _: None)


def test_a_run_does_not_go_on_with_another_teacher(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = options(home, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", lambda trainer: trainer.done >= 3)
        distill.distill(config, lambda _: None)
    elsewhere = open_artifact(save_model(tmp_path / "moved",
                                         nudge(build_model(open_artifact(home / "teacher")).requires_grad_(True))).folder)
    monkeypatch.setattr(teachers, "open_artifact", lambda _: elsewhere)
    with pytest.raises(GuardStop, match=r"the teacher is .* now, the run began with"):
        distill.distill(config, lambda _: None)


def test_a_teacher_that_moves_is_caught(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    placed, over = list[Transformer](), Trainer.over
    place = teachers.place_teacher

    def struck(trainer: Trainer) -> bool:
        if trainer.done == 3:
            with torch.no_grad():
                placed[0].embed.weight[0, 0] += 1e-3
        return over(trainer)

    monkeypatch.setattr(teachers, "place_teacher", lambda *given: (placed.append(place(*given)), placed[0])[1])
    monkeypatch.setattr(Trainer, "over", struck)
    with pytest.raises(GuardStop, match=r"1 of .* tensors of the teacher changed, embed.weight"):
        distill.distill(options(home, tmp_path / "run"), lambda _: None)
    assert not (tmp_path / "run" / "model").exists()


def test_oneself_teaches_nothing(home: Path, tmp_path: Path):
    same = {"model": str(home / "teacher")}
    with pytest.raises(UsageError, match=r"the same weights .*every gradient would be 0"):
        distill.distill(options(home, tmp_path / "run", **same), lambda _: None)
    assert not (tmp_path / "run").exists()
    config = options(home, tmp_path / "beside", **same, ce_weight=1.0, max_steps=1)
    distilled(config)  # the text teaches, and the student's old self holds it back
    assert events(config, "hand over")[0]["kl_fell_by"] is None  # there was none
    share, = (verdict for verdict in events(config, "preflight")[0]["verdicts"] if verdict["check"] == "share")
    assert (share["outcome"], "already agrees" in share["reason"]) == ("UNPROVEN", True)

# ---------------------------------------------------------------- checkpoints


class Proving(NoProver):
    """Replacement of fresh processes: says PROVEN of all that it is given, and remembers what that was."""

    def __init__(self) -> None:
        self.given: list[Path] = []

    def start(self, folder: Path, **_: Any) -> None:
        self.given.append(folder)

    def finished(self) -> list[tuple[Path, list[Verdict]]]:
        given, self.given = self.given, []
        return [(folder, [proven("whole", "in this test")]) for folder in given]

    close = finished


def steps_of(config: Distill, kind: str) -> list[int]:
    return [int(event["checkpoint"].removeprefix("step-")) for event in events(config, kind)]


@pytest.mark.parametrize(("every", "due"), [(3, [0, 1, 3, 6, 7]), (5, [0, 1, 5, 7]), (0, [0, 1, 7])])
def test_checkpoints_come_every_so_many_steps_the_first_after_step_1_and_each_goes_to_its_proof(
        every: int, due: list[int], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "Prover", Proving)
    config = options(home, tmp_path / "run", max_steps=7, save_steps=every, insist=True)
    distilled(config)
    assert steps_of(config, "save") == due
    assert sorted(steps_of(config, "proof")) == due
    assert {event["outcome"] for event in events(config, "proof")} == {"PROVEN"}


def test_checkpoints_come_after_so_many_minutes_too(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now, record = [0.0], Trainer.record

    def slow(trainer: Trainer, step: Any, **columns: Any) -> None:
        now[0] += 40  # seconds
        record(trainer, step, **columns)

    monkeypatch.setattr(Clock, "seconds", property(lambda _: now[0]))
    monkeypatch.setattr(Trainer, "record", slow)
    config = options(home, tmp_path / "run", max_steps=8, save_steps=0, save_minutes=1.5, insist=True)
    distilled(config)
    assert steps_of(config, "save") == [0, 1, 4, 7, 8]  # at 40, 160, 280 and 320 seconds


@pytest.mark.slow
def test_every_checkpoint_is_proven_in_a_fresh_process(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "Prover", Prover)
    config = options(home, tmp_path / "run", max_steps=2, save_steps=1)
    distilled(config)
    assert sorted(steps_of(config, "proof")) == [0, 1, 2]
    assert {event["outcome"] for event in events(config, "proof")} == {"PROVEN"}
    assert all(open_checkpoint(step_folder(tmp_path / "run" / "checkpoints", step)).hallmark for step in (1, 2))

# ---------------------------------------------------------------- stored


@pytest.mark.arithmetic
def test_stored_answers_teach_what_the_teacher_would_and_are_used_again_without_it(home: Path, tmp_path: Path,
                                                                                   monkeypatch: pytest.MonkeyPatch):
    online = options(home, tmp_path / "online")
    stored = options(home, tmp_path / "stored", how="stored", teacher_logits=str(tmp_path / "kept"))
    distilled(online)
    distilled(stored)
    assert losses(stored)[-1] < 0.9 * losses(stored)[0]
    # All but the likeliest 32 of 320 are one outcome, so KL is less by a little that the last bits may hide; the way down is the same.
    assert losses(stored) == pytest.approx(losses(online), rel=1e-3)
    handed, = events(stored, "hand over")
    assert handed["kl_fell_by"]["low"] > 0
    assert "teacher_ce" not in handed["agreement"]  # unknown, and not made up

    monkeypatch.setattr(teachers, "place_teacher", None)  # nobody sits down a second time
    again = options(home, tmp_path / "again", how="stored", teacher_logits=str(tmp_path / "kept"), teacher=None)
    distilled(again)
    assert metrics(again) == metrics(stored)


def test_stored_answers_are_refused_where_they_are_of_something_else(home: Path, tmp_path: Path):
    kept: dict[str, Any] = {"how": "stored", "teacher_logits": str(tmp_path / "kept")}
    with pytest.raises(UsageError, match="kept does not exist yet"):
        distill.distill(options(home, tmp_path / "run", **kept, teacher=None), lambda _: None)
    with pytest.raises(UsageError, match="allows forward alone"):
        distill.distill(options(home, tmp_path / "run", **kept, divergence="reverse"), lambda _: None)
    first = options(home, tmp_path / "first", **kept)
    distill.load_teacher(first, *loaded(first), "cpu", lambda _: None)
    changed = [row | {"completion": row["completion"] + "a"} if place == 50 else row for place, row in enumerate(walks(120, "few"))]
    other_text = write(tmp_path / "walks.jsonl", changed)
    cases: list[tuple[dict[str, Any], type[Exception], str]]
    cases = [({"temperature": 2.0}, UsageError, "at temperature 1; --teacher-top-k is 32 and --temperature 2"),
             ({"teacher_top_k": 8}, UsageError, "holds 32 tokens a place"),
             ({"teacher": str(home / "ignorant")}, DataError, "holds answers of the teacher"),
             ({"model": str(home / "stranger")}, DataError, "its ids mean other text"),
             ({"data": (other_text,)}, DataError, "was not asked about example")]
    for refused, error, reason in cases:
        with pytest.raises(error, match=reason):
            distill.distill(options(home, tmp_path / "run", **(kept | refused)), lambda _: None)
    assert not (tmp_path / "run").exists()

# ---------------------------------------------------------------- text


@pytest.mark.arithmetic
def test_a_teacher_of_another_tokenizer_writes_text(home: Path, tmp_path: Path):
    config = options(home, tmp_path / "run", how="text", model=str(home / "stranger"), sample_temperature=1.0)
    said: list[str] = []
    distilled(config, said.append)
    kept = rows(tmp_path / "run" / "teacher.jsonl") + rows(tmp_path / "run" / "teacher-held-out.jsonl")
    asked = {row["prompt"] for row in walks(120, "few")}
    assert {row["prompt"] for row in kept} <= asked
    assert len({row["prompt"] for row in kept}) == len(kept) > 60
    assert {row["teacher"] for row in kept} == {open_artifact(home / "teacher").digest}
    assert any("answers of teacher" in line for line in said)
    evaluated = rows(tmp_path / "run" / "eval.jsonl")
    assert sum(evaluated[-1]["per_document"]) < sum(evaluated[0]["per_document"])
    before = (tmp_path / "run" / "teacher.jsonl").read_bytes()
    distilled(config)  # a second session reads them again
    assert (tmp_path / "run" / "teacher.jsonl").read_bytes() == before
    write(tmp_path / "run" / "teacher.jsonl", [row | {"asked": "otherwise"} for row in kept])
    with pytest.raises(UsageError, match="what another teacher said, or was asked otherwise"):
        distill.distill(config, lambda _: None)


@pytest.mark.parametrize("other", ["wrote its own", "is running"])
def test_a_teacher_that_answers_late_does_not_write_over_what_another_run_learns_from(
        other: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, late = tmp_path / "run" / "teacher.jsonl", teacher_text.sample_answers

    def answers(*asked: Any) -> Any:
        running.claim()
        if other == "wrote its own":
            file.write_text("words of another\n")
            running.close()
        return late(*asked)

    running = Ledger(tmp_path / "run" / "ledger.jsonl")
    monkeypatch.setattr(teacher_text, "sample_answers", answers)
    sentence = "by another run while this one asked" if other == "wrote its own" else "another process is writing"
    with pytest.raises(UsageError, match=sentence):
        distill.distill(options(home, tmp_path / "run", how="text", sample_temperature=1.0), lambda _: None)
    running.close()
    assert not file.exists() or file.read_text() == "words of another\n"


def test_what_the_teacher_did_not_finish_is_not_learned(home: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"none of \d+ answers .*\(cut at --max-new-tokens\)"):
        distill.distill(options(home, tmp_path / "run", how="text", max_new_tokens=1, teacher=str(home / "ignorant")), lambda _: None)
    text = write(tmp_path / "text.jsonl", [{"text": "abc"}] * 3)
    with pytest.raises(DataError, match="there is no prompt"):
        distill.distill(options(home, tmp_path / "run", how="text", data=(text,)), lambda _: None)

# ---------------------------------------------------------------- requests, and exit codes


@pytest.mark.parametrize(("changed", "reason"), [
    ({"model": None}, "name the student: .* found none"),
    ({"student_layers": 2, "model": "x"}, "found --model and --student-layers"),
    ({"teacher": None}, "name who teaches"),
    ({"teacher_logits": "x"}, "is for --how stored"),
    ({"kd_weight": 0.0}, "kd_weight is 0.0"),
    ({"how": "text", "ce_weight": 1.0}, "leave --ce-weight out"),
    ({"on_policy": 0.5, "how": "text"}, "its teacher must read along"),
    ({"on_policy": 0.5, "ce_weight": 1.0}, "taught its own words"),
    ({"how": "text", "divergence_top_k": 4}, "it is of a teacher that reads along"),
    ({"on_policy": 1.0, "sample_temperature": 0.0}, "give a temperature above 0"),
    ({"teacher": "a=0.7,b=0.7"}, "that add up to 1"), ({"teacher": "a,b"}, "several as PATH=WEIGHT"),
    ({"save_steps": 0}, "may take more than 10 minutes: a crash would lose all of it"),  # nobody knows how long steps take
    ({"save_steps": 0, "max_steps": None}, "a crash would lose all of it"),
    ({"save_steps": 0, "max_steps": None, "minutes": 10.1, "how": "text"}, "a crash would lose all of it"),
])
def test_a_request_that_makes_no_sense_is_refused(changed: dict[str, Any], reason: str, home: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=reason):
        distill.distill(options(home, tmp_path / "run", **changed), lambda _: None)
    assert not (tmp_path / "run").exists()


def test_no_checkpoints_is_allowed_where_it_is_short_or_insisted_on(home: Path, tmp_path: Path):
    for changed in ({"max_steps": None, "minutes": 10.0}, {"insist": True}, {"max_steps": None, "minutes": 60.0, "insist": True}):
        refuse_nonsense(options(home, tmp_path / "run", save_steps=0, **changed))


def test_exit_codes(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(cli.VERBS, "distill", "")
    usual = ["--data", str(home / "walks.jsonl"), "--model", str(home / "student"), "--max-length", str(LENGTH), "--batch-tokens", "512",
             "--max-steps", "1", "--device", "cpu", "--held-out", "0.25"]

    def done(teacher: str, out: str) -> int:
        return cli.run(["distill", "--teacher", str(home / teacher), "--out", str(tmp_path / out), *usual])

    assert done("teacher", "run") == 0
    assert "result: the reported loss" in capsys.readouterr().out.replace("PROVEN", "")
    assert done("stranger", "strange") == 2
    assert "--how text" in capsys.readouterr().err
    assert done("ignorant", "nothing") == 4
    assert "a uniform guess" in capsys.readouterr().err
    monkeypatch.setattr(hand_over, "check_exported", lambda *_: Verdict("score", Outcome.REFUTED, "in this test", {}))
    assert done("teacher", "refuted") == 3
