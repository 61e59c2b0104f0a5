"""Second opinion on a comparison: the same scores by scipy's t-test, and what every p-value and interval must satisfy.

Ours are exact, or corrected for small numbers, so the two differ; they do not differ by what a mistake makes.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from assay.comparison.pairwise import Comparison
from assay.comparison.read_results import Arm
from assay.verdict import Verdict, proven, refuted

ENOUGH = 10  # problems: below it a t-test is no yardstick
TIMES_APART = 4.0  # times: half-widths of intervals; and, of p-values, their logarithms
FAINT, CLEAR = 0.3, 1e-5  # p-values between which two tests of the same scores may differ


def check_comparisons(arms: Sequence[Arm], found: Sequence[Comparison], level: float) -> Verdict:
    """Whether what is said of each pair is what a plain reading of its scores would say."""
    by_name = {(arm.name, arm.group): arm for arm in arms}
    wrong = [f"{one.after} against {one.before}: {why}" for one in found
             for why in [*_impossible(one, level), *_unlike_scipy(one, by_name, len(found))]]
    if wrong:
        return refuted("second opinion", f"{len(wrong)} things that are said do not hold: {'; '.join(wrong[:3])}", wrong=wrong)
    return proven("second opinion", f"{len(found)} comparisons are what a t-test of the same scores says, as far as one can")


def _impossible(one: Comparison, level: float) -> list[str]:
    outside = not one.effect.contains(0)
    return [sentence for sentence, so in (
        (f"p = {one.p}: no test gives that", not 0 < one.p <= 1),
        (f"{one.claim} at p = {one.p:.3g}, level {level:g}", one.claim != "not shown" and one.p > level),
        (f"the interval {one.effect} leaves 0 out at p = {one.p:.3g}, level {level:g}", outside and one.p > level),
        (f"{one.claim}, and the effect is {one.effect.mean:+.3g}", one.claim != "not shown" and (
            (one.effect.mean > 0) != ((one.claim == "shown better") != one.lower_is_better)))) if so]


def _unlike_scipy(one: Comparison, arms: dict[tuple[str, str], Arm], together: int) -> list[str]:
    """Only where both arms are one run of the same problems."""
    pair = [arms.get((name, one.group)) for name in (one.before, one.after)]
    before, after = pair
    if before is None or after is None or len(before.runs) != 1 or len(after.runs) != 1 or before.tally or not before.has_problems:
        return []
    old, new = (np.array([np.mean(arm.runs[0].scores[problem]) for problem in before.problems]) for arm in (before, after))
    change = new - old
    if abs(change.mean() - one.effect.mean) > 1e-9 * max(1.0, abs(change.mean())):
        return [f"the scores differ by {change.mean():+.6g}, said is {one.effect.mean:+.6g}"]
    if change.size < ENOUGH or not change.std() > 0 or np.count_nonzero(change) < ENOUGH:
        return []
    test = stats.ttest_1samp(change, 0.0)
    interval = test.confidence_interval(one.effect.level)
    wide, usual, plain = one.effect.high - one.effect.low, float(interval.high - interval.low), float(test.pvalue)
    apart = (plain > FAINT and one.p < plain / 10) or (one.p > FAINT and plain * together < CLEAR)
    return [sentence for sentence, so in (
        (f"the interval is {wide / usual:.1f} times as wide as a t-test's", not usual / TIMES_APART <= wide <= usual * TIMES_APART),
        (f"p = {one.p:.2g}, by a t-test {plain:.2g}", apart)) if so]
