"""Every fault of an evaluation is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "slot that keeps another prompt": "the samples are not what this model says",
    "stop string taken letter by letter": "8 of 8 right texts do not score 1",
    "first number taken for the answer": "wrong texts score above 0",
    "intervals that know nothing of what was not seen": "known answers do not come out",
    "a lenient reading that takes the whole statement": "known answers are read otherwise",
    "grader that always says yes": "48 of 48 wrong texts score above 0",
    "beginning of text missing": "the tokenizer begins it with [256",
    "dropout while evaluating": "gave other logits the second time",
    "evaluated in training mode": "the model is in training mode",
    "seeds that do not reach the sampler": "8 of 8 prompts got the same text twice",
    "failed examples left out of the mean": "3 of 8 examples have no score",
    "cut off, and said to have stopped": "samples did not end as they say",
    "one question in four copies": "6 of 8 examples are exact copies of another (75%), 0 stands there 4 times",
    "a token counted that was never drawn": "tokens is",
    "one row of the dataset changed": "a row was changed, added, removed or moved",
    "trained on the test rows": "the model was trained on what it is tested on",
    "pass@k as if samples were put back": "by counting; the estimator says",
    "pass@k of more samples than were drawn": "so many were never drawn",
    "an evaluation without the generation prompt": "has the ids",
    "questions asked without the form of the answer": "then, all in all?\\nWork step by step. End with",
    "one example more than --limit": "7 examples are scored, 6 were due ('6' is not in both)",
    "states a fifth too large in every pass": "the texts are not what this model says",
    "prompt cut from the left": "the samples are not what this model says",
    "votes counted by the lenient reading": "is recorded as (strict, lenient, parsed, answer) (False, False, False, '",
}


def test_every_fault_has_its_reason_and_every_row_a_fault():
    here = {name: fault for name, fault in catalogue().items() if fault.plant.__module__ == "assay.zoo.evaluation_faults"}
    assert here.keys() == REASONS.keys()
    assert {"D19", "D20", *(f"E0{i}" for i in range(1, 8))} <= {row for fault in here.values() for row in fault.rows}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, shown
    assert not sighting.false_alarm, shown
    assert REASONS[name] in sighting.facts()["reason"], shown
