"""Every fault of rollouts drawn ahead is caught by its check, for its own reason; the clean twin is silent."""

import re

import pytest

from assay.testing.tiny_ahead import a_run_ahead
from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "rollout beyond the staleness bound": "tokens by 2; 0 to 1 are allowed",
    "stale rollout under the newest version's name": "come from version",
    "weights of before under the right version": "the same version by name, and other weights",
    "stale rollout learned from as if it were not": "as if it were not",
    "importance weights computed and not applied": "do not have their importance weight",
    "importance weight that is no number": "do not have their importance weight",
    "prompts in flight lost at a resume": "does not say what was in flight",
    "part of what was in flight lost at a resume": "1 of 4 prompts are lost",
}


def test_all_of_them_are_tried():
    assert {name for name, fault in catalogue().items() if fault.job is a_run_ahead} == set(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_each_is_caught_for_its_own_reason(name: str):
    seen = sight(catalogue()[name])
    assert seen.caught, seen.planted
    assert not seen.false_alarm, seen.clean
    assert re.search(REASONS[name], str(seen.facts()["reason"]))
