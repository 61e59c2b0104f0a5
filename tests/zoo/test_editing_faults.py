"""Every fault of editing is caught by its check, for its own reason, and its clean twin is silent."""

import pytest

from assay.testing.fault_injection import FAULTS
from assay.zoo import editing_faults as _  # noqa: F401 - importing registers
from tests.zoo.sightings import sight

REASONS = {
    "product shifted by one": "multiplies other elements",
    "subject not found, another place edited": "1 of 3 edits would strike another place than their subject: row 1: ' Ulla is' for 'ulla'",
    "key averaged in one place only": "do not use the same key",
    "target without its space": "3 of 3 targets are not what would follow",
    "teacher-forced score": "the score counts what it should not",
    "scored before the later edits": "of 2 edits that were said to hold, 1 do not hold in the final model (Borin)",
    "padding counted as text": "padding is counted",
    "another model's moments under this one's digest": "the second moments in the cache are not this model's: layer 0's differ",
    "text's moments left out of the solve": "nats a token more than its own, bound 0.5",
    "evaluated paraphrases in the search": "6 of 12 rephrasings are among the paraphrases that judge the edits: Borin",
}


@pytest.mark.arithmetic
@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(FAULTS[name])
    assert sighting.caught, sighting.planted
    assert REASONS[name] in sighting.facts()["reason"]
    assert not sighting.false_alarm, sighting.clean
