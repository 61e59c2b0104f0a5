"""Schedules: endpoints, bounds and continuity for any sizes; impossible plans are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import UsageError
from assay.learn import lr_schedule
from assay.learn.lr_schedule import Budget, Schedule, cosine, warmup_stable_decay


@st.composite
def plans(draw):
    total = draw(st.integers(1, 3000))
    warmup = draw(st.integers(0, total - 1))
    decay = draw(st.integers(1, total - warmup))
    peak = draw(st.floats(0.01, 10))
    return total, warmup, decay, peak, draw(st.floats(0, 1)) * peak


@given(plans(), st.integers(0, 4000))
def test_cosine(plan, step):
    total, warmup, _, peak, floor = plan
    at = lambda s: cosine(s, total, warmup, peak, floor)
    assert at(0) > 0
    assert at(warmup) == pytest.approx(peak)
    assert at(total) == at(total + step) == pytest.approx(floor, abs=1e-12)
    assert 0 <= at(step) <= peak * (1 + 1e-12)
    assert at(step) >= floor - 1e-12 or step < warmup
    steepest = max(peak / (warmup + 1), math.pi / 2 * (peak - floor) / (total - warmup))
    assert abs(at(step + 1) - at(step)) <= steepest * (1 + 1e-9)
    assert (at(step + 1) >= at(step)) if step < warmup else (at(step + 1) <= at(step) + 1e-12)


@given(plans(), st.integers(0, 4000))
def test_warmup_stable_decay(plan, step):
    total, warmup, decay, peak, floor = plan
    at = lambda s: warmup_stable_decay(s, total, warmup, decay, peak, floor)
    assert at(0) > 0
    assert at(warmup) == at(total - decay) == pytest.approx(peak)
    assert at(total) == at(total + step) == floor
    assert 0 <= at(step) <= peak * (1 + 1e-12)
    assert abs(at(step + 1) - at(step)) <= max(peak / (warmup + 1), (peak - floor) / decay) * (1 + 1e-9)
    if warmup <= step <= total - decay:
        assert at(step) == pytest.approx(peak)


def test_known_values():
    assert [cosine(s, 12, 2) for s in (0, 1, 2, 7, 12)] == pytest.approx([1 / 3, 2 / 3, 1, 0.55, 0.1])
    assert [warmup_stable_decay(s, 10, 1, 4) for s in (0, 1, 6, 7, 9, 10)] == pytest.approx([0.5, 1, 1, 0.75, 0.25, 0])


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: cosine(-1, 10), "step is -1; steps count from 0"),
    (lambda: cosine(float("nan"), 10), "step is nan"),
    (lambda: cosine(0, 10, 10), "10 steps of warm-up and 0 of decay do not fit into 10"),
    (lambda: cosine(0, 0), "do not fit into 0"),
    (lambda: cosine(0, 10, -1), "-1 steps of warm-up"),
    (lambda: cosine(0, 10, 1, peak=0.05), "floor 0.1 and peak 0.05"),
    (lambda: cosine(0, 10, 1, floor=-0.1), "floor -0.1"),
    (lambda: warmup_stable_decay(0, 10, 6, 5), "6 steps of warm-up and 5 of decay do not fit into 10"),
    (lambda: warmup_stable_decay(0, 10, 1, 0), "0 of decay"),
])
def test_impossible_plans(call, sentence):
    with pytest.raises(UsageError, match=sentence):
        call()


@pytest.mark.parametrize("decay", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("seconds_a_step", [0.5, 4.0, 9.0, 11.0, 14.0])
def test_minutes_end_on_the_way_down_however_slow_a_step_is(seconds_a_step: float, decay: float, monkeypatch: pytest.MonkeyPatch):
    """As the loop asks: after every step, and it does not begin one when the time is up."""
    now = [0.0]
    monkeypatch.setattr(lr_schedule.Clock, "seconds", property(lambda _: now[0]))
    schedule, done = Schedule(Budget(None, 1.0, "wsd", 0, decay)), 0
    schedule.begin()
    rates = []
    while not schedule.over(done):
        rates.append(schedule.multiplier(done))
        now[0] += seconds_a_step
        done += 1
        schedule.decide_end(done, seconds_a_step)
    assert done == schedule.stop_at
    assert now[0] <= 60
    assert rates[-1] <= 0.5
    flat = 1 - max(decay, (lr_schedule.LEAST_DOWN + 1) * seconds_a_step / 60)
    assert rates.count(1.0) >= flat * 60 / seconds_a_step
