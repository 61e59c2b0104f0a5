"""Notebooks of the recipes: every cell runs as it stands, and ends with what the file shows of it, numbers aside."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from assay.cli import _RECIPES
from assay.guard.proving_process import PROVING_PROCESSES

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
TEXTS = re.compile(r"\[('[^']*'(, )?)+\]")  # what a tiny model says depends on the last bits of a CPU

_spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
assert _spec is not None
assert _spec.loader is not None
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)


def without_numbers(value: str | None) -> str | None:
    return None if value is None else TEXTS.sub("[…]", NUMBER.sub("#", value))


@pytest.fixture(scope="module", autouse=True)
def one_proving_process():
    with PROVING_PROCESSES.keeping():
        yield


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_runs_and_shows_what_it_found(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(file.read_text())
    found = notebooks.run_cells(notebook, file.stem)
    assert [without_numbers(value) for value in found] == [without_numbers(value) for value in notebooks.shown(notebook)]


def test_every_recipe_has_one_of_at_most_eight_cells():
    assert {file.stem for file in FILES} == {*(verb.replace("-", "_") for verb in _RECIPES), "evaluate"}
    assert all(len(json.loads(file.read_text())["cells"]) <= 8 for file in FILES)
