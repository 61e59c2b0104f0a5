"""Pairwise comparison of results with the first: an effect with its interval, and a verdict in words.

    for found in compare([before, after, other]):       # the first is what the others are held against
        print(found.sentence)

Paired per problem; with several runs the run is the unit. Nothing is claimed that an exact test at the level does not
support, over all comparisons together (Holm).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from assay.comparison.read_results import Arm, refuse_copies
from assay.errors import DataError, UsageError
from assay.statistics.effects import POWER, Effect, counts_effect, fewest_runs, holm, paired_effect, runs_effect, welch_p
from assay.statistics.estimate import Array, Estimate, mean, mean_rate, proportion
from assay.statistics.seed_stability import SeedsVerdict, stability

SUGGESTIVE = 0.2  # a p-value above the level and up to here is worth a second look, and no more
FAIR_TO_COMPARE = {"dtype", "k"}  # of one model: its number format, and how many samples were drawn
Claim = Literal["shown better", "shown worse", "not shown"]


@dataclass(frozen=True)
class Comparison:
    """`effect` is `after` − `before`, at a level that holds for all comparisons made together."""

    before: str
    after: str
    metric: str
    group: str
    lower_is_better: bool
    effect: Estimate
    p: float  # after Holm
    unit: str
    claim: Claim
    needed: int | None
    notes: tuple[str, ...]
    per_completion_p: float | None
    same_weights: bool = False  # on both sides: what differs is the asking
    more_than: int | None = None  # units per arm that did not show it, though by the usual formula they would

    @property
    def sentence(self) -> str:
        where = f" on {self.group}" if self.group else ""
        found = f"{self.after} against {self.before}{where}: {self.metric} {signed_estimate(self.effect)} {self.unit}, p = {self.p:.2g}"
        return "; ".join([f"{found}: {self.verdict}", *self.notes])

    @property
    def verdict(self) -> str:
        if self.same_weights:
            return "not shown: both sides are the same weights, asked twice; a difference is the asking's and no model's"
        if self.claim != "not shown":
            return self.claim
        suggestive = "suggestive at most, " if self.p <= SUGGESTIVE else ""
        return f"not shown: {suggestive}the interval includes 0; {self.what_it_takes}"

    @property
    def what_it_takes(self) -> str:
        if self.more_than is not None:
            return f"more than these {self.more_than:,} {self.unit} per arm would be needed for this effect"
        if self.needed is None:
            return "there is no effect here to plan for" if self.effect.mean == 0 else "how many would be needed cannot be told from these"
        return f"about {self.needed:,} {self.unit} per arm would be needed for this effect"

    def to_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "before": self.before, "after": self.after, "metric": self.metric, "group": self.group or None,
            "effect": {"mean": self.effect.mean, "low": _or_none(self.effect.low), "high": _or_none(self.effect.high),
                       "level": self.effect.level}, "n": self.effect.n, "unit": self.unit, "p": self.p, "claim": self.claim,
            "needed": self.needed, "more_than": self.more_than, "power": POWER, "sentence": self.sentence, "notes": list(self.notes),
            "same_weights": self.same_weights}
        if self.per_completion_p is not None:
            facts["per_completion"] = {"p": self.per_completion_p, "valid": False, "why": NOT_INDEPENDENT}
        return facts


@dataclass(frozen=True)
class ArmEffect:
    effect: Effect
    metric: str
    lower_is_better: bool
    notes: tuple[str, ...] = ()


NOT_INDEPENDENT = "completions of one run, and samples of one problem, are not independent of each other"


def compare(arms: Sequence[Arm], *, level: float = 0.05) -> list[Comparison]:
    """Compare every arm with the first one of its group. Arms that were not asked the same are refused."""
    if not 0 < level < 1:
        raise UsageError(f"level {level}: expected a chance of error between 0 and 1, such as 0.05")
    pairs = [(before, after) for before, *others in _by_group(arms) for after in others]
    if not pairs:
        names = ", ".join(dict.fromkeys(arm.name for arm in arms))
        raise UsageError(f"nothing to compare: the only arm is {names}; give two results, or a file with a column `arm`")
    judged = [_judged(before, after) for before, after in pairs]
    p_values = [one.effect.p for one in judged]
    adjusted, ranks = holm(p_values), np.argsort(np.argsort(p_values, kind="stable"), kind="stable")
    shares = [level / (len(pairs) - int(rank)) for rank in ranks]  # of Holm's steps
    return [_concluded(*pairs[i], judged[i], adjusted[i], shares[i], level) for i in range(len(pairs))]


def arm_summary(arm: Arm) -> str:
    """Summary of one arm by itself: a number with its interval, or why a mean is no summary."""
    values = np.array([run.score for run in arm.runs])
    modes = _modes(arm, values)
    if modes is not None and values.size > 1:
        return modes.sentence
    if arm.tally:
        return f"{arm.metric} {proportion(*arm.tally)}" if len(arm.runs) == 1 else f"{arm.metric} {_mean(values)} runs"
    if len(arm.runs) > 1:
        return f"{arm.metric} {_mean(values)} runs"
    problems = np.array([np.mean(samples) for samples in arm.runs[0].scores.values()])
    return f"{arm.metric} {_mean(problems)} {arm.unit}" if problems.size > 1 else f"{arm.metric} {values[0]:.6g}: one number, no interval"


def _mean(values: Array) -> Estimate:
    return mean_rate(values) if values.min() >= 0 and values.max() <= 1 else mean(values)


def signed_estimate(effect: Estimate) -> str:
    """A change shows its sign."""
    return ("+" if effect.mean > 0 else "") + str(effect)


def _concluded(before: Arm, after: Arm, judged: ArmEffect, adjusted: float, share: float, level: float) -> Comparison:
    effect, interval = judged.effect, judged.effect.interval(1 - share)
    if adjusted > level and not interval.contains(0):  # an earlier one of Holm's steps failed, so this one claims nothing
        interval = Estimate(interval.mean, min(interval.low, 0.0), max(interval.high, 0.0), interval.n, interval.level)
    claim: Claim = "not shown"
    same = _same_weights_asked_twice(before, after)
    if adjusted <= level and not same:
        claim = "shown worse" if (effect.mean > 0) == judged.lower_is_better else "shown better"
    needed = effect.needed(1 - share)
    more_than = effect.per_arm if claim == "not shown" and needed is not None and needed <= effect.per_arm else None
    return Comparison(before.name, after.name, judged.metric, before.group, judged.lower_is_better, interval, adjusted, effect.unit, claim,
                      needed if more_than is None else None, (*before.notes, *after.notes, *judged.notes),
                      per_completion_p(before, after), same, more_than)


def _judged(before: Arm, after: Arm) -> ArmEffect:
    """The unit is the run where either arm has several, else the problem."""
    refuse_unlike(before, after)
    judged = _of_problems(before, after) if len(before.runs) == len(after.runs) == 1 else _of_runs(before, after)
    return replace(judged, notes=(*judged.notes, *_asked_otherwise(before, after)))


def _of_runs(before: Arm, after: Arm) -> ArmEffect:
    old, new = (np.array([run.score for run in arm.runs]) for arm in (before, after))
    seen = [_modes(arm, values) for arm, values in ((before, old), (after, new))]
    if any(one is not None and one.collapsed for one in seen):
        return _of_collapses(before, after, *seen)
    if _binary(old) and _binary(new):
        return ArmEffect(counts_effect(int(new.sum()), new.size, int(old.sum()), old.size), before.metric, before.lower_is_better)
    fewest = fewest_runs()
    few = f"{new.size} against {old.size} runs cannot show much: 5 % is out of reach below about {fewest} per arm"
    return ArmEffect(runs_effect(new, old), before.metric, before.lower_is_better, (few,) if min(old.size, new.size) < fewest else ())


def _of_problems(before: Arm, after: Arm) -> ArmEffect:
    one_run = "one run per arm: this is about these two artifacts, not about what made them"
    if before.tally and after.tally:
        effect = counts_effect(*after.tally, *before.tally, unit="problems")
        return ArmEffect(effect, before.metric, before.lower_is_better,
                      ("counts alone cannot be paired: scores per problem would show smaller effects", one_run))
    if not before.has_problems:
        if len(before.runs[0].scores[""]) == len(after.runs[0].scores[""]) == 1:
            raise DataError(f"{after.name} and {before.name} are one number each, and nothing says how far such numbers scatter; give "
                            "scores per problem (a column `id`), or several runs of each (a column `run`)")
        raise DataError(f"the scores of {after.name} and {before.name} have no ids, so they cannot be paired; add a column `id`, the "
                        "problem's name")
    old, new = (np.array([np.mean(arm.runs[0].scores[problem]) for problem in before.problems]) for arm in (before, after))
    return ArmEffect(replace(paired_effect(new, old), unit=before.unit), before.metric, before.lower_is_better, (one_run,))


def _of_collapses(before: Arm, after: Arm, old: SeedsVerdict | None, new: SeedsVerdict | None) -> ArmEffect:
    """Effect on how often a run collapses: where seeds part into two modes a mean is not a summary."""
    bad = [0 if one is None else len(one.collapsed) for one in (old, new)]
    effect = counts_effect(bad[1], len(after.runs), bad[0], len(before.runs))
    notes = [f"{arm.name}: {one.sentence}" for arm, one in ((before, old), (after, new)) if one is not None and one.collapsed]
    return ArmEffect(effect, f"share of runs whose {before.metric} collapsed", True,
                  (f"{bad[1]} of {len(after.runs)} against {bad[0]} of {len(before.runs)} runs", *notes))


def _modes(arm: Arm, values: Array) -> SeedsVerdict | None:
    """Whether an arm's runs of a loss part into two modes; other metrics have no known noise to tell."""
    if arm.has_problems or not arm.lower_is_better or arm.tally:
        return None
    names = [int(run.name) if run.name.lstrip("-").isdigit() else i for i, run in enumerate(arm.runs)]
    return stability(dict(zip(names, map(float, values), strict=True)), metric=arm.metric)


def refuse_unlike(before: Arm, after: Arm) -> None:
    """Refuse to compare two arms unless metric, data and problems are the same."""
    both = f"{after.name} and {before.name}"
    if before.metric != after.metric:
        raise DataError(f"{both}: the one is {after.metric!r}, the other {before.metric!r}; compare one metric, named with --metric")
    for key in sorted(before.data.keys() & after.data.keys() - {"how"}):
        if before.data[key] != after.data[key]:
            raise DataError(f"{both} were not asked the same: {key} is {after.data[key]!r} and {before.data[key]!r}; evaluate both on one "
                            f"version of the {'grader' if key == 'grader' else 'data'}")
    if bool(before.tally) != bool(after.tally):
        raise DataError(f"{both}: the one is a count, the other has scores; give both in one form")
    problems = set(before.problems)
    for run in (*before.runs, *after.runs):
        if strangers := problems ^ set(run.scores):
            some = ", ".join(sorted(map(repr, strangers))[:3])
            raise DataError(f"{both}: {len(strangers)} problem(s) were scored in one of them only ({some}); score the same in both")
    if len(before.runs) + len(after.runs) > 2 and before.data.get("how") == after.data.get("how"):
        refuse_copies((*before.runs, *after.runs), both)


def _asked_otherwise(before: Arm, after: Arm) -> list[str]:
    """Ways in which the same questions were asked otherwise: allowed, and reported."""
    old, new = before.data.get("how", {}), after.data.get("how", {})
    return [f"asked with {key} {new[key]} against {old[key]}" for key in sorted(old.keys() & new.keys()) if old[key] != new[key]]


def _same_weights_asked_twice(before: Arm, after: Arm) -> bool:
    """Whether the same weights stand on both sides, asked with another sampling, template, stop or seed. Another number format alone is
    fair."""
    shared = {run.weights for run in before.runs} & {run.weights for run in after.runs} - {""}
    old, new = before.data.get("how", {}), after.data.get("how", {})
    otherwise = {key for key in old.keys() & new.keys() if old[key] != new[key]}
    return bool(shared) and (not otherwise or not otherwise <= FAIR_TO_COMPARE)


def per_completion_p(before: Arm, after: Arm) -> float | None:
    """p-value of a test that takes every completion for independent: shown only where asked, and struck through."""
    old, new = (np.array([score for run in arm.runs for samples in run.scores.values() for score in samples]) for arm in (before, after))
    if min(old.size, new.size) < 2 or not (np.isfinite(old).all() and np.isfinite(new).all()):
        return None
    if not (_binary(old) and _binary(new)):
        return welch_p(new, old)
    from scipy.stats import fisher_exact

    return float(fisher_exact([[new.sum(), new.size - new.sum()], [old.sum(), old.size - old.sum()]])[1])


def _by_group(arms: Sequence[Arm]) -> list[list[Arm]]:
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        mine = groups.setdefault(arm.group, [])
        if any(other.name == arm.name for other in mine):
            raise UsageError(f"two arms are called {arm.name!r}; give each a name of its own (name=path)")
        mine.append(arm)
    return list(groups.values())


def _binary(values: Array) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
