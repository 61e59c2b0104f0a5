"""Second opinion on a comparison: the same scores by scipy's tests, and what every p-value, interval, claim and sentence must satisfy.

Ours are exact, or corrected for small numbers, so the two differ; they do not differ by what a mistake makes.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from assay.comparison.pairwise import Comparison
from assay.comparison.read_results import Arm
from assay.statistics.estimate import mean, mean_rate
from assay.verdict import Verdict, proven, refuted

ENOUGH = 10  # problems: below it a t-test is no yardstick
TIMES_APART = 4.0  # times: half-widths of intervals; and, of p-values, their logarithms
FAINT, CLEAR = 0.3, 1e-5  # p-values between which two tests of the same scores may differ

KNOWN_DIRECTIONS = {"pass@": False, "accuracy": False, "loss": True, "perplexity": True}  # word of a metric → lower is better
ASKED_ALIKE = {"dtype", "k"}  # of one model: these alone may differ


def check_comparisons(arms: Sequence[Arm], found: Sequence[Comparison], level: float) -> Verdict:
    """Whether what is said of each pair is what a plain reading of its scores would say."""
    by_name = {(arm.name, arm.group): arm for arm in arms}
    wrong = [f"{one.after} against {one.before}: {why}" for one in found
             for why in [*_impossible(one, level), *_unlike_arms(one, by_name, level), *_misspelled(one, one.to_json()),
                         *_unlike_scipy(one, by_name, len(found))]]
    due = [(others[0].name, arm.name, group) for group, others in _groups(arms).items() for arm in others[1:]]
    if [(one.before, one.after, one.group) for one in found] != due:
        wrong.append(f"{len(found)} comparisons are made, and every arm against the first of its group is {len(due)}")
    if wrong:
        return refuted("second opinion", f"{len(wrong)} things that are said do not hold: {'; '.join(wrong[:3])}", wrong=wrong)
    return proven("second opinion", f"{len(found)} comparisons are what a t-test of the same scores says, as far as one can")


def check_evaluations(arms: Sequence[Arm]) -> Verdict:
    """Check that no evaluation that is compared was refuted itself, for a leak for one: its scores say nothing of a model."""
    wrong = [f"{arm.name}: {why}" for arm in arms for run in arm.runs for why in run.against]
    if wrong:
        return refuted("evaluations", f"nothing follows from scores that were refuted: {'; '.join(wrong)}", wrong=wrong)
    return proven("evaluations", f"no verdict went against the evaluations of {len(arms)} arms")


def _impossible(one: Comparison, level: float) -> list[str]:
    outside = not one.effect.contains(0)
    return [sentence for sentence, so in (
        (f"p = {one.p}: no test gives that", not 0 < one.p <= 1),
        (f"{one.claim} at p = {one.p:.3g}, level {level:g}", one.claim != "not shown" and one.p > level),
        (f"the interval {one.effect} leaves 0 out at p = {one.p:.3g}, level {level:g}", outside and one.p > level),
        (f"the interval {one.effect} holds 0 at p = {one.p:.3g}, level {level:g}", not outside and one.p <= level),
        (f"{one.claim}, and the effect is {one.effect.mean:+.3g}", one.claim != "not shown" and (
            (one.effect.mean > 0) != ((one.claim == "shown better") != one.lower_is_better)))) if so]


def check_summaries(summaries: Sequence[tuple[Arm, str]], *, told: bool) -> Verdict:
    """Check what is said of each arm by itself, where it is one run of several problems; and which way is better, where nobody `told`
    it."""
    wrong = []
    for arm, words in summaries:
        for word, lower in KNOWN_DIRECTIONS.items():
            if not told and word in arm.metric.lower() and arm.lower_is_better != lower:
                wrong.append(f"{arm.name}: {arm.metric} is taken to be better when {'lower' if arm.lower_is_better else 'higher'}")
        scores = np.array([sum(samples) / len(samples) for samples in arm.runs[0].scores.values()])
        if len(arm.runs) == 1 and arm.tally is None and scores.size > 1 and arm.has_problems:
            due = mean_rate(scores) if float(min(scores)) >= 0 and float(max(scores)) <= 1 else mean(scores)
            if words != f"{arm.metric} {due} {arm.unit}":
                wrong.append(f"{arm.name} is {arm.metric} {due} {arm.unit}, said is {words}")
    if wrong:
        return refuted("summaries", f"{len(wrong)} things that are said do not hold: {'; '.join(wrong[:3])}", wrong=wrong)
    return proven("summaries", f"{len(summaries)} arms are what their scores say")


def _groups(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    return {group: [arm for arm in arms if arm.group == group] for group in dict.fromkeys(arm.group for arm in arms)}


def _unlike_arms(one: Comparison, arms: dict[tuple[str, str], Arm], level: float) -> list[str]:
    """Whether both sides are the same weights, whether a claim is made where the p-value allows it, and the p-value that is struck out."""
    before, after = (arms.get((name, one.group)) for name in (one.before, one.after))
    if before is None or after is None:
        return ["one of the two is no arm"]
    shared = any(run.weights and run.weights == other.weights for run in before.runs for other in after.runs)
    old, new = (arm.data.get("how", {}) for arm in (before, after))
    unlike = {key for key in old if key in new and old[key] != new[key]}
    same = shared and not (unlike and unlike <= ASKED_ALIKE)
    silent = one.p <= level and not same and one.claim == "not shown" and one.effect.mean != 0
    completions = [[score for run in arm.runs for samples in run.scores.values() for score in samples] for arm in (before, after)]
    struck = _per_completion(*completions)
    off = one.per_completion_p is not None and struck is not None and abs(one.per_completion_p - struck) > 1e-6
    return [sentence for sentence, so in (
        (f"both sides are the same weights: {same}, said is {one.same_weights}", same != one.same_weights),
        (f"p = {one.p:.3g} at level {level:g}, and nothing is claimed", silent),
        (f"the p-value of single completions is {struck}, said is {one.per_completion_p}",
         off or (struck is None) != (one.per_completion_p is None))) if so]


def _per_completion(old: Sequence[float], new: Sequence[float]) -> float | None:
    if min(len(old), len(new)) < 2 or not np.isfinite([*old, *new]).all():
        return None
    from scipy import stats  # half a second to import: not paid by whoever lists the faults

    if all(score in (0, 1) for score in (*old, *new)):
        right = [sum(score == 1 for score in scores) for scores in (new, old)]
        return float(stats.fisher_exact([[right[0], len(new) - right[0]], [right[1], len(old) - right[1]]]).pvalue)
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of scores that hardly differ: then the p-value hardly matters
        found = float(stats.ttest_ind(new, old, equal_var=False).pvalue)
    return found if np.isfinite(found) else None if np.ptp(old) or np.ptp(new) else float(np.mean(old) == np.mean(new))


def _misspelled(one: Comparison, facts: Mapping[str, Any]) -> list[str]:
    """Differences between what is printed and what was found."""
    where = f" on {one.group}" if one.group else ""
    finite = [value if np.isfinite(value) else None for value in (one.effect.low, one.effect.high)]
    struck = None if one.per_completion_p is None else {"p": one.per_completion_p, "valid": False}
    told = facts.get("per_completion")
    return [sentence for sentence, so in (
        (f"its sentence is {one.sentence!r}", not one.sentence.startswith(f"{one.after} against {one.before}{where}: {one.metric} ")),
        ("its sentence does not say whether the weights are the same", ("the same weights" in one.sentence) != one.same_weights),
        (f"its interval is written as {facts['effect']}", [facts["effect"][end] for end in ("low", "high")] != finite),
        (f"its group is written as {facts['group']!r}", facts["group"] != (one.group or None)),
        ("the p-value of single completions is not written as it was found",
         (told and {key: told[key] for key in ("p", "valid")}) != struck)) if so]


def _unlike_scipy(one: Comparison, arms: dict[tuple[str, str], Arm], together: int) -> list[str]:
    """Differences from scipy's result; only where both arms are one run of the same problems."""
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
    from scipy import stats

    test = stats.ttest_1samp(change, 0.0)
    interval = test.confidence_interval(one.effect.level)
    wide, usual, plain = one.effect.high - one.effect.low, float(interval.high - interval.low), float(test.pvalue)
    apart = (plain > FAINT and one.p < plain / 10) or (one.p > FAINT and plain * together < CLEAR)
    return [sentence for sentence, so in (
        (f"the interval is {wide / usual:.1f} times as wide as a t-test's", not usual / TIMES_APART <= wide <= usual * TIMES_APART),
        (f"p = {one.p:.2g}, by a t-test {plain:.2g}", apart)) if so]
