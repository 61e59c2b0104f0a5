"""Sequential bounds on a rate: an interval that holds at all looks together, so that one may look after every sample.

    sequential_bounds(0, 64)            (0.0, 0.085): 64 clean samples, looked at as often as one likes
    clean_samples_needed(0.05)          how many clean samples in a row bound the rate at 5 %

The likelihood of the samples under any rate of a wide range (a Beta(½, ½) mixture), over that under one rate, is a martingale
where that one is true: it ever exceeds 20 with a chance of at most 1 in 20 (Ville). The rates for which it has not, are left.
"""

import math

SEQUENTIAL_LEVEL = 0.95


def sequential_bounds(bad: int, n: int, *, level: float = SEQUENTIAL_LEVEL) -> tuple[float, float]:
    """The rates that are left after n samples of which `bad` were bad."""
    if n == 0:
        return 0.0, 1.0
    return (_edge(bad, n, 0.0, level) if bad else 0.0), (_edge(bad, n, 1.0, level) if bad < n else 1.0)


def excludes(rate: float, bad: int, n: int, *, level: float = SEQUENTIAL_LEVEL) -> bool:
    """Whether these samples rule out this rate; a true one is ever ruled out with a chance of at most 1 − level."""
    return _evidence(bad, n, rate) >= -math.log(1 - level)


def clean_samples_needed(rate: float, *, level: float = SEQUENTIAL_LEVEL) -> int:
    """Clean samples in a row after which this rate, and every higher one, is excluded."""
    low, high = 1, 2
    while not excludes(rate, 0, high, level=level):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if excludes(rate, 0, middle, level=level):
            high = middle
        else:
            low = middle + 1
    return low


def _evidence(bad: int, n: int, rate: float) -> float:
    """Log of the martingale: how much better the mixture explains the samples than this rate does."""
    mixture = _log_beta(bad + 0.5, n - bad + 0.5) - _log_beta(0.5, 0.5)
    if (bad and rate <= 0) or (bad < n and rate >= 1):
        return math.inf
    alone = (bad * math.log(rate) if bad else 0.0) + ((n - bad) * math.log1p(-rate) if bad < n else 0.0)
    return mixture - alone


def _edge(bad: int, n: int, outside: float, level: float) -> float:
    """Rate at which exclusion begins, between the observed rate and one that is excluded."""
    inside = bad / n
    for _ in range(60):
        middle = (inside + outside) / 2
        if excludes(middle, bad, n, level=level):
            outside = middle
        else:
            inside = middle
    return outside


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
