"""Checkpoints that pace themselves: by what they cost, at least twice an hour; and nothing but when they come depends on the clock."""

import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from assay.errors import GuardStop, UsageError
from assay.recipes import pretrain, trainer
from assay.recipes.evaluator import EarlyStopping
from assay.recipes.options import Pretrain
from assay.recipes.save_pace import FREE_COPIES, LEAST_APART, LITTLE, MOST_APART, OF_COPIES, SavePace
from assay.recipes.trainer import Trainer
from assay.report.findings import verdicts_section
from assay.report.run_record import read_run
from assay.store import durable, saving
from assay.store.checkpoint import open_checkpoint, step_folder
from assay.store.saving import Contents, owned_contents
from tests.recipes.sittings import EVERY, STEPS, Now, Strike, events, in_a_fork, left_by, options, rows, saved_steps, sit


def rested(pace: SavePace) -> None:
    """Steps are read twice with nothing beside them: the first may have shared the machine."""
    for _ in range(2):
        pace.read(0.04, 16, beside=False)


@pytest.mark.parametrize(("cost", "apart"), [(0.0, LEAST_APART), (1.0, LEAST_APART), (6.0, 400.0), (24.0, 1600.0), (60.0, MOST_APART)])
def test_the_next_one_comes_when_the_last_has_cost_little(cost: float, apart: float):
    now = Now()
    pace = SavePace(now)
    now.seconds = 1000.0
    pace.saved(cost)
    rested(pace)
    now.seconds += apart - 0.5
    assert not pace.due()
    now.seconds += 1.0
    assert pace.due()


def test_no_other_one_comes_while_the_last_is_written_or_proven_and_steps_have_not_said_what_they_take_alone():
    now = Now()
    pace = SavePace(now)
    pace.saved(0.0)
    now.seconds += LEAST_APART
    assert not pace.due()
    pace.read(0.04, 16, beside=True)
    assert not pace.due()
    pace.read(0.04, 16, beside=False)  # it ended among these
    assert not pace.due()
    pace.read(0.04, 16, beside=False)
    assert pace.due()
    pace.saved(0.0)
    now.seconds += MOST_APART
    assert pace.due(), "at least every 30 minutes, whatever is under way"


class Hours(NamedTuple):
    """What hours of a paced run came to, by a clock that is simulated."""

    stood: float  # for checkpoints after the first
    slowed: float
    copied: float
    wall: float
    oldest: float  # the most that the newest state on the disk was behind
    passed_over: int


def hours(cost: float, *, step: float, every: int, slows: tuple[float, float], copy: float, room: bool, improves: Callable[[int], bool],
          wall: float = 3 * 3600.0) -> Hours:
    """A checkpoint costs the loop `cost` seconds at once and makes the steps of the next `slows[1]` seconds `slows[0]` times as long; a
    copy in memory costs `copy`. An evaluation comes every so many steps, and is the best so far or not. Steps are read in sixteens."""
    now = Now()
    pace, busy_until, waiting, state_at, done = SavePace(now), 0.0, None, 0.0, 0
    stood = slowed = copied = oldest = took = 0.0
    passed_over = unread = 0
    while now.seconds < wall:
        longer = step * (slows[0] - 1) * (now.seconds < busy_until)
        now.seconds, slowed, took, done, unread = now.seconds + step + longer, slowed + longer, took + step + longer, done + 1, unread + 1
        oldest = max(oldest, now.seconds - state_at)
        evaluated = done % every == 0
        if unread == 16 or evaluated:
            pace.read(took / unread, unread, beside=now.seconds < busy_until)
            took, unread = 0.0, 0
        best = evaluated and improves(done)
        if not (evaluated or pace.due()):
            continue
        turn = pace.turn(best=best, waiting=waiting is not None, room=room)
        if turn in ("save", "save waiting"):
            state = waiting if turn == "save waiting" else None
            now.seconds, stood, waiting = now.seconds + cost, stood + cost, None
            state_at, busy_until = (now.seconds if state is None else state), now.seconds + slows[1]
            pace.saved(cost, state_at=state)
        elif turn == "copy":
            now.seconds, copied = now.seconds + copy, copied + copy
            pace.copied(copy)
            waiting = now.seconds
        passed_over += turn == "pass over"
    return Hours(stood, slowed, copied, now.seconds, oldest, passed_over)


@pytest.mark.parametrize("seed", range(40))
def test_saving_keeps_to_two_percent_whatever_it_costs_and_however_often_the_best_so_far_comes(seed: int):
    """The law: what regular checkpoints cost (standing still, slower steps, copies of the best) stays within 2 % of the time and one of
    each; and the newest state on the disk is never more than half an hour behind. Where one costs more than half an hour allows, twice
    an hour it is made all the same."""
    draw = random.Random(seed)
    cost, step, copy = 10 ** draw.uniform(-3, 1.9), 10 ** draw.uniform(-1.3, 0.7), 10 ** draw.uniform(-4, 1)
    slows = (draw.choice((1.0, 1.3, 2.0)), draw.choice((0.0, 5.0, 40.0, 200.0)))
    often, every, room = draw.choice((1.0, 0.5, 0.05)), draw.choice((20, 100, 500)), draw.random() < 0.7
    found = hours(cost, step=step, every=every, slows=slows, copy=copy, room=room, improves=lambda _: draw.random() < often)
    whole = cost + math.ceil(slows[1] / (step * slows[0])) * step * (slows[0] - 1)  # of one checkpoint, what it slows included
    saving = found.stood + found.slowed
    forced = 2 * whole * found.wall / MOST_APART  # what waits, and then what is half an hour newer
    assert saving <= max((1 - OF_COPIES) * LITTLE * found.wall, forced) + 2 * whole
    assert found.copied <= OF_COPIES * LITTLE * found.wall + FREE_COPIES + copy
    assert found.oldest <= MOST_APART + cost + copy + 2 * step * slows[0]
    assert not found.passed_over or not room or copy > OF_COPIES * LITTLE * every * step, "with room and time, nothing is lost"


def test_a_checkpoint_comes_as_often_as_it_may():
    found = hours(2.1, step=0.043, every=100, slows=(1.0, 0.0), copy=0.002, room=True, improves=lambda _: True)  # SmolLM2-135M on an H200
    assert 0.012 * found.wall < found.stood <= 0.015 * found.wall + 2.1
    assert found.copied < 0.001 * found.wall
    assert found.passed_over == 0


def test_what_slows_the_steps_counts_though_no_step_was_ever_read_before_it():
    """A proof takes longer than the least time between two, and begins before the first step."""
    found = hours(0.01, step=0.5, every=100, slows=(1.1, 150.0), copy=0.001, room=True, improves=lambda _: True)
    assert found.slowed <= 0.015 * found.wall + 3 * 14.0


def test_steps_that_are_slow_by_themselves_cost_a_checkpoint_nothing():
    now = Now()
    pace = SavePace(now)
    for seconds in (0.04, 0.06, 0.05, 0.04, 0.06, 0.05):
        pace.read(seconds, 16, beside=False)
    pace.saved(1.0)
    for seconds in (0.04, 0.06) * 400:
        pace.read(seconds, 16, beside=True)
    rested(pace)
    assert pace.slowed < 1.0
    now.seconds += LEAST_APART
    assert pace.due()


def test_a_run_that_goes_on_owes_what_it_owed():
    now = Now()
    pace = SavePace(now)
    pace.saved(6.0)
    now.seconds += 300.0
    again = SavePace(now)
    again.restore(pace.state())  # 6 − 0.015 · 300, and the checkpoint that holds this
    rested(again)
    now.seconds += 490.0
    assert not again.due()
    now.seconds += 20.0
    assert again.due()


def paced(out: Path, monkeypatch: pytest.MonkeyPatch, tick: float, after: dict[int, Strike] | None = None, **changed: Any) -> Pretrain:
    """A run whose clock goes by `tick` seconds at each look, and which is told nothing of how often to save."""
    pace, steps = SavePace(Now(tick)), list[int]()
    read = pace.read
    monkeypatch.setattr(pace, "read", lambda seconds, count, *, beside: (steps.append(count), read(seconds, count, beside=beside)))
    monkeypatch.setattr(trainer, "SavePace", lambda: pace)
    monkeypatch.setattr(pretrain, "PRETRAINING_EVALUATED_EVERY", EVERY)
    config = options(out, save_steps=None, **changed)
    sit(config, after=after)
    assert after or sum(steps) == STEPS, "the pace is told of every step"
    return config


def saves(config: Pretrain) -> list[int]:
    return [event["step"] for event in events(config, "save")]


def best_evaluations(config: Pretrain) -> list[int]:
    """The steps whose evaluation was the best so far."""
    evaluated = {row["step"]: sum(row["per_document"]) for row in rows(Path(config.out) / "eval.jsonl")}
    return [step for step in evaluated if evaluated[step] == min(loss for other, loss in evaluated.items() if other <= step)]


def test_when_it_saves_changes_nothing_that_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slow, quick = (paced(tmp_path / str(tick), monkeypatch, tick) for tick in (1e-9, MOST_APART / 16))
    told = options(tmp_path / "told")
    sit(told)
    assert saves(told) == [0, 1, *range(EVERY, STEPS, EVERY), STEPS] == [0, *best_evaluations(told)]
    assert saves(slow) == [0, 1, STEPS]
    assert len(saves(quick)) > 3
    assert left_by(slow) == left_by(quick) == left_by(told)


UPHILL = {"learning_rate": 0.75, "embedding_learning_rate": 0.75, "warmup_steps": 20, "decay_ratio": 0.0}  # the loss rises from step 12 on


@pytest.fixture(scope="module")
def uphill(tmp_path_factory: pytest.TempPathFactory) -> Pretrain:
    """A run that gets worse, told to save at every evaluation."""
    config = options(tmp_path_factory.mktemp("uphill") / "told", **UPHILL)
    sit(config)
    assert 1 < max(best_evaluations(config)) < STEPS - EVERY
    return config


def same_best(config: Pretrain, told: Pretrain) -> bool:
    """Both kept the same weights, moments and place in the data of the best evaluation."""
    step = max(best_evaluations(told))
    left, due = (open_checkpoint(step_folder(Path(run.out) / "checkpoints", step)) for run in (config, told))
    return left.manifest["tensors"] == due.manifest["tensors"] and (left.trainer() or {})["data"] == (due.trainer() or {})["data"]


def test_the_best_waits_in_memory_and_is_saved_before_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uphill: Pretrain):
    config = paced(tmp_path / "run", monkeypatch, 1e-9, **UPHILL)
    assert rows(tmp_path / "run" / "eval.jsonl") == rows(Path(uphill.out) / "eval.jsonl")
    assert saves(config) == [0, 1, max(best_evaluations(config)), STEPS]
    assert same_best(config, uphill)
    (spent,) = events(config, "saving")
    assert spent["copies"] == len(best_evaluations(config)) - 1, "all but step 1, which is saved at once"
    assert events(config, "not saved") == []


@pytest.mark.parametrize("how", ["killed", "terminated", "stopped by a guard"])
def test_a_run_that_is_ended_while_its_best_waits_comes_to_the_same(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                     uphill: Pretrain):
    best = max(best_evaluations(uphill))

    def end(of: Trainer) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped by a guard":
            raise GuardStop("so that it stops")
        of.run.interrupted = 15

    config, strike = options(tmp_path / "run", save_steps=None, **UPHILL), {best + 2: end}
    if how == "killed":
        monkeypatch.setattr(pretrain, "PRETRAINING_EVALUATED_EVERY", EVERY)
        assert in_a_fork(lambda: bool(paced(tmp_path / "run", monkeypatch, 1e-9, strike, **UPHILL))) == -signal.SIGKILL
        assert saved_steps(config) == [0, 1], "what waited went with the process"
    elif how == "terminated":
        paced(tmp_path / "run", monkeypatch, 1e-9, strike, **UPHILL)
        assert saves(config) == [0, 1, best, best + 2]
    else:
        with pytest.raises(GuardStop):
            paced(tmp_path / "run", monkeypatch, 1e-9, strike, **UPHILL)
        assert saves(config) == [0, 1, best], "what waited was sound"
    sit(config)
    assert left_by(config) == left_by(uphill)
    assert same_best(config, uphill)


def test_what_waits_is_saved_before_anything_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uphill: Pretrain):
    """From whatever checkpoint a run goes on, the best up to there is on the disk."""
    for looks in (4, 9, 16, 25, 40):
        config = paced(tmp_path / str(looks), monkeypatch, MOST_APART / looks, **UPHILL)
        for saved in saves(config)[1:]:
            assert max(step for step in best_evaluations(config) if step <= saved) in saves(config)[: saves(config).index(saved) + 1]
        assert same_best(config, uphill)


def test_a_best_that_can_neither_wait_nor_be_saved_is_said_and_not_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "room_in_memory", lambda size: False)
    config = paced(tmp_path / "run", monkeypatch, 1e-9, after={1: lambda of: of.pace.saved(100.0)}, **UPHILL)
    lost = best_evaluations(config)[1:]
    assert saves(config) == [0, 1, STEPS]
    assert lost
    said = events(config, "not saved")
    assert [event["step"] for event in said][: len(lost)] == lost  # and others that are better than what is saved
    assert f"step {lost[0]} scored better than all that is saved, and was not saved: a checkpoint so soon" in said[0]["reason"]
    assert "memory has no room" in said[0]["reason"]
    told = list[str]()
    sit(config, say=told.append, handing_over=True)  # again, from the last checkpoint
    (handed,) = events(config, "hand over")
    best = min((1, STEPS), key=lambda step: next(sum(row["per_document"]) for row in rows(tmp_path / "run" / "eval.jsonl")
                                                 if row["step"] == step))
    assert handed["checkpoint"] == f"step-{best:06d}"
    verdict = next(verdict for verdict in handed["verdicts"] if verdict["check"] == "best")
    assert verdict["outcome"] == "UNPROVEN"
    assert f"the best evaluation (step {max(lost)}, " in verdict["reason"]
    assert f"the best of what was saved is step {best} (" in verdict["reason"]
    assert any(line.startswith(f"best: step-{best:06d}; the best evaluation (step {max(lost)}, ") for line in told)
    warned = [words for words, _ in verdicts_section(read_run(tmp_path / "run"))["warnings"]]
    assert any(words.startswith(f"not saved: step {max(lost)} scored better") for words in warned), "the report says it"


def test_without_room_in_memory_the_best_is_saved_where_what_was_spent_is_paid_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "room_in_memory", lambda size: False)
    config = paced(tmp_path / "run", monkeypatch, 1.0)
    assert len(saves(config)) > 3
    assert {*saves(config)} | {event["step"] for event in events(config, "not saved")} == {0, *best_evaluations(config)}


def test_the_last_step_is_saved_where_the_run_stops_early_after_its_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uphill: Pretrain):
    stop = max(best_evaluations(uphill)) + EVERY

    class Stopping(EarlyStopping):
        def judge(self, step: int) -> None:
            self.reason = "planted" if step == stop else None

    monkeypatch.setattr(pretrain, "EarlyStopping", Stopping)
    config = paced(tmp_path / "run", monkeypatch, 1e-9, after={STEPS: lambda _: None}, **UPHILL)
    assert saves(config) == [0, 1, stop - EVERY, stop]


def test_an_interrupted_run_that_paces_itself_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = paced(tmp_path / "whole", monkeypatch, LEAST_APART / 2)

    def interrupt(of: Trainer) -> None:
        of.run.interrupted = 15

    config = options(tmp_path / "halves", save_steps=None)
    sit(config, after={9: interrupt})
    sit(config)
    assert left_by(config) == left_by(whole)


def test_a_resumed_run_owes_what_the_interrupted_one_owed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    owed = dict[int, float]()

    def spend(of: Trainer) -> None:
        of.pace.saved(50.0)

    def interrupt(of: Trainer) -> None:
        of.run.interrupted = 15

    def look(of: Trainer) -> None:
        owed[of.done] = of.pace.state()["owed"]

    config = paced(tmp_path / "run", monkeypatch, 1e-9, {8: spend, 9: interrupt})
    monkeypatch.setattr(trainer, "SavePace", lambda: SavePace(Now()))
    sit(config, after={10: look})
    assert owed[10] >= 50.0


def test_a_large_model_is_not_written_after_step_1_where_the_cost_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "MOST_BYTES_EARLY", 1000)
    config = paced(tmp_path / "run", monkeypatch, 1e-9)
    assert saves(config) == [0, STEPS]
    told = options(tmp_path / "told", tokens=2 * 16 * 16)
    sit(told)
    assert saves(told)[:2] == [0, 1]


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
    """The clock says that a save is due after every step: after the last one too, before the loop knows that it is the last."""
    monkeypatch.setattr(SavePace, "due", lambda _: True)
    config = options(tmp_path / "run", save_steps=None, tokens=4 * 256, warmup_steps=0)
    sit(config)
    assert [event["step"] for event in events(config, "save")] == [0, 1, 2, 3, 4]
    moved = [next(each for each in event["verdicts"] if each["check"] == "movement") for event in events(config, "account")]
    assert [each["outcome"] for each in moved] == ["PROVEN"] * 4 + ["UNPROVEN"]
    assert rows(tmp_path / "run" / "eval.jsonl")[-1]["step"] == 4
