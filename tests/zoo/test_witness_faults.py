"""Every fault of a step, and of an evaluation in a run, is refuted by the witness, for its own reason; its clean twin is proven."""

import pytest

from assay.witness.due_looks import LOOKS
from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "a held-out row trained on under a planned id": "step 4: the gradients of 14 of 14 tensors are not those of these texts",
    "stop token never learned after step 1": "tokens were learned from, 88 were due",
    "another seed's order under the planned ids": "tokens were learned from, 88 were due",
    "prompts learned from step 2 on": "196 tokens were learned from",
    "packed texts see each other": "the gradients of 14 of 14 tensors",
    "the divergence turned round": "its loss was",
    "chosen and rejected swapped as they are read": "are not those of these texts",
    "labels turned round as they are read": "are not those of these texts",
    "completions drawn and not learned from": "are not those of these texts",
    "the next rollout's prompts in this one's place": "the prompts are not those that were due",
    "advantages of the wrong sign": "are not those of these texts",
    "last ragged micro-batch dropped": "its loss was 4.3",
    "mean of the micro-batches' means": "the gradients of 14 of 14 tensors",
    "clipping computed and not applied": "clipped to 1: embed.weight is off by 3.2e+00",
    "gradients of half of the embedding rows lost": "embedding rows that were due took in no gradient",
    "half of the embedding rows put back after the step": "(embed.weight) did not move as the options say: 0.707 times as far",
    "half of the embedding rows detached in the forward pass": "embed.weight is off by",
    "Adam's betas swapped on resume": "the second moments of 14 tensors",
    "weight decay on norms and embeddings": "6 of 14 tensors",
    "a warm-up that never ends": "1.54 times as far, where the rate is 0.325 of its peak",
    "a norm outside the optimizer": "does not hold 1 tensors that are to be trained (norm.weight)",
    "adapter learned at twice its scale": "the gradients of 28 of 28 tensors",
    "q, k and v orthogonalised as one matrix": "blocks.0.attn.qkv.weight, blocks.0.mlp.up.weight) did not move",
    "bf16 in the place of fp32": "the gradients of 14 of 14 tensors",
    "training prompts in the place of held-out ones": "prompts are not among the",
    "held-out answers colder than the run's": "it was drawn at temperature 0.5, due is [1.0]",
    "an evaluation's scores given to the next prompt": "its completions score",
    "answers by other weights than the step's": "the texts are not what this model says",
}


def test_every_fault_is_named_here():
    assert {name for name, fault in catalogue().items() if fault.check in ("witness", LOOKS)} == REASONS.keys()


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in " ".join(verdict.reason for verdict in sighting.planted), shown
