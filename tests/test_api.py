"""The Python API: the page's blocks and the notebook run as they stand; what is given in memory, and what cannot travel, in words."""

import asyncio
import inspect
import json
import linecache
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import assay
from assay.errors import UsageError
from assay.recipes.options import Sft
from assay.reward.callable_reward import reward_spec

ROOT = Path(__file__).parents[1]
KEPT = """from assay.guard.proving_process import PROVING_PROCESSES
kept = PROVING_PROCESSES.keeping()
kept.__enter__()
"""  # proofs of all cells in one process: to start one takes longer than most proofs
FACTOR = 2.0


def half(prompt, completion, row):
    return len(completion) / FACTOR


def double(prompt, completion, row):
    return 2 * FACTOR * half(prompt, completion, row)


def run_block(source: str, name: str, space: dict) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # so that inspect finds a function's source
    exec(compile(source, name, "exec"), space)


def test_every_block_of_the_page_runs_in_order(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "__main__"}
    for place, block in enumerate(blocks):
        run_block(block, f"page[{place}]", space)
    assert "PROVEN 0 runs/sft/model" in capsys.readouterr().out


def test_the_notebooks_cells_run_under_a_running_event_loop_and_show_their_outcome(tmp_path, monkeypatch):
    """As Jupyter runs them, in this process."""
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "__main__"}

    async def cells() -> None:
        for place, cell in enumerate(json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]):
            if cell["cell_type"] == "code":
                run_block("".join(cell["source"]), f"notebook[{place}]", space)

    asyncio.run(cells())
    assert "PROVEN" in space["outcome"]._repr_html_()


@pytest.mark.slow  # its sibling above runs the same cells; a kernel and its proving process take most of half a minute to start
def test_the_notebook_runs_in_jupyter(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(KEPT))
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", []) if output["output_type"] == "execute_result"]
    assert any("PROVEN" in data.get("text/html", "") for data in shown)


def test_importing_assay_loads_no_torch():
    code = "import sys, assay; assay.__all__; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert found.stdout == "False\n"


def test_signatures_show_the_options():
    assert set(inspect.signature(assay.sft).parameters) == {"say", *(field.name for field in fields(Sft))}


def test_an_unknown_option_names_the_nearest(tmp_path):
    with pytest.raises(UsageError, match="learning_rate"):
        assay.sft(model="x", data=[{"text": "a"}], out=str(tmp_path / "run"), learnin_rate=1e-3)


def test_rows_that_are_no_rows_are_refused(tmp_path):
    with pytest.raises(UsageError, match="data"):
        assay.sft(model="x", data=[1, 2], out=str(tmp_path / "run"))


def test_a_reward_travels_with_what_it_names(tmp_path):
    file, name, weight = reward_spec((double, 0.5), tmp_path).rsplit(":", 2)
    made: dict = {}
    exec(Path(file).read_text(), made)
    assert (made[name]("", "abc", {}), name, weight) == (6.0, "double", "0.5")


def test_what_cannot_travel_is_refused_in_words(tmp_path):
    opened = object()

    def closure(prompt, completion, row):
        return opened

    for reward in (closure, lambda prompt, completion, row: 1.0, print):
        with pytest.raises(UsageError, match="reward"):
            reward_spec(reward, tmp_path)
    assert not list(tmp_path.iterdir())
