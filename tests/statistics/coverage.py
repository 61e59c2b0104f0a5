"""How often the intervals hold the truth and the verdicts claim what is not so, by simulation.

    OMP_NUM_THREADS=1 python -m tests.statistics.coverage > results/coverage.txt

A truth is a number of units (5 to 2,000, as likely small as large), a rate (0 to 1, a third of them near the ends), and how
alike the samples of one problem are. Each simulated truth gives one data set to each method.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from assay.statistics.effects import boschloo_p, counts_effect, holm, paired_effect, permutation_p, runs_effect
from assay.statistics.estimate import clustered, mean_rate, pass_at_k, proportion

LEVEL = 0.95


@dataclass(frozen=True)
class Truth:
    n: int
    rate: float
    alike: float  # intra-problem correlation
    rng: np.random.Generator

    def problem_rates(self) -> np.ndarray:
        if self.alike == 0 or self.rate in (0.0, 1.0):
            return np.full(self.n, self.rate)
        spread = 1 / self.alike - 1
        return self.rng.beta(self.rate * spread, (1 - self.rate) * spread, self.n)


def truths(count: int, seed: int, most: int = 2000) -> Iterator[Truth]:
    rng = np.random.default_rng(seed)
    for i in range(count):
        n = round(math.exp(rng.uniform(math.log(5), math.log(most))))
        near = 10 ** rng.uniform(-3.5, -1)
        rate = (rng.uniform(), near, 1 - near)[i % 3] if i > 1 else float(i)
        yield Truth(n, float(rate), float(rng.choice([0.0, 0.1, 0.4, 0.8])), rng)


# ---------------------------------------------------------------- does the interval hold the truth?


def of_a_proportion(truth: Truth) -> bool:
    return proportion(truth.rng.binomial(truth.n, truth.rate), truth.n).contains(truth.rate)


def of_clusters(truth: Truth) -> bool:
    samples = truth.rng.random((truth.n, 8)) < truth.problem_rates()[:, None]
    return clustered(samples.ravel(), np.repeat(np.arange(truth.n), 8).tolist()).contains(truth.rate)


def of_pass_at_4_of_16(truth: Truth) -> bool:
    right = truth.rng.binomial(16, truth.problem_rates())
    table = [pass_at_k(16, c, 4) for c in range(17)]
    if truth.alike == 0 or truth.rate in (0.0, 1.0):
        wanted = 1 - (1 - truth.rate) ** 4
    else:
        spread = 1 / truth.alike - 1
        failing = (1 - truth.rate) * spread
        wanted = 1 - math.prod((failing + i) / (spread + i) for i in range(4))
    found = mean_rate([table[c] for c in right])
    return found.low - 1e-12 <= wanted <= found.high + 1e-12


def _moved(truth: Truth, samples: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Before: the rate of each problem. After: some problems are lost or won for good."""
    before = truth.problem_rates()
    share = 10 ** truth.rng.uniform(-3, -0.5)
    won, lost = truth.rng.random(truth.n) < share, truth.rng.random(truth.n) < share / 3
    after = np.where(won, 1.0, np.where(lost, 0.0, before))
    change = share * (1 - truth.rate) - (1 - share) * share / 3 * truth.rate
    return truth.rng.binomial(samples, after) / samples, truth.rng.binomial(samples, before) / samples, change


def of_a_paired_change(truth: Truth) -> bool:
    after, before, change = _moved(truth, 1)
    return paired_effect(after, before).interval(LEVEL).contains(change)


def of_a_paired_change_of_8_samples(truth: Truth) -> bool:
    after, before, change = _moved(truth, 8)
    return paired_effect(after, before).interval(LEVEL).contains(change)


def of_a_paired_change_in_loss(truth: Truth) -> bool:
    before = truth.rng.normal(3, 1, truth.n)
    return paired_effect(before + truth.rng.standard_t(5, truth.n) * 0.2 - 0.1, before).interval(LEVEL).contains(-0.1)


def of_runs(truth: Truth) -> bool:
    sizes = truth.rng.integers(2, 12, 2)
    after, before = truth.rng.normal(1.1, 0.02, sizes[0]), truth.rng.normal(1.0, 0.02 + 0.1 * truth.rate, sizes[1])
    return runs_effect(after, before).interval(LEVEL).contains(1.1 - 1.0)


def of_counts_of_runs(truth: Truth) -> bool:
    sizes, other = truth.rng.integers(2, 20, 2), truth.rng.uniform()
    found = counts_effect(truth.rng.binomial(sizes[0], truth.rate), sizes[0], truth.rng.binomial(sizes[1], other), sizes[1])
    return found.interval(LEVEL).contains(truth.rate - other)


# ---------------------------------------------------------------- does a verdict claim a difference where there is none?


def claims_on_pairs(truth: Truth) -> bool:
    rates = truth.problem_rates()
    after, before = (truth.rng.random(truth.n) < rates for _ in range(2))
    return not paired_effect(after.astype(float), before.astype(float)).interval(LEVEL).contains(0)


def claims_on_pairs_of_8_samples(truth: Truth) -> bool:
    rates = truth.problem_rates()
    after, before = (truth.rng.binomial(8, rates) / 8 for _ in range(2))
    return not paired_effect(after, before).interval(LEVEL).contains(0)


def claims_on_skewed_changes(truth: Truth) -> bool:
    after, before = (truth.rng.exponential(1 + truth.rate, truth.n) ** 2 for _ in range(2))
    return not paired_effect(after, before).interval(LEVEL).contains(0)


def claims_on_runs(truth: Truth) -> bool:
    sizes = truth.rng.integers(2, 12, 2)
    after, before = (truth.rng.exponential(1, size) for size in sizes)
    return not runs_effect(after, before).interval(LEVEL).contains(0)


def claims_on_permuted_runs(truth: Truth) -> bool:
    sizes = truth.rng.integers(3, 9, 2)
    return permutation_p(truth.rng.normal(size=sizes[0]), truth.rng.normal(size=sizes[1])) <= 1 - LEVEL


def claims_on_counts_of_runs(truth: Truth) -> bool:
    sizes = truth.rng.integers(2, 20, 2)
    after, before = (int(truth.rng.binomial(size, truth.rate)) for size in sizes)
    return boschloo_p(after, int(sizes[0]), before, int(sizes[1])) <= 1 - LEVEL


def claims_among_four_arms(truth: Truth) -> bool:
    """Any of four comparisons with one base line, after Holm."""
    rates, p_values = truth.problem_rates(), []
    before = truth.rng.binomial(4, rates) / 4
    for _ in range(4):
        p_values.append(paired_effect(truth.rng.binomial(4, rates) / 4, before).p)
    return min(holm(p_values)) <= 1 - LEVEL


INTERVALS: dict[str, Callable[[Truth], bool]] = {f.__name__: f for f in (
    of_a_proportion, of_clusters, of_pass_at_4_of_16, of_a_paired_change, of_a_paired_change_of_8_samples, of_a_paired_change_in_loss,
    of_runs, of_counts_of_runs)}
CLAIMS: dict[str, Callable[[Truth], bool]] = {f.__name__: f for f in (
    claims_on_pairs, claims_on_pairs_of_8_samples, claims_on_skewed_changes, claims_on_runs, claims_on_permuted_runs,
    claims_on_counts_of_runs, claims_among_four_arms)}


def share(method: Callable[[Truth], bool], count: int, seed: int = 0, most: int = 2000) -> float:
    return float(np.mean([method(truth) for truth in truths(count, seed, most)]))


def main() -> None:
    import datetime
    import platform

    import scipy

    print(f"command   OMP_NUM_THREADS=1 python -m tests.measure.coverage\nversions  Python {platform.python_version()}, numpy "
          f"{np.__version__}, scipy {scipy.__version__}, {platform.machine()}\ndate      {datetime.date.today()}\n")
    print("95 % intervals: share of 2,000 simulated truths that they hold (goal: 0.94), seeds 0, 1, 2")
    for name, method in INTERVALS.items():
        print(f"  {name:34}", *(f"{share(method, 2000, seed):.4f}" for seed in range(3)))
        sys.stdout.flush()
    print("\nverdicts at 5 %: share of 2,000 truths without a difference in which one is claimed (goal: 0.05), seeds 0, 1, 2")
    for name, method in CLAIMS.items():
        print(f"  {name:34}", *(f"{share(method, 2000, seed):.4f}" for seed in range(3)))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
