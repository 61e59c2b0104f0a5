"""The table of arithmetics: a row says what failed and what was asserted, so that it need not be run again to be mended."""

import sys
from pathlib import Path

import pytest

from tests import arithmetics

TESTS = """
import os
import pytest

@pytest.mark.arithmetic
def test_sound():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""

@pytest.mark.arithmetic
def test_wrong():
    found = 0.25
    assert found < 0.1
"""


def test_a_row_names_the_test_and_the_assertion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a process that sees no GPU; a row that could not run at all tells why."""
    file = tmp_path / "test_two.py"
    file.write_text(TESTS)
    monkeypatch.setattr(arithmetics, "PYTEST", (*arithmetics.PYTEST, "-c", str(Path("pyproject.toml").resolve()), "--noconftest"))
    told, against = arithmetics.read_row(arithmetics.run_row("as it is", [str(file)]))
    assert "1 failed, 1 passed" in told
    assert any("::test_wrong" in line for line in against)
    assert any("assert 0.25 < 0.1" in line for line in against)
    monkeypatch.setattr(arithmetics, "PYTEST", (sys.executable, "-c", "raise SystemExit('no torch here')"))
    assert arithmetics.read_row(arithmetics.run_row("as it is", [str(file)])) == ("no test passed", ["no torch here"])


def test_every_row_is_of_its_own():
    assert len(arithmetics.ARITHMETICS) == 26 == len({tuple(row.items()) for row in arithmetics.ARITHMETICS.values()})
