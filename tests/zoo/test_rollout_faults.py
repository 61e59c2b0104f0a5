"""Every fault of rollouts and policies is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.guard.policy_identity import check_identity
from assay.testing import tiny_grpo
from assay.testing.fault_injection import swap
from assay.testing.tiny_grpo import TinyGrpo, run_grpo
from assay.verdict import Outcome, proven
from assay.zoo import catalogue, observe
from tests.zoo.sightings import sight

REASONS = {
    "weights rolled back after a load": "the sampler is off",
    "half-written adapter served": "the sampler is off",
    "adapter of step 0 served for ever": "stale, or another model",
    "rollouts from the base model": "16 of 16 rollouts come from version '0@",
    "fork served from an empty adapter": "the same version by name, and other weights",
    "keys and values of the weights before": "the sampler is off",
    "temperature missing in the trainer": "the trainer is off",
    "ratio of the policy with itself": "the surrogate that was asked for: loss",
    "log-probabilities before the temperature": "the sampler's are those of temperature 1",
    "top-p renormalised in the sampler alone": "the sampler is off",
    "coarser numbers in the sampler": "the sampler is off",
    "log-probabilities that depend on the micro-batch": "what is trained is not what was sampled",
    "decoded and encoded again": "was never sampled",
    "stop token cut off": "its stop token was cut off",
    "one seed for all siblings": "24 of 24 pairs of siblings are identical",
    "two members of a group share a seed": "members 1 and 3 were",
    "drawn at half the temperature": "likelier: greedy, or of a lower temperature",
    "rewards of the neighbours": "rewards went to other completions, or were not computed",
    "order that begins again after a resume": "the order was lost, reset, or is of other prompts",
    "held-out prompts in the second epoch": "are held out (prompts.jsonl:10:10)",
    "completions that no longer end": "the policy has forgotten how to end",
    "seed that never reaches the sampler": "16 of 16 pairs of answers to two seeds are identical",
    "rewards that differ between groups only": "of the last 256 groups none had rewards that differ",
    "drift without a reward": "the KL term alone moves the weights",
    "loss that reaches no weight": "the gradient is exactly 0 in 3 steps whose rewards differ",
    "masked completions in the divisor": "the surrogate that was asked for: loss",
    "masked tokens in the divisor": "the surrogate that was asked for: loss",
    "truncation mask on everything": "are left out that should count",
    "baseline of the whole batch": "its group by itself gives",
    "baseline of the first rollout": "its group by itself gives",
    "unknown reward counted as 0": "an error counts as a reward",
    "KL with its sign turned": "the KL term drives the policy away from its reference",
    "KL weight not handed on": "the surrogate that was asked for: loss",
    "normalised by sequence, asked by token": "the surrogate that was asked for: loss",
    "reference that is not the fork": "the reference is not the fork",
    "reference that is the policy itself": "it was replaced, or it moves with the policy",
}
WANTED = {"S1", "M11", "O10", "W05", *(f"R{i:02d}" for i in (1, 2, 3, *range(6, 25)))}


def test_every_row_about_policies_has_a_fault_and_every_fault_its_reason():
    ours = {name: fault for name, fault in catalogue().items() if getattr(fault.plant, "__module__", "") == "assay.zoo.rollout_faults"}
    assert ours.keys() == REASONS.keys()
    assert not WANTED - {row for fault in ours.values() for row in fault.rows}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown


def test_a_blind_check_misses_its_fault():
    with swap(tiny_grpo, "check_identity", lambda *parts: proven("identity", "looks fine")):
        assert not observe(catalogue()["temperature missing in the trainer"]).caught
    assert tiny_grpo.check_identity is check_identity


@pytest.mark.parametrize("seed", range(2))
def test_clean_rehearsals_are_silent(seed: int):
    for how in ("token", "sequence", "constant"):
        assert not [str(v) for v in run_grpo(TinyGrpo(seed=seed, normalise=how, micro=3)) if v.outcome is Outcome.REFUTED]  # type: ignore[arg-type]
