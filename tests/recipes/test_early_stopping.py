"""Stopping early: on evidence alone, refused where it could not know, and the same in every session."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from assay.errors import UsageError
from assay.recipes.evaluator import EarlyStopping, EvalHistory, stopping_rule
from tests.recipes import sittings
from tests.recipes.sittings import events, options, rows, sit

EVERY = 10


class Watched(EarlyStopping):
    """With evaluations that a test makes, and ears."""

    def __init__(self, patience=3, worth=0.05, looks=30):
        self.said, self.events = [], []
        run = SimpleNamespace(say=self.said.append, log=lambda kind, **what: self.events.append((kind, what)))
        rule = stopping_rule(patience, worth, schedule="cosine", steps=looks * EVERY, every=EVERY)
        super().__init__(run, EvalHistory(SimpleNamespace(folder=Path("nowhere"))), rule, EVERY)

    def evaluate(self, step, losses):
        self.history.steps.append(step)
        self.history.losses.append(np.asarray(losses))
        self.judge(step)
        return self.reason is not None


def curve(of_step, noise=0.002, sequences=200):
    """Losses of the same sequences at every look, about a curve; each has a level of its own, which cancels."""
    draw = np.random.default_rng(0)
    level = draw.normal(2, 0.5, sequences)
    return lambda step: level + of_step(step) + draw.normal(0, noise, sequences)


def stopped_at(stopping, losses, looks=30):
    """The odd looks at the beginning do not count: they lie elsewhere on the curve."""
    steps = [0, 1, *range(EVERY, (looks + 1) * EVERY, EVERY)]
    return next((step for step in steps if stopping.evaluate(step, losses(step))), None)


def test_a_run_that_improves_goes_on_and_one_that_does_not_is_stopped_with_its_evidence():
    assert stopped_at(Watched(), curve(lambda step: -0.03 * step / EVERY)) is None
    stopping = Watched()
    stop = stopped_at(stopping, curve(lambda step: -0.03 * min(step / EVERY, 12)))
    assert stop in range(13 * EVERY, 18 * EVERY)
    assert len([step for step in stopping.history.steps if step and step % EVERY == 0]) == stop // EVERY
    assert "over the last 3 evaluations the held-out loss improved by" in stopping.said[-1]
    (kind, event), = stopping.events
    assert kind == "early stop"
    assert event["verdicts"][0]["outcome"] == "PROVEN"


def test_where_noise_is_larger_than_what_it_should_detect_the_rule_refuses_to_run():
    """The incident: two batches of validation, patience 2, and what was called stagnation was chance."""
    stopping = Watched(patience=2, worth=0.01)
    with pytest.raises(UsageError, match=r"at least \d+ sequences.*--early-stopping-patience 0"):
        stopped_at(stopping, curve(lambda step: 0.0, noise=0.04, sequences=16))
    assert not stopping.events


def test_noise_that_grows_after_the_rule_was_accepted_stops_nothing():
    """A third of the sequences begin to swing, up and down by turns: the trend hardly feels it, a stop could no longer know."""
    stopping, quiet = Watched(), curve(lambda step: 0.0)
    swing = np.where(np.arange(200) % 3 == 0, np.where(np.arange(200) % 2, 0.9, -0.9), 0.0)
    loud = lambda step: quiet(step) + (swing * (-1) ** (step // EVERY) if step > 7 * EVERY else 0.0)
    assert stopped_at(stopping, loud) is None
    assert not stopping.events
    assert stopped_at(Watched(), quiet) == 8 * EVERY


@pytest.mark.parametrize(("asked", "words"), [
    ({"steps": None}, "--minutes does not say how many come"), ({"schedule": "wsd"}, "give --lr-scheduler-type cosine"),
    ({"steps": 70}, "evaluate at least 8 times"), ({"worth": 0.0}, "min_improvement > 0")])
def test_what_cannot_work_is_refused_before_anything_is_spent(asked, words):
    usual = {"worth": 0.01, "schedule": "cosine", "steps": 300, "every": EVERY}
    with pytest.raises(UsageError, match=words):
        stopping_rule(2, **(usual | asked))
    assert stopping_rule(0, **(usual | asked)) is None


def test_a_run_stops_early_hands_over_and_does_not_begin_again(tmp_path: Path):
    """With a learning rate of next to nothing; the second session of the same command takes no step, and one without patience goes on."""
    asked = {"save_steps": 1, "lr_scheduler_type": "cosine", "learning_rate": 1e-5, "embedding_learning_rate": 1e-5, "weight_decay": 0.0,
             "early_stopping_threshold": 0.05}
    config = options(tmp_path / "run", early_stopping_patience=2, **asked)
    said = []
    sit(config, say=said.append)
    assert any("stopping early" in line for line in said)
    steps = [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(steps) == 8  # the first look that may stop a run
    assert [event["step"] for event in events(config, "early stop")] == [8]
    sit(config)
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == steps
    sit(options(tmp_path / "run", early_stopping_patience=0, **asked))
    assert len([row for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]) == sittings.STEPS


def test_a_run_of_an_earlier_version_goes_on_where_options_have_come_since(tmp_path: Path):
    import yaml

    config = options(tmp_path / "run", tokens=4 * sittings.ROWS * sittings.LENGTH)
    sit(config)
    file = tmp_path / "run" / "config.yaml"
    file.write_text(yaml.safe_dump({key: value for key,
                                    value in yaml.safe_load(file.read_text()).items() if key != "gradient_checkpointing"}))
    sit(options(tmp_path / "run", tokens=6 * sittings.ROWS * sittings.LENGTH))
    assert len([row for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]) == 6
    with pytest.raises(UsageError, match="gradient_checkpointing was False, now True"):
        sit(options(tmp_path / "run", gradient_checkpointing=True))
