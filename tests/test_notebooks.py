"""Notebooks of the recipes: every cell runs as it stands, and ends with what the file shows of it, numbers aside.

The longest run with the slow tests: every day their calls fit what assay offers, and their recipes are run in tests/recipes.
"""

import ast
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

import assay
from assay.cli import _RECIPES
from assay.guard.proving_process import PROVING_PROCESSES

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LONG = ("distill", "edit", "evaluate", "grpo")
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


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem, marks=pytest.mark.slow if file.stem in LONG else ()) for file in FILES])
def test_a_notebook_runs_and_shows_what_it_found(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(file.read_text())
    found = notebooks.run_cells(notebook, file.stem)
    assert [without_numbers(value) for value in found] == [without_numbers(value) for value in notebooks.shown(notebook)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_call_of_a_notebook_fits_what_assay_offers(file):
    sources = ["".join(cell["source"]) for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    calls = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "assay"]
    assert calls
    for call in calls:
        named = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        inspect.signature(getattr(assay, call.func.attr)).bind(*call.args, **named)  # TypeError where it would be one


def test_every_recipe_has_one_of_at_most_eight_cells():
    assert {file.stem for file in FILES} == {*(verb.replace("-", "_") for verb in _RECIPES), "evaluate"}
    assert all(len(json.loads(file.read_text())["cells"]) <= 8 for file in FILES)
