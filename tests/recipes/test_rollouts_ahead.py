"""Rollouts drawn ahead: one rollout off the policy, corrected, the same bits however fast either side is, and nothing lost at a resume."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.agents.episodes import PlayedEpisodes, SampledTurn
from assay.agents.trajectory import Piece, TokenSequence, Trajectory
from assay.errors import GuardStop, UsageError
from assay.generate.engine import Engine
from assay.generate.generation_request import Completion
from assay.learn.stale_weights import effective_share, truncated_weights
from assay.recipes import grpo as recipe
from assay.recipes import rollouts_ahead
from assay.recipes.drawn_records import drawn_json, read_drawn
from assay.recipes.rollouts import RolloutCollector
from assay.recipes.rollouts_ahead import RolloutsAhead
from assay.recipes.run import plain
from assay.recipes.trainer import Trainer
from assay.store.checkpoint import open_checkpoint, step_folder
from assay.testing.tiny_models import tiny_model
from tests.recipes.sums import Believer, events, left_by, options, reinforced, steps_of, unproven


@pytest.fixture(scope="module")
def adapter(sums_adapter: Path) -> Path:
    return sums_adapter


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch, Believer)


def stale(parent: Path, out: Path, **changed: Any) -> Any:
    return options(parent, out, **({"max_staleness": 1, "learning_rate": 2e-3, "refill": 1} | changed))


@pytest.fixture(scope="module")
def uncut(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = stale(adapter, tmp_path_factory.mktemp("ahead") / "uncut")
    with pytest.MonkeyPatch.context() as patch:
        unproven(patch, Believer)
        reinforced(config)
    return config


def test_each_rollout_is_one_off_recorded_and_corrected(uncut: Any):
    found = steps_of(uncut)
    assert [row["sampling/staleness/max"] for row in found] == [0, 1, 1, 1]
    assert all(0.1 < row["sampling/effective_sample_size"] <= 1 for row in found[1:])
    assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4 for row in found)
    versions = {row["step"]: row["version"].split("@")[0] for row in left_by(uncut, 4)["samples"]}
    assert versions == {0: "0", 1: "0", 2: "1", 3: "2"}
    said = {verdict["check"]: verdict["outcome"] for event in events(uncut, "rollout") for verdict in event["verdicts"]}
    assert {said[check] for check in ("staleness", "importance", "identity", "version")} == {"PROVEN"}
    assert [v["check"] for v in events(uncut, "data ledger")[0]["verdicts"]] == ["prompt_ledger", "in_flight"]


def test_interrupted_with_a_rollout_in_flight_and_resumed_is_the_uninterrupted_run_however_slow_sampling_is(
        uncut: Any, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cut, record, draw, names = stale(adapter, tmp_path / "cut"), Trainer.record, RolloutCollector.draw, set[str]()

    def struck(trainer: Trainer, step: Any, **columns: Any) -> None:
        record(trainer, step, **columns)
        if trainer.done == 3:
            trainer.run.interrupted = 15

    def slowly(collector: RolloutCollector, step: int) -> Any:
        names.add(threading.current_thread().name)
        time.sleep(0.05 * (step % 3))
        return draw(collector, step)

    monkeypatch.setattr(RolloutCollector, "draw", slowly)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "record", struck)
        assert recipe.grpo(cut, lambda _: None).interrupted == 15
    ahead = (open_checkpoint(step_folder(tmp_path / "cut" / "checkpoints", 3)).trainer() or {})["data"]["ahead"]
    assert (ahead["step"], ahead["drawn_at"], len(ahead["prompts"])) == (3, 2, 4)
    reinforced(cut)
    assert left_by(cut, 4) == left_by(uncut, 4)
    assert any(name.startswith("rollouts") for name in names)


def test_two_updates_a_rollout_are_two_behind(adapter: Path, tmp_path: Path):
    config = stale(adapter, tmp_path / "run", num_iterations=2, save_steps=4)
    reinforced(config)
    assert [row.get("sampling/staleness/max") for row in steps_of(config)] == [0, None, 2, None]


def test_episodes_played_ahead_wait_in_the_checkpoint_as_they_were():
    said = Completion((5, 6), (-0.1, -1 / 3), "stop", "3@ab", "x")
    turn = Piece("policy", said.ids, said.logprobs, said.version, "stop")
    trajectory = Trajectory("0/a/0", "a", 0, (TokenSequence((Piece("template", (1, 2)), turn)),), ({"role": "user", "content": "?"},),
                            (0.5, 0.1), "done", calls=1)
    played = PlayedEpisodes([[trajectory]], [SampledTurn((1, 2), said)], {"0/a/0": [0.5, 0.1]}, ["0/a/0"])
    assert read_drawn(plain(drawn_json(played)), ()) == played


def test_what_is_drawn_and_not_learned_from_is_named(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The budget of a run by the clock ends it while a rollout is in flight."""
    config = stale(adapter, tmp_path / "run", max_steps=None, minutes=10.0, save_steps=1000)
    monkeypatch.setattr(Trainer, "over", lambda trainer: trainer.done == 2)
    reinforced(config)
    [dropped] = events(config, "dropped")
    assert (dropped["step"], len(dropped["prompts"])) == (2, 4)
    assert "1 are named as dropped" in events(config, "data ledger")[0]["verdicts"][1]["reason"]


def test_a_checkpoint_that_lost_what_was_in_flight_is_not_gone_on_from(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = stale(adapter, tmp_path / "run")
    monkeypatch.setattr(RolloutsAhead, "facts", lambda self: {})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", lambda trainer: trainer.done == 4)
        reinforced(config)
    with pytest.raises(GuardStop, match="prompts that were drawn are lost"):
        reinforced(config)


@pytest.mark.parametrize(("name", "value", "words"), [
    ("importance_weighted", lambda batch, *_: batch, "as if it were not"),
    ("truncated_weights", lambda now, then, counts, cap: torch.ones_like(now), "not corrected for")])
def test_a_rollout_that_is_not_corrected_is_stopped(name: str, value: Any, words: str, adapter: Path, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollouts_ahead, name, value)
    with pytest.raises(GuardStop, match=words):
        reinforced(stale(adapter, tmp_path / "run", learning_rate=2e-2))


def test_a_rollout_two_steps_old_is_stopped(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sampler is not given the weights of every step: what it draws carries an older version."""
    load = RolloutCollector.load
    monkeypatch.setattr(RolloutCollector, "load", lambda self, step: load(self, step) if step % 2 == 0 else None)
    with pytest.raises(GuardStop, match=r"staleness|version"):
        reinforced(stale(adapter, tmp_path / "run"))


def test_an_engine_that_lags_goes_on_with_the_weights_that_it_was_given():
    model = tiny_model()
    lagging, own = (Engine(model, slots=1, length=8, version="0", lags=lags) for lags in (True, False))
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    lagging.step()
    assert lagging.weights.stale()
    with pytest.raises(GuardStop, match="have changed since version"):
        own.step()
    lagging.load("1")
    assert not lagging.weights.stale()


@pytest.mark.parametrize("changed", [{"kl_estimator": "shift"}, {"reward": ("judge[model=m,url=http://127.0.0.1:1/v1]:1",)}])
def test_what_cannot_be_one_off_is_refused(changed: dict[str, Any], adapter: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="give --max-staleness 0"):
        recipe.grpo(stale(adapter, tmp_path / "run", **changed), lambda _: None)


def test_importance_weights_are_ratios_up_to_the_cap_and_their_effective_share():
    now, then = torch.tensor([[0.0, 0.0, 3.0, 9.0]]).log_softmax(-1), torch.zeros(1, 4).log_softmax(-1)
    weights = truncated_weights(now, then, torch.tensor([[True, True, True, False]]), 2.0)
    assert weights[0].tolist() == [pytest.approx(float((now - then).exp()[0, place])) for place in range(3)] + [1.0]
    assert truncated_weights(then, now, torch.ones(1, 4, dtype=torch.bool), 2.0).max() == 2.0
    assert effective_share(torch.ones(5)) == 1.0
    assert effective_share(torch.tensor([1.0, 0.0])) == 0.5
