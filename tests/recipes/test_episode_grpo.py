"""Reinforcement over episodes: what is sampled, answered, rewarded and learned is what was meant; and it goes on bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.agents.environment_pool import EnvironmentPool
from assay.agents.transcript import Transcript
from assay.errors import GuardStop, UsageError
from assay.recipes import grpo as recipe
from assay.recipes import hand_over, run
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompt_evaluator import PromptEvaluator, plan_evaluations
from assay.recipes.seeds import final_score
from assay.recipes.trainer import Trainer
from assay.recipes.witness_records import pending_records
from assay.store.checkpoint import step_folder
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import RecordingProver
from assay.verdict import Outcome, proven
from assay.witness.replay import replay_step
from tests.recipes.sittings import rows
from tests.recipes.sums import events, left_by, metrics, reinforced, unproven

ECHO = "assay.testing.echo_environment:Echo"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    save_model(folder, tiny_model("llama"))
    return folder


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch)


def options(base: Path, out: Path, **changed: Any) -> Grpo:
    usual: dict[str, Any] = {
        "model": str(base), "out": str(out), "environment": ECHO, "tasks": 24, "held_out": 0.3, "prompts": 3, "num_generations": 4,
        "max_completion_length": 6, "max_turns": 3, "max_steps": 3, "num_train_epochs": 50, "learning_rate": 2e-3, "warmup_steps": 0,
        "save_steps": 3, "eval_prompts": 2, "micro_batch_size": 128, "device": "cpu", "reward_workers": 1, "samples": 4}
    return Grpo(**(usual | changed))


def test_a_run_over_episodes_holds_and_is_the_same_after_an_interruption(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uncut, cut = (options(base, tmp_path / name, loss_type="grpo") for name in ("uncut", "cut"))
    verdicts = reinforced(uncut)
    assert not [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]
    judged = {each["check"]: each["outcome"] for event in events(uncut, "rollout") for each in event["verdicts"]}
    due = {"token_law", "every_turn", "trajectory_weights", "episode_rewards", "episode_kinds", "identity", "version", "independence"}
    assert judged.keys() >= due
    assert set(judged.values()) == {"PROVEN"}
    first = {each["check"]: each["outcome"] for event in events(uncut, "preflight") for each in event["verdicts"]}
    assert first["inserted_tokens"] == first["inserted_ids"] == first["environment_errors"] == first["repeatable"] == "PROVEN"
    score = final_score(Path(uncut.out))
    assert score is not None
    assert score.n == 7
    kept = rows(tmp_path / "uncut" / "samples.jsonl")
    assert [message["role"] for message in kept[0]["messages"]][:3] == ["user", "assistant", "user"]
    assert sum(kept[0]["rewards"]["steps"]) == pytest.approx(kept[0]["reward"])
    assert {"episodes/turns", "episodes/dropped_with_tools", "episodes/done"} <= metrics(uncut)[1].keys()

    over = Trainer.over

    def struck(trainer: Trainer) -> bool:
        if trainer.done == 2:
            trainer.run.interrupted = 15
        return over(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", struck)
        assert recipe.grpo(cut, lambda _: None).interrupted == 15
    reinforced(cut)
    assert left_by(cut, 3) == left_by(uncut, 3)


def test_the_witness_replays_steps_over_episodes(base: Path, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Prover", RecordingProver)
        patch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
        recipe.grpo(options(base, tmp_path / "run", max_steps=2, witness="0", loss_type="dr_grpo"), lambda _: None)
    said = [replay_step(record) for record in pending_records(tmp_path / "run")]
    assert [verdict.outcome for verdict in said] == [Outcome.PROVEN] * 2, "\n".join(map(str, said))


def twice(usual: Callable[..., Any]) -> Callable[..., Any]:
    """What is heard is said to be the policy's."""
    def hear(self: Transcript, messages: Any, pieces: Any) -> None:
        from assay.agents.trajectory import Piece

        usual(self, messages, [Piece("policy", piece.ids, (-1.0,) * len(piece.ids), "0", "stop") for piece in pieces])
    return hear


def test_answers_that_are_taken_for_the_policys_stop_the_run(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Transcript, "hear", twice(Transcript.hear))
    with pytest.raises(GuardStop, match=r"every_turn|token_law"):
        recipe.grpo(options(base, tmp_path / "run"), lambda _: None)


def test_an_error_that_is_paid_for_stops_the_run(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from assay.agents.environment_pool import EnvironmentReply

    monkeypatch.setattr(EnvironmentPool, "drill", lambda self: EnvironmentReply())
    with pytest.raises(GuardStop, match="an error is no reward"):
        recipe.grpo(options(base, tmp_path / "run"), lambda _: None)


def test_too_many_errors_stop_the_run(base: Path, tmp_path: Path):
    config = options(base, tmp_path / "run", environment="assay.testing.echo_environment:FailingEcho")
    with pytest.raises(GuardStop, match="could not be scored"):
        recipe.grpo(config, lambda _: None)


@pytest.mark.parametrize(("changed", "words"), [
    ({"reward": ("answer:1",)}, "tasks and rewards of its own"), ({"environment": None}, "give --data and --reward"),
    ({"environment": "calculater"}, "did you mean"), ({"environment_options": ("a",)}, "KEY=VALUE"), ({"tasks": 4}, "raise --tasks")])
def test_a_request_that_makes_no_sense_is_refused(changed: dict[str, Any], words: str, base: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=words):
        recipe.grpo(options(base, tmp_path / "run", **changed), lambda _: None)

# ---------------------------------------------------------------- what an evaluation may say


def evaluator_with(histories: list[list[float]], tmp_path: Path) -> PromptEvaluator:
    from types import SimpleNamespace

    made = PromptEvaluator(SimpleNamespace(folder=tmp_path, checkpoints=tmp_path), (),  # type: ignore[arg-type]
                           SimpleNamespace(metric=SimpleNamespace(name="answer")), None, 1)  # type: ignore[arg-type]
    for number, scores in enumerate(histories):
        made.history._remember(10 * number, -np.array(scores), 0.0)
    return made


def test_the_last_is_handed_over_unless_another_is_shown_to_be_better(tmp_path: Path):
    noise = np.tile([0.0, 1.0, 1.0, 0.0], 16)
    lucky, last, collapsed = noise.copy(), noise.copy(), np.zeros(64)
    lucky[0] = 1.0
    start = [*noise]
    assert evaluator_with([start, [*lucky], [*last]], tmp_path).chosen()[0] == 20
    step, why = evaluator_with([start, [*lucky], [*collapsed]], tmp_path).chosen()
    assert (step, "shown" in why) == (10, True)
    assert step_folder(tmp_path, evaluator_with([start, [*lucky], [*last]], tmp_path).best_step()).name == "step-000010", "and it is kept"


@pytest.mark.parametrize(("held_out", "completions", "looks", "found"), [
    (1000, 100_000, 10, (500, 1)), (200, 100_000, 10, (100, 5)), (1000, 10_000, 5, (100, 1)), (10, 64, 3, (5, 1)),
    (300, None, 2, (128, 1))])
def test_evaluations_take_what_a_twentieth_of_the_run_pays_for(held_out, completions, looks, found):
    plan = plan_evaluations(held_out=held_out, asked_prompts=None, asked_samples=None, completions=completions, evaluations=looks)
    assert (plan.prompts, plan.samples) == found
    assert plan.prompts <= held_out // 2
    if completions and completions > 1000:
        assert plan.share <= 0.05
