"""What a run reports of itself: every estimate of its last result, with its interval."""

from collections.abc import Mapping
from typing import Any

from assay.report.html import Html, lead, section, table, tag
from assay.report.record import Record, number
from assay.report.standing import RESULTS


def results_section(record: Record) -> Html | None:
    """Of each kind of result the latest; a bare number that was recorded without an interval says so."""
    latest = {event["kind"]: event for event in record.of_kind(*RESULTS)}
    rows = [[tag("code", kind), name, value] for kind, event in latest.items() for name, value in reported(event)]
    if not rows:
        return None
    return section("results", "Results", lead("As the ledger has them. What each is worth, the verdicts say."),
                   table(["event", "what", "estimate"], rows, class_="wraps"))


def reported(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    if isinstance(event.get("score"), dict):
        found.append((f"score ({event['unit']})" if event.get("unit") else "score", estimate_text(event["score"])))
    estimates = event.get("estimates")
    found += [(str(name), estimate_text(value)) for name, value in estimates.items()] if isinstance(estimates, dict) else []
    bare = {name: value for name in ("before", "after") if (value := number(event.get(name))) is not None}
    metric = event.get("metric", "score")
    return found + [(f"{metric} {name}", f"{value:.4g} (its interval is in the verdicts)") for name, value in bare.items()]


def estimate_text(found: Any) -> str:
    """0.412 [0.386, 0.439] (n=1319), and `unknown` for what is not on record."""
    if not isinstance(found, dict) or number(found.get("mean")) is None:
        return "unknown"
    low, high = number(found.get("low")), number(found.get("high"))
    interval = "[unknown]" if low is None or high is None else f"[{low:.4g}, {high:.4g}]"
    return f"{found['mean']:.4g} {interval} (n={found.get('n', 'unknown')})"
