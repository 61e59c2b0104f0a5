"""Every fault of a published folder is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.zoo import catalogue, publication_faults
from tests.zoo.sightings import sight

REASONS = {
    "weights changed after publishing": "model.safetensors: its bytes hash to",
    "model card changed after publishing": "README.md: its bytes hash to",
    "publication of another folder": "is of another folder: it names the manifest",
    "signature of another folder": "is no signature of these bytes",
    "signed by another key": "signed by another key: the ED25519 key SHA256:",
}
pytestmark = pytest.mark.skipif(not publication_faults.ssh_keygen_installed(), reason="ssh-keygen is not installed")


def own():
    return {name: fault for name, fault in catalogue().items() if fault.job is publication_faults.a_publication}


def test_every_fault_has_its_reason():
    assert own().keys() == REASONS.keys()


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(own()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown
