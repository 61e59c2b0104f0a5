"""What saving cost a loop is written down, and said where it was not little."""

import time
from pathlib import Path

import pytest

from assay.recipes import run
from assay.recipes.run import Run, SaveCost
from tests.recipes.sittings import events, options, sit


@pytest.mark.parametrize(("loop", "each", "times", "said"), [
    (100.0, 1.0, 10, "saving held the loop up for 10 s of 100, 1 s a checkpoint: 10%; with one every 500 steps, or 50 s, it would be 2%"),
    (100.0, 0.2, 10, None),  # exactly as much as is little
    (100.0, 0.21, 10, "one every 110 steps, or 10 s"),
    (59.0, 1.0, 10, None), (100.0, 5.0, 3, None)])
def test_it_speaks_of_what_is_much_and_would_go_on(loop: float, each: float, times: int, said: str | None, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    spent = SaveCost()
    for _ in range(times):
        with spent.saving():
            now[0] += each
    now[0] = loop
    found = spent.advice(steps=1000)
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(("steps", "rounded"), [(7.2, 8), (99.0, 99), (104.0, 110), (1234.0, 1300), (5000.0, 5000)])
def test_advice_is_rounded_up(steps: float, rounded: int):
    assert run._round_up(steps) == rounded


def test_a_run_writes_it_down_and_says_it_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = Run.save

    def slow(self: Run, step: int, *given, **named):
        time.sleep(0.2 if step else 2.0)
        return whole(self, step, *given, **named)

    monkeypatch.setattr(Run, "save", slow)
    monkeypatch.setattr(run, "WORTH_SAYING", 0.0)
    config, said = options(tmp_path / "run", save_steps=2), list[str]()
    began = time.monotonic()
    sit(config, say=said.append)
    whole_run = time.monotonic() - began
    (spent,) = events(config, "saving")
    assert spent["checkpoints"] > run.FEW
    assert 0.2 * spent["checkpoints"] <= spent["seconds"] < spent["loop"]
    assert spent["loop"] < whole_run - 2.0  # the first checkpoint comes before the loop
    assert any("saving held the loop up" in line and "s a checkpoint" in line for line in said)
