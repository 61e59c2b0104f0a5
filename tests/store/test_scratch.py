"""Scratch folders: gone with their block; of a process that was killed, swept by the next one, and never while the owner lives."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from assay.cli import run
from assay.store.scratch import PREFIX, scratch_folder, sweep_scratch

HOLD = "from assay.store.scratch import scratch_folder\nwith scratch_folder() as folder:\n    (folder / 'x').write_text('1')\n" \
       "    print(folder, flush=True)\n    input()"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_scratch_folder_is_empty_and_gone_with_its_block(temporary: Path):
    with scratch_folder() as folder:
        assert list(folder.iterdir()) == []
        assert list(temporary.glob(f"{PREFIX}*")) == [folder.parent]
    assert list(temporary.iterdir()) == []


def test_a_killed_process_leaves_a_folder_that_the_next_command_sweeps(temporary: Path, capsys: pytest.CaptureFixture[str]):
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        held = Path(owner.stdout.readline().strip())
        sweep_scratch()
        assert (held / "x").exists()  # its owner lives
        owner.send_signal(signal.SIGKILL)
    assert (held / "x").exists()
    assert run(["runs", str(temporary)]) in (0, 2)
    assert list(temporary.iterdir()) == []


def test_what_others_made_and_what_is_being_made_stays(temporary: Path):
    (temporary / "assay-other").mkdir()
    (temporary / f"{PREFIX}1-being-made").mkdir()
    sweep_scratch()
    assert len(list(temporary.iterdir())) == 2
