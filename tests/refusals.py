"""Refusals by name: which check stopped a run, whatever its sentence says."""

import contextlib
from collections.abc import Iterator

import pytest

from assay.errors import GuardStop


@contextlib.contextmanager
def stopped_by(check: str, **evidence: object) -> Iterator[pytest.ExceptionInfo[GuardStop]]:
    """The block is stopped by a guard, this check went against it, and its evidence holds these values."""
    with pytest.raises(GuardStop) as stop:
        yield stop
    found = {verdict.check: verdict for verdict in stop.value.verdicts}
    assert check in found, f"stopped by {sorted(found) or 'no check'}: {stop.value}"
    assert {name: found[check].evidence[name] for name in evidence} == evidence
