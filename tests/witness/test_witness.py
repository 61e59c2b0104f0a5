"""The witness stands alone, knows the documented order, proves clean steps, refutes wrong ones, and says what it did not replay."""

import ast
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.data.chat import TrainingExample, render_conversations
from assay.data.layouts import read_conversations
from assay.data.order import Order, permuted_places
from assay.data.packing import PackedExamples, hold_out
from assay.errors import GuardStop, UsageError
from assay.guard import proof
from assay.learn import loop
from assay.learn.lr_schedule import Budget, Schedule
from assay.recipes import hand_over, run, sft, witness_pace, witness_records
from assay.recipes.options import Sft
from assay.recipes.trainer import Trainer
from assay.recipes.witness_pace import WitnessPace
from assay.recipes.witness_records import pending_records, witness_verdict
from assay.store.checkpoint import open_checkpoint
from assay.testing.tiny_models import save_model, tiny_model, tokenizer_and_stops
from assay.testing.tiny_training import RecordingProver, tiny_corpus
from assay.verdict import Outcome, Verdict, proven, unproven
from assay.witness import replay
from assay.witness.due_rows import DueText, PackedPlan, WindowPlan, seed_at, shuffled_place
from assay.witness.due_texts import texts_to_learn
from assay.witness.due_update import Budgeted, rate_share
from assay.witness.replay import replay_step, replay_steps

MAY_IMPORT = {"assay.verdict", "assay.errors", "assay.strict_json"}


def test_it_imports_none_of_the_code_that_it_watches():
    for file in Path(replay.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", ())] \
                if isinstance(node, ast.Import) else []
            assert not [name for name in named if name.startswith("assay") and name not in MAY_IMPORT
                        and not name.startswith("assay.witness")], file.name

# ---------------------------------------------------------------- the documented order


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_permutations_are_those_that_are_trained_by(size: int):
    assert [shuffled_place(place, size, 11) for place in range(size)] == permuted_places(np.arange(size), size, 11).tolist()


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_those_that_are_trained_on(packing: bool):
    lengths = [2 + seed_at(3, number) % 11 for number in range(57)]
    examples = [TrainingExample(str(number), np.zeros(length, np.int32), np.zeros(length, np.float32), (), 1)
                for number, length in enumerate(lengths)]
    order = PackedExamples(examples, 5, 4, 16, 3, packing)
    texts = [DueText(str(number), [0] * length, [0.0] * length) for number, length in enumerate(lengths)]
    plan = PackedPlan(texts, {"max_length": 16, "seed": 5, "packing": packing, "num_train_epochs": 3, "batch_tokens": 64})
    assert plan.steps == order.steps
    for step in range(order.steps):
        assert tuple(tuple(text.name for text in row) for row in plan.due(step)) == order.ids(step)


def test_windows_are_those_that_are_trained_on():
    corpus = tiny_corpus()
    order = Order(corpus, 3, 4, 16, 2)
    plan = WindowPlan(corpus.folder, {"max_length": 16, "seed": 3, "batch_tokens": 64, "num_train_epochs": 2})
    for step in (0, 1, order.steps - 1):
        batch = order.batch(step)
        for row, pieces in enumerate(plan.due(step)):
            tokens, weights = ([each for text in pieces for each in getattr(text, name)] for name in ("tokens", "weights"))
            assert batch.tokens[row].tolist()[:len(tokens)] == tokens
            assert batch.weight[row].tolist()[:len(tokens)] == weights


CHAT = [{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"the {a} é"},
                      {"role": "assistant", "content": f" {a} is 🙂 the"}, {"role": "user", "content": "and"},
                      {"role": "assistant", "content": "ing"}]} for a in range(12)]
ROWS = {"messages": CHAT, "prompt-completion": [{"prompt": f"{a} the", "completion": f"{a}ing"} for a in range(12)],
        "alpaca": [{"instruction": f"say {a}", "input": "now", "output": str(a), "system": "s"} for a in range(12)],
        "text": [{"text": f"the {a}"} for a in range(12)],
        "sharegpt": [{"conversations": [{"from": "human", "value": f"{a}?"}, {"from": "gpt", "value": f"{a}."}]} for a in range(12)],
        "gsm8k": [{"question": f"{a}?", "answer": f"well\n#### {a}"} for a in range(12)]}


@pytest.mark.parametrize("layout", ROWS)
def test_texts_and_masks_are_those_that_are_trained_on(layout: str, tmp_path: Path):
    write(tmp_path / "rows.jsonl", ROWS[layout])
    save_model(tmp_path / "base", tiny_model())
    tokenizer, stops = tokenizer_and_stops()
    for roles, turns in ((("assistant",), "together"), (("assistant", "user"), "apart")):
        kept, _ = hold_out(read_conversations(tmp_path / "rows.jsonl", gsm8k="think").rows, 0.25, 7)
        due = render_conversations(kept, tokenizer, stops, length=48, over="truncate", roles=roles, turns=turns).examples  # type: ignore[arg-type]
        found = texts_to_learn(tmp_path / "base", {"data": [str(tmp_path / "rows.jsonl")], "held_out_data": None, "held_out": 0.25,
                                                   "seed": 7, "gsm8k": "think", "max_length": 48, "too_long": "truncate",
                                                   "roles": list(roles), "turns": turns})
        assert [(text.name, text.tokens, text.weights) for text in found] == [
            (example.id, example.tokens.tolist(), example.weight.tolist()) for example in due]


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 5, 40])
def test_rates_are_those_of_the_schedule(kind: str, steps: int):
    schedule = Schedule(Budget(steps, None, kind, min(10, steps // 4), 0.5))  # type: ignore[arg-type]
    options = {"warmup_steps": 10, "lr_scheduler_type": kind, "decay_ratio": 0.5}
    for step in range(steps):
        assert rate_share(step, options, steps, Budgeted(steps, None), tuning=True) == pytest.approx(schedule.multiplier(step), rel=1e-12)

# ---------------------------------------------------------------- kept steps


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def options(home: Path, **changed: Any) -> Sft:
    if not (home / "base").exists():
        save_model(home / "base", tiny_model())
        write(home / "chat.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(8) for b in range(6)])
    usual: dict[str, Any] = {"model": str(home / "base"), "data": (str(home / "chat.jsonl"),), "out": str(home / "run"), "max_length": 32,
                             "batch_tokens": 96, "max_steps": 3, "learning_rate": 3e-3, "held_out": 0.1, "save_steps": 100,
                             "probe_samples": 0, "device": "cpu"}
    return Sft(**usual | changed)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are written, and nobody replays them but the test."""
    monkeypatch.setattr(run, "Prover", RecordingProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])


@pytest.mark.usefixtures("recording")
def test_first_last_and_drawn_steps_are_kept_and_said_in_the_hallmark(tmp_path: Path):
    found = sft.sft(options(tmp_path, witness="1"), lambda _: None)
    records = pending_records(tmp_path / "run")
    assert {record.name for record in records} >= {"step-000001", "step-000003"}
    (mark,) = [v for v in open_checkpoint(tmp_path / "run" / "model").hallmark["verdicts"] if v["check"] == "witness"]  # type: ignore[index]
    assert mark["outcome"] == "UNPROVEN"
    assert "was kept and not replayed" in mark["reason"]
    assert found.exit_code == 0

    said = replay_steps(records)
    assert said.outcome is Outcome.PROVEN, str(said)
    assert not list(tmp_path.glob("run/witness/*/*.safetensors"))
    assert pending_records(tmp_path / "run") == []
    assert witness_verdict(tmp_path / "run", "1").outcome is Outcome.PROVEN


@pytest.mark.arithmetic
@pytest.mark.usefixtures("recording")
def test_a_step_of_a_model_that_is_sure_is_proven(tmp_path: Path):
    """Of 1 - p fp32 has few digits left where p is nearly 1: a sound run was refused for what the loss itself rounds."""
    rows = [{"prompt": f"{a}+{b}=", "completion": "I shall look that up, and tell you then"} for a in range(8) for b in range(6)]
    data = str(write(tmp_path / "same.jsonl", rows))
    sft.sft(options(tmp_path, data=(data,), max_steps=100, max_length=64, batch_tokens=512, learning_rate=1e-2, num_train_epochs=100,
                    witness="1"), lambda _: None)
    last = pending_records(tmp_path / "run")[-1]
    assert last.name == "step-000100"
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])["loss"] < 0.01
    said = replay_step(last)
    assert said.outcome is Outcome.PROVEN, said.reason


@pytest.mark.usefixtures("recording")
def test_what_touches_the_weights_between_two_steps_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = Trainer.record

    def nudge(trainer: Trainer, *given: Any, **named: Any) -> None:
        usual(trainer, *given, **named)
        trainer.model.norm.weight.data.mul_(1.001)

    monkeypatch.setattr(Trainer, "record", nudge)
    sft.sft(options(tmp_path, max_steps=1), lambda _: None)
    said = replay_step(pending_records(tmp_path / "run")[0])
    assert said.outcome is Outcome.REFUTED
    assert "norm.weight) did not move as the options say" in said.reason


@pytest.mark.usefixtures("recording")
def test_weights_that_are_not_the_checkpoints_after_a_resume_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", lambda trainer: trainer.done >= 2)
        sft.sft(options(tmp_path, num_train_epochs=2), lambda _: None)
    usual = Trainer.start_loop

    def nudge(trainer: Trainer, *given: Any) -> None:
        usual(trainer, *given)
        trainer.model.norm.weight.data.mul_(1.001)

    monkeypatch.setattr(Trainer, "start_loop", nudge)
    for record in pending_records(tmp_path / "run"):
        assert replay_steps([record]).outcome is Outcome.PROVEN
    sft.sft(options(tmp_path, num_train_epochs=2), lambda _: None)
    said = replay_step(tmp_path / "run" / "witness" / "step-000003")
    assert said.outcome is Outcome.REFUTED
    assert "before the step are not those of" in said.reason


@pytest.mark.usefixtures("recording")
def test_a_checkpoint_is_proven_with_the_records_of_the_steps_that_led_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are written beside the loop: a save waits for its own, and takes no later one's and none that another has."""
    usual, asked = witness_records._write, dict[str, list[str]]()

    def slowly(*given: Any) -> None:
        time.sleep(0.3)
        usual(*given)

    monkeypatch.setattr(witness_records, "_write", slowly)
    def asks(folder: Path, *, records: Sequence[Path], **_: Any) -> list[Verdict]:
        asked[folder.name] = [record.name for record in records]
        return [unproven("whole", "nobody looked", optional=True)]

    monkeypatch.setattr(proof, "prove_checkpoint", asks)
    monkeypatch.setattr(run, "Prover", proof.Prover)
    sft.sft(options(tmp_path, witness="0"), lambda _: None)
    assert asked == {"step-000000": [], "step-000001": ["step-000001"], "step-000003": ["step-000003"]}


@pytest.mark.parametrize(("changed", "words"), [({"witness": "off"}, "--witness off"), ({}, "more than 0")])
@pytest.mark.usefixtures("recording")
def test_what_is_not_replayed_is_unproven_with_its_reason(changed: dict[str, Any], words: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("assay.recipes.witness_records.MOST_BYTES", 0)
    monkeypatch.delattr("assay.recipes.witness_records.WitnessRecords._state")  # what is not replayed is not copied either
    found = sft.sft(options(tmp_path, max_steps=1, **changed), lambda _: None)
    (said,) = [verdict for verdict in found.verdicts if verdict.check == "witness"]
    assert said.outcome is Outcome.UNPROVEN
    assert words in said.reason
    assert found.exit_code == 0


def test_a_number_or_off_is_expected(tmp_path: Path):
    with pytest.raises(UsageError, match="--witness is 'often'"):
        sft.sft(options(tmp_path, witness="often"), lambda _: None)


def test_a_fault_of_step_1_stops_the_run_at_its_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through the real proof: a fresh process, which has no fault, replays the step."""
    usual = loop.clip_gradients
    monkeypatch.setattr(loop, "clip_gradients", lambda optimizer, parameters, clip: usual(optimizer, parameters, 1e9))
    with pytest.raises(GuardStop, match=r"step-000001 was refuted by its proof .*witness: step 1: the gradients of 14 of 14 tensors"):
        sft.sft(options(tmp_path, max_steps=1), lambda _: None)
    assert not (tmp_path / "run" / "model").exists()
    assert (tmp_path / "run" / "witness" / "step-000001" / "before.safetensors").exists()

# ---------------------------------------------------------------- pace


def test_a_replay_is_kept_where_two_percent_of_the_time_pay_for_it(tmp_path: Path):
    clock = [0.0]
    pace = WitnessPace(lambda: clock[0])
    assert pace.too_dear(expected=9.0) is None, "of a small model replays take seconds"
    assert "would have taken 30 s of the 0 s so far" in str(pace.too_dear(expected=30.0))
    pace.kept.append(tmp_path)
    (tmp_path / "verdict.json").write_text(json.dumps(unproven("witness", "timed", seconds=30.0).to_json()))
    clock[0] = 2900.0
    assert pace.too_dear(expected=1.0) is not None, "what was measured counts, not what was expected"
    clock[0] = 3000.0
    assert pace.too_dear(expected=1.0) is None
    pace.kept.append(tmp_path / "not replayed yet")
    assert pace.too_dear(expected=1.0) is not None, "those that wait for their replay will take as long"
    clock[0] = 4500.0
    assert pace.too_dear(expected=1.0) is None


@pytest.mark.usefixtures("recording")
def test_the_first_step_is_always_kept_and_what_is_not_paid_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(witness_pace, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(witness_pace, "WITNESS_SHARE", 0.0)
    sft.sft(options(tmp_path, witness="0"), lambda _: None)
    assert [record.name for record in pending_records(tmp_path / "run")] == ["step-000001"]
    said = replay_steps(pending_records(tmp_path / "run"))
    assert said.outcome is Outcome.PROVEN
    assert "step-000003 was not replayed: replays would have taken" in witness_verdict(tmp_path / "run", "0").reason
