"""Notebooks of the recipes (make notebooks): every code cell is run, in order and in one namespace, and its output is stored.

A light executor: what a cell prints is not kept, the value of its last expression is. tests/test_notebooks.py runs the same.
"""

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parent / "notebooks"


def run_cells(notebook: dict[str, Any], name: str) -> list[str | None]:
    """What each code cell ends with, as Python shows it, in the current folder; None for one that ends with a statement."""
    space: dict[str, Any] = {"__name__": "__main__"}
    return [run_cell("".join(cell["source"]), f"{name}[{place}]", space)
            for place, cell in enumerate(notebook["cells"]) if cell["cell_type"] == "code"]


def run_cell(source: str, name: str, space: dict[str, Any]) -> str | None:
    import linecache

    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # so that inspect finds a function's source
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(tree, name, "exec"), space)
        value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), space)
    return None if value is None else repr(value)


def shown(notebook: dict[str, Any]) -> list[str | None]:
    """The same, as the file has it stored."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(cell["outputs"][0]["data"]["text/plain"]) if cell["outputs"] else None for cell in cells]


def with_outputs(notebook: dict[str, Any], values: list[str | None]) -> dict[str, Any]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, value) in enumerate(zip(cells, values, strict=True), 1):
        result = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": {"text/plain": [value]}}
        cell |= {"execution_count": number, "outputs": [] if value is None else [result]}
    return notebook


def main() -> int:
    from assay.guard.proving_process import PROVING_PROCESSES

    with PROVING_PROCESSES.keeping():  # to start one takes longer than most proofs
        for file in sorted(NOTEBOOKS.glob("*.ipynb")) if len(sys.argv) == 1 else [NOTEBOOKS / f"{name}.ipynb" for name in sys.argv[1:]]:
            notebook = json.loads(file.read_text())
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                values = run_cells(notebook, file.stem)
            file.write_text(json.dumps(with_outputs(notebook, values), indent=1, ensure_ascii=False) + "\n")
            print(file.name, *values, sep="\n  ", flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
