"""launch/: each file a page, its commands exist, and SIGTERM becomes a save, 143 and a requeue."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from assay.config import parse
from assay.recipes.options import Sft

LAUNCH = Path(__file__).parents[1] / "launch"


@pytest.mark.parametrize("name", ["Dockerfile", "skypilot.yaml", "slurm.sbatch"])
def test_each_is_at_most_sixty_lines(name: str):
    assert len((LAUNCH / name).read_text().splitlines()) <= 60


def test_the_skypilot_task_calls_sft_with_options_that_exist():
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) == {"name", "resources", "workdir", "envs", "setup", "run"}
    words = shlex.split(task["run"])
    assert words[2] == "sft"
    words = [word if word != "$SKYPILOT_NUM_GPUS_PER_NODE" else "8" for word in words[3:]]
    parsed = parse(Sft, words, prog="assay sft")
    assert (parsed.remote, parsed.gpus, parsed.shards) == ("$REMOTE", 8, 8)


def test_under_slurm_a_term_reaches_the_run_which_saves_and_is_queued_again(tmp_path: Path):
    """With stand-ins for the two programs; the script is the real one."""
    programs = {"assay": "trap 'sleep 0.3; echo saved; exit 143' TERM; echo run \"$@\"; for i in $(seq 100); do sleep 0.1; done",
                "scontrol": "echo scontrol \"$@\""}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}
    job = subprocess.Popen(["bash", LAUNCH / "slurm.sbatch", "sft", "--out", "x"], env=environment, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    first = job.stdout.readline()
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    rest = job.communicate(timeout=20)[0]
    assert first == "run sft --out x --gpus 2\n"
    assert rest.splitlines() == ["saved", "scontrol requeue 7"]
    assert job.returncode == 143
