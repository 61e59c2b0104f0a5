"""Learning steps of GRPO, replayed from the kept rollout: clean ones are proven, and what is made of the rewards is worked out again."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.data.batch import Batch
from assay.learn import loop
from assay.learn.advantage import group_advantages
from assay.recipes import grpo, hand_over, rewards, rollouts, rollouts_ahead, run
from assay.recipes.prompts import Prompt, PromptOrder
from assay.recipes.witness_records import pending_records
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.server import serve_in_background
from assay.testing.tiny_training import RecordingProver
from assay.verdict import Outcome, Verdict, proven
from assay.witness import due_rollout
from assay.witness.due_rollout import advantages
from assay.witness.due_rows import DueText
from assay.witness.replay import replay_step
from tests.recipes.sums import options, taught


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("taught"), steps=120)


def replayed(parent: Path, out: Path, **changed: Any) -> list[Verdict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Prover", RecordingProver)
        patch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
        grpo.grpo(options(parent, out, **{"max_steps": 2, "learning_rate": 5e-3, "witness": "0", "eval_prompts": 2} | changed),
                  lambda _: None)
    return [replay_step(record) for record in pending_records(out)]


def test_clean_steps_are_proven(parent: Path, tmp_path: Path):
    """The second update on one rollout: ratios have left 1, and the KL has left 0."""
    said = replayed(parent, tmp_path / "run", num_iterations=2)
    assert [verdict.outcome for verdict in said] == [Outcome.PROVEN] * 2, "\n".join(map(str, said))
    assert said[1].evidence["norm"] > 0


def test_what_a_server_drew_is_weighed_as_the_witness_weighs_it(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In bf16, so that the weights leave 1 by some percent: without them the witness finds another step."""
    serving = EngineThread(ServerSize(slots=16, dtype=torch.bfloat16, takes_weights=True))
    serving.open("policy", parent)
    with serve_in_background(serving) as url:
        said = replayed(parent, tmp_path / "run", vllm_server_base_url=url)
    assert [verdict.outcome for verdict in said] == [Outcome.PROVEN] * 2, "\n".join(map(str, said))
    monkeypatch.setattr(due_rollout, "importance_weights", lambda said, tokens, *_: [1.0] * tokens)
    assert Outcome.REFUTED in [replay_step(record).outcome for record in pending_records(tmp_path / "run")]


@pytest.mark.parametrize("changed", [{}, {"max_staleness": 1}, {"importance_sampling_level": "sequence"}, {"loss_type": "cispo"}], ids=str)
def test_what_a_token_costs_is_computed_where_the_logits_lie(changed: dict[str, Any]):
    """And not where the rollout was read, on the host: a second device is needed to tell, here torch's "meta"."""
    texts = [DueText("a", [1, 2, 3], [0.0, 1.0, 1.0]), DueText("b", [4, 5], [0.0, 1.0])]
    streams = {text.name: [0.5] * len(text.tokens) for text in texts}
    drawn = due_rollout.DueRollout(texts, {"a": 1.0, "b": -1.0}, streams, 3.0, streams)
    asked = asdict(options(Path("parent"), Path("run"))) | {"entropy_weight": 0.1, "beta": 0.0} | changed
    tokens = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    found = due_rollout.policy_costs(drawn, asked, 0, None, {})(torch.zeros(2, 3, 8, device="meta"), tokens, texts)  # type: ignore[arg-type]
    assert (found.device.type, found.shape) == ("meta", (2, 2))


ECHO = {"environment": "assay.testing.echo_environment:Echo", "data": (), "reward": (), "tasks": 64, "max_turns": 3,
        "max_completion_length": 6, "max_episode_length": 200}


def test_episodes_that_a_server_drew_are_weighed_as_the_witness_weighs_them(parent: Path, tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch):
    serving = EngineThread(ServerSize(slots=16, dtype=torch.bfloat16, takes_weights=True))
    serving.open("policy", parent)
    with serve_in_background(serving) as url:
        said = replayed(parent, tmp_path / "run", vllm_server_base_url=url, **ECHO)
    assert [verdict.outcome for verdict in said] == [Outcome.PROVEN] * 2, "\n".join(map(str, said))
    monkeypatch.setattr(due_rollout, "importance_weights", lambda said, tokens, *_: [1.0] * tokens)
    assert Outcome.REFUTED in [replay_step(record).outcome for record in pending_records(tmp_path / "run")]


@pytest.mark.parametrize("weigh", [True, False])
def test_episodes_played_one_step_ahead_are_weighed_as_the_witness_weighs_them(weigh: bool, parent: Path, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch):
    """Weights that are left out, with the check that looks for them silenced, are the witness's to find."""
    if not weigh:
        monkeypatch.setattr(rollouts_ahead, "truncated_weights", lambda now, then, counts, cap: torch.ones_like(now))
        monkeypatch.setattr(rollouts_ahead, "check_stale_weights", lambda *_: proven("importance", "not looked at"))
    said = replayed(parent, tmp_path / "run", max_staleness=1, **ECHO)
    due = [Outcome.PROVEN, Outcome.PROVEN if weigh else Outcome.REFUTED]
    assert [verdict.outcome for verdict in said] == due, "\n".join(map(str, said))


def test_completions_that_are_not_learned_from_are_seen(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = loop.accumulated

    def of_the_first(model: Any, objective: Any, batch: Batch, micro: int, weight: float) -> loop.Accumulated:
        return usual(model, objective, next(batch.split(12)), micro, weight)

    monkeypatch.setattr(loop, "accumulated", of_the_first)
    said = replayed(parent, tmp_path / "run", max_steps=3)
    assert any("are not those of these texts" in verdict.reason for verdict in said), "\n".join(map(str, said))


def test_rewards_that_the_rules_do_not_give_are_seen(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of every group the first two have each other's: the group's own figures are what they were."""
    usual = rewards.score_by_rules

    def exchanged(*given: Any) -> list[rewards.Group]:
        return [replace(group, scored=[*reversed(group.scored)]) for group in usual(*given)]

    monkeypatch.setattr(rollouts, "score_by_rules", exchanged)
    monkeypatch.setattr(rollouts.RolloutCollector, "check", lambda *_: [])
    said = replayed(parent, tmp_path / "run")
    assert any("completions have another reward than their rules give" in verdict.reason for verdict in said), "\n".join(map(str, said))


def test_prompts_in_another_order_are_seen(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = PromptOrder.drawn

    def one_further(order: PromptOrder, rollout: int) -> Sequence[Prompt]:
        return usual(order, rollout + 1)

    monkeypatch.setattr(PromptOrder, "drawn", one_further)
    monkeypatch.setattr(rollouts, "check_planned_prompts", lambda *_, **__: proven("prompt_order", "not looked at"))
    monkeypatch.setattr(grpo, "check_prompt_ledger", lambda *_: proven("prompt_ledger", "not looked at"))
    assert "the prompts are not those that were due" in replayed(parent, tmp_path / "run")[0].reason


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_that_are_trained_by(scale: Any):
    rewards = [[1.0, 0.0, 0.5], [None, 1.0, 1.0], [0.3, None, 0.1]]
    due = group_advantages(rewards, scale=scale).values_PG
    assert [value for group in advantages(rewards, scale) for value in group] == pytest.approx(due.flatten().tolist())
