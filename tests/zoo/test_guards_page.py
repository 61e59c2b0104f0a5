"""The table of what got past the guards names rows of the zoo, tests and checks that exist."""

import ast
import re
from pathlib import Path

from assay.zoo import catalogue

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guards.md").read_text()


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_row_of_the_zoo_that_it_names_exists():
    named = {name for part in re.findall(r"zoo ((?:`[^`]+`(?:, )?)+)", PAGE) for name in re.findall(r"`([^`]+)`", part)}
    assert len(named) > 30
    assert named - catalogue().keys() == set()


def test_every_test_that_it_names_exists():
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", PAGE)
    assert len(named) > 50
    for file, name in named:
        made = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
        assert name in made, f"{file} has no {name}"


def test_every_check_that_it_names_exists():
    source = "\n".join(path.read_text() for path in (ROOT / "assay").rglob("*.py"))
    checks = {check for cells in rows() if len(cells) == 5 for check in re.findall(r"`([^`]+)`", cells[3])}
    assert len(checks) > 20
    assert {check for check in checks if f'"{check}"' not in source} == set()


def test_every_point_is_in_it():
    points = {f"1.{number}" for number in range(1, 24)}
    assert points <= {cells[0] for cells in rows()}
