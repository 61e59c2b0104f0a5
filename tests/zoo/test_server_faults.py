"""Faults of a server's answers: the known requests refute every one before it listens; the clean twin is silent."""

import re

import pytest

from assay.testing.tiny_rehearsed import a_rehearsed_server
from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "log-probabilities one token late": "nats from those under",
    "request's temperature not heard": "nats from those under",
    "request's top-p not heard": "nats from those under|leave no chance",
    "request's seed not heard": "same request at the same seed",
    "plain log-probabilities for those of the draw": "nats from those under|likeliest tokens were asked for",
    "choices of one prompt all the same": "the same",
    "request's stop string not heard": "is shown as|is right",
    "stop token shown to the client": "are shown as",
    "stream without its last piece": "are shown as",
    "usage without the stop token": "a reply counts",
    "unknown field of a request dropped": "is not heard",
    "chat without the template's beginning of an answer": "answered as another",
    "tools left out of the prompt": "answered as another",
    "adapter's name answered by its base": "says of itself",
    "room of a request never given back": "says of its health",
    "adapter said to be retired that stays": "what is said to be retired is not",
}


def test_all_of_them_are_tried():
    assert {name for name, fault in catalogue().items() if fault.job is a_rehearsed_server} == set(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_each_is_refuted_by_name(name: str):
    seen = sight(catalogue()[name])
    assert seen.caught, seen.planted
    assert not seen.false_alarm, seen.clean
    assert re.search(REASONS[name], str(seen.facts()["reason"]))
