"""Each fault of serving is caught by its check, and the clean twin is silent."""

import pytest

from assay.testing.fault_injection import FAULTS
from assay.zoo import adapter_faults
from tests.zoo.sightings import sight

MINE = [fault for fault in FAULTS.values() if fault.job is adapter_faults.versions_join]


@pytest.mark.parametrize("fault", MINE, ids=lambda fault: fault.name)
def test_a_fault_of_serving_is_caught(fault):
    seen = sight(fault)
    assert seen.caught, seen.planted
    assert not seen.false_alarm, seen.clean


def test_there_are_some():
    assert len(MINE) == 4
