"""Reinforcement: what is sampled, rewarded, learned, compared with and handed over is what was meant. The toy has the real proofs."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from assay.cli import run as assay
from assay.data.batch import Batch
from assay.data.layouts import read_conversations
from assay.errors import ArtifactError, AssayError, GuardStop, UsageError
from assay.generate.engine import Engine
from assay.generate.generation_request import Completion
from assay.model.attention import PADDING
from assay.recipes import grpo as recipe
from assay.recipes import prompt_evaluator, reference, trainer
from assay.recipes.prompt_evaluator import Answered, PromptEvaluator
from assay.recipes.prompts import Prompt, PromptOrder, asked, read_prompts
from assay.recipes.reference import Reference
from assay.recipes.rewards import Group, reading_metrics
from assay.recipes.rollout_batch import Layout, Packed
from assay.recipes.rollouts import RolloutCollector, RolloutHistory, Sampler
from assay.recipes.save_pace import MOST_APART, SavePace
from assay.recipes.trainer import Trainer
from assay.store.checkpoint import open_checkpoint, step_folder, step_folders
from assay.testing.tiny_models import tiny_tokenizer
from assay.verdict import Outcome
from tests.recipes.sittings import Now, rows
from tests.recipes.sums import Believer, events, left_by, options, reinforced, steps_of, unproven, write
from tests.refusals import stopped_by


@pytest.fixture(scope="module")
def whole(knows_sums: Path) -> Path:
    return knows_sums


@pytest.fixture(scope="module")
def adapter(sums_adapter: Path) -> Path:
    return sums_adapter


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch)

# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("changed", "words"), [
    ({"num_generations": 1}, "at least 2 completions"),
    ({"temperature": 0.0}, "all the same teach nothing"),
    ({"num_iterations": 3}, "give a multiple of that"),
    ({"kl_window": 2, "beta": 0.0}, "it needs --beta"),
    ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "leave --importance-sampling-level at token"),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, "give a cap above 1"),
    ({"overlong_buffer": 9}, "--overlong-buffer at most --max-completion-length"),
    ({"minutes": 1.0}, "give one budget"),
    ({"held_out": 0.0}, "0 prompts are held out"),
    ({"prompts": 80}, "lower --prompts"),
    ({"max_steps": 10**4}, "Give more prompts"),
    ({"reward": ("anser:1",)}, "did you mean 'answer'"),
    ({"reward_errors": 1.0}, "--reward-errors"),
])
def test_a_request_that_makes_no_sense_is_refused(changed: dict[str, Any], words: str, adapter: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=words):
        recipe.grpo(options(adapter, tmp_path / "run", **changed), lambda _: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("changed", "ratio", "cap", "weighed"), [
    ({}, "token", 1.2, "token"), ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "sequence", 1.2, "sequence"),
    ({"loss_type": "dr_grpo", "epsilon_high": 0.28}, "token", 1.28, "constant"), ({"loss_type": "cispo"}, "cispo", 1.2, "token"),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", 5.0, "token")])
def test_loss_types_mean_what_they_mean_in_trl(changed: dict[str, Any], ratio: str, cap: float, weighed: str, tmp_path: Path):
    """With cispo `epsilon_high` is the cap itself."""
    config = options(tmp_path, tmp_path / "run", **changed)
    asked = recipe.surrogate_of(config, "cpu")
    assert (asked.ratio, 1 + asked.high, config.normalisation) == (ratio, pytest.approx(cap), weighed)


@pytest.mark.parametrize(("changed", "kl", "weight"), [
    ({"beta": 0.3, "kl_estimator": "k2"}, "k2", 0.3), ({"beta": 0.0, "kl_estimator": "k3"}, "none", 0.0),
    ({"beta": 0.3, "kl_estimator": "shift"}, "none", 0.0)])
def test_beta_weighs_the_estimator_in_the_loss(changed: dict[str, Any], kl: str, weight: float, tmp_path: Path):
    asked = recipe.surrogate_of(options(tmp_path, tmp_path / "run", **changed), "cpu")
    assert (asked.kl, asked.kl_weight) == (kl, weight)


def test_rewards_that_do_not_reward_the_answer_are_refused_before_the_first_rollout(adapter: Path, tmp_path: Path):
    """Disconnected from the answer, or the same for all."""
    (tmp_path / "odd.py").write_text("import zlib\n\ndef noise(prompt, completion, row):\n"
                                     "    return zlib.crc32(repr((prompt, completion)).encode()) % 2\n\n"
                                     "def flat(prompt, completion, row):\n    return 1.0\n")
    for name, words in (("noise", "reward_"), ("flat", "reward_flat")):
        config = options(adapter, tmp_path / name, reward=(f"{tmp_path / 'odd.py'}:{name}:1",))
        with pytest.raises(GuardStop, match=words):
            recipe.grpo(config, lambda _: None)
        assert not (tmp_path / name / "samples.jsonl").exists()


@pytest.mark.parametrize(("seconds", "outcome", "words"), [
    (0.4, Outcome.PROVEN, "of the peak learning rate"), (4.0, Outcome.UNPROVEN, "ran out")])
def test_minutes_begin_with_the_first_rollout_and_a_run_that_they_cut_short_says_so(
        seconds: float, outcome: Outcome, words: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock that moves with the work alone: the preflight takes longer than the budget of six seconds, and a rollout `seconds`."""
    clock, collect, preflight = {"now": 1000.0}, RolloutCollector.collect, recipe.preflight_grpo

    def collected(*given: Any) -> Any:
        clock["now"] += seconds
        return collect(*given)

    def checked_slowly(*given: Any) -> Any:
        clock["now"] += 100
        return preflight(*given)

    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(RolloutCollector, "collect", collected)
    monkeypatch.setattr(recipe, "preflight_grpo", checked_slowly)
    config = options(adapter, tmp_path / "run", max_steps=None, minutes=0.1, save_steps=1000, eval_prompts=2, lr_scheduler_type="wsd",
                     decay_ratio=0.9)
    (found,) = [verdict for verdict in reinforced(config) if verdict.check == "budget"]
    assert found.outcome is outcome, found.reason
    assert words in found.reason
    assert (len(steps_of(config)) > 6) is (outcome is Outcome.PROVEN)


def test_held_out_prompts_that_are_trained_on_are_refused(adapter: Path, tmp_path: Path):
    write(tmp_path / "apart.jsonl", [{"prompt": "1+1=", "gold": "2"}, {"prompt": "10+1=", "gold": "11"}])
    with pytest.raises(GuardStop, match="1 held-out prompts are trained on too"):
        recipe.grpo(options(adapter, tmp_path / "run", held_out_data=str(tmp_path / "apart.jsonl")), lambda _: None)

# ---------------------------------------------------------------- a run


@pytest.mark.arithmetic
def test_exact_answers_become_more_and_the_run_says_so(whole: Path, tmp_path: Path):
    config = options(whole, tmp_path / "run", prompts=16, num_generations=8, max_steps=12, save_steps=12, eval_prompts=30,
                     num_generations_eval=8,
                     samples=4)
    said: list[str] = []
    verdicts = reinforced(config, said.append)
    gain = verdicts[-1]
    assert gain.check == "gain"
    assert gain.outcome is Outcome.PROVEN, gain.reason
    assert gain.evidence["p"] < 0.01
    assert gain.evidence["change"] > 0.1
    assert all(verdict.outcome is Outcome.PROVEN for verdict in verdicts)
    assert any("it rose" in line for line in said)
    kept = rows(tmp_path / "run" / "samples.jsonl")
    assert len(kept) == 12 * 4
    assert all(sample["version"].startswith(f"{sample['step']}@") for sample in kept)
    assert all(sample["address"][3:5] == [sample["step"], sample["prompt_id"]] for sample in kept)
    assert all(sample["reward"] == sample["rewards"]["answer"] for sample in kept)
    names = {"reward", "reward_std", "rewards/answer/mean", "frac_reward_zero_std", "completions/mean_length", "entropy", "kl",
             "num_tokens", "clip_ratio/region_mean", "sampling/importance_sampling_ratio/mean"}
    assert all(names <= row.keys() for row in steps_of(config))


def test_problems_of_reasoning_gym_are_rewarded_by_its_own_scorers(whole: Path, tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    assert assay(["data", "gym", "chain_sum", "--n", "40", "--out", str(tmp_path / "gym.jsonl")]) == 0
    config = options(whole, tmp_path / "run", data=(str(tmp_path / "gym.jsonl"),), reward=("gym:1", "format:0.1"), max_steps=1,
                     eval_prompts=4)
    reinforced(config)
    [step] = steps_of(config)
    assert step["rewards/unknown"] == 0
    assert {"rewards/gym/mean", "rewards/format/mean"} <= step.keys()
    before = {verdict["check"]: verdict["outcome"] for verdict in events(config, "preflight")[0]["verdicts"]}
    assert {before[check] for check in ("reward_gold", "reward_wrong", "reward_empty", "reward_scale")} == {"PROVEN"}


@pytest.mark.parametrize("form", ["whole", "adapter"])
def test_the_reference_is_the_fork_and_the_policy_leaves_it(form: str, request: pytest.FixtureRequest, tmp_path: Path):
    parent = request.getfixturevalue(form)
    config = options(parent, tmp_path / "run", learning_rate=2e-3)
    reinforced(config)
    kl = [row["kl"] for row in steps_of(config)]
    assert kl[0] == 0
    assert min(kl[1:]) > 0
    said, = [event for event in events(config, "reference") if "weights" in event]
    of_parent = open_checkpoint(parent).manifest["tensors"]
    assert open_checkpoint(step_folder(tmp_path / "run" / "checkpoints", 0)).manifest["tensors"].items() >= {
        name: tensors for name, tensors in of_parent.items() if "optimizer" not in name and "probe" not in name}.items()
    assert said["step"] == 0
    assert open_checkpoint(step_folder(tmp_path / "run" / "checkpoints", 4)).facts["change"] == "moved"
    assert (tmp_path / "run" / "adapter").exists() is (form == "adapter")


def test_interrupted_and_resumed_is_the_uninterrupted_run_bit_for_bit(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An adapter, two updates a rollout, a reference that trails; a signal in the midst of a rollout waits for its end."""
    unproven(monkeypatch, Believer)
    uncut, cut = (options(adapter, tmp_path / name, num_iterations=2, kl_window=2, max_steps=6, entropy_weight=0.01, entropy_decay=0.9,
                          importance_sampling_level="sequence", loss_type="grpo", mask_truncated_completions=True, overlong_buffer=4,
                          learning_rate=2e-3) for name in ("uncut", "cut"))
    reinforced(uncut)
    record = Trainer.record

    def struck(trainer: Trainer, step: Any, **columns: Any) -> None:
        record(trainer, step, **columns)
        if trainer.done == 3:
            trainer.run.interrupted = 15

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "record", struck)
        found = recipe.grpo(cut, lambda _: None)
    assert (found.verdicts, found.interrupted, found.exit_code) == ([], 15, 143)
    assert rows(tmp_path / "cut" / "metrics.jsonl")[-1]["step"] == 3
    reinforced(cut)
    assert left_by(cut, 6) == left_by(uncut, 6)


def test_torn_away_after_a_step_and_resumed_is_the_same(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The whole model, and no last save: the newest checkpoint is two steps old, and its samples and metrics are taken back."""
    uncut, cut = (options(whole, tmp_path / name, refill=1, kl_estimator="shift", scale_rewards="batch", loss_type="dr_grpo", samples=3)
                  for name in ("uncut", "cut"))
    reinforced(uncut)

    class Torn(Exception):
        pass

    def torn(history: RolloutHistory, step: int) -> None:
        say_warnings(history, step)
        if step == 3:
            raise Torn

    say_warnings = RolloutHistory.say_warnings
    with monkeypatch.context() as patch:
        patch.setattr(RolloutHistory, "say_warnings", torn)
        with pytest.raises(Torn):
            recipe.grpo(cut, lambda _: None)
    reinforced(cut)
    assert left_by(cut, 4) == left_by(uncut, 4)


def saves(config: Any) -> list[int]:
    return [event["step"] for event in events(config, "save")]


def test_when_it_saves_changes_nothing_that_it_learns(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without --save-steps the clock decides; here it stands still, or half an hour goes by at every look."""
    told = options(adapter, tmp_path / "told", save_steps=1, max_steps=6)
    reinforced(told)
    for name, tick in (("slow", 1e-9), ("quick", MOST_APART)):
        monkeypatch.setattr(trainer, "SavePace", lambda tick=tick: SavePace(Now(tick)))
        config = options(adapter, tmp_path / name, save_steps=None, eval_steps=1, max_steps=6)
        reinforced(config)
        scores = {row["step"]: -sum(row["per_document"]) for row in rows(tmp_path / name / "eval.jsonl")}
        best = max(list(scores)[1:], key=lambda step: (scores[step], -step))
        assert set(saves(config)) == {0, 1, best, 6} if name == "slow" else saves(config) == [0, 1, 2, 3, 4, 5, 6]
        assert left_by(config, 6) == left_by(told, 6)
    between = options(adapter, tmp_path / "between", save_steps=None, eval_steps=3, max_steps=6)
    reinforced(between)
    assert saves(between) == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(tmp_path / "between" / "eval.jsonl")] == [0, 3, 6]
    assert left_by(between, 6)["tensors"] == left_by(told, 6)["tensors"]


def test_a_best_that_was_not_kept_is_not_chosen_and_is_said(tmp_path: Path):
    run = SimpleNamespace(folder=tmp_path, checkpoints=tmp_path, unsaved={2: "there was no room"}, spent=None)
    evaluator = PromptEvaluator(run, [], SimpleNamespace(metric=SimpleNamespace(name="score")), None, 1)  # type: ignore[arg-type]
    for step, score in ((0, 0.0), (1, 0.25), (2, 1.0), (3, 0.5)):
        evaluator.history.add(step, -np.full(8, score), 0.0, None)
    assert evaluator.best_step() == 3
    assert evaluator.best_checkpoint() == step_folder(tmp_path, 3)
    assert evaluator.chosen() == (3, "the last evaluation has the highest mean of those that were kept; step 2 scored 1.0000 and was not: "
                                     "there was no room")
    run.unsaved.clear()
    assert evaluator.best_step() == 2
    assert evaluator.chosen()[0] == 2


def test_rewards_that_never_differ_move_nothing_and_are_no_fault(adapter: Path, tmp_path: Path):
    """Too hard a task: the run goes on until it is sure, says so, and claims nothing."""
    write(tmp_path / "hard.jsonl", [{"prompt": f"{a}+{b}=", "gold": "99"} for a in range(10) for b in range(10)])
    config = options(adapter, tmp_path / "run", data=(str(tmp_path / "hard.jsonl"),), max_steps=2, refill=2)
    told: list[str] = []
    gain = reinforced(config, told.append)[-1]
    assert "not shown" in gain.reason
    assert "on prompts that were not used to choose the checkpoint" in gain.reason
    assert f"{gain.evidence['prompts'] + 8} held out" in " ".join(told)  # evaluations had the other eight
    assert [row["groups"] for row in steps_of(config)] == [12, 12]  # four places, each filled three times
    assert [row["grad_norm"] for row in steps_of(config)] == [0.0, 0.0]
    first, last = (open_checkpoint(step_folder(tmp_path / "run" / "checkpoints", step)) for step in (0, 2))
    assert first.manifest["tensors"]["adapter_model.safetensors"] == last.manifest["tensors"]["adapter_model.safetensors"]
    assert last.facts["change"] == "same"  # or its proof would expect it to have moved


def test_a_last_step_that_was_not_evaluated_is_refuted(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, evaluate = options(adapter, tmp_path / "run"), PromptEvaluator.evaluate
    monkeypatch.setattr(PromptEvaluator, "evaluate", lambda self, sampler, step: None if step == config.max_steps
                        else evaluate(self, sampler, step))
    found = recipe.grpo(config, lambda _: None)
    assert [verdict.check for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED] == ["last evaluation"], str(found)


def test_one_prompt_is_answered_otherwise_at_every_step(adapter: Path, tmp_path: Path):
    """Draws have the step in their address: with weights that stand still, the same prompts get other completions."""
    write(tmp_path / "few.jsonl", [{"prompt": f"{a}+1=", "gold": "99"} for a in range(8)])
    config = options(adapter, tmp_path / "run", data=(str(tmp_path / "few.jsonl"),), max_steps=2, held_out=0.5, samples=16)
    reinforced(config)
    said = [[(row["prompt_id"], row["address"][-1], row["text"]) for row in rows(tmp_path / "run" / "samples.jsonl") if row["step"] == step]
            for step in (0, 1)]
    assert len(said[0]) == len(said[1]) == 16
    assert {key[:2] for key in said[0]} == {key[:2] for key in said[1]}
    assert set(said[0]) != set(said[1])


def test_other_prompts_are_another_run(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = tmp_path / "sums.jsonl"
    data.write_text((adapter.parent.parent.parent / "sums.jsonl").read_text())
    config = options(adapter, tmp_path / "run", data=(str(data),))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", lambda trainer: trainer.done >= 2)
        reinforced(config)
    data.write_text(data.read_text().replace('"gold": "7"', '"gold": "8"'))
    with pytest.raises(GuardStop, match="the template or the split is another"):
        recipe.grpo(config, lambda _: None)



def test_another_rule_in_the_same_file_is_another_run(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rule = tmp_path / "mine.py"
    rule.write_text("def right(prompt, completion, row):\n    return float(completion.strip() == row['gold'])\n")
    config = options(adapter, tmp_path / "run", reward=(f"{rule}:right:1",))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", lambda trainer: trainer.done >= 2)
        reinforced(config)
    rule.write_text(rule.read_text().replace("row['gold'])", "row['gold']) or 0.5"))
    with pytest.raises(GuardStop, match="the reward right is another than the run began with"):
        recipe.grpo(config, lambda _: None)

# ---------------------------------------------------------------- the fork experiment: every suspected cause, by name


def test_other_held_out_prompts_than_the_last_time_stop_the_run(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = PromptEvaluator.evaluate

    def others(evaluator: PromptEvaluator, sampler: Any, step: int) -> Answered:
        evaluator.prompts = evaluator.prompts[1:] if step else evaluator.prompts
        return whole(evaluator, sampler, step)

    monkeypatch.setattr(PromptEvaluator, "evaluate", others)
    config = options(adapter, tmp_path / "run")
    with stopped_by("held_out_set"):
        reinforced(config)
    assert [row["step"] for row in rows(tmp_path / "run" / "eval.jsonl")] == [0]


def forked(parent: Path, out: Path, **changed: Any) -> None:
    recipe.grpo(options(parent, out, learning_rate=2e-3, **changed), lambda _: None)


def test_a_reference_that_is_the_base_is_stopped(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load = Reference.load

    def of_the_base(self: Reference, step: int) -> None:
        load(self, step)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".lefts." in name:
                    parameter.zero_()
        self.fingerprint = self.used

    monkeypatch.setattr(Reference, "load", of_the_base)
    with stopped_by("reference"):
        forked(adapter, tmp_path / "run")


def test_a_reference_that_is_not_what_the_disk_says_is_stopped(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digest = reference.weights_digest
    monkeypatch.setattr(reference, "weights_digest", lambda tensors: digest({name: t + 1e-7 for name, t in tensors.items()}))
    with pytest.raises(GuardStop, match="what was loaded of it is"):
        forked(adapter, tmp_path / "run")


def test_a_reference_that_moves_with_the_policy_is_stopped(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make = Reference.__init__

    def shared(self: Reference, weights: Any, *rest: Any, **options: Any) -> None:
        make(self, weights, *rest, **options)
        self.model = weights.model

    monkeypatch.setattr(Reference, "__init__", shared)
    with stopped_by("reference"):
        forked(adapter, tmp_path / "run")


def test_stale_sampler_weights_are_stopped(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine itself refuses to draw from weights that moved under it; with that asleep, the name of the version tells."""
    monkeypatch.setattr(Sampler, "load", lambda self, updates: self.version)
    with pytest.raises(GuardStop, match="the weights have changed since version"):
        forked(adapter, tmp_path / "one")
    monkeypatch.setattr(Engine, "_refuse_other_weights", lambda self, changed: None)
    with stopped_by("version"):
        forked(adapter, tmp_path / "two")


def test_weights_of_another_policy_under_the_right_name_are_stopped(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy on another device that was not renewed: only the log-probabilities tell."""
    draw = Sampler.draw

    @torch.no_grad()
    def stale(self: Sampler, *asked: Any) -> Any:
        learned = {parameter: parameter.clone() for parameter in self.model.parameters() if parameter.requires_grad}
        for parameter in learned:
            parameter.mul_(0.97)
        self.engine.load(self.version)
        found = draw(self, *asked)
        for parameter, value in learned.items():
            parameter.copy_(value)
        return found

    monkeypatch.setattr(Sampler, "draw", stale)
    with stopped_by("identity"):
        forked(adapter, tmp_path / "run")


def test_a_sampler_on_a_device_of_its_own_is_the_same_run_and_its_copy_is_handed_over_by_digest(adapter: Path, tmp_path: Path,
                                                                                               monkeypatch: pytest.MonkeyPatch):
    together, apart = (options(adapter, tmp_path / name, max_steps=2, learning_rate=2e-3, **more) for name, more in (
        ("together", {}), ("apart", {"sampler_device": "cpu"})))
    for config in (together, apart):
        reinforced(config)
    assert left_by(apart, 2) == left_by(together, 2)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda targets, sources: None)  # never renewed after the first time
    with pytest.raises(GuardStop, match="on cpu are not the trainer's"):
        forked(adapter, tmp_path / "stale", sampler_device="cpu")


def test_packed_rows_are_the_same_run_and_a_token_lost_there_is_stopped(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Packed on a GPU, and here where a test says so."""
    apart, packed = (options(adapter, tmp_path / name, max_steps=3, learning_rate=2e-3, kl_estimator="k3", beta=0.05)
                     for name in ("apart", "packed"))
    reinforced(apart)
    monkeypatch.setattr(recipe, "layout_of", lambda *_: Layout(2, 48))
    reinforced(packed)
    one, two = ([row for row in rows(Path(config.out) / "metrics.jsonl") if "loss" in row] for config in (apart, packed))
    assert len(one) == 3
    for name in ("loss", "grad_norm", "kl", "reward", "completions/mean_length"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-3, abs=1e-6), name
    sound = Layout.packed

    def lossy(self: Layout, batch: Batch) -> Packed:
        found = sound(self, batch)
        documents = found.batch.documents.clone()
        documents[0, documents[0].eq(0).sum() - 1] = PADDING
        return found._replace(batch=replace(found.batch, documents=documents, weight=found.batch.weight * (documents != PADDING)))

    monkeypatch.setattr(Layout, "packed", lossy)
    with pytest.raises(GuardStop, match="ids"):
        forked(adapter, tmp_path / "lossy")


def test_a_parent_whose_adapter_is_not_loaded_is_stopped(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from assay.recipes import starting_model

    def without(artifact: Any, *dtype: Any) -> Any:
        model = build(artifact, *dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lefts." in name:
                    parameter.mul_(0.5)
        return model

    build = starting_model.build_model
    monkeypatch.setattr(starting_model, "build_model", without)
    with stopped_by("fork"):
        forked(adapter, tmp_path / "run")


@pytest.mark.parametrize("fault", ["half-written", "empty"])
def test_an_adapter_that_is_not_whole_is_not_forked(fault: str, adapter: Path, tmp_path: Path):
    copy = tmp_path / "home" / "sft" / "checkpoints" / adapter.name
    shutil.copytree(adapter, copy)
    file = copy / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2 if fault == "half-written" else 0])
    write(tmp_path / "home" / "sums.jsonl", [{"prompt": f"{a}+{b}=", "gold": str(a + b)} for a in range(10) for b in range(10)])
    with pytest.raises(ArtifactError, match=r"adapter_model\.safetensors"):
        forked(copy, tmp_path / "run")

# ---------------------------------------------------------------- the parts


def test_a_trailing_reference_is_a_function_of_the_step_and_its_checkpoints_stay(adapter: Path, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch):
    unproven(monkeypatch, Believer)
    config = options(adapter, tmp_path / "run", kl_window=3, save_steps=1, max_steps=6, eval_steps=6, learning_rate=2e-3)
    reinforced(config)
    followed = [event["step"] for event in events(config, "reference") if "weights" in event]
    assert followed == [0, 1, 2]
    assert next(int(path.name[5:]) for path in step_folders(tmp_path / "run" / "checkpoints")) == 2  # the last step was compared with it


def test_a_trailing_reference_must_be_proven(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from assay.verdict import refuted

    monkeypatch.setattr(reference, "prove_checkpoint", lambda folder, **_: [refuted("answers", "other ones")])
    with pytest.raises(GuardStop, match=r"reference: step-000002 is not proven: .* other ones"):
        forked(adapter, tmp_path / "run", kl_window=1)


def test_an_order_reads_every_prompt_once_an_epoch_and_spares_are_others():
    prompts = [Prompt(f"f:{i}:{i}", (i,), str(i), {}) for i in range(10)]
    order = PromptOrder(prompts, 0, 4, 2)
    drawn = [prompt.id for rollout in range(order.rollouts) for prompt in order.drawn(rollout)]
    assert sorted(drawn) == sorted([prompt.id for prompt in prompts] * 2)
    assert drawn[:10] != drawn[10:]
    spare = [prompt.id for prompt in order.spare(1)]
    assert set(spare) | {prompt.id for prompt in order.drawn(1)} == {prompt.id for prompt in prompts}
    assert len(spare) == 6
    with pytest.raises(UsageError, match="--num-train-epochs 3"):
        order.drawn(5)


def test_prompts_end_where_the_answer_begins(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    write(tmp_path / "gsm.jsonl", [{"question": "2+2?", "answer": "two\n#### 4"}])
    write(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                                                  {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}])
    found, = read_prompts(str(tmp_path / "gsm.jsonl"), tokenizer)
    assert found.text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(found.ids) == found.text
    assert found.row["answer"].endswith("#### 4")
    assert [message["content"] for message in asked(read_conversations(tmp_path / "chat.jsonl").rows[0])] == ["a", "b", "c"]


@pytest.mark.parametrize(("changed", "evaluations", "outcome"), [
    (0.3, 1, "PROVEN"), (0.3, 10**6, "UNPROVEN"), (0.0, 1, "UNPROVEN"), (-0.3, 1, "REFUTED")])
def test_a_gain_is_claimed_on_evidence_and_chances_are_counted(changed: float, evaluations: int, outcome: str):
    before = np.tile([0.5, 0.25, 0.5, 0.75], 8)
    after = before + changed * np.tile([1.0, 0.5, 1.0, 0.7], 8)
    verdict = prompt_evaluator.check_gain("answer", before, after, evaluations)
    assert verdict.outcome == outcome
    assert ("not shown" in verdict.reason) is (outcome == "UNPROVEN")


def test_answers_are_read_both_ways_and_both_are_shown():
    prompt = Prompt("f:0:0", (1,), "40+2=", {"gold": "42"})
    said = ("<answer>42</answer>", "it is 42", "<answer>41 or 42</answer>", "41")
    group = Group(prompt, [Completion((1,), (0.0,), "stop", text=text) for text in said], ())
    assert reading_metrics([group], "any") == {"rewards/answer/strict": 0.25, "rewards/answer/lenient": 0.75,
                                               "rewards/answer/readings_apart": 0.5}
    assert reading_metrics([group], "tag")["rewards/answer/lenient"] == 0.5


def test_a_reward_that_rises_while_the_metric_falls_is_told_in_a_sentence(tmp_path: Path):
    """And a run that goes on from a checkpoint still knows what came before."""
    from assay.recipes.run import Run

    said: list[str] = []
    answers = iter([(0.5 - 0.03 * time, 0.3 + 0.03 * time) for time in range(10)])

    class Scripted(PromptEvaluator):
        def answer(self, *_: Any) -> Answered:
            wanted, rewarded = next(answers)
            return Answered(np.full(6, wanted), np.full(6, rewarded))

    run = Run(tmp_path / "run", options(tmp_path / "a" / "b" / "c" / "d", tmp_path / "run"), say=said.append)
    for first in (0, 5):
        evaluator = Scripted(run, (), SimpleNamespace(metric=SimpleNamespace(name="answer")), None, 1)  # type: ignore[arg-type]
        run.rewind(first)
        evaluator.recall()
        for step in range(first, first + 5):
            evaluator.evaluate(SimpleNamespace(load=lambda step: None), step)  # type: ignore[arg-type]
    told = [line for line in said if "what is rewarded is no longer what is wanted" in line]
    assert told
    assert not [line for line in said[:6] if "no longer" in line], "a few evaluations show nothing"
    [first_told, *_] = [event for event in run.ledger.events() if event["kind"] == "proxy"]
    assert first_told["verdicts"][0]["outcome"] == "REFUTED"


def test_the_command_line_knows_its_options(capsys: pytest.CaptureFixture[str]):
    from assay.config import parse
    from assay.verbs import grpo as verb

    flags = parse(verb.FLAGS, ["--data", "x.jsonl", "--reward", "answer:1", "format:0.1", "--out", "y", "--from", "nowhere",
                               "--optimizer-state", "fresh"], prog="assay grpo")
    assert flags.reward == ("answer:1", "format:0.1")
    with pytest.raises(AssayError, match="nowhere"):
        verb.run(flags)
    assert assay(["--help"]) == 0
    capsys.readouterr()
