"""The README's tree is true, rooms keep their order, names stand in one place, and every command that is shown exists."""

import ast
import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from assay.cli import VERBS
from assay.cli import run as cli_run
from assay.config import _parser
from assay.testing.tiny_models import save_model, tiny_model
from docs.generate import ROOMS, files_page, parsed, room_of

ROOT = Path(__file__).parents[1]


def test_the_readme_is_a_front_door():
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 10_000
    tree = text.split("## The tree")[1].split("```")[1]
    listed = {word for line in tree.splitlines() for word in re.findall(r"^  ((?:\w+(?:\.py|/)\s+)+)", line) for word in word.split()}
    folders = {f"{file.parent.name}/" for file in (ROOT / "assay").glob("*/__init__.py")}
    assert listed == folders | {file.name for file in (ROOT / "assay").glob("*.py") if not file.name.startswith("__")}


def test_the_page_of_files_is_up_to_date():
    assert (ROOT / "docs" / "files.md").read_text() == files_page(), "run make docs"


def test_a_room_imports_only_from_rooms_below_it():
    upward = []
    for file in (ROOT / "assay").rglob("*.py"):
        here = room_of(file)
        for room in re.findall(r"^\s*(?:from|import) assay\.(\w+)", file.read_text(), re.MULTILINE):
            if here in ROOMS and ROOMS.index(room) > ROOMS.index(here):
                upward.append(f"{file.name}: {here} imports {room}")
    assert not upward


def public_names():
    """(name, module) of everything that a module defines at its top level for others."""
    for file in sorted((ROOT / "assay").rglob("*.py")):
        for node in parsed(file).body:
            named = [node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            for name in [each.name for each in named] + [each.id for each in targets if isinstance(each, ast.Name)]:
                if not name.startswith("_"):
                    yield name, str(file.relative_to(ROOT / "assay"))


def twice(pairs):
    """Names that stand in two places, as {name: places}."""
    found: dict[str, set[str]] = {}
    for name, place in pairs:
        found.setdefault(name, set()).add(place)
    return {name: sorted(places) for name, places in found.items() if len(places) > 1}


def test_no_public_name_stands_in_two_modules_without_a_reason():
    allowed = tomllib.loads((ROOT / "tests" / "allowed_twice.toml").read_text())
    found = twice(public_names())
    assert {name: places for name, places in found.items() if name not in allowed["names"]} == {}
    assert [name for name in allowed["names"] if name not in found] == [], "no longer needed"


def test_no_file_name_stands_in_two_folders_without_a_reason():
    allowed = tomllib.loads((ROOT / "tests" / "allowed_twice.toml").read_text())
    files = [file for file in (ROOT / "assay").rglob("*.py") if not file.name.startswith("__")]
    found = twice((file.name, str(file.parent.relative_to(ROOT / "assay"))) for file in files)
    verbs = {name for name, folders in found.items() if folders == ["recipes", "verbs"]}  # a verb and its recipe
    assert {name: folders for name, folders in found.items() if name not in verbs | allowed["files"].keys()} == {}
    assert [name for name in allowed["files"] if name not in found] == [], "no longer needed"


def commands(files=("README.md", "docs/guide.md")):
    """Every `assay …` line of a code block, with where it stands."""
    for file in files:
        for block in re.findall(r"^```\w*\n(.*?)^```", (ROOT / file).read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("assay ") and not line.startswith("assay: "):
                    yield pytest.param(shlex.split(line, comments=True)[1:], id=f"{file}: {line[:60]}")


@pytest.mark.parametrize("words", list(commands()))
def test_every_command_that_is_shown_exists(words):
    verb, *rest = words
    assert verb in VERBS
    modules = [importlib.import_module(f"assay.verbs.{name}") for name in (verb, *rest[:1]) if name == verb or verb in ("seeds", "plan")]
    known = {option for module in modules for option in _parser(module.FLAGS, "assay", "", True)._option_string_actions}
    assert [word for word in rest if word.startswith("-") and word not in known] == []


def reward_of_the_guide():
    return re.search(r"^```python\n(import re.*?)^```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL | re.MULTILINE)[1]


def test_the_reward_in_the_guide_pays_for_the_answer_alone():
    made: dict = {}
    exec(reward_of_the_guide(), made)
    row = {"answer": "The sum.\n#### 12"}
    assert made["right"]("", "It is 12.", row) == 1
    assert [made["right"]("", said, row) for said in ("", "13", "12 or 13", "12 12", "1 2")] == [0] * 5

# ---------------------------------------------------------------- the commands that are shown, run on a tiny model

ELSEWHERE = {"fetch": "needs the network", "init": "asks", "zoo": "has tests of its own"}
SMALL = {
    "sft": "--max-length 64 --batch-tokens 512 --max-steps 4 --num-train-epochs 9 --held-out 0.2 --learning-rate 1e-3 --probe-samples 0",
    "eval": "--limit 6 --max-new-tokens 4 --witness 0", "sample": "--max-new-tokens 4",
}


def small(words):
    """The command on the tiny model, with options that make it short."""
    named = [word.replace("smollm2-135m", "tiny") for word in words]
    return named + SMALL.get(words[0], "").split() + (["--device", "cpu"] if words[0] in SMALL else [])


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_inputs(folder):
    """Make what the commands read: models, conversations, problems, and an evaluation of the model that is trained."""
    for name in ("tiny", "any-folder-from-transformers-trl-or-peft"):
        save_model(folder / name, tiny_model())
    sums = [(a, b) for a in range(8) for b in range(8)]
    write_rows(folder / "chats.jsonl", [{"prompt": f"{a}+{b}=", "completion": f"it is {a + b}"} for a, b in sums])
    write_rows(folder / "test.jsonl", [{"question": f"{a}+{b}=", "answer": f"The sum.\n#### {a + b}"} for a, b in sums])
    problems = ["--task", "gsm8k", "--data", "test.jsonl", "-k", "16", "--temperature", "0.7"]
    assert cli_run(small(["eval", "tiny", *problems, "--out", "evals/base"])) == 0


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_their_order(tmp_path, fresh_proofs, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)
    failed = []
    for shown in commands(["README.md"]):
        words = shown.values[0]
        if words[0] in ELSEWHERE:
            continue
        if (code := cli_run(small(words))) != 0:
            failed.append(f"{shlex.join(small(words))}: exit code {code}\n{''.join(capsys.readouterr())[-1500:]}")
    assert not failed, "\n\n".join(failed)
