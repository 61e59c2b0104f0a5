"""Every fault of KTO, reward models, on-policy distillation and merges is caught by its check; its clean twin is silent."""

import pytest

from assay.zoo import catalogue, observe

REASONS = {
    "KTO with labels flipped": "The labels are flipped in the data",
    "KTO's reference follows the policy": "the weights move and the loss does not",
    "KTO's completions not mismatched": "completions are not mismatched",
    "KTO's KL of each micro-batch": "a micro-batch would be compared with its own",
    "KTO's KL of its own answers": "it was estimated on other completions",
    "KTO's KL added instead of taken off": "the objective and its formula written out",
    "KTO's evaluation by another baseline": "an evaluation's losses are not what its texts give",
    "KTO's weights exchanged": "the objective and its formula written out",
    "score head as it began": "the score head is the one that it began with",
    "reward of the first token": "the objective and its formula written out",
    "reward model asked in the policy's template": "<|im_end|> stands in its prompts and is no token of its tokenizer",
    "chats that the reward model reads as plain text": "where its chat template writes",
    "teacher off by one token on the student's own words": "the teacher scores other tokens than those that were drawn",
    "student's words masked one token late": "ids were retokenised, shifted or masked",
    "whole text of the student learned": "ids were retokenised, shifted or masked",
    "merge of unrelated parents": "they were not trained from one model",
    "task vectors without the base": "weights, signs or densities are others",
    "TIES without its signs": "weights, signs or densities are others",
    "DARE without its scale": "weights, signs or densities are others",
}


def test_every_fault_of_these_methods_has_its_reason():
    here = {name: fault for name, fault in catalogue().items() if fault.plant.__module__ == "assay.zoo.method_faults"}
    assert here.keys() == REASONS.keys()


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = observe(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown
