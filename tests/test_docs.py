"""The README's tree is true, rooms keep their order, and every command that is shown exists."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from assay.cli import VERBS
from assay.config import _parser

ROOT = Path(__file__).parents[1]


def test_the_tree_names_every_file_and_no_other():
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    listed: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines()[2:]:
        depth, name = (len(line) - len(line.lstrip())) // 2 - 1, line.split()[0]
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            listed.add("".join(folders) + name)
    files = {str(f.relative_to(ROOT / "assay")) for f in (ROOT / "assay").rglob("*.py") if not f.name.startswith("__")}
    assert listed == files


def test_a_room_imports_only_from_rooms_below_it():
    floors = ["errors", "strict_json", "config", "seeds", "verdict", "kernels", "model", "store", "data", "learn", "generate", "reward",
              "edit", "measure", "guard", "recipes", "report", "interop", "zoo", "verbs", "cli"]
    upward = []
    for file in (ROOT / "assay").rglob("*.py"):
        here = file.relative_to(ROOT / "assay").parts[0].removesuffix(".py")
        for room in re.findall(r"^\s*(?:from|import) assay\.(\w+)", file.read_text(), re.MULTILINE):
            if here in floors and floors.index(room) > floors.index(here):
                upward.append(f"{file.name}: {here} imports {room}")
    assert not upward


def commands():
    """Every `assay …` line of a code block, with where it stands."""
    for file in ("README.md", "docs/guide.md"):
        for block in re.findall(r"^```\w*\n(.*?)^```", (ROOT / file).read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("assay ") and not line.startswith("assay: "):
                    yield pytest.param(shlex.split(line, comments=True)[1:], id=f"{file}: {line[:60]}")


@pytest.mark.parametrize("words", list(commands()))
def test_every_command_that_is_shown_exists(words):
    verb, *rest = words
    assert verb in VERBS
    modules = [importlib.import_module(f"assay.verbs.{name}") for name in (verb, *rest[:1]) if name == verb or verb == "seeds"]
    known = {option for module in modules for option in _parser(module.FLAGS, "assay", "", True)._option_string_actions}
    assert [word for word in rest if word.startswith("-") and word not in known] == []


def test_the_reward_in_the_guide_pays_for_the_answer_alone():
    made: dict = {}
    exec(re.search(r"^```python\n(import re.*?)^```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL | re.MULTILINE)[1], made)
    row = {"answer": "The sum.\n#### 12"}
    assert made["right"]("", "It is 12.", row) == 1
    assert [made["right"]("", said, row) for said in ("", "13", "12 or 13", "12 12", "1 2")] == [0] * 5
