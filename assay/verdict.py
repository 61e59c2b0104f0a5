"""Verdict of a check: PROVEN, REFUTED or UNPROVEN, with a sentence and its evidence. UNPROVEN is never success."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    PROVEN = "PROVEN"
    REFUTED = "REFUTED"
    UNPROVEN = "UNPROVEN"


@dataclass(frozen=True)
class Verdict:
    check: str
    outcome: Outcome
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.outcome:8}  {self.check}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return {"check": self.check, "outcome": str(self.outcome), "reason": self.reason, "evidence": self.evidence}


def proven(check: str, reason: str, **evidence: Any) -> Verdict:
    return Verdict(check, Outcome.PROVEN, reason, evidence)


def refuted(check: str, reason: str, **evidence: Any) -> Verdict:
    return Verdict(check, Outcome.REFUTED, reason, evidence)


def unproven(check: str, reason: str, **evidence: Any) -> Verdict:
    """UNPROVEN verdict of a check that did not run: `reason` says why, and what would let it run."""
    return Verdict(check, Outcome.UNPROVEN, reason, evidence)


def overall(verdicts: Iterable[Verdict]) -> Outcome:
    """REFUTED if any check refutes; PROVEN only if there are checks and every one of them proves."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if Outcome.REFUTED in outcomes:
        return Outcome.REFUTED
    return Outcome.PROVEN if outcomes == {Outcome.PROVEN} else Outcome.UNPROVEN


def without_optional(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Verdicts but for those that only an optional library could have checked."""
    return [v for v in verdicts if not (v.outcome is Outcome.UNPROVEN and v.evidence.get("optional"))]
