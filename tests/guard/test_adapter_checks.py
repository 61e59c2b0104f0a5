"""Adapters count as often as was asked: live, and as adapter_config.json says."""

import pytest

from assay.guard.adapter_checks import check_adapter_scale, check_written_adapter
from assay.verdict import Outcome


@pytest.mark.parametrize(("alpha", "rslora", "found", "outcome"), [
    (8.0, False, [2.0, 2.0], Outcome.PROVEN), (None, False, [2.0], Outcome.PROVEN), (8.0, True, [4.0], Outcome.PROVEN),
    (8.0, False, [2.0, 4.0], Outcome.REFUTED), (8.0, True, [2.0], Outcome.REFUTED), (8.0, False, [], Outcome.REFUTED)])
def test_every_part_of_a_live_adapter_counts_as_often_as_was_asked(alpha: float | None, rslora: bool, found: list[float], outcome: Outcome):
    assert check_adapter_scale(4, alpha, rslora, found).outcome is outcome


@pytest.mark.parametrize(("fields", "outcome"), [
    ({"r": 4, "lora_alpha": 8, "use_rslora": False}, Outcome.PROVEN), ({"r": 4, "lora_alpha": 8.0}, Outcome.PROVEN),
    ({"r": 4, "lora_alpha": 16}, Outcome.REFUTED), ({"r": 8, "lora_alpha": 8}, Outcome.REFUTED), ({"r": 4}, Outcome.REFUTED),
    ({"r": 4, "lora_alpha": 8, "use_rslora": True}, Outcome.REFUTED)])
def test_an_adapter_is_written_with_the_scale_that_was_asked_for(fields: dict, outcome: Outcome):
    assert check_written_adapter(4, 8.0, False, fields).outcome is outcome
