"""Effects between two results: interval and p-value that agree, Holm's correction, and the sample size still needed.

    effect = paired_effect(after, before)         the same problems on both sides
    effect = runs_effect(after, before)           one number a run: the run is the unit
    effect = counts_effect(2, 4, 0, 6)            k of n runs against k of n runs
    effect.p, effect.interval(0.95)               the interval leaves out 0 exactly where p is at most 0.05

An effect is after − before. Each p-value is the larger of two: of an exact test (sign flips, permutations of runs,
Boschloo's), which holds its level whatever the scores look like, and of the interval's own t-statistic.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.errors import DataError, UsageError
from assay.seeds import derive
from assay.statistics.estimate import Array, Estimate, finite_vector, proportion, standard_errors

POWER = 0.8  # how surely the numbers of problems or runs that we name would show the effect
ENUMERATED = 1 << 16  # arrangements up to here are all looked at; more are drawn at random
DRAWS = 9_999
WORTH_A_TEST = 0.25  # a t-statistic less clear than this shows nothing at any level in use: its own p-value will do
MOST_RUNS = 60  # per arm, in the search for how many would settle it


@dataclass(frozen=True)
class Effect:
    """after − before over `n` units. `bounds(level)` is an interval of its own right, made to agree with `p`."""

    mean: float
    n: int
    unit: str  # problems, runs
    p: float
    bounds: Callable[[float], tuple[float, float]]
    settled_by: Callable[[float], int | None]
    per_arm: int  # units of the smaller arm; of pairs, all

    def needed(self, level: float = 0.95) -> int | None:
        """Units per arm that would show an effect of this size at `level`; None where there is none, or no telling."""
        return self.settled_by(level)

    def interval(self, level: float = 0.95) -> Estimate:
        low, high = self.bounds(level)
        if self.p > 1 - level:
            low, high = min(low, 0.0), max(high, 0.0)
        elif self.mean > 0:
            low = max(low, math.nextafter(0.0, 1.0))
        else:
            high = min(high, -math.nextafter(0.0, 1.0))
        return Estimate(self.mean, min(low, self.mean), max(high, self.mean), self.n, level)


def paired_effect(after: ArrayLike, before: ArrayLike) -> Effect:
    """The mean change over the same problems. A problem's score may be the mean of its samples.

    Scores between 0 and 1 get up to three made-up pairs, which change nothing on average: too few problems have not
    shown what is rare.
    """
    new, old = finite_vector("score after", after), finite_vector("score before", before)
    if new.size != old.size or new.size < 2:
        raise DataError(f"{new.size} scores after and {old.size} before: pairs need the same problems, and 2 or more of them")
    change = new - old
    limit = _limit(new, old)
    centre, error = _with_unseen(change) if limit == 1 else (float(change.mean()), float(change.std(ddof=1)) / math.sqrt(change.size))
    mean, p = float(change.mean()), _t_p(centre, error, change.size - 1)
    if p < WORTH_A_TEST:
        p = max(p, sign_flip_p(change))
    return Effect(mean, change.size, "problems", p, _t_bounds(centre, error, change.size - 1, limit),
                  lambda level: needed_pairs(mean, error * math.sqrt(change.size), level=level), change.size)


def runs_effect(after: ArrayLike, before: ArrayLike) -> Effect:
    """The difference of the arms' means, one number a run: Welch's interval, and an exact permutation of the runs.

    Below 4 runs Welch's degrees of freedom are guessed too high (coverage 0.90): there the smaller arm's own count.
    """
    new, old = finite_vector("run after", after), finite_vector("run before", before)
    mean, n = float(new.mean() - old.mean()), new.size + old.size
    if min(new.size, old.size) < 2:  # one run does not say how far runs lie apart
        return Effect(mean, n, "runs", 1.0, lambda level: (-math.inf, math.inf), lambda level: None, min(new.size, old.size))
    error, welch = _welch(new, old)
    degrees = welch if min(new.size, old.size) >= 4 else min(new.size, old.size) - 1
    spread = math.sqrt((new.var(ddof=1) + old.var(ddof=1)) / 2)
    p = _t_p(mean, error, degrees)
    if p < WORTH_A_TEST:
        p = max(p, permutation_p(new, old))
    return Effect(mean, n, "runs", p, _t_bounds(mean, error, degrees, _limit(new, old)),
                  lambda level: needed_runs(mean, spread, level=level), min(new.size, old.size))


def counts_effect(after: int, of_after: int, before: int, of_before: int, *, unit: str = "runs") -> Effect:
    """The difference of two rates over independent units: Boschloo's exact test.

    The interval joins exact intervals of the two rates at √level each, so that it holds at any rates and any numbers of
    runs; narrower ones in use (Agresti and Caffo's, Newcombe's) fall below 0.88 with 4 against 6.
    """
    def bounds(level: float) -> tuple[float, float]:
        new, old = (proportion(k, n, level=math.sqrt(level)) for k, n in ((after, of_after), (before, of_before)))
        return new.low - old.high, new.high - old.low

    bounds(0.95)  # refuses what is no count
    p, new, old = boschloo_p(after, of_after, before, of_before), after / of_after, before / of_before
    return Effect(new - old, of_after + of_before, unit, p, bounds, lambda level: needed_counts(new, old, level=level),
                  min(of_after, of_before))

# ---------------------------------------------------------------- tests that hold their level


def sign_flip_p(changes: ArrayLike) -> float:
    """Two-sided: were A and B the same, each change would be as likely with the other sign. McNemar's test, where all are ±1."""
    change = finite_vector("change", changes)
    sizes, total = np.abs(change[change != 0]), float(change.sum())
    if not sizes.size:
        return 1.0
    if bool((sizes == sizes[0]).all()):  # a binomial count
        from scipy.special import bdtr

        fewer = round((sizes.size - abs(total) / sizes[0]) / 2)
        return min(1.0, 2 * float(bdtr(fewer, sizes.size, 0.5)))
    reach = abs(total) * (1 - 1e-12)
    if 2**sizes.size <= ENUMERATED:
        return float((np.abs(sizes.sum() - 2 * (_every_flip(sizes.size) @ sizes)) >= reach).mean())
    rng, hits = np.random.default_rng(derive(0, "sign flips")), 0
    for chunk in _chunks(DRAWS, sizes.size):
        flipped = np.unpackbits(rng.integers(0, 256, (chunk, -(-sizes.size // 8)), dtype=np.uint8), axis=1, count=sizes.size)
        hits += int((np.abs(sizes.sum() - 2 * (flipped @ sizes)) >= reach).sum())
    return (1 + hits) / (1 + DRAWS)


def permutation_p(after: ArrayLike, before: ArrayLike) -> float:
    """Two-sided: the share of all ways to deal the runs to the arms that part their means at least this far."""
    new, old = finite_vector("run after", after), finite_vector("run before", before)
    pool, k = np.concatenate([new, old]), new.size
    reach = abs(new.mean() - old.mean()) * (1 - 1e-9)
    every = math.comb(pool.size, k) <= ENUMERATED
    dealt = _every_deal(pool.size, k) if every else _random_deals(pool.size, k)
    sums = pool[dealt].sum(axis=1)
    hits = float((np.abs(sums / k - (pool.sum() - sums) / old.size) >= reach).sum())
    return hits / len(dealt) if every else (1 + hits) / (1 + len(dealt))


def boschloo_p(after: int, of_after: int, before: int, of_before: int) -> float:
    """Two-sided p-value of Boschloo's exact unconditional test: twice the smaller one-sided one."""
    if of_after * of_before > 10_000:  # too many tables to look at each: Fisher's test, which is valid and a little shy
        from scipy.stats import fisher_exact

        return float(fisher_exact([[after, of_after - after], [before, of_before - before]])[1])
    return float(_boschloo_table(of_after, of_before)[after, before])


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: claims made where they are at most the level are all true with that certainty together."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted

# ---------------------------------------------------------------- how much would be needed


def needed_pairs(effect: float, spread: float, *, level: float = 0.95, power: float = POWER) -> int | None:
    """Problems on which a mean change of this size would be shown, where single changes have this standard deviation."""
    return max(2, math.ceil((_reach(level, power) * spread / effect) ** 2)) if effect else None


def visible_change(scores: ArrayLike, *, level: float = 0.95, power: float = POWER) -> float:
    """The mean change that a second look at as many problems would show 8 times in 10, if single scores changed at will.

    Scores between 0 and 1 are given a right and a wrong one more: of a few that are all the same, the spread is not known to be 0.
    """
    found = finite_vector("score", scores)
    known = np.append(found, [0.0, 1.0]) if found.min() >= 0 and found.max() <= 1 else found
    return _reach(level, power) * math.sqrt(2) * float(known.std()) / math.sqrt(found.size)


def needed_runs(effect: float, spread: float, *, level: float = 0.95, power: float = POWER) -> int | None:
    """Runs per arm; never fewer than a permutation test needs to reach the level at all."""
    if not effect:
        return None
    return max(fewest_runs(level), math.ceil(2 * (_reach(level, power) * spread / effect) ** 2) + 1)


def needed_counts(after: float, before: float, *, level: float = 0.95, power: float = POWER) -> int | None:
    """Units per arm for which Boschloo's test shows rates like these: searched for where few will do, else by the usual formula."""
    if after == before:
        return None
    variance = after * (1 - after) + before * (1 - before)
    usual = math.ceil(variance * (_reach(level, power) / (after - before)) ** 2)
    if usual > MOST_RUNS:
        return usual
    return next((n for n in range(2, 2 * MOST_RUNS) if counts_power(n, after, before, level) >= power), usual)


def counts_power(n: int, after: float, before: float, level: float = 0.95) -> float:
    """How often Boschloo's test on n against n runs rejects where the rates are these."""
    chances = np.outer(_binomial(n, np.array([after]))[0], _binomial(n, np.array([before]))[0])
    return float(chances[_boschloo_table(n, n) <= 1 - level].sum())


def fewest_runs(level: float = 0.95) -> int:
    """Runs per arm from which on the clearest permutation of all reaches the level: 4 at 95 %."""
    return next(n for n in itertools.count(2) if 2 / math.comb(2 * n, n) <= 1 - level)

# ---------------------------------------------------------------- helpers


def _with_unseen(change: Array) -> tuple[float, float]:
    """The centre and standard error of a mean change between scores of 0 to 1, with what was too rare to be seen.

    Three made-up changes, half up and half down and as large as those seen, count as far as problems do not change at
    all; and fully where scores are 0 or 1 (then this is the interval of `estimate.paired`).
    """
    n, seen = change.size, change[change != 0]
    whole = bool((np.abs(seen) == 1).all())
    size = math.sqrt(float((seen**2).mean())) if seen.size else 1.0
    extra = 3.0 if whole else 3.0 * (1 - seen.size / n)
    centre = float(change.sum()) / (n + extra)
    second = (float((change**2).sum()) + extra * size**2) / (n + extra)
    return centre, math.sqrt(max(second - centre**2, 0.0) / (n + extra - (not whole)))


def _limit(new: Array, old: Array) -> float:
    """How far scores can part: by 1 where all lie between 0 and 1."""
    return 1.0 if min(new.min(), old.min()) >= 0 and max(new.max(), old.max()) <= 1 else math.inf


def _t_bounds(centre: float, error: float, degrees: float, limit: float = math.inf) -> Callable[[float], tuple[float, float]]:
    def bounds(level: float) -> tuple[float, float]:
        half = standard_errors(level, degrees) * error
        return max(centre - half, -limit), min(centre + half, limit)

    return bounds


def welch_p(after: ArrayLike, before: ArrayLike) -> float:
    """Two-sided, of the difference of two means of independent scores."""
    new, old = finite_vector("score after", after), finite_vector("score before", before)
    return _t_p(float(new.mean() - old.mean()), *_welch(new, old))


def difference_of_means(one: ArrayLike, other: ArrayLike, *, level: float = 0.95) -> Estimate:
    """one − other, of independent scores, with Welch's interval."""
    new, old = finite_vector("score of one", one), finite_vector("score of the other", other)
    if min(new.size, old.size) < 2:
        raise DataError(f"{new.size} and {old.size} scores: a difference of means needs two of each at least")
    centre = float(new.mean() - old.mean())
    low, high = _t_bounds(centre, *_welch(new, old))(level)
    return Estimate(centre, low, high, new.size + old.size, level)


def _welch(new: Array, old: Array) -> tuple[float, float]:
    """The standard error of a difference of means, and its degrees of freedom."""
    parts = np.array([new.var(ddof=1) / new.size, old.var(ddof=1) / old.size])
    if not parts.sum():
        return 0.0, new.size + old.size - 2.0
    return math.sqrt(parts.sum()), float(parts.sum() ** 2 / (parts**2 / [new.size - 1, old.size - 1]).sum())


def _t_p(centre: float, error: float, degrees: float) -> float:
    from scipy.special import stdtr

    if error == 0:
        return 1.0 if centre == 0 else 0.0
    return 2 * float(stdtr(degrees, -abs(centre) / error))


def _reach(level: float, power: float) -> float:
    from scipy.special import ndtri

    if not (0 < level < 1 and 0 < power < 1):
        raise UsageError(f"level {level} and power {power}: expected both between 0 and 1")
    return float(ndtri((1 + level) / 2) + ndtri(power))


def _chunks(draws: int, width: int) -> list[int]:
    """Sizes of the chunks of draws, such that a chunk of signs, in float64, stays below 32 MiB."""
    most = max(1, (1 << 22) // width)
    return [min(most, draws - start) for start in range(0, draws, most)]


@lru_cache(maxsize=16)
def _every_flip(n: int) -> NDArray[np.int64]:
    return (np.arange(2**n)[:, None] >> np.arange(n)) & 1


@lru_cache(maxsize=16)
def _every_deal(n: int, k: int) -> NDArray[np.int64]:
    return np.array(list(itertools.combinations(range(n), k)))


@lru_cache(maxsize=16)
def _random_deals(n: int, k: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(derive(0, "permutations"))
    return rng.permuted(np.tile(np.arange(n), (DRAWS, 1)), axis=1)[:, :k]


def _binomial(n: int, rates: Array) -> Array:
    """[rate, count]: how likely each count of n is."""
    from scipy.special import gammaln, xlog1py, xlogy

    k, rate = np.arange(n + 1), rates[:, None]
    return np.exp(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + xlogy(k, rate) + xlog1py(n - k, -rate))


@lru_cache(maxsize=512)
def _boschloo_table(of_after: int, of_before: int) -> Array:
    """[after, before]: the two-sided p-value of every table, so that power is a sum over it.

    A table is as extreme as Fisher's one-sided p-value is small; its p-value is the chance of one so extreme, at the
    common rate for which that is most likely.
    """
    from scipy.stats import hypergeom

    after, before = np.arange(of_after + 1)[:, None], np.arange(of_before + 1)[None, :]
    rates = np.concatenate([np.linspace(0.001, 0.999, 499), [1e-4, 1 - 1e-4]])
    chances_RAB = _binomial(of_after, rates)[:, :, None] * _binomial(of_before, rates)[:, None, :]
    total = of_after + of_before
    sides = [hypergeom.sf(after - 1, total, after + before, of_after), hypergeom.cdf(after, total, after + before, of_after)]
    return np.minimum(1.0, 2 * np.minimum(*(_unconditional(side, chances_RAB) for side in sides)))


def _unconditional(fisher: Array, chances_RAB: Array) -> Array:
    """Unconditional p-value of each table: the largest chance, over the rates, of a Fisher p-value that is not larger than its own."""
    flat = fisher.ravel()
    order = np.argsort(flat, kind="stable")
    cumulated = chances_RAB.reshape(len(chances_RAB), -1)[:, order].cumsum(axis=1)
    ends = np.searchsorted(flat[order], flat * (1 + 1e-9), side="right") - 1  # ties count as one
    return cumulated.max(axis=0)[ends].reshape(fisher.shape)
