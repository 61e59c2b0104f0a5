"""Markdown: tables, code blocks and text of a run that stays text; and the summary that CI shows of a command."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.report.templates import visible
from assay.verdict import Outcome, Verdict

_MARKUP = re.compile(r"[\\`*_\[\]<>|#&~!@$]")  # as Markdown, HTML, GitHub's mentions and its mathematics read them
_SIGN = {Outcome.PROVEN: "✅", Outcome.REFUTED: "❌", Outcome.UNPROVEN: "⚠️"}


def markdown_text(value: Any) -> str:
    """One line that is shown as it is written, whatever a stranger wrote into it."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}" if found[0] not in "<>&@" else f"&#{ord(found[0])};", " ".join(visible(value).split()))


def code(value: Any) -> str:
    """Code span within a line, as a digest or a path is shown."""
    return f"`{' '.join(visible(value).split()).replace('`', chr(39)).replace('|', chr(0xA6))}`"


def code_block(text: str, language: str = "") -> str:
    """Code block between fences that are longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{visible_lines(text)}\n{fence}"


def visible_lines(text: str) -> str:
    return "\n".join(map(visible, text.rstrip("\n").split("\n")))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown table of cells that are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def verdict_table(verdicts: Iterable[Verdict]) -> str:
    return table(("", "check", "what was found"),
                 [(f"{_SIGN[one.outcome]} {one.outcome}", markdown_text(one.check), markdown_text(one.reason)) for one in verdicts])


def append_summary(path: str, text: str) -> None:
    """Append to a summary file: GitHub collects the summaries of a job's commands in one file."""
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")
    except OSError as error:
        raise UsageError(f"--summary {path}: cannot be written: {error.strerror}") from None
