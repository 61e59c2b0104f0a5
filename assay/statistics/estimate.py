"""Estimates: a mean, rate or ratio with its interval and n. A bare number does not travel.

    print(proportion(543, 1319))            0.412 [0.385, 0.439] (n=1319)
    print(paired(after, before))            the change on the same examples, per example
    print(bits_per_byte(nll, bytes))        the unit is the document

Every function refuses a score that is not finite, and fewer than two independent units where their spread must be
estimated. How often the intervals cover the truth was computed or simulated: see tests/statistics/test_estimate.py.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.errors import DataError, UsageError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """`n` counts the independent units: examples, clusters, pairs, documents, runs."""

    mean: float
    low: float
    high: float
    n: int
    level: float = 0.95

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.low <= self.mean <= self.high):
            raise DataError(f"an estimate needs a finite mean inside its interval, found {self.mean} in [{self.low}, {self.high}]")

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        digits = _decimals((self.high - self.low) / 2)
        level = "" if self.level == 0.95 else f", {self.level:.6g} level"
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}] (n={self.n}{level})"


def proportion(successes: int, n: int, *, level: float = 0.95) -> Estimate:
    """How often: the exact (Clopper–Pearson) interval, which covers any true rate at least `level` of the time.

    Wilson's does not: near 0 and 1 its coverage falls to 0.83 at every n from 5 to 2,000, and with its outermost intervals replaced
    by exact ones it still stays under 0.94 for some rates. The price is a width 23 % larger at n = 5, 6 % at 100, 1 % at 2,000.
    """
    if not (n >= 1 and 0 <= successes <= n and successes == int(successes) and n == int(n)):
        raise DataError(f"a proportion needs whole counts, 0 <= successes <= n and n >= 1, not {successes} of {n}")
    low, high = _exact_binomial(successes, n, level)
    return Estimate(successes / n, low, high, int(n), level)


def mean(scores: ArrayLike, *, level: float = 0.95) -> Estimate:
    """The mean of independent scores with its t-interval; scores that are all 0 or 1 are a `proportion`.

    The t-interval is exact for normal scores. Strongly skewed ones need n: of exponential scores it covers 88 % at
    n = 5, 93 % at 30, 94 % at 200.
    """
    values = finite_vector("score", scores)
    if values.size > 1 and _binary(values):
        return proportion(int(values.sum()), values.size, level=level)
    return ratio(values, np.ones_like(values), level=level)


def mean_rate(scores: ArrayLike, *, level: float = 0.95) -> Estimate:
    """The mean of independent scores between 0 and 1, such as each problem's pass@k or its share of right samples.

    The exact binomial interval at the sample size that the spread of the scores amounts to (as in `clustered`). A
    t-interval misses: where most problems score 0 or all score 1 its coverage falls to 0. This one's least was 0.941
    over 560 designs: 5 to 500 problems, rates 0.001 to 0.9, pass@1 to pass@16 of 4 or 16 samples.
    """
    values = finite_vector("score", scores)
    if values.min() < 0 or values.max() > 1:
        raise DataError(f"a rate needs scores between 0 and 1, found {values.min():g} to {values.max():g}; use `mean`")
    if _binary(values):
        return proportion(int(values.sum()), values.size, level=level)
    if values.size < 2:
        return mean(values, level=level)  # which refuses
    share = float(values.mean())
    variance = values.var(ddof=1) / values.size + _unseen_variance(share, values.size)
    effective = share * (1 - share) / variance
    low, high = _exact_binomial(share * effective, effective, level)
    return Estimate(share, low, high, values.size, level)


def clustered(scores: ArrayLike, clusters: Sequence[Hashable], *, level: float = 0.95) -> Estimate:
    """The mean over scores that come in groups (samples of one problem, completions of one run); n counts the groups.

    Scores of 0 and 1 get the exact binomial interval at their effective sample size, others a jackknife t-interval.
    """
    values = finite_vector("score", scores)
    labels = list(clusters)
    if len(labels) != values.size:
        raise DataError(f"{values.size} scores came with {len(labels)} cluster labels; give one label per score")
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    index = np.array([number[label] for label in labels])
    sums = np.bincount(index, weights=values).astype(np.float64)
    sizes = np.bincount(index).astype(np.float64)
    if sizes.size < 2:
        raise DataError("all scores are of one cluster, so nothing says how clusters differ; give at least 2 clusters")
    return _clustered_proportion(sums, sizes, level) if _binary(values) else ratio(sums, sizes, level=level)


def clustered_rate(scores: ArrayLike, clusters: Sequence[Hashable], *, level: float = 0.95) -> Estimate:
    """`clustered`, of scores between 0 and 1: `mean_rate` where each is a cluster by itself, and never outside 0 to 1."""
    if len(set(clusters)) == len(clusters):
        return mean_rate(scores, level=level)
    found = clustered(scores, clusters, level=level)
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))


def paired(after: ArrayLike, before: ArrayLike, ids: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None, *,
           level: float = 0.95) -> Estimate:
    """The mean change, after − before, over the same examples.

    `ids` names the examples of each side, (of after, of before), and matches them; without it both sides hold the same
    examples in the same order. Scores of 0 and 1 get an interval that excludes 0 only where McNemar's exact test does.
    """
    new, old = finite_vector("score after", after), finite_vector("score before", before)
    if ids is not None:
        old = old[_matched(ids, new.size, old.size)]
    if new.size != old.size:
        raise DataError(f"{new.size} scores after and {old.size} before cannot be paired; score the same examples")
    if new.size > 1 and _binary(new) and _binary(old):
        return _paired_proportions(int((new > old).sum()), int((new < old).sum()), new.size, level)
    return ratio(new - old, np.ones_like(new), level=level)


def ratio(numerators: ArrayLike, denominators: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Σ numerators / Σ denominators over independent units, with a delete-one jackknife t-interval.

    Where all denominators are equal this is the t-interval of the mean. Where a few units outweigh the rest it needs n:
    with log-normal sizes (σ = 1) it covers 91 % at n = 5, 92 % at 20, 94 % from 100 on.
    """
    above, below = finite_vector("numerator", numerators), finite_vector("denominator", denominators)
    if above.size != below.size:
        raise DataError(f"{above.size} numerators came with {below.size} denominators; give one of each per unit")
    if above.size < 2:
        raise DataError("one unit alone shows no spread, so no interval can be given; give at least 2 (a single long document can be "
                        "scored as blocks)")
    if (below < 0).any() or (below.sum() - below <= 0).any():
        raise DataError("the denominators must not be negative, nor sum to 0 when any one unit is left out")
    value = above.sum() / below.sum()
    half = standard_errors(level, above.size - 1) * math.sqrt(_jackknife_variance(above, below))
    return Estimate(float(value), float(value - half), float(value + half), above.size, level)


def bits_per_byte(nll_nats_per_document: ArrayLike, bytes_per_document: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Σ nll / (ln 2 · Σ raw bytes), independent of the tokenizer; the unit of its interval is the document."""
    nll = finite_vector("document's nll", nll_nats_per_document)
    if (nll < 0).any():
        raise DataError(f"document {int((nll < 0).argmax())} has a negative nll: no probability is above 1")
    return cost_ratio(nll / math.log(2), finite_vector("document's byte count", bytes_per_document), level=level)


def cost_ratio(costs: ArrayLike, units: ArrayLike, *, level: float = 0.95) -> Estimate:
    """`ratio`, of what cannot be below 0, such as a loss: a t-interval of few units that reaches there is cut, and covers as often."""
    found = ratio(costs, units, level=level)
    return found if found.mean < 0 else replace(found, low=max(found.low, 0.0))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k samples, drawn without replacement from n of which `correct` are right, hold a right one.

    Unbiased for the chance that k fresh samples do (Chen et al. 2021). Of one problem: its samples are counted here,
    never problems, and never more of them than were drawn.
    """
    if not 1 <= k <= n:
        raise UsageError(f"pass@{k} of {n} samples: k must lie between 1 and the number of samples; draw at least {k}")
    if not 0 <= correct <= n:
        raise DataError(f"pass@{k}: {correct} correct of {n} samples is no count")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """The chance that the most frequent answer of one problem's samples is right, ties being broken at random.

    An answer that was not parsed is None and has no vote; where nobody votes the problem is wrong. Give answers in
    their canonical form: equal ones must be equally right.
    """
    right: dict[Hashable, bool] = {}
    for answer, good in zip(answers, correct, strict=True):
        if answer is not None and right.setdefault(answer, good) != good:
            raise DataError(f"the answer {answer!r} is marked right in one sample and wrong in another")
    votes = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(right[answer] for answer in winners) / len(winners) if winners else 0.0


def finite_vector(what: str, values: ArrayLike) -> Array:
    """`values` as a vector, or a DataError that names the first that is not finite: none is dropped or replaced."""
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or vector.size == 0:
        raise DataError(f"expected a list of at least one {what}, found shape {vector.shape}")
    bad = np.flatnonzero(~np.isfinite(vector))
    if bad.size:
        raise DataError(f"{what} {bad[0]} is {vector[bad[0]]} ({bad.size} of {vector.size} are not finite); find out why, a mean without "
                        "them would be of other data")
    return vector


def standard_errors(level: float, degrees: float) -> float:
    """How many standard errors a two-sided interval reaches to either side, by Student's t."""
    from scipy.special import stdtrit  # 0.4 s to import: not paid by --help

    return float(stdtrit(degrees, (1 + level) / 2))


def _binary(values: Array) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _decimals(half_width: float) -> int:
    """Number of decimals to print: two significant digits of the half-width, and three decimals at least where it is below 10."""
    if half_width <= 0:
        return 3
    digits = 1 - math.floor(math.log10(half_width)) if math.isfinite(half_width) else 3
    return min(max(digits, 3 if half_width < 10 else 0), 9)


def _exact_binomial(successes: float, n: float, level: float) -> tuple[float, float]:
    """Clopper–Pearson; counts may be fractions, as an effective sample size is."""
    from scipy.special import betaincinv

    tail = (1 - level) / 2
    low = betaincinv(successes, n - successes + 1, tail) if successes > 0 else 0.0
    high = betaincinv(successes + 1, n - successes, 1 - tail) if successes < n else 1.0
    return float(low), float(high)


def _jackknife_variance(above: Array, below: Array) -> float:
    n = above.size
    without_one = (above.sum() - above) / (below.sum() - below)
    return float((n - 1) / n * ((without_one - above.sum() / below.sum()) ** 2).sum())


def _clustered_proportion(sums: Array, sizes: Array, level: float) -> Estimate:
    """Korn–Graubard: the exact interval at the sample size that would explain the spread between clusters.

    Over 280 designs (2 to 300 clusters of 1 to 32 scores, rates 0.005 to 0.4, intra-cluster correlation 0 to 0.9) the
    worst coverage is 0.945; without what was not seen it would be 0.85.
    """
    clusters, n, rate = sizes.size, sizes.sum(), float(sums.sum() / sizes.sum())
    if rate in (0.0, 1.0):  # nothing shows how alike the scores of one cluster are: each cluster counts once
        low, high = _exact_binomial(rate * clusters, clusters, level)
        return Estimate(rate, low, high, clusters, level)
    variance = _jackknife_variance(sums, sizes) + _unseen_variance(rate, clusters)
    effective = min(n, rate * (1 - rate) / variance)
    low, high = _exact_binomial(rate * effective, effective, level)
    return Estimate(rate, low, high, clusters, level)


def _unseen_variance(rate: float, units: int) -> float:
    """A quarter of an all-right and of an all-wrong unit: few units with rare successes show too little of their spread."""
    return 0.25 * (rate**2 + (1 - rate) ** 2) / units**2


def _paired_proportions(gained: int, lost: int, n: int, level: float) -> Estimate:
    """A t-interval after adding 1.5 gains and 1.5 losses (Bonett and Price add 1), and 0 wherever McNemar allows it.

    Exact enumeration over n = 5 to 400 and all rates of gain and loss: coverage never below 0.944, false claims of a
    change never above 0.041. A plain t-interval would call 3 gains of 3 certain.
    """
    change = (gained - lost) / n
    gain, loss = (gained + 1.5) / (n + 3), (lost + 1.5) / (n + 3)
    half = standard_errors(level, n - 1) * math.sqrt((gain + loss - (gain - loss) ** 2) / (n + 3))
    low, high = max(gain - loss - half, -1.0), min(gain - loss + half, 1.0)
    within = [change, 0.0] if _mcnemar(gained, lost) > 1 - level else [change]
    return Estimate(change, min(low, *within), max(high, *within), n, level)


def _mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value that gains and losses are equally likely."""
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


def _matched(ids: tuple[Sequence[Hashable], Sequence[Hashable]], after: int, before: int) -> NDArray[np.int64]:
    """Index on the before side of each example of the after side."""
    new, old = list(ids[0]), list(ids[1])
    if (len(new), len(old)) != (after, before):
        raise DataError(f"{after} scores after and {before} before came with {len(new)} and {len(old)} ids")
    place = {name: i for i, name in enumerate(old)}
    if len(place) != len(old) or len(set(new)) != len(new):
        raise DataError("an id stands twice on one side; average the scores of one example first")
    strangers = set(new) ^ set(old)
    if strangers:
        some = ", ".join(sorted(map(str, strangers))[:3])
        raise DataError(f"{len(strangers)} example(s) were scored on one side only ({some}); pairs need both")
    return np.array([place[name] for name in new], dtype=np.int64)
