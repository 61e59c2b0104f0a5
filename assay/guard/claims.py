"""Checks on what is concluded: a claimed gain or loss was shown, a reward that is said to rise does, both sides answered the same."""

from collections.abc import Sequence

from assay.errors import DataError
from assay.measure.arms import Arm, Series
from assay.measure.compare import Claim, compare
from assay.measure.trend import trend
from assay.verdict import Verdict, proven, refuted


def check_claim(claimed: str, arms: Sequence[Arm], claims: Claim, *, level: float = 0.05) -> Verdict:
    """What is said of the arm `claimed` against the first one is what the scores show, with every arm that was tried counted."""
    try:
        found = {one.after: one for one in compare(arms, level=level)}[claimed]
    except DataError as error:
        return refuted("claim", f"{claimed} is said to be {claims}, and nothing can be said: {error}")
    evidence = {"claimed": claims, "found": found.claim, "p": found.p, "needed": found.needed, "arms": len(arms)}
    if claims not in ("not shown", found.claim):
        return refuted("claim", f"said to be {claims}: {found.sentence}", **evidence)
    return proven("claim", f"said to be {claims}: {found.sentence}", **evidence)


def check_rise(series: Series, *, passed: bool, level: float = 0.05) -> Verdict:
    """A run that is declared a success on its reward has a reward that rose, or has not fallen as far as it shows."""
    found = trend(series, level=level)
    went_wrong = found.direction != "not shown" and not found.improves
    if passed and went_wrong:
        return refuted("rise", f"declared passed: {found.sentence}", **found.to_json())
    return proven("rise", f"declared {'passed' if passed else 'not passed'}: {found.sentence}", **found.to_json())
