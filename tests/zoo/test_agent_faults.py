"""Every fault of agents is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.zoo import catalogue, observe

REASONS = {
    "tool result trained on": "that the policy did not sample",
    "objective ignores the mask of inserted tokens": "a tool's result is trained on",
    "old assistant turns trained as new": "that the policy did not sample",
    "history rewritten by the template": "the policy did not sample|written anew",
    "sampled text encoded again": "its text was encoded again",
    "episode error scored 0": "an error is no reward",
    "reward given twice": "counted twice",
    "only tool-free episodes kept": "episodes with tools are not learned from",
    "trajectory of another version": "stale, or another model|other weights",
    "turn that goes on from the weights before": "sampler and trainer differ",
    "branch lost": "a branch was lost",
    "a branched episode counts once a branch": "is due",
    "log-probabilities shifted by a token": "in no trajectory as they were sampled",
}


def test_all_of_them_are_tried():
    assert {name for name, fault in catalogue().items() if fault.job.__name__ in
            ("an_episode_rollout", "a_turn_after_an_update")} == set(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_each_is_caught_for_its_own_reason(name: str):
    import re

    seen = observe(catalogue()[name])
    assert seen.caught, seen.facts()["reason"]
    assert not seen.false_alarm
    assert re.search(REASONS[name], str(seen.facts()["reason"]))
