"""The README's tree is true, rooms keep their order, names stand in one place, and every command that is shown exists."""

import ast
import importlib
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from assay.cli import VERBS
from assay.cli import run as cli_run
from assay.config import _parser
from assay.testing.tiny_models import save_model, tiny_model
from docs.generate import ROOMS, files_page, room_of

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
        for node in ast.parse(file.read_text()).body:
            named = [node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            for name in [each.name for each in named] + [each.id for each in targets if isinstance(each, ast.Name)]:
                if not name.startswith("_"):
                    yield name, str(file.relative_to(ROOT / "assay"))


def twice(pairs):
    """What stands in two places, as {name: places}."""
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


def reward_of_the_guide():
    return re.search(r"^```python\n(import re.*?)^```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL | re.MULTILINE)[1]


def test_the_reward_in_the_guide_pays_for_the_answer_alone():
    made: dict = {}
    exec(reward_of_the_guide(), made)
    row = {"answer": "The sum.\n#### 12"}
    assert made["right"]("", "It is 12.", row) == 1
    assert [made["right"]("", said, row) for said in ("", "13", "12 or 13", "12 12", "1 2")] == [0] * 5

# ---------------------------------------------------------------- the commands that are shown, run on a tiny model

ELSEWHERE = {"fetch": "needs the network", "zoo": "has tests of its own"}
JUDGES = {"probe", "bisect", "trace"}  # a verdict against a model that has learned nothing is an answer too: 3
TINY = {"smollm2-135m": "tiny", "step-000300": "step-000004", "step-000400": "step-000004", "step-000200": "step-000002"}
SMALL = {
    "sft": "--max-length 64 --batch-tokens 512 --max-steps 4 --num-train-epochs 9 --held-out 0.2 --learning-rate 1e-3 --probe-samples 0",
    "dpo": "--max-length 48 --batch-tokens 768 --max-steps 4 --num-train-epochs 9 --held-out 0.2 --learning-rate 3e-3 --probe-samples 0",
    "grpo": "--max-steps 4 --save-steps 2 --prompts 4 --num-generations 4 --max-completion-length 8 --held-out 0.2 --learning-rate 1e-4 "
            "--probe-samples 0",
    "eval": "--limit 6 --max-new-tokens 4 --witness 0", "sample": "--max-new-tokens 4", "probe": "--max-new-tokens 8 -n 1",
}
COMPARED = ("before", "after", "a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4")  # runs of their own: the same weights twice are one
ON_CPU = ("sft", "dpo", "grpo", "eval", "sample", "probe")


def small(words):
    """The command on the tiny model, with options that make it short."""
    verb = words[0]
    named = [re.sub("|".join(TINY), lambda found: TINY[found[0]], word) for word in words]
    return named + SMALL.get(verb, "").split() + (["--device", "cpu"] if verb in ON_CPU else [])


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_inputs(folder):
    """What the commands read: models of other tools, conversations, problems, a reward."""
    for name in ("tiny", "base-model", "source", "any-folder-from-transformers-trl-or-peft"):
        save_model(folder / name, tiny_model(max_length=512))  # the longest question of a probe has room
    for name in COMPARED:
        save_model(folder / "trained" / name, tiny_model(seed=COMPARED.index(name)))
    sums = [(a, b) for a in range(8) for b in range(8)]
    for name in ("chats", "more"):
        write_rows(folder / f"{name}.jsonl", [{"prompt": f"{a}+{b}=", "completion": f"{name} {a + b}"} for a, b in sums])
    for name in ("sums", "test"):
        write_rows(folder / f"{name}.jsonl", [{"question": f"{a}+{b}=", "answer": f"The sum.\n#### {a + b}"} for a, b in sums])
    write_rows(folder / "pairs.jsonl", [{"prompt": f"{a}+{b}=", "chosen": f"yes {a + b}", "rejected": f"no {a}"} for a, b in sums])
    (folder / "mine.py").write_text(reward_of_the_guide())


def make_results(folder):
    """What the commands find from work that the pages do not show: a run, evaluations, what TRL and llama.cpp would have written."""
    problems = ["--task", "gsm8k", "--data", "test.jsonl"]
    made = [["sft", "--model", "tiny", "--data", "chats.jsonl", "--out", "runs/sft"],
            ["eval", "tiny", *problems, "-k", "16", "--temperature", "0.7", "--out", "evals/base"]]
    made += [["eval", f"trained/{name}", *problems, "--out", f"evals/{name}", "--temperature", "0.7"] for name in COMPARED]
    for words in made:
        assert cli_run(small(words)) == 0, words
    shutil.copytree(folder / "runs/sft/model", folder / "trl-output",
                    ignore=shutil.ignore_patterns("manifest.json", "hallmark.json", "probes.safetensors"))
    assert cli_run(["export", "source", "--to", "gguf", "--dtype", "q8_0", "--out", "model-q8_0.gguf"]) == 0


@pytest.mark.slow
def test_the_commands_that_are_shown_run_in_their_order(tmp_path, fresh_proofs, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)
    make_results(tmp_path)
    failed = []
    for shown in commands():
        words = shown.values[0]
        if words[0] in ELSEWHERE:
            continue
        if words[:2] == ["prove", "./adapter"]:
            shutil.copytree("runs/lora/adapter", "adapter")
        allowed = {0, 3} if words[0] in JUDGES else {0}
        if (code := cli_run(small(words))) not in allowed:
            failed.append(f"{shlex.join(small(words))}: exit code {code}\n{''.join(capsys.readouterr())[-1500:]}")
    assert not failed, "\n\n".join(failed)
