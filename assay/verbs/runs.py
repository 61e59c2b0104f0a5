"""assay runs: list every run under a folder, and how each stands."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.config import argument, option
from assay.errors import UsageError

if TYPE_CHECKING:
    from assay.report.board import RunRow


@dataclass(frozen=True)
class FLAGS:
    """A table of the runs under a folder: recipe, whether each reached its purpose and is proven, steps, held-out score with its
    interval, the last proven checkpoint, and what it came from. Reads ledgers, metrics and manifests; changes nothing."""

    folder: str = argument("folder to look in", default=".", default_text="here")
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay runs
  assay runs runs --json"""
COLOURS = {"done and proven": "green", "running": "cyan",
           **dict.fromkeys(("done, refuted", "stopped", "ledger damaged", "unreadable"), "red")}


def run(flags: FLAGS) -> int:
    from assay.report.board import board

    folder = Path(flags.folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give one that holds runs")
    rows = board(folder)
    if flags.json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    elif rows:
        print_board(rows)
    else:
        print(f"no run is under {folder}: a run is a folder with ledger.jsonl")
    return 0


def print_board(rows: "list[RunRow]") -> None:
    """Names, reasons and paths come from files: they are shown as text, never as the console's own markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "recipe", "outcome", "steps", "held out", "last proven", "parent"):
        table.add_column(name, justify="right" if name == "steps" else "left", overflow="fold")
    for row in rows:
        outcome = Text(row.headline, style=_colour(row))
        if row.reason:
            outcome.append(f" ({row.reason[:160]})", style="dim")
        steps = "unknown" if row.steps is None else f"{row.steps:,}"
        table.add_row(Text(row.run), Text(row.recipe), outcome, steps, Text(row.held_out or "unknown"), Text(row.last_proven or "none"),
                      Text(row.parent or "none"))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=200).print(table)


def _colour(row: "RunRow") -> str:
    """Colour of a run's row; green is for what is proven and reached its purpose."""
    if row.reached == "REFUTED":
        return "red"
    return COLOURS.get(row.state, "yellow") if row.reached in (None, "PROVEN") or row.state != "done and proven" else "yellow"
