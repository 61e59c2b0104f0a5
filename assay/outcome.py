"""Outcome of a recipe: where it wrote, what was proven, what it measured, and the exit code of a command that ends with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.verdict import Outcome as Standing
from assay.verdict import Verdict, overall


@dataclass(frozen=True)
class Outcome:
    """`model` is what was handed over, `results` are estimates by name. Nothing is handed over by a run that a signal `interrupted`."""

    folder: Path
    verdicts: list[Verdict] = field(default_factory=list)
    interrupted: int | None = None
    model: Path | None = None
    results: Mapping[str, Any] = field(default_factory=dict)

    @property
    def standing(self) -> Standing:
        """Of all verdicts but those that only an optional part could have given."""
        from assay.guard.proof import without_optional

        return overall(without_optional(self.verdicts))

    @property
    def exit_code(self) -> int:
        """0 done and proven, 3 a verdict went against it, 128 + signal interrupted, after a good save."""
        if self.interrupted is not None:
            return 128 + self.interrupted
        return 0 if self.standing is Standing.PROVEN else 3

    def __str__(self) -> str:
        return "\n".join(f"  {verdict}" for verdict in self.verdicts)
