"""What a recipe returns says how it ended, in words and as an exit code, and costs nothing to import."""

import subprocess
import sys
from pathlib import Path

import pytest

from assay.outcome import Outcome
from assay.verdict import Verdict, proven, refuted, unproven

GOOD, BAD = proven("whole", "all of it"), refuted("score", "another one")
OPEN, OPTIONAL = unproven("gain", "not looked at"), unproven("gain", "not shown", optional=True)


@pytest.mark.parametrize(("verdicts", "interrupted", "code"), [
    ([GOOD], None, 0), ([GOOD, OPTIONAL], None, 0), ([GOOD, OPEN], None, 3), ([GOOD, BAD], None, 3), ([], None, 3), ([], 15, 143),
    ([], 2, 130)])
def test_the_exit_code_is_that_of_the_convention(verdicts: list[Verdict], interrupted: int | None, code: int):
    assert Outcome(Path("run"), verdicts, interrupted).exit_code == code


def test_it_says_every_verdict():
    assert str(Outcome(Path("run"), [GOOD, BAD])).splitlines() == [f"  {GOOD}", f"  {BAD}"]


def test_importing_it_loads_no_torch():
    asked = [sys.executable, "-c", "import sys, assay.outcome; print('torch' in sys.modules)"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
