"""Every fault of agents is caught by its check, for its own reason; the clean twin is silent."""

import contextlib
import re
from pathlib import Path

import pytest

from assay.verdict import Outcome
from assay.zoo import catalogue

REASONS = {
    "tool result trained on": "that the policy did not sample",
    "objective ignores the mask of inserted tokens": "a tool's result is trained on",
    "turn looked for in the ids": "a tool's words decide what is trained on",
    "old assistant turns trained as new": "that the policy did not sample",
    "history rewritten by the template": "the policy did not sample|written anew",
    "sampled text encoded again": "its text was encoded again",
    "episode error scored 0": "an error is no reward",
    "reward given twice": "counted twice",
    "only tool-free episodes kept": "episodes with tools are not learned from",
    "tool calls in a format that nobody reads": "which the format hermes does not read",
    "trajectory of another version": "stale, or another model|other weights",
    "turn that goes on from the weights before": "sampler and trainer differ",
    "branch lost": "a branch was lost",
    "episodes cut after their first turn": "its environment said that it goes on",
    "a branched episode counts once a branch": "is due",
    "log-probabilities shifted by a token": "in no trajectory as they were sampled",
}
JOBS = ("an_episode_rollout", "a_turn_after_an_update")


def test_all_of_them_are_tried():
    assert {name for name, fault in catalogue().items() if fault.job.__name__ in JOBS} == set(REASONS)


@pytest.mark.parametrize("name", ["branch lost", "turn that goes on from the weights before"])
def test_the_clean_twins_are_silent(name: str, tmp_path: Path):
    """One for each of the two jobs."""
    verdicts = catalogue()[name].job(tmp_path, lambda folder: contextlib.nullcontext())
    assert [verdict for verdict in verdicts if verdict.outcome is not Outcome.PROVEN] == []
    assert {fault.check for fault in catalogue().values() if fault.job is catalogue()[name].job} <= {verdict.check for verdict in verdicts}


@pytest.mark.parametrize("name", REASONS)
def test_each_is_caught_for_its_own_reason(name: str, tmp_path: Path):
    fault = catalogue()[name]
    against = [verdict for verdict in fault.job(tmp_path, fault.plant) if verdict.check == fault.check]
    assert [verdict.outcome for verdict in against] == [Outcome.REFUTED]
    assert re.search(REASONS[name], against[0].reason)
