"""Reinforcement over episodes: what is sampled, answered, rewarded and learned is what was meant; and it goes on bit for bit."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from assay.agents.environment_pool import EnvironmentPool
from assay.agents.tool_calls import TOOL_FORMATS, ParsedTurn, ToolCall, ToolFormat
from assay.agents.transcript import ChatWriter, Transcript
from assay.errors import GuardStop, UsageError
from assay.guard.trajectory_checks import check_episode_figures
from assay.model.tokenizer import Tokenizer
from assay.recipes import grpo as recipe
from assay.recipes import hand_over, run
from assay.recipes.environment_tasks import check_history
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompt_evaluator import PromptEvaluator, plan_evaluations
from assay.recipes.seeds import final_score
from assay.recipes.trainer import Trainer
from assay.recipes.witness_records import pending_records
from assay.store.checkpoint import step_folder
from assay.testing.tiny_episodes import templated
from assay.testing.tiny_models import TINY_CHAT_TEMPLATE, save_model, tiny_model, tiny_tokenizer
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
    due = {"token_law", "every_turn", "trajectory_weights", "episode_rewards", "episode_kinds", "identity", "version", "independence",
           "episode_figures", "episode_ends"}
    assert judged.keys() >= due
    assert set(judged.values()) == {"PROVEN"}
    first = {each["check"]: each["outcome"] for event in events(uncut, "preflight") for each in event["verdicts"]}
    assert {first[name] for name in ("inserted_tokens", "inserted_ids", "environment_errors", "repeatable", "history")} == {"PROVEN"}
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


def test_the_witness_replays_steps_over_episodes(tmp_path: Path):
    """Though the chat template writes the moment: the run, and its witness, are of the one at which it began."""
    base = save_model(tmp_path / "base", tiny_model("llama"),
                      tokenizer=templated(f"{{{{ strftime_now('%f') }}}} {TINY_CHAT_TEMPLATE}")).folder
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

    made = PromptEvaluator(SimpleNamespace(folder=tmp_path, checkpoints=tmp_path, unsaved={}), (),  # type: ignore[arg-type]
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


def test_figures_that_the_episodes_do_not_give_are_refuted():
    said: Any = [SimpleNamespace(turns=range(turns), sequences=range(1), ended="done", messages=[{}, {"tool_calls": ["one"]}])
                 for turns in (1, 2, 3)]
    due = {"episodes/turns": 2.0, "episodes/sequences": 1.0, "episodes/calls": 1.0, "episodes/faults": 0.0, "episodes/done": 1.0}
    assert check_episode_figures(due, said).outcome is Outcome.PROVEN
    for wrong in (due | {"episodes/turns": 6.0}, due | {"episodes/faults": math.nan}, {"episodes/turns": 2.0}):
        assert check_episode_figures(wrong, said).outcome is Outcome.REFUTED


def test_a_policy_that_does_not_see_what_it_said_is_refuted(monkeypatch: pytest.MonkeyPatch):
    writer = ChatWriter(tiny_tokenizer(), ())
    assert check_history(writer).outcome is Outcome.PROVEN
    with monkeypatch.context() as lost:
        lost.setattr(ToolFormat, "history", lambda form, message: {"role": "assistant", "content": ""})
        assert check_history(writer).outcome is Outcome.REFUTED
    plain = ChatWriter(Tokenizer(tiny_tokenizer().document, tiny_tokenizer().settings, {}), ())
    monkeypatch.setattr(ChatWriter, "insert", lambda _, answered: plain_insert(plain, answered))
    assert check_history(writer).outcome is Outcome.REFUTED


def test_plain_words_that_are_taken_for_a_tool_call_are_refuted(monkeypatch: pytest.MonkeyPatch):
    for name in TOOL_FORMATS:
        assert check_history(ChatWriter(tiny_tokenizer(), (), name)).outcome is Outcome.PROVEN, name
    writer = ChatWriter(tiny_tokenizer(), ())
    for wrong in (ParsedTurn("", (ToolCall("add", {}),)), ParsedTurn("", (), ("no JSON",))):
        monkeypatch.setattr(ToolFormat, "read", lambda form, text, tools, wrong=wrong: replace(wrong, content=text))
        assert "taken for tool calls" in check_history(writer).reason


def plain_insert(plain: ChatWriter, answered: Any) -> list[str | None]:
    """Insert messages as if there were no chat template."""
    for transcript, messages in answered:
        transcript.hear(messages, plain.pieces("".join(each["content"] for each in messages), messages))
    return [None] * len(answered)
