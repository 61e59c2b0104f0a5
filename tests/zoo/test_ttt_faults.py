"""Every fault of test-time training is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.zoo import catalogue, ttt_faults
from tests.zoo.sightings import sight

REASONS = {
    "learned before it was scored": "it was scored by what had seen the future",
    "the last chunk learned, scored and forgotten": "it was scored by what had seen the future",
    "sum over the batch in place of the document's own": "the score of document 1's token",
    "target within sight": "its score has seen the token itself",
    "patch not reset between documents": "what another document taught was still there",
    "scores of a patch that was stepped meanwhile": "the one that the chunks before it left is",
    "patch merged into the base": "1 of 14 tensors of the model are not as they were: blocks.0.attn.out.weight",
    "an optimizer that counts no steps": "read again alone, cost what was recorded but for",
    "one document learned before another beside it is scored": "it was scored by what had seen the future",
    "an adapter that was to be carried over begins afresh": "it was not carried over",
    "a carried-over adapter runs away": "they run away or die out",
    "a step too large for its documents": "documents got worse",
    "warm-started factors run away": "they run away or die out",
    "two seeds of three collapse while reading": "two modes: {42} near",
}


def own():
    return {name: fault for name, fault in catalogue().items() if fault.plant.__module__ == ttt_faults.__name__}


def test_every_fault_has_its_reason():
    assert own().keys() == REASONS.keys()


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(own()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown
