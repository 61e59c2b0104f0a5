"""The README's tree is true, and the project speaks of itself alone."""

import re
from pathlib import Path

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
    floors = ["errors", "config", "seeds", "verdict", "kernels", "model", "data", "learn", "store", "generate", "reward", "edit", "measure",
              "guard", "recipes", "report", "interop", "zoo", "verbs", "cli"]
    upward = []
    for file in (ROOT / "assay").rglob("*.py"):
        here = file.relative_to(ROOT / "assay").parts[0].removesuffix(".py")
        for room in re.findall(r"^\s*(?:from|import) assay\.(\w+)", file.read_text(), re.MULTILINE):
            if here in floors and floors.index(room) > floors.index(here):
                upward.append(f"{file.name}: {here} imports {room}")
    assert not upward
