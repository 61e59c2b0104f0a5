"""All kernels in Triton's interpreter, on the CPU: every interpreted_*.py of this folder, in one process of its own.

Triton reads TRITON_INTERPRET once, when it is first imported; and to start a process takes as long as most of these files.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.stem for path in HERE.glob("interpreted_*.py"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is published for Linux alone")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[ElementTree.Element]:
    """Every test that ran, and what was said of those that did not pass."""
    assert importlib.util.find_spec("triton"), "the development extra installs triton: pip install -e '.[dev]'"
    report = tmp_path_factory.mktemp("interpreter") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *(HERE / f"{name}.py" for name in FILES)]
    done = subprocess.run(command, cwd=HERE.parents[1], env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    assert report.exists(), done.stdout[-4000:] + done.stderr[-1000:]
    return list(ElementTree.parse(report).iter("testcase"))


@pytest.mark.parametrize("name", FILES)
def test_the_kernels_of_a_file(name: str, cases: list[ElementTree.Element]):
    """None fails, none is skipped, none is left out."""
    mine = [case for case in cases if name in f"{case.get('classname')}.{case.get('name')}".split(".")]
    assert len(mine) >= (HERE / f"{name}.py").read_text().count("\ndef test_")
    assert not [(case.get("name"), said.tag, (said.text or "")[-2000:]) for case in mine for said in case if said.tag in
                ("failure", "error", "skipped")]
