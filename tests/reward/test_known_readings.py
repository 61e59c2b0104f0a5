"""Known readings: sound code reads them as they stand, and a mistake in reading is named."""

import pytest

from assay.reward import answer
from assay.reward.known_readings import check_readings
from assay.verdict import Outcome


def test_a_sound_package_reads_them_all():
    found = check_readings()
    assert found.outcome is Outcome.PROVEN, found.reason


@pytest.mark.parametrize(("name", "wrong"), [
    ("last_number", lambda text: None), ("_outermost", lambda marks: marks), ("_marks_left_open", lambda text: False),
    ("_words", lambda text: text), ("_unwrapped", lambda stated: stated.strip()), ("_leniently", lambda stated: stated or None)])
def test_a_mistake_in_reading_is_named(monkeypatch, name, wrong):
    monkeypatch.setattr(answer, name, wrong)
    found = check_readings()
    assert found.outcome is Outcome.REFUTED
    assert "known is" in found.reason
