"""Every fault of a number format is caught by its check, for its own reason, and its clean twin is silent."""

import pytest

from assay.verdict import Outcome
from assay.zoo import catalogue
from tests.zoo.sightings import sight

REASONS = {
    "loss scale left in the gradients": "the loss in torch.float16 as it will run, and in fp32",
    "loss scale never lowered": "not finite",
    "bf16 masters rounded to the nearest": "no weight moved that only stochastic rounding can move",
    "moments in 8 bits that are never read": "moments are not kept as they were made",
    "moments with the scale of the block before": "codes are read with another scale",
}


def test_every_fault_of_a_number_format_has_its_reason():
    assert REASONS.keys() == {name for name, fault in catalogue().items() if fault.plant.__module__ == "assay.zoo.number_format_faults"}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    seen = sight(catalogue()[name])
    against = [v for v in seen.planted if v.check == seen.fault.check and v.outcome is Outcome.REFUTED]
    assert against, "\n".join(map(str, seen.planted))
    assert REASONS[name] in against[0].reason
    assert not any(v.outcome is Outcome.REFUTED for v in seen.clean), "\n".join(map(str, seen.clean))
    assert {v.outcome for v in seen.clean if v.check == seen.fault.check} == {Outcome.PROVEN}
