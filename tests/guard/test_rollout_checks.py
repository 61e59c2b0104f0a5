"""Rules against collapse and no signal: each stops what it exists for, and nothing that a healthy run shows."""

import math
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from assay.generate.generation_request import Completion
from assay.guard.rollout_checks import (
    Groups,
    SiblingCounts,
    check_collapse,
    check_divergence,
    check_endings,
    check_entropy,
    check_looping,
    check_measured,
    check_ratio,
    check_reward_signal,
    check_rollout_seeds,
    is_looping,
    rollout_metrics,
    rollout_warnings,
)
from assay.learn.advantage import group_advantages
from assay.verdict import Outcome, Verdict

VOCAB = 320


def said(ids: list[int], logprob: float = -1.0, ended: str = "stop") -> Completion:
    return Completion(tuple(ids), (logprob,) * len(ids), ended)  # type: ignore[arg-type]


def healthy(step: int) -> dict[str, float]:
    noise = random.Random(step)
    return {"groups": 16, "frac_reward_zero_std": noise.uniform(0.3, 0.7), "entropy": 2.0 - 0.01 * step + noise.uniform(0, 0.2),
            "completions/clipped_ratio": noise.uniform(0, 0.3), "completions/looping": noise.uniform(0, 0.05), "kl": 0.001 * step,
            "sampling/importance_sampling_ratio/mean": noise.uniform(0.97, 1.03), "clip_ratio/region_mean": noise.uniform(0, 0.1),
            "grad_norm": noise.uniform(0.1, 1), "rewards/unknown": 0.0, "completions/unique": noise.uniform(0.6, 1.0),
            "completions/mean_length": noise.uniform(80, 160)}


def run(**changed: list[float]) -> list[dict[str, float]]:
    """A healthy run whose last steps are given another course."""
    history = [healthy(step) for step in range(20)]
    for name, values in changed.items():
        for step, value in zip(history[-len(values):], values, strict=True):
            step[name.replace("__", "/")] = value
    return history


def test_what_is_measured():
    groups = [[said([1, 2]), said([1, 2]), said([3] * 60, ended="length")], [said([4]), said([5]), said([6])]]
    rewards = [[1.0, None, 0.0], [0.5, 0.5, 0.5]]
    found = rollout_metrics(groups, rewards, group_advantages(rewards))
    assert found == pytest.approx({
        "groups": 2, "frac_reward_zero_std": 0.5, "rewards/unknown": 1 / 6, "reward": 0.5, "reward_std": 8**-0.5,
        "completions/mean_length": 67 / 6, "completions/min_length": 1, "completions/max_length": 60, "completions/clipped_ratio": 1 / 6,
        "completions/mean_terminated_length": 7 / 5, "completions/min_terminated_length": 1, "completions/max_terminated_length": 2,
        "completions/looping": 1 / 6, "completions/unique": (2 / 3 + 1) / 2,
        "completions/mean_length_better": 2, "completions/mean_length_worse": 60})


def test_what_cannot_be_said_is_left_out():
    found = rollout_metrics([[said([1], ended="length"), said([2], ended="length")]], [[None, None]], group_advantages([[None, None]]))
    assert not {"reward", "reward_std", "completions/mean_terminated_length", "completions/mean_length_better"} & found.keys()


def test_loops():
    assert is_looping([7, *[1, 2, 3] * 16])
    assert not is_looping([1, 2, 3] * 15)  # too short to be sure of
    assert not is_looping([*[1, 2, 3] * 16, 9])
    assert not is_looping(list(range(17)) * 3)


def test_healthy_runs_are_silent_at_every_step():
    for length in range(1, 21):
        verdicts = check_collapse(run()[:length], VOCAB)
        assert not [v for v in verdicts if v.outcome is Outcome.REFUTED]
        assert rollout_warnings(run()[:length]) == []
    assert all(v.outcome is Outcome.PROVEN for v in check_collapse(run(), VOCAB))


@pytest.mark.parametrize(("check", "changed", "words"), [
    (check_reward_signal, {"frac_reward_zero_std": [1.0] * 16}, "the KL term alone moves the weights"),
    (check_reward_signal, {"grad_norm": [0.0] * 3}, "the gradient is exactly 0"),
    (check_endings, {"completions__clipped_ratio": [0.95, 0.93, 0.97]}, "forgotten how to end"),
    (check_looping, {"completions__looping": [0.6, 0.5, 0.7]}, "end in a loop"),
    (lambda h: check_entropy(h, VOCAB), {"entropy": [4.2, 4.5, 4.0]}, "the policy dissolves"),
    (check_divergence, {"kl": [6.0, 7.0, 9.0]}, "another model"),
    (check_divergence, {"kl": [math.nan]}, "is nan"),
    (check_ratio, {"sampling__importance_sampling_ratio__mean": [1.6, 1.7, 3.0]}, "have parted"),
    (check_ratio, {"clip_ratio__region_mean": [0.9, 0.9, 0.9]}, "lower the learning rate"),
])
def test_what_stops_a_run(check, changed, words):
    assert check(run()).outcome is Outcome.PROVEN
    found = check(run(**changed))
    assert found.outcome is Outcome.REFUTED
    assert words in found.reason
    one_less = {name: values[1:] for name, values in changed.items()}
    if len(next(iter(one_less.values()))):  # one odd batch stops nothing
        assert check(run(**one_less)).outcome is Outcome.PROVEN


def test_what_a_run_began_with_is_no_collapse():
    assert check_endings([step | {"completions/clipped_ratio": 1.0} for step in run()]).outcome is Outcome.PROVEN
    assert check_entropy([step | {"entropy": math.log(VOCAB)} for step in run()], VOCAB).outcome is Outcome.PROVEN
    assert check_reward_signal(run(frac_reward_zero_std=[1.0] * 16,
                                   grad_norm=[0.0] * 16)[-4:]).outcome is Outcome.UNPROVEN  # 64 silent groups


def test_warnings():
    assert "most sampling is wasted" in rollout_warnings(run(frac_reward_zero_std=[15 / 16] * 16))[0]
    assert "hit the cap" in rollout_warnings([healthy(0) | {"completions/clipped_ratio": 0.95}])[0]
    assert "25.0% of rewards are unknown" in rollout_warnings(run(rewards__unknown=[0.25]))[0]
    assert "little is explored" in rollout_warnings(run(entropy=[0.1]))[0]
    assert "moves far" in rollout_warnings(run(kl=[0.8]))[0]
    assert "too large" in rollout_warnings(run(clip_ratio__region_mean=[0.4]))[0]
    assert "says the same again and again" in rollout_warnings(run(completions__unique=[0.2]))[0]
    for length in (10.0, 800.0):
        assert "look whether the reward pays for length" in rollout_warnings(run(completions__mean_length=[length]))[0]
    assert rollout_warnings([step | {"completions/unique": 0.13, "completions/mean_length": 2.0} for step in run()]) == [], "so it began"


def test_names_that_others_know_are_theirs():
    """TRL's, found in the source of its trainer as it is installed; what has no name there is listed with the metrics."""
    trl = find_spec("trl")  # read, not imported: that takes many seconds
    if trl is None or trl.origin is None:
        pytest.skip("trl is not installed")
    source = (Path(trl.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    groups, rewards = [[said([1, 2]), said([3, 4])]], [[1.0, 0.0]]
    ours = {"groups", "rewards/unknown", *(f"completions/{name}" for name in ("unique", "looping", "mean_length_better",
                                                                             "mean_length_worse"))}
    names = rollout_metrics(groups, rewards, group_advantages(rewards)).keys() - ours
    names |= {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "sampling/importance_sampling_ratio/mean",
              "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "kl", "entropy", "num_tokens"}
    assert [name for name in sorted(names) if f'"{name}"' not in source] == []


def siblings(groups: Groups) -> Verdict:
    counts = SiblingCounts(len(groups[0]))
    counts.add(groups)
    return counts.check()


def test_coincidence_is_judged_by_the_completions_own_probability():
    unlikely = [[said([1, 2, 3], -3.0)] * 2] * 3  # each e^-9
    assert "they share a seed" in siblings(unlikely).reason
    sure = [[said([1, 2, 3], -1e-4)] * 8] * 16  # a policy that has learned its answer
    assert siblings(sure).outcome is Outcome.PROVEN
    likely = [[said([1], math.log(0.5))] * 2] * 10 + [[said([1], math.log(0.5)), said([2], math.log(0.5))]] * 10
    assert siblings(likely).outcome is Outcome.PROVEN
    assert siblings([[said([1])]]).outcome is Outcome.UNPROVEN
    assert "does not reach the sampler" in check_rollout_seeds(unlikely[0] * 2, unlikely[0] * 2).reason


def test_honest_draws_raise_no_alarm():
    """A thousand steps of eight groups of four, each from a few outcomes of very different probability."""
    chance, weights = random.Random(0), [0.6, 0.3, 0.09, 0.01]
    for _ in range(1000):
        groups = [[said([k], math.log(weights[k])) for k in chance.choices(range(4), weights, k=4)] for _ in range(8)]
        assert siblings(groups).outcome is Outcome.PROVEN


@pytest.mark.parametrize("wrong", [{"reward_std": 0.0}, {"reward": 0.3}, {"completions/mean_length": 9.0},
                                   {"completions/clipped_ratio": 0.0}])
def test_figures_of_a_rollout_are_counted_again(wrong: dict[str, float]):
    groups = [[Completion((1, 2, 3), (0.0,) * 3, "length"), Completion((4,), (0.0,), "stop")]] * 2
    rewards = [[0.0, 1.0], [1.0, None]]
    measured = rollout_metrics(groups, rewards, group_advantages(rewards))
    assert check_measured(measured, {"entropy": 1.0}, groups, rewards, entropy=True).outcome is Outcome.PROVEN
    assert check_measured(measured | wrong, {"entropy": 1.0}, groups, rewards, entropy=True).outcome is Outcome.REFUTED
    assert check_measured(measured, {}, groups, rewards, entropy=True).outcome is Outcome.REFUTED
