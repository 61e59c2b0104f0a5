"""Checkpoints that pace themselves: by what they cost, at least twice an hour; and nothing but when they come depends on the clock."""

from pathlib import Path
from typing import Any

import pytest
import torch

from assay.errors import UsageError
from assay.recipes import pretrain, trainer
from assay.recipes.save_pace import LEAST_APART, MOST_APART, SavePace
from assay.recipes.trainer import Trainer
from assay.store import durable, saving
from assay.store.checkpoint import open_checkpoint, step_folder
from assay.store.saving import Contents, owned_contents
from tests.recipes.sittings import EVERY, STEPS, events, left_by, options, rows, saved_steps, sit


class Now:
    """A clock that goes by so many seconds each time it is looked at."""

    def __init__(self, tick: float = 0.0) -> None:
        self.seconds, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.seconds += self.tick
        return self.seconds


@pytest.mark.parametrize(("cost", "apart"), [(0.0, LEAST_APART), (1.0, LEAST_APART), (6.0, 300.0), (30.0, 1500.0), (60.0, MOST_APART)])
def test_the_next_one_comes_when_the_last_has_cost_little(cost: float, apart: float):
    now = Now()
    pace = SavePace(now)
    now.seconds = 1000.0
    pace.saved(cost)
    now.seconds += apart - 0.5
    assert not pace.due()
    now.seconds += 0.5
    assert pace.due()


def test_a_checkpoint_costs_what_it_slows_too():
    """Two hours of steps of 40 ms: each checkpoint stops the loop for a second, and the next ten seconds of steps take twice as long."""
    now, lost, busy_until, began = Now(), 0.0, 0.0, 1000.0
    now.seconds = began
    pace = SavePace(now)
    while now.seconds < began + 7200:
        beside = now.seconds < busy_until
        now.seconds += 16 * (0.08 if beside else 0.04)
        lost += 16 * 0.04 * beside
        pace.read(0.08 if beside else 0.04, 16, beside=now.seconds < busy_until)
        if pace.due():
            now.seconds += 1.0
            lost, busy_until = lost + 1.0, now.seconds + 10.0
            pace.saved(1.0)
    assert lost > 0.01 * 7200, "as often as it may"
    assert lost <= 0.021 * 7200  # the first comes before it is known what one costs


def test_steps_that_are_slow_by_themselves_cost_a_checkpoint_nothing():
    pace = SavePace(Now())
    for seconds in (0.04, 0.06, 0.05, 0.04, 0.06, 0.05):
        pace.read(seconds, 16, beside=False)
    pace.saved(1.0)
    for seconds in (0.04, 0.06) * 400:
        pace.read(seconds, 16, beside=True)
    assert pace.apart == LEAST_APART


def paced(out: Path, monkeypatch: pytest.MonkeyPatch, tick: float) -> Any:
    """A run whose clock goes by `tick` seconds at each look, and which is told nothing of how often to save."""
    pace, steps = SavePace(Now(tick)), list[int]()
    read = pace.read
    monkeypatch.setattr(pace, "read", lambda seconds, count, *, beside: (steps.append(count), read(seconds, count, beside=beside)))
    monkeypatch.setattr(trainer, "SavePace", lambda: pace)
    monkeypatch.setattr(pretrain, "PRETRAINING_EVALUATED_EVERY", EVERY)
    config = options(out, save_steps=None)
    sit(config)
    assert sum(steps) == STEPS, "the pace is told of every step"
    return config


def test_when_it_saves_changes_nothing_that_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slow, quick = (paced(tmp_path / str(tick), monkeypatch, tick) for tick in (1e-9, LEAST_APART / 2))
    told = options(tmp_path / "told")
    sit(told)
    took = [[event["step"] for event in events(config, "save")] for config in (slow, quick, told)]
    assert took[0] == took[2] == [0, 1, *range(EVERY, STEPS, EVERY), STEPS]  # every evaluation was the best so far
    assert set(took[1]) > set(took[2])
    assert left_by(slow) == left_by(quick) == left_by(told)


def test_what_is_neither_the_best_nor_due_is_not_saved_but_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "SavePace", lambda: SavePace(Now()))
    monkeypatch.setattr(pretrain, "PRETRAINING_EVALUATED_EVERY", EVERY)
    config = options(tmp_path / "run", save_steps=None, learning_rate=3.0, embedding_learning_rate=3.0)  # so high that it gets worse
    sit(config)
    evaluated = {row["step"]: sum(row["per_document"]) for row in rows(tmp_path / "run" / "eval.jsonl")}
    best = [step for step in evaluated if evaluated[step] == min(loss for other, loss in evaluated.items() if other <= step)]
    assert len(best) < len(evaluated) - 1
    assert [event["step"] for event in events(config, "save")] == sorted({0, 1, *best, STEPS})
    assert max(best) in saved_steps(config)


def test_an_interrupted_run_that_paces_itself_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = paced(tmp_path / "whole", monkeypatch, LEAST_APART / 2)

    def interrupt(of: Trainer) -> None:
        of.run.interrupted = 15

    config = options(tmp_path / "halves", save_steps=None)
    sit(config, after={9: interrupt})
    sit(config)
    assert left_by(config) == left_by(whole)


def test_a_large_model_is_not_written_after_step_1_where_the_cost_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "MOST_BYTES_EARLY", 1000)
    config = paced(tmp_path / "run", monkeypatch, 1e-9)
    assert [event["step"] for event in events(config, "save")][:2] == [0, EVERY]
    first = open_checkpoint(step_folder(tmp_path / "run" / "checkpoints", 0)) if 0 in saved_steps(config) else None
    assert first is None or not first.optimizer()
    told = options(tmp_path / "told", tokens=2 * 16 * 16)
    sit(told)
    assert [event["step"] for event in events(told, "save")][:2] == [0, 1]


def test_a_disk_too_small_for_the_run_is_refused_before_step_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(durable, "free_space", lambda _: 100_000)
    config = options(tmp_path / "run")
    with pytest.raises(UsageError, match=r"the disk has 0\.0 GB free, and the run will need 0\.\d: up to 4 checkpoints"):
        sit(config)
    assert events(config, "save") == []
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_copies_stay_where_they_are_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch):
    """By the rule, on tensors of the CPU that are taken for a GPU's."""
    weight = torch.arange(12.0).reshape(3, 4)
    contents = Contents("model", {"w": weight.t()}, optimizer={"m": weight})
    asked = []
    monkeypatch.setattr(saving, "room_on_device", lambda tensors, headroom: asked.append(headroom) or True)
    owned = owned_contents(contents, headroom=7)
    assert asked == [7]
    assert torch.equal(owned.weights["w"], weight.t())
    assert owned.weights["w"].is_contiguous()
    assert owned.weights["w"].untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


def test_a_run_whose_last_step_was_saved_before_it_is_evaluated_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps so slow that each is saved as the clock says: the last one too, before the loop knows that it is the last."""
    monkeypatch.setattr(trainer, "SavePace", lambda: SavePace(Now(2 * LEAST_APART)))
    config = options(tmp_path / "run", save_steps=None, tokens=4 * 256, warmup_steps=0)
    sit(config)
    assert [event["step"] for event in events(config, "save")] == [0, 1, 2, 3, 4]
    moved = [next(each for each in event["verdicts"] if each["check"] == "movement") for event in events(config, "account")]
    assert [each["outcome"] for each in moved] == ["PROVEN"] * 4 + ["UNPROVEN"]
    assert rows(tmp_path / "run" / "eval.jsonl")[-1]["step"] == 4
