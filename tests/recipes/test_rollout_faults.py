"""Faults of rollouts through the real recipe: draws, seeds, order, rewards, reference and endings, each stopped by its own check."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.recipes import grpo as recipe
from assay.recipes import rollouts
from assay.recipes.prompt_evaluator import PromptEvaluator
from assay.recipes.prompts import PromptOrder
from assay.recipes.reference import Reference
from assay.recipes.rewards import Group
from assay.recipes.rollouts import Sampler
from assay.recipes.trainer import Trainer
from tests.recipes.sums import events, options, reinforced, steps_of, unproven
from tests.refusals import stopped_by


@pytest.fixture(scope="module")
def whole(knows_sums: Path) -> Path:
    return knows_sums


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch)


def run(parent: Path, out: Path, **changed: Any) -> None:
    usual = {"learning_rate": 1e-3, "eval_steps": 100, "save_steps": 100, "eval_prompts": 4}
    recipe.grpo(options(parent, out, **usual | changed), lambda _: None)


def interrupted(config: Any, after: int, patch: pytest.MonkeyPatch) -> None:
    """The run up to a step, saved there."""
    record = Trainer.record

    def struck(trainer: Trainer, step: Any, **columns: Any) -> None:
        record(trainer, step, **columns)
        if trainer.done == after:
            trainer.run.interrupted = 15

    with patch.context() as for_now:
        for_now.setattr(Trainer, "record", struck)
        recipe.grpo(config, lambda _: None)

# ---------------------------------------------------------------- the reference


def test_a_reference_that_is_anchored_anew_is_stopped_though_its_fingerprint_goes_along(whole: Path, tmp_path: Path,
                                                                                       monkeypatch: pytest.MonkeyPatch):
    """Onto the policy itself: its KL is exactly 0. Onto the one of a step before: the bytes on the disk tell, before a save."""
    follow, kept = Reference.follow, list[dict[str, torch.Tensor]]()

    def anchored(lag: int) -> Any:
        def anew(self: Reference, step: int) -> None:
            follow(self, step)
            kept.append({name: tensor.detach().clone() for name, tensor in policies[0].state_dict().items()})
            if step >= 2:
                self.model.load_state_dict(kept[-1 - lag])
                self.fingerprint = self.used
        return anew

    policies: list[torch.nn.Module] = []
    load = Sampler.__init__
    monkeypatch.setattr(Sampler, "__init__", lambda self, model, *rest, **more: (
        policies.append(model), load(self, model, *rest, **more))[1])
    for lag, check in ((0, "reference"), (1, "pinned")):
        policies.clear(), kept.clear()
        monkeypatch.setattr(Reference, "follow", anchored(lag))
        with stopped_by(check):
            run(whole, tmp_path / check, max_steps=3)


def test_noise_in_the_reference_after_a_resume_is_stopped(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = options(whole, tmp_path / "run", max_steps=4, learning_rate=1e-3, eval_prompts=4)
    interrupted(config, 2, monkeypatch)
    sound = Reference.logprobs
    monkeypatch.setattr(Reference, "logprobs", lambda self, *given, **more: torch.normal(sound(self, *given, **more), 0.01))
    with stopped_by("reference_again"):
        recipe.grpo(config, lambda _: None)

# ---------------------------------------------------------------- what is drawn


def test_completions_of_half_the_temperature_are_stopped_over_the_rollouts(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their log-probabilities are those of the whole temperature, so that sampler and trainer agree."""
    draw = Sampler.draw

    def colder(self: Sampler, prompts: Any, sampling: Any, address: Any, group: int) -> Any:
        found = draw(self, prompts, replace(sampling, temperature=sampling.temperature / 2), address, group)
        if address[0] != "rollout":
            return draw(self, prompts, sampling, address, group)
        return [[replace(c, logprobs=tuple(rollouts.naive_logprobs(self.model, [prompt.ids], [c.ids], sampling.temperature)[0]))
                 for c in members] for prompt, members in zip(prompts, found, strict=True)]

    monkeypatch.setattr(Sampler, "draw", colder)
    with stopped_by("draws"):
        run(whole, tmp_path / "run", temperature=1.6, prompts=8, max_steps=16, beta=0.0, learning_rate=1e-6)


def test_two_members_of_a_group_that_share_a_seed_are_stopped_over_the_rollouts(whole: Path, tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch):
    """One rollout does not show it: their texts are short, and often the same anyway."""
    draw = Sampler.draw

    def shared(self: Sampler, prompts: Any, sampling: Any, address: Any, group: int) -> Any:
        found = draw(self, prompts, sampling, address, group)
        return [[*members[:-1], members[1]] for members in found] if address[0] == "rollout" else found

    monkeypatch.setattr(Sampler, "draw", shared)
    with stopped_by("independence"):
        run(whole, tmp_path / "run", temperature=1.2, prompts=8, max_steps=16, beta=0.0, learning_rate=1e-6)
    assert len(steps_of(options(whole, tmp_path / "run"))) > 1, "it takes several"

# ---------------------------------------------------------------- prompts


def test_an_order_that_begins_again_after_a_resume_is_stopped(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = options(whole, tmp_path / "run", max_steps=4, eval_prompts=4)
    interrupted(config, 2, monkeypatch)
    drawn = PromptOrder.drawn
    monkeypatch.setattr(PromptOrder, "drawn", lambda self, rollout: drawn(self, max(0, rollout - 2)))
    with stopped_by("prompt_order"):
        recipe.grpo(config, lambda _: None)


def test_held_out_prompts_that_come_in_with_the_second_epoch_are_stopped(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held_out: list[Any] = []
    make, drawn = PromptEvaluator.__init__, PromptOrder.drawn
    monkeypatch.setattr(PromptEvaluator, "__init__", lambda self, run, prompts, *rest, **more: (
        held_out.extend(prompts), make(self, run, prompts, *rest, **more))[1])
    monkeypatch.setattr(PromptOrder, "drawn", lambda self, rollout: [
        held_out[0] if held_out and rollout * self.places >= len(self.prompts) else prompt for prompt in drawn(self, rollout)])
    with stopped_by("held_out"):
        run(whole, tmp_path / "run", held_out=0.8, max_steps=8)

# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize("fault", ["permuted", "cached by prompt"])
def test_rewards_that_are_not_their_completions_are_stopped(fault: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    score, cached = rollouts.score_by_rules, dict[str, Any]()

    def other(*given: Any) -> list[Group]:
        groups = score(*given)
        if fault == "permuted":
            return [replace(group, scored=[*group.scored[1:], group.scored[0]]) for group in groups]
        return [replace(group, scored=[cached.setdefault(group.prompt.id, group.scored[0])] * len(group.scored)) for group in groups]

    monkeypatch.setattr(rollouts, "score_by_rules", other)
    with stopped_by("rewards_again"):
        run(whole, tmp_path / "run", prompts=8, max_steps=6, temperature=1.3)


def test_a_reward_with_noise_is_said_and_what_is_noise_alone_is_counted(whole: Path, tmp_path: Path):
    (tmp_path / "noisy.py").write_text("import random\nfrom assay.reward.answer import read_answer, same_answer\n\n"
                                       "def noisy(prompt, completion, row):\n"
                                       "    right = same_answer(read_answer(completion), row['gold'])\n"
                                       "    return right + 0.01 * random.uniform(-1, 1)\n")
    said: list[str] = []
    config = options(whole, tmp_path / "run", reward=(f"{tmp_path / 'noisy.py'}:noisy:1",), metric="answer", max_steps=2, eval_prompts=4)
    reinforced(config, said.append)
    assert any("UNPROVEN" in line and "reward_repeat: asked twice about the same 15 completions" in line
               for text in said for line in text.splitlines()), said
    assert any("by no more than the reward's own noise" in line for line in said)
    assert all(0 < row["rewards/noise_alone"] <= 1 for row in steps_of(config))
    found = {verdict["check"]: verdict["outcome"] for event in events(config, "rollout") for verdict in event["verdicts"]}
    assert found["rewards_again"] == "PROVEN", "within what was measured before the run"

# ---------------------------------------------------------------- endings


def test_completions_that_no_longer_end_are_stopped_within_six_steps(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    draw, steps = Sampler.draw, list[int]()

    def endless(self: Sampler, prompts: Any, sampling: Any, address: Any, group: int) -> Any:
        steps.append(address[1] if address[0] == "rollout" else 0)
        before = self.engine.stop_ids
        self.engine.stop_ids = before if steps[-1] < 3 else type(before)()
        try:
            return draw(self, prompts, sampling, address, group)
        finally:
            self.engine.stop_ids = before

    monkeypatch.setattr(Sampler, "draw", endless)
    with stopped_by("endings"):
        run(whole, tmp_path / "run", max_steps=6)


def test_what_no_longer_ends_is_not_handed_over(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The parent is answered first when a run hands over, then what was saved, and what is handed over."""
    answer, of_all = PromptEvaluator.answer, list[int]()

    def cut(self: PromptEvaluator, sampler: Any, prompts: Any) -> Any:
        found = answer(self, sampler, prompts)
        of_all.append(len(prompts) > len(self.prompts))
        return replace(found, cut=np.full_like(found.cut, float(sum(of_all) > 1)))

    monkeypatch.setattr(PromptEvaluator, "answer", cut)
    verdicts = reinforced(options(whole, tmp_path / "run", max_steps=2, eval_steps=2))
    assert [str(verdict.outcome) for verdict in verdicts if verdict.check == "endings"] == ["REFUTED"]

# ---------------------------------------------------------------- the last line


def test_the_commands_last_line_says_first_that_no_gain_was_shown(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   capsys: pytest.CaptureFixture[str]):
    from assay.verbs import grpo as verb

    assert verb.run(options(whole, tmp_path / "run", max_steps=1, learning_rate=1e-6, eval_prompts=4)) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("no gain shown: "), last
    assert last.endswith("; artifact proven"), last
