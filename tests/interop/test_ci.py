"""The GitHub Action and the pre-commit hooks: their own command lines, run as they stand in the files."""

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from assay.cli import VERBS
from assay.cli import run as assay
from assay.store.checkpoint import write_hallmark
from assay.testing.tiny_models import flip_bit, save_hf_folder, save_model, tiny_model, truncate
from assay.verdict import proven

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A proven checkpoint, and scores of two arms."""
    made = tmp_path_factory.mktemp("ci")
    write_hallmark(save_model(made / "model", tiny_model()), [proven("whole", "every file is there")])
    with (made / "scores.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["arm", "id", "score"])
        rows.writerows((arm, number, int(number % 10 < share)) for arm, share in (("old|arm", 2), ("new", 8)) for number in range(100))
    return made


def run_action(folder: Path, verb: str, arguments: str) -> tuple[int, str]:
    """The last step's own script, with what GitHub would put into its environment."""
    step = ACTION["runs"]["steps"][-1]
    assert step["env"] == {"VERB": "${{ inputs.verb }}", "ARGUMENTS": "${{ inputs.arguments }}"}
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "assay"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m assay "$@"\n')
    program.chmod(0o755)
    summary = folder / "summary.md"
    summary.write_text("")
    told = os.environ | {"VERB": verb, "ARGUMENTS": arguments, "GITHUB_STEP_SUMMARY": str(summary), "PYTHONPATH": str(ROOT),
                         "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(shell, env=told, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, summary.read_text() + done.stderr


def test_the_action_writes_its_verdicts_into_the_summary(folder):
    code, said = run_action(folder, "compare", "scores.csv\n--require better")
    assert code == 0, said
    assert "### assay compare" in said
    assert "| old\\|arm | " in said
    code, said = run_action(folder, "verify", "model $(touch pwned)")
    assert code == 2, said
    assert not (folder / "pwned").exists()
    assert run_action(folder, "sft", "x")[0] == 2


def test_the_actions_inputs_are_those_of_its_steps():
    text = (ROOT / "action.yml").read_text()
    used = {word.split("}}")[0].strip() for word in text.split("inputs.")[1:] for word in [word.split(" ")[0]]}
    assert used == ACTION["inputs"].keys()
    assert all("${{" not in step.get("run", "") for step in ACTION["runs"]["steps"])  # nobody's input becomes a command


@pytest.mark.parametrize("hook", HOOKS)
def test_the_hooks_run_verbs(hook):
    program, verb = shlex.split(HOOKS[hook]["entry"])
    assert program == "assay"
    assert verb in VERBS
    assert HOOKS[hook]["pass_filenames"] is False


def test_a_hook_stops_a_commit_of_a_changed_model(folder, tmp_path, capsys):
    copied = tmp_path / "model"
    assert assay(["publish", str(folder / "model"), "--to", str(copied)]) == 0
    words = [*shlex.split(HOOKS["assay-verify"]["entry"])[1:], str(copied), "--summary", str(tmp_path / "summary.md")]
    assert assay(words) == 0
    flip_bit(copied / "model.safetensors", -1001)
    assert assay(words) == 3
    first, second = (tmp_path / "summary.md").read_text().split("### assay verify ")[1:]
    assert "✅ PROVEN | files |" in first
    assert "❌ REFUTED | files |" in second


def test_the_summary_of_a_comparison_and_of_a_proof(folder, tmp_path, capsys):
    summary = tmp_path / "summary.md"
    truncate(save_hf_folder(tmp_path / "a_model", tiny_model()) / "model.safetensors")
    assert assay(["prove", str(tmp_path / "a_model"), "--summary", str(summary)]) == 3
    assert "a\\_model: REFUTED" in summary.read_text()
    assert "| ❌ REFUTED | whole | " in summary.read_text()
    assert "| ⚠️ UNPROVEN | consumer | " in summary.read_text()
    capsys.readouterr()
    assert assay(["compare", str(folder / "scores.csv"), "--require", "better", "--json", "--summary", str(summary)]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"]
    assert summary.read_text().count("### assay") == 2
    assert assay(["compare", str(folder / "scores.csv"), "--summary", str(tmp_path / "no" / "such.md")]) == 2
