"""Every fault of the forward pass that the catalogue knows is caught at its site, and its clean twin is silent."""

import pytest

from assay.zoo import forward, observe
from assay.zoo.fault import FAULTS
from assay.zoo.surgery import PLANTINGS

NAMES = [name for name, planting in PLANTINGS.items() if planting.rows]


def test_the_catalogue_s_rows_have_faults():
    assert {row for name in NAMES for row in PLANTINGS[name].rows} == {"S6", "S7", "L12", "L13", "L14", "M08", "D24", "D25"}
    assert forward.__name__ == "assay.zoo.forward"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = observe(FAULTS[name])
    assert sighting.caught, sighting.planted
    assert any(f"{right} is the first that parts" in sighting.facts()["reason"] for right in PLANTINGS[name].right), sighting.planted
    assert not sighting.false_alarm, sighting.clean
