"""Recipe command: a training recipe run as --quiet, --json and --track ask, its outcome printed last."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.outcome import RunOutcome
from assay.verbs.terminal import headline_of, keep_silent, line_printer, print_headline


def run_recipe(recipe: Callable[[Any, Callable[[str], None]], RunOutcome], flags: Any) -> int:
    from assay.interop.live_tracking import tracking

    with tracking(Path(flags.out), flags.track, checkpoints=flags.track_checkpoints):
        outcome = recipe(flags, keep_silent if flags.quiet else line_printer(json=flags.json))
    if flags.json and not outcome.followed:
        print(json.dumps(outcome_document(outcome), indent=1, default=str), flush=True)
    elif outcome.verdicts:
        print(outcome)
        print_headline(outcome.folder)
    return outcome.exit_code


def outcome_document(outcome: RunOutcome) -> dict[str, Any]:
    return {"outcome": str(outcome.standing), "exit_code": outcome.exit_code, "folder": str(outcome.folder),
            "model": None if outcome.model is None else str(outcome.model), "interrupted": outcome.interrupted,
            "headline": headline_of(outcome.folder),
            "results": {name: str(value) for name, value in outcome.results.items()},
            "verdicts": [verdict.to_json() for verdict in outcome.verdicts]}
