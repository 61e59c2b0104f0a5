"""Faults between a served policy and an outside agent: every planted cause is stopped by its check; the clean twin is silent."""

import re

import pytest

from assay.testing.tiny_served import a_served_policy
from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "agent's trajectory of another version": "come from version",
    "agent's reward given twice": "a reward is given once",
    "agent's crash scored 0": "unknown is not 0",
    "agent's conversations with tools all crash": "episodes with tools are not learned from",
    "agent's update that changes no weight": "changed none of its weights",
    "branch of an agent's conversation lost": "a branch was lost",
    "agent's rewritten conversation not heard": "was not heard",
    "agent's own words taken for the policy's": "that the policy did not sample",
    "agent's conversation rendered and encoded again": "as they were sampled",
    "agent's update written down twice": "2 rows are in updates.jsonl, where one is due",
    "agent's dropped conversation not written down": "are not in trajectories.jsonl",
    "agent's calls counted that nobody made": "turn by turn there are 0 and 0",
    "served prefix cache of the weights before": "sampler and trainer differ",
}


def test_all_of_them_are_tried():
    assert {name for name, fault in catalogue().items() if fault.job is a_served_policy} == set(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_each_is_stopped_by_name(name: str):
    seen = sight(catalogue()[name])
    assert seen.caught, seen.planted
    assert not seen.false_alarm, seen.clean
    assert re.search(REASONS[name], str(seen.facts()["reason"]))
