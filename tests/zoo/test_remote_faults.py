"""Every fault of rollouts by a server is caught by its check, for its own reason; the clean twin is silent."""

import contextlib
import re
from pathlib import Path

import pytest

from assay.verdict import Outcome
from assay.zoo import catalogue
from assay.zoo.remote_faults import a_remote_rollout

REASONS = {
    "prefix cache that outlives a reload": "keys and values of the old ones",
    "adapter name reused": "answers by other weights",
    "rollouts that never get new weights": "name 0@.*: requests reach other weights",
    "reply of another version": "come from version '0@before'",
    "server's log-probabilities before the temperature": "log-probabilities of another distribution",
    "server's log-probabilities off by a little": "sampler and trainer differ",
    "server's log-probabilities shifted by a token": "sampler and trainer differ",
    "another policy behind the importance weights": "no weights mend that",
    "log-probability that is no number": "log-probability None",
    "prompt encoded again by the server": "decoded and encoded again, or cut",
}


def test_all_of_them_are_tried():
    assert {name for name, fault in catalogue().items() if fault.job is a_remote_rollout} == set(REASONS)


def test_the_clean_twin_is_silent(tmp_path: Path):
    verdicts = a_remote_rollout(tmp_path, lambda folder: contextlib.nullcontext())
    assert [verdict for verdict in verdicts if verdict.outcome is not Outcome.PROVEN] == []
    assert {catalogue()[name].check for name in REASONS} <= {verdict.check for verdict in verdicts}


@pytest.mark.parametrize("name", REASONS)
def test_each_is_caught_for_its_own_reason(name: str, tmp_path: Path):
    fault = catalogue()[name]
    against = [verdict for verdict in fault.job(tmp_path, fault.plant) if verdict.check == fault.check]
    assert [verdict.outcome for verdict in against] == [Outcome.REFUTED]
    assert re.search(REASONS[name], against[0].reason)
