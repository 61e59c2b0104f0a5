"""Terminal output of the verbs: lines that leave stdout to JSON, progress, tables."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

SECONDS = 5.0  # between two lines of progress where there is no terminal


def line_printer(*, json: bool) -> Callable[[str], None]:
    """Printer of lines, at once; to stderr where stdout is kept for JSON."""
    return partial(print, file=sys.stderr if json else sys.stdout, flush=True)


def keep_silent(_: str) -> None:
    """Print nothing: what is not printed stands in the ledger."""


def headline_of(folder: Path) -> str | None:
    """First whether the run's purpose was reached, then whether what it handed over is proven; None where no run is."""
    from assay.report.headline import headline
    from assay.report.run_record import is_run, read_run

    return str(headline(read_run(folder))) if is_run(folder) else None


def print_headline(folder: Path) -> None:
    """A command's last line."""
    if told := headline_of(folder):
        print(told, flush=True)


class ShowProgress(Protocol):
    def __call__(self, words: str, *, last: bool = False) -> None: ...


@contextmanager
def progress_line() -> Iterator[ShowProgress]:
    """Progress on stderr: on a terminal one line that is rewritten, elsewhere one every few seconds, and the last."""
    terminal, printed = sys.stderr.isatty(), time.monotonic()

    def show(words: str, *, last: bool = False) -> None:
        nonlocal printed
        now = time.monotonic()
        if terminal:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)
        elif last or now - printed >= SECONDS:
            printed = now
            print(words, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal:
            print(file=sys.stderr)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=120, highlight=False).print(table)
