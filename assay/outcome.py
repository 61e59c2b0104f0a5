"""Run outcome: where a recipe wrote, what was proven, what it measured, and the exit code of a command that ends with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from assay.verdict import Outcome, Verdict, overall, without_optional

_COLOURS = {Outcome.PROVEN: "#2a7", Outcome.REFUTED: "#c33", Outcome.UNPROVEN: "#b80"}


@dataclass(frozen=True)
class RunOutcome:
    """`model` is what was handed over, `results` are estimates by name. Nothing is handed over by a run that a signal `interrupted`."""

    folder: Path
    verdicts: list[Verdict] = field(default_factory=list)
    interrupted: int | None = None
    followed: bool = False  # of several processes, one that only computed for the first
    model: Path | None = None
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def standing(self) -> Outcome:
        """Overall outcome of all verdicts but those that only an optional part could have given."""
        return overall(without_optional(self.verdicts))

    @property
    def exit_code(self) -> int:
        """0 done and proven, 3 a verdict went against it, 128 + signal interrupted, after a good save."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        return 0 if self.followed or self.standing is Outcome.PROVEN else 3

    def __str__(self) -> str:
        return "\n".join(f"  {verdict}" for verdict in self.verdicts)

    def _repr_html_(self) -> str:
        """HTML for notebooks: the outcome, the figures, and every verdict."""
        state = f"interrupted by signal {self.interrupted}" if self.interrupted is not None else str(self.standing)
        head = f"<b>{escape(state)}</b> <code>{escape(str(self.model or self.folder))}</code>"
        figures = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in self.results.items())
        verdicts = "".join(f'<tr><td style="color:{_COLOURS[one.outcome]}">{one.outcome}</td><td>{escape(one.check)}</td>'
                           f'<td style="text-align:left">{escape(one.reason)}</td></tr>' for one in self.verdicts)
        return f"<div>{head}<table>{figures}</table><details open><summary>verdicts</summary><table>{verdicts}</table></details></div>"
