"""The recipe: what it refuses, how it ends, what it hands over."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from assay.cli import run as assay
from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.data_ledger import ids_digest
from assay.data.order import Order
from assay.errors import DataError, GuardStop, UsageError
from assay.guard.corpus_checks import check_document_copies
from assay.guard.training_guards import UpdateAccount
from assay.learn import loss_scaling, lr_schedule
from assay.model.transformer import Transformer, initialised
from assay.recipes import pretrain, run, trainer
from assay.recipes.options import Pretrain
from assay.recipes.pretrain import optimizer_for
from assay.recipes.trainer import Trainer
from assay.store.checkpoint import latest_checkpoint, open_checkpoint
from assay.testing.tiny_models import tiny_tokenizer
from assay.testing.tiny_training import NoProver, make_corpus, tiny_corpus, tiny_documents, write_documents, write_tiny_tokenizer
from assay.verdict import Outcome
from assay.zoo.run_faults import hand_nothing_over
from tests.recipes import sittings
from tests.recipes.sittings import EVERY, LENGTH, ROWS, STEPS, events, left_by, options, rows, saved_steps, sit
from tests.refusals import stopped_by


def flags(config: Pretrain) -> list[str]:
    given = {name: value for name, value in vars(config).items() if value is not None and value is not False and value != ()}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value)) if word != "True"]


# ---------------------------------------------------------------- what is refused before anything is spent


@pytest.mark.parametrize(("changed", "words"), [
    ({"tokens": None}, "give one budget: --minutes or --tokens"),
    ({"minutes": 1.0}, "give one budget: --minutes or --tokens"),
    ({"tokens": None, "minutes": 1.0, "lr_scheduler_type": "cosine"}, "--lr-scheduler-type cosine must know its last step from the first"),
    ({"depth": 0}, "expected a depth of at least 1"),
    ({"batch_tokens": 8}, "a batch of at least one row"),
    ({"ema": 1.5}, "expected a number between 0 and 1"),
    ({"value_residual": True}, "--shape qwen3 opens in transformers, which has neither --value-residual nor"),
    ({"attention_gate": True}, "add --shape assay, or leave them out"),
])
def test_a_request_that_makes_no_sense_is_refused(changed: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(UsageError, match=words):
        sit(options(tmp_path / "run", **changed))
    assert not (tmp_path / "run").exists()


def test_a_corpus_with_one_held_out_document_is_refused_with_its_place(tmp_path: Path):
    corpus = make_corpus(tmp_path / "made", tiny_documents(4), seed=2)
    assert corpus.held_out.documents == 1
    with pytest.raises(DataError, match=r"made/corpus: 1 held-out document; one alone shows no spread.*--held-out"):
        sit(options(tmp_path / "run", corpus=str(corpus.folder)))
    assert not (tmp_path / "run").exists()


def test_a_corpus_of_copies_is_said_and_one_that_repeats_itself_is_refused(tmp_path: Path):
    texts = tiny_documents(60)
    corpora = []
    for name, copies in (("few", 1), ("many", 30), ("most", 90)):
        words = write_tiny_tokenizer(tmp_path / f"{name}-words", tiny_tokenizer(template=False))
        held, train = (write_documents(tmp_path / f"{name}-{side}.jsonl", part) for side, part in (
            ("held", texts[:10]), ("train", [*texts[10:], *texts[10:11] * copies])))
        corpora.append(build_corpus([train], tmp_path / name, words, CorpusPlan(held_out=0, held_out_files=(held,))))
    found = [check_document_copies(corpus) for corpus in corpora]
    assert [verdict.outcome for verdict in found] == [Outcome.PROVEN, Outcome.UNPROVEN, Outcome.REFUTED]
    assert "30 of 80 training documents" in found[1].reason
    assert "number 1)" in found[1].reason


def test_a_copy_of_a_corpus_is_not_mixed_in_as_new_text(tmp_path: Path):
    corpus = tiny_corpus()
    shutil.copytree(corpus.folder, tmp_path / "copy")
    other = build_corpus([write_documents(tmp_path / "other.jsonl", tiny_documents(40, seed=9))], tmp_path / "other", corpus.folder,
                         CorpusPlan(held_out=0.2))
    ordered = lambda *mix: pretrain.corpus_order(options(tmp_path / "run", mix=mix), corpus, 2)
    assert ordered(f"{other.folder}:0.3").windows > ordered().windows
    for mix in ((f"{tmp_path / 'copy'}:0.3",), (f"{other.folder}:0.3", f"{corpus.folder}:0.3")):
        with pytest.raises(UsageError, match=r"the same corpus as .*, whose text would be read twice and counted as new"):
            ordered(*mix)


@pytest.mark.parametrize(("given", "due"), [({}, 0.3), ({"optimizer": "adamw"}, 0.1), ({"weight_decay": 0.0}, 0.0),
                                            ({"optimizer": "adamw", "weight_decay": 0.7}, 0.7)])
def test_matrices_decay_as_the_optimizer_asks_unless_told_otherwise(given: dict[str, Any], due: float, tmp_path: Path):
    config = options(tmp_path / "run", **given)
    plan = pretrain.derived(config, tiny_corpus(), "cpu")
    optimizer = optimizer_for(config, plan, initialised(plan.model, 0))
    assert optimizer.param_groups[0]["weight_decay"] == due


# ---------------------------------------------------------------- guards


def test_a_frozen_layer_that_is_listed_as_trainable_is_stopped_before_step_1(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def freezing(config: Any, plan: Any, model: Transformer) -> Any:
        optimizer = optimizer_for(config, plan, model)
        model.get_parameter("blocks.0.mlp.down.weight").requires_grad_(False)
        return optimizer

    monkeypatch.setattr(pretrain, "optimizer_for", freezing)
    config = options(tmp_path / "run")
    assert assay(["pretrain", *flags(config)]) == 4
    assert "blocks.0.mlp.down.weight" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert events(config, "stopped")[0]["exit_code"] == 4


def test_a_layer_that_stops_moving_is_stopped_at_the_next_checkpoint(tmp_path: Path):
    def freeze(work: Any) -> None:
        group = next(group for group in work.optimizer.param_groups if group["orthogonal"])
        stuck = work.model.blocks[0].mlp.down.weight
        index = next(i for i, p in enumerate(group["params"]) if p is stuck)
        group["params"].pop(index)
        group["rows"].pop(index)

    config = options(tmp_path / "run")
    with stopped_by("movement", tensors=["blocks.0.mlp.down.weight"]):
        sit(config, after={EVERY: freeze})
    assert events(config, "stopped")[0]["stands"] == f"step-{EVERY:06d}"


def test_nan_in_one_micro_batch_is_exit_code_4_with_a_sentence_and_a_good_checkpoint(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    whole, bad = pretrain.next_token, []
    over = Trainer.over

    def poisoned(model: Transformer, batch: Any) -> Any:
        loss = whole(model, batch)
        return loss._replace(total=loss.total * bad.pop()) if bad else loss

    def strike(trainer: Trainer) -> bool:
        if trainer.done == 8:
            bad.append(float("nan"))
        return over(trainer)

    monkeypatch.setattr(pretrain, "next_token", poisoned)
    monkeypatch.setattr(Trainer, "over", strike)
    monkeypatch.setattr(pretrain, "hand_over", hand_nothing_over)
    monkeypatch.setattr("assay.recipes.run.Prover", sittings.NoProver)
    config = options(tmp_path / "run")
    assert assay(["pretrain", *flags(config)]) == 4
    out, err = capsys.readouterr()
    assert "assay: step 8: loss nan" in err
    assert "Lower the learning rate, or look at this step's data" in err
    assert f"stopped; step-{EVERY:06d} stands" in out
    found, passed_over = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert (found and found.step, passed_over) == (EVERY, [])


def test_a_resume_that_lost_its_moments_is_stopped_before_it_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = options(tmp_path / "run", tokens=8 * ROWS * LENGTH)
    sit(config)
    monkeypatch.setattr(trainer, "load_state_tensors", lambda *_: None)
    longer = options(tmp_path / "run", tokens=12 * ROWS * LENGTH)
    with pytest.raises(GuardStop, match=r"optimizer .*step-000008"):
        sit(longer)
    assert saved_steps(config)[-1] == 8


def test_steps_too_small_to_see_at_the_end_of_the_schedule_are_no_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last checkpoint may come one step after the last but one, at a rate of almost nothing."""
    judged: list[int] = []
    begin = UpdateAccount.begin
    monkeypatch.setattr(UpdateAccount, "begin", lambda account, *given: (judged.append(1), begin(account, *given))[1])
    monkeypatch.setattr(lr_schedule, "warmup_stable_decay", lambda step, *_, **__: 1.0 if step < 7 else 1e-12)
    config = options(tmp_path / "run", tokens=9 * ROWS * LENGTH, save_steps=8)
    assert sit(config).interrupted is None
    assert len(judged) == 2  # at the beginning and after step 1; the steps that can hardly be seen are judged with those before them


def test_in_fp16_it_follows_fp32_and_its_loss_scale_is_resumed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From a scale that overflows, and grows after three clean steps: whoever goes on with another scale computes other bits."""
    for name, value in (("FIRST_SCALE", 2.0**24), ("LARGEST_SCALE", 2.0**24), ("CLEAN_STEPS", 3)):
        monkeypatch.setattr(loss_scaling, name, value)
    steps = 8
    whole, parted, wide = (options(tmp_path / name, tokens=steps * ROWS * LENGTH, dtype=dtype)
                           for name, dtype in (("whole", "fp16"), ("parted", "fp16"), ("wide", "fp32")))
    sit(whole)
    assert sit(parted, after={5: lambda trainer: setattr(trainer.run, "interrupted", 15)}).interrupted == 15
    sit(parted)
    assert left_by(whole, steps) == left_by(parted, steps)
    sit(wide)
    half, due = ([row for row in rows(Path(config.out) / "metrics.jsonl") if "loss" in row] for config in (whole, wide))
    assert [row["loss"] for row in half] == pytest.approx([row["loss"] for row in due], rel=5e-3)
    assert half[-1]["recomputed_batches"] > half[0]["recomputed_batches"] > 0


# ---------------------------------------------------------------- what is written


def test_metrics_say_what_was_read_and_the_ledger_how_often(tmp_path: Path):
    config = options(tmp_path / "run")
    sit(config)
    order = Order(tiny_corpus(), 0, ROWS, LENGTH, 2)
    steps = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert [row["data"] for row in steps] == [ids_digest(order.batch(step).ids) for step in range(STEPS)]
    assert [row["num_tokens"] for row in steps] == [(step + 1) * ROWS * LENGTH for step in range(STEPS)]
    assert [row["epoch"] for row in steps] == [0] * 21 + [1] * 5
    evaluated = [row["step"] + 1 for row in rows(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in row]
    assert evaluated == [1, 6, 12, 18, 24, 26]
    consumed, = events(config, "consumed")
    assert consumed["read_times"] == {"2": STEPS * ROWS - order.windows, "1": 2 * order.windows - STEPS * ROWS}


def test_a_budget_of_time_ends_at_the_foot_of_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tenth of a second a step, by a clock that only moves with the work: 60 steps in 6 seconds, half of them on the way down."""
    clock = {"now": 1000.0}
    whole = pretrain.next_token

    def working(model: Transformer, batch: Any) -> Any:
        clock["now"] += 0.05  # two micro-batches a step
        return whole(model, batch)

    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(pretrain, "next_token", working)
    config = options(tmp_path / "run", tokens=None, minutes=0.1, num_train_epochs=4, save_steps=1000)
    assert sit(config).interrupted is None
    way_down, = events(config, "way down")
    assert way_down["seconds_a_step"] == pytest.approx(0.1)
    rates = [row["learning_rate"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert 40 < len(rates) == way_down["stop_at"] <= 60
    assert rates[way_down["step"]] == pytest.approx(0.02)
    assert rates[-1] < 0.05 * rates[way_down["step"]]


@pytest.mark.parametrize(("seconds", "later", "steps", "words"), [
    (0.05, 0.05, None, None), (4.0, 4.0, 1, "1 step taken, the last at 25%"), (0.4, 0.4, 8, None),
    (0.4, 0.8, 8, "ran out on the way down")])
def test_minutes_begin_with_the_first_step_and_a_run_that_they_cut_short_says_so(
        seconds: float, later: float, steps: int | None, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock that moves with the work alone: the preflight takes longer than the budget, and a step twice `seconds`, or `later` from
    the way down on. Seven steps of which the last three go all the way down are a whole run."""
    clock, whole, preflight = {"now": 1000.0, "learned": 0.0}, pretrain.next_token, pretrain.preflight_pretrain

    def working(model: Transformer, batch: Any) -> Any:
        taken = seconds if clock["learned"] < 3 else later
        clock["now"] += taken
        clock["learned"] += taken
        return whole(model, batch)

    def checked_slowly(*given: Any) -> Any:
        found = preflight(*given)
        clock["now"] += 100
        clock["learned"] = 0.0
        return found

    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(pretrain, "next_token", working)
    monkeypatch.setattr(pretrain, "preflight_pretrain", checked_slowly)
    config = options(tmp_path / "run", tokens=None, minutes=0.1, num_train_epochs=4, save_steps=1000)
    outcome = sit(config)
    (found,) = [verdict for verdict in outcome.verdicts if verdict.check == "budget"]
    assert found.outcome is (Outcome.PROVEN if words is None else Outcome.UNPROVEN), found.reason
    assert (words or "") in found.reason
    taken = len([row for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row])
    assert taken > 40 if steps is None else taken <= steps


# ---------------------------------------------------------------- the whole of it, with fresh processes


def hallmarked(folder: Path) -> bool:
    return open_checkpoint(folder).hallmark is not None


def test_a_run_ends_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Nothing is stubbed: a fresh process proves each save and the model that is handed over, here and at a URL."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    config = options(tmp_path / "run", tokens=ROWS * LENGTH, remote=f"file://{tmp_path}/store", corpus=f"file://{tiny_corpus().folder}")
    assert assay(["pretrain", *flags(config)]) == 0, capsys.readouterr()
    assert [hallmarked(tmp_path / "run" / "checkpoints" / f"step-00000{step}") for step in (0, 1)] == [True, True]
    assert hallmarked(tmp_path / "run" / "model")
    assert all(hallmarked(tmp_path / "store" / name) for name in ("model", "checkpoints/step-000001"))
    handed, = events(config, "hand over")
    not_proven = [(verdict["check"], verdict["outcome"]) for verdict in handed["verdicts"] if verdict["outcome"] != "PROVEN"]
    assert not_proven == [("health", "UNPROVEN")]  # after one step it babbles, which stops nothing
    assert [verdict["check"] for verdict in handed["verdicts"]].count("score") == 2
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["model_type"] == "qwen3"


def test_only_the_proof_of_what_ended_the_loop_has_the_machine_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: dict[int, bool] = {}

    class Asked(NoProver):
        def start(self, folder: Path, *, beside: bool, **_: Any) -> None:
            asked[open_checkpoint(folder).step] = beside

    monkeypatch.setattr(run, "Prover", Asked)
    monkeypatch.setattr(pretrain, "hand_over", hand_nothing_over)
    monkeypatch.setattr(pretrain, "write_down", lambda *_, **__: None)
    pretrain.pretrain(options(tmp_path / "run"), say=lambda _: None)
    assert (asked[0], asked[1], asked[STEPS]) == (True, True, False)
