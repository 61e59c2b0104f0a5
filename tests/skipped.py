"""Skipped tests, told in words at the end of a run: how many did not run, and why; a reason says what to install."""

from collections import Counter
from collections.abc import Iterable


def skip_summary(reasons: Iterable[str]) -> str:
    """One line for all reasons, the commonest first; empty where nothing was skipped."""
    counted = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    if not counted:
        return ""
    told = [f"{count} because {_with_a_way_out(reason)}" for reason, count in counted.most_common()]
    total = counted.total()
    return f"{total} test{'s' * (total > 1)} did not run: {'. '.join(told)}."


def _with_a_way_out(reason: str) -> str:
    return f"{reason} (make test installs it)" if reason.startswith("could not import") else reason
