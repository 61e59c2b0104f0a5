"""Every fault of conversations is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "completion truncated away": "6 of 20 examples supervise no token",
    "mask discarded": "tokens of prompts are supervised, in 20 of 20 examples",
    "answer found by searching for it": "20 examples mean to teach what their conversations do not say",
    "mask off by one": "supervises 'he river 0<|im_end|>', meant was 'the river 0<|im_end|>'",
    "prompt measured alone": "20 of 20 prompts are other ids than their text alone becomes",
    "end never taught": "40 of 40 completions end with no supervised stop token",
    "packed examples in one document": "examples that share the row would see each other",
    "end masked as padding": "are not those that were audited",
    "end of turn that stops nothing": "the chat template ends turns with '<|im_end|>', which stops nothing",
    "BOS twice": "20 examples begin with '<|endoftext|>' twice",
    "BOS dropped by another template": "20 examples begin without '<|endoftext|>'",
    "template not applied": "the model's own template or tokenizer writes '<|im_start|>user",
    "rows written with another template": "is not what its conversation becomes: it reads '_start|>vter",
    "new tokens without rows": "4 tokens in the data have an empty embedding row that is frozen: '<think>'",
    "held-out conversation trained on": "4 of 4 held-out examples are trained on",
    "tool calls lost by the template": "rows.jsonl:1: the chat template does not write tool_calls ('look_up') of turn 1 (assistant)",
    "reasoning lost by the template": "does not write reasoning_content ('it may be 0.') of turn 1",
    "empty answers taught": "rows.jsonl:1: turn 1 (assistant) is empty",
}
WANTED = {*(f"D{i:02d}" for i in range(1, 9)), "D10", "D11", "D12", "D13", "D15"}  # D09 strikes an export: see checkpoints


def test_every_row_about_conversations_has_a_fault_and_every_fault_its_reason():
    own = {name: fault for name, fault in catalogue().items() if fault.plant.__module__ == "assay.zoo.chat_faults"}
    assert own.keys() == REASONS.keys()
    assert not WANTED - {row for fault in own.values() for row in fault.rows}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown
