"""Every fault of preference learning is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "reference of another model": "the reference is not the model that is trained",
    "reference's log-probabilities shifted by one": "the reference has moved, or is another model",
    "reference that moves": "the reference has moved, or is another model",
    "live reference in the policy's tensors": "shares tensors with the policy that learn",
    "ln 2 for ever": "the weights move and the loss does not",
    "swapped columns": "Chosen and rejected are swapped",
    "chosen is rejected": "pairs.jsonl:25: chosen and rejected are the same",
    "columns swapped against their scores": "score_chosen is 2 and score_rejected 9",
    "sides that differ in white space alone": "pairs.jsonl:25: chosen and rejected differ in white space at their ends alone",
    "completions that repeat the prompt": "in 24 of 24 rows the completion begins with the whole prompt",
    "every pair the other way round too": "48 of 48 pairs (100%) stand there the other way round too",
    "prompts held out that are learned from": "16 of 16 held-out pairs are of prompts that are learned from",
    "both sides written from one": "chosen and rejected are the same tokens",
    "prompt cut on one side only": "one side was cut or written differently",
    "preference the wrong way round": "the objective and its formula written out",
    "IPO by sums over tokens": "the objective and its formula written out",
    "margins of the rejected over the chosen": "figures of a step are not what its texts give",
    "held-out margins at half their size": "an evaluation's margins are not what its texts give",
    "preference that takes a mean": "rows one at a time, and all at once",
}


def test_every_fault_of_preferences_has_its_reason():
    here = {name: fault for name, fault in catalogue().items() if fault.plant.__module__ == "assay.zoo.preference_faults"}
    assert here.keys() == REASONS.keys()
    assert {"R22", "O10", "N33", "L03", "D19"} <= {row for fault in here.values() for row in fault.rows}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown
