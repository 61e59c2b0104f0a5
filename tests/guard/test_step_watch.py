"""The watch: reads rarely, judges everything, and measures time that no other tenant and no GPU queue can bend."""

import time
from collections.abc import Iterator

import pytest
import torch

from assay.errors import GuardStop
from assay.guard import series_checks, training_guards
from assay.guard.training_guards import READ_EVERY, StepWatch, check_detectors, stop_if_refuted
from assay.learn import loop
from assay.learn.loop import Step
from assay.verdict import Outcome, Verdict, proven, refuted, unproven
from tests.refusals import stopped_by

PEAKS = [0.02, 0.01]


def flat(_: int) -> float:
    return 1.0


def steps(losses: list[float], start: int = 0, norm: float = 1.0) -> Iterator[Step]:
    for index, loss in enumerate(losses, start):
        yield Step(index, torch.tensor(loss), torch.tensor(norm), 100.0, 128, 1.0, ((index,),))


def falling(count: int) -> list[float]:
    return [5.0 * (1 + i) ** -0.2 for i in range(count)]


def feed(watched: StepWatch, given: Iterator[Step], rates: list[float] = PEAKS) -> list:
    return [read for step in given for read in watched.feed(step, rates)]


def test_values_come_in_readings_and_the_last_ones_when_asked():
    watched = StepWatch(PEAKS, flat)
    assert [read.step.index for read in feed(watched, steps(falling(READ_EVERY + 3)))] == list(range(READ_EVERY))
    rest = watched.read()
    assert [read.step.index for read in rest] == [READ_EVERY, READ_EVERY + 1, READ_EVERY + 2]
    assert [read.loss for read in rest] == pytest.approx(falling(READ_EVERY + 3)[READ_EVERY:])
    assert [read.grad_norm for read in rest] == [1.0, 1.0, 1.0]
    assert watched.read() == []


def test_between_readings_no_value_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    """On a GPU every one would be a wait."""
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("asked for a value"))
    feed(StepWatch(PEAKS, flat), steps(falling(READ_EVERY - 1)))


@pytest.mark.parametrize(("losses", "norm", "words"), [
    ([3.0, 2.9, float("nan")], 1.0, "finite: loss or gradient norm is nan at 4"),
    ([3.0, 2.9, 2.8], float("inf"), "finite: loss or gradient norm is inf at 1"),
    ([3.0, 1.0, 1.0, 1.0], 1.0, "constant_loss: the loss is 1.0 3 times in a row from 1 on"),
    ([3.0, 2.5, 2.5, 2.5, 2.5, 2.5], 1.0, "constant_loss: the loss is exactly 2.5 5 times in a row"),
])
def test_a_series_that_cannot_be_stops_with_its_sentence(losses: list[float], norm: float, words: str):
    watched = StepWatch(PEAKS, flat)
    feed(watched, steps(losses, norm=norm))
    with pytest.raises(GuardStop) as stop:
        watched.read()
    assert words in str(stop.value)
    assert any(verdict.outcome is Outcome.REFUTED for verdict in watched.verdicts)


def test_a_placeholder_across_two_readings_is_found():
    watched = StepWatch(PEAKS, flat)
    with stopped_by("constant_loss", at=READ_EVERY - 1, value="1.0"):
        feed(watched, steps([*falling(READ_EVERY - 1), *[1.0] * 20]))


def test_a_jump_in_the_loss_stops():
    watched = StepWatch(PEAKS, flat)
    with stopped_by("change_point", cause="the loss jumped up"):
        feed(watched, steps([*falling(100), *[4.9 + i / 1000 for i in range(20)]]))


def test_every_group_is_held_to_its_own_rate():
    watched = StepWatch(PEAKS, flat)
    feed(watched, steps(falling(3)), [0.02, 0.01])
    watched.read()
    feed(watched, steps(falling(3), start=3), [0.02, 0.02])
    with stopped_by("learning_rate", step=3, observed="0.02", planned=0.01):
        watched.read()


def test_a_group_that_the_plan_does_not_know_is_refuted():
    watched = StepWatch(PEAKS, flat)
    feed(watched, steps(falling(3)), [0.02])
    with stopped_by("learning_rate"):
        watched.read()


def test_the_plan_is_asked_by_step_number():
    watched = StepWatch([1.0], lambda step: 1 / (1 + step))
    for step in steps(falling(5), start=7):
        watched.feed(step, [1 / (1 + step.index)])
    assert len(watched.read()) == 5


def test_the_first_loss_is_judged_once_and_only_at_step_0():
    with stopped_by("initial_loss"):
        feed(StepWatch(PEAKS, flat, vocab=320), steps([9.0, *falling(READ_EVERY)[1:]]))
    later = StepWatch(PEAKS, flat, vocab=320)
    assert len(feed(later, steps(falling(READ_EVERY), start=20))) == READ_EVERY  # resumed: 5.0 is no first loss
    first = StepWatch(PEAKS, flat, vocab=320)
    assert len(feed(first, steps([5.77, *falling(2 * READ_EVERY)[1:]]))) == 2 * READ_EVERY


def test_a_child_is_held_to_its_parents_loss():
    with stopped_by("inherited_loss"):
        feed(StepWatch(PEAKS, flat, parent_loss=2.0), steps(falling(READ_EVERY), start=3))
    assert len(feed(StepWatch(PEAKS, flat, parent_loss=5.0),
                    steps(falling(3 * READ_EVERY), start=3))) == 3 * READ_EVERY  # later it has learned


def test_what_was_read_is_judged_by_whoever_knows_the_data():
    told: list[list[int]] = []

    def consumed(given) -> Verdict:
        told.append([step.index for step in given])
        return proven("consumed", "as planned") if len(told) == 1 else refuted("consumed", "read twice")

    watched = StepWatch(PEAKS, flat, consumed=consumed)
    with stopped_by("consumed"):
        feed(watched, steps(falling(2 * READ_EVERY)))
    assert told == [list(range(READ_EVERY)), list(range(READ_EVERY, 2 * READ_EVERY))]


# ---------------------------------------------------------------- time


class Clocks:
    """Wall and thread time that pass when told."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.wall = self.work = 100.0
        patch.setattr(time, "monotonic", lambda: self.wall)
        patch.setattr(time, "thread_time", lambda: self.work)

    def passes(self, wall: float, work: float | None = None) -> None:
        self.wall, self.work = self.wall + wall, self.work + (wall if work is None else work)


def test_a_steps_time_includes_the_wait_for_the_gpu_and_no_save(monkeypatch: pytest.MonkeyPatch):
    """Launching takes a millisecond; the wait comes with the reading; looks and saves lie between the steps."""
    clocks = Clocks(monkeypatch)
    watched = StepWatch(PEAKS, flat)
    stack = torch.stack

    def waiting(tensors, *rest):
        if len(tensors) == READ_EVERY:
            clocks.passes(READ_EVERY * 0.040)
        return stack(tensors, *rest)

    monkeypatch.setattr(torch, "stack", waiting)
    for step in steps(falling(4 * READ_EVERY)):
        watched.begin()
        clocks.passes(0.001)
        watched.feed(step, PEAKS)
        clocks.passes(5.0)  # a save
    assert watched.seconds == pytest.approx([0.041] * 4)
    assert watched.pace() == pytest.approx(0.041)


def test_the_pace_is_unknown_before_the_first_reading():
    assert StepWatch(PEAKS, flat).pace() is None


def run_for(watched: StepWatch, clocks: Clocks, readings: int, wall: float, work: float, start: int) -> int:
    for step in steps(falling(start + readings * READ_EVERY)[start:], start=start):
        watched.begin()
        clocks.passes(wall, work)
        watched.feed(step, PEAKS)
    return start + readings * READ_EVERY


def test_steps_that_do_no_work_are_found(monkeypatch: pytest.MonkeyPatch):
    clocks, watched = Clocks(monkeypatch), StepWatch(PEAKS, flat)
    done = run_for(watched, clocks, 17, 0.040, 0.038, 0)
    with stopped_by("step_time"):
        run_for(watched, clocks, 4, 0.0001, 0.0001, done)


def test_a_machine_that_becomes_less_busy_is_no_alarm(monkeypatch: pytest.MonkeyPatch):
    """Ten times as fast on the wall, the same work: the other tenants have left."""
    clocks, watched = Clocks(monkeypatch), StepWatch(PEAKS, flat)
    done = run_for(watched, clocks, 17, 0.400, 0.040, 0)
    run_for(watched, clocks, 8, 0.040, 0.040, done)
    assert [v.outcome for v in watched.verdicts if v.check == "step_time"] == [Outcome.PROVEN]


def test_a_compilation_in_the_first_reading_is_no_alarm(monkeypatch: pytest.MonkeyPatch):
    clocks, watched = Clocks(monkeypatch), StepWatch(PEAKS, flat)
    done = run_for(watched, clocks, 1, 4.0, 4.0, 0)
    run_for(watched, clocks, 24, 0.040, 0.040, done)


# ---------------------------------------------------------------- the detectors themselves


def test_live_detectors_are_proven():
    assert check_detectors().outcome is Outcome.PROVEN


@pytest.mark.parametrize("blind", ["to a loss", "to a gradient", "to all", "nervous"])
def test_a_dead_alarm_is_found(blind: str, monkeypatch: pytest.MonkeyPatch):
    whole = loop._raise_if_bad

    def dead(index: int, values: torch.Tensor) -> None:
        if blind == "nervous":
            raise GuardStop("always")
        if blind != "to all":
            whole(index, values[1:].repeat(2) if blind == "to a loss" else values[:1].repeat(2))

    monkeypatch.setattr(loop, "_raise_if_bad", dead)
    assert check_detectors().outcome is Outcome.REFUTED


def test_a_dead_detector_of_the_log_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(series_checks, "check_finite", lambda values, name="loss": proven("finite", "fine"))
    assert check_detectors().outcome is Outcome.REFUTED
    assert training_guards.check_detectors().check == "self_test"


def test_only_what_is_refuted_stops():
    stop_if_refuted([proven("a", "good"), unproven("b", "did not run")])
    with pytest.raises(GuardStop, match=r"^c: bad; d: worse$"):
        stop_if_refuted([proven("a", "good"), refuted("c", "bad"), refuted("d", "worse")])
