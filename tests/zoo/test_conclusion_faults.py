"""Faults of conclusions: each is caught by its check for its own reason, and its clean twin is silent."""

import pytest

from assay.testing.fault_injection import FAULTS
from assay.zoo import conclusion_faults  # noqa: F401 - importing registers
from tests.zoo.sightings import sight

REASONS = {
    "completions counted as runs": "said to be shown worse: new against old: malformed +0.500",
    "one problem called a gain": "problems per arm would be needed for this effect",
    "best of many called a gain": "not shown",
    "best seed reported": "a mean is not a summary",
    "form taken for the answer": "shown worse",
    "compared on other problems": "150 problem(s) were scored in one of them only",
    "the worst chosen for the best": "what is handed over is shown worse than what the run began with",
    "p-values lost on the way": "p = 0.0: no test gives that",
    "a fall called success": "shown: it falls",
    "the best by another mean than is printed": "it was chosen by another mean",
    "a budget cut short": "the run ended by itself before the 20 steps",
    "saved artifact loops": "repetition",
    "every question answered with sums": "numbers for prose",
    "empty answers": "shown worse",
}


@pytest.mark.parametrize("name", REASONS)
def test_every_conclusion_is_caught(name):
    sighting = sight(FAULTS[name])
    assert sighting.caught, sighting.planted
    assert not sighting.false_alarm, sighting.clean
    assert REASONS[name] in str(sighting.facts()["reason"])
