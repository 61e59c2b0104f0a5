"""Pace of the witness: how much of a run's time replays may take. The first step of a session is always replayed; others as they fit."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from assay.witness.replay import SAID

WITNESS_SHARE = 0.02  # of the time that the session has taken so far: what all replays together may take beside it
FREE_SECONDS = 10.0  # that they may always take: of a small model a replay is a second
REPLAY_SPEED = {"cpu": 2e10, "cuda": 2e13}  # operations a second, as long as no replay of the run has been timed


class WitnessPace:
    """Pace of the witness: says whether one more step may be kept, by what the replays of this process took."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began, self.kept = now, now(), list[Path]()

    def too_dear(self, expected: float) -> str | None:
        """Why a further replay is not paid for; None where it is. `expected` seconds of one, where none has been timed yet."""
        known = [seconds for folder in self.kept if (seconds := replay_seconds(folder)) is not None]
        one = max(known, default=expected)
        total, elapsed = sum(known) + (len(self.kept) - len(known) + 1) * one, self._now() - self._began
        if total <= max(FREE_SECONDS, WITNESS_SHARE * elapsed):
            return None
        return (f"replays would have taken {total:.0f} s of the {elapsed:.0f} s so far, more than {WITNESS_SHARE:.0%} and more than "
                f"{FREE_SECONDS:g} s")


def replay_seconds(record: Path) -> float | None:
    """Seconds that the replay of a record took; None where it has not been replayed."""
    said = record / SAID
    return json.loads(said.read_text())["evidence"].get("seconds") if said.is_file() else None
