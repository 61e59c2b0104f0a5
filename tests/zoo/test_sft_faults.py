"""Every fault of fine-tuning is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "planned layers left without an adapter": "6 of 14 planned layers carry no adapter: model.layers.0.mlp.gate_proj",
    "adapter cut from the gradient": "trainable tensors got no gradient: blocks.0.attn.out.lefts.0",
    "a save that saves what was before": "what was saved is not what was scored",
    "alpha taken for the scale": "what was saved is not what was scored",
    "another alpha than was asked for": "ask for an update scaled by 2 (rank 4, alpha 8), the model's is scaled by 4",
    "stop token masked from step 2 on": "are not those that were audited",
    "held-out row trained on under a planned id": "row 0: the tokens are not those of sums.jsonl:",
    "tokens masked between the batch and the loss": "something between the batch and the loss masks or adds tokens",
}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown
