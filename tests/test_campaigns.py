"""Programs that CI does not run, for hours of `make` and on GPUs: all that they import is still there."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(set(re.findall(r"-m (tests[\w.]+)", (ROOT / "Makefile").read_text())))
OURS = sorted(path for folder in ("bench", "docs", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_make_runs_is_there(program: str):
    found = importlib.util.find_spec(program)
    assert found is not None
    module = importlib.import_module(f"{program}.__main__" if found.submodule_search_locations else program)
    assert callable(module.main)


def is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or (hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None)


def test_what_is_imported_of_assay_is_there():
    imported = {(node.module or "", alias.name) for file in OURS for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.ImportFrom) for alias in node.names}
    asked = {(module, name) for module, name in imported if module.partition(".")[0] in ("assay", "tests")}
    assert len(asked) > 500
    assert {(module, name) for module, name in asked if not is_there(module, name)} == set()
