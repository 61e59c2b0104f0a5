"""Every fault of the forward pass that the catalogue knows is caught at its site, and its clean twin is silent."""

import pytest

from assay.testing.fault_injection import FAULTS
from assay.testing.tiny_forward import FORWARD_FAULTS
from assay.zoo import forward_faults
from tests.zoo.sightings import sight

NAMES = [name for name, planting in FORWARD_FAULTS.items() if planting.rows]


def test_the_catalogue_s_rows_have_faults():
    assert {row for name in NAMES for row in FORWARD_FAULTS[name].rows} == {"S6", "S7", "L12", "L13", "L14", "M08", "D24", "D25"}
    assert forward_faults.__name__ == "assay.zoo.forward_faults"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(FAULTS[name])
    assert sighting.caught, sighting.planted
    reason = sighting.facts()["reason"]
    assert any(f"{right} is the first that diverges" in reason for right in FORWARD_FAULTS[name].right), sighting.planted
    assert not sighting.false_alarm, sighting.clean
