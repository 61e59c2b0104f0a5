"""Known answers of the statistics: intervals, tests and stopping rules on small data whose results stand here as numbers.

A mistake in an interval shows in no number that it prints: nothing else says how wide it should be. So every command that prints one first
computes these, which were worked out elsewhere (tests/statistics/test_known_answers.py does so by scipy's routines and by counting).
"""

import math
from collections.abc import Callable
from typing import Any

from assay.statistics.correlation import correlation
from assay.statistics.early_stopping import (
    StoppingRule,
    choose_best,
    compare_losses,
    mann_kendall_p,
    paired_noise,
    plan_stopping,
    should_stop,
    widening_gap,
)
from assay.statistics.effects import (
    Effect,
    boschloo_p,
    counts_effect,
    counts_power,
    difference_of_means,
    fewest_runs,
    holm,
    needed_counts,
    needed_pairs,
    needed_runs,
    paired_effect,
    permutation_p,
    runs_effect,
    sign_flip_p,
    welch_p,
)
from assay.statistics.estimate import (
    Estimate,
    bits_per_byte,
    clustered,
    clustered_rate,
    majority,
    mean,
    mean_rate,
    paired,
    pass_at_k,
    proportion,
    ratio,
    standard_errors,
)
from assay.statistics.seed_stability import collapse_bound, stability
from assay.statistics.sequential import clean_samples_needed, sequential_bounds
from assay.verdict import Verdict, proven, refuted

_CLOSE = 1e-6  # relative: the special functions of other versions of scipy differ in the last digits
BY_DRAWS = 0.02  # of a p-value that is drawn

NEW = [0.1, 0.3, 0.2, 0.6, 0.5, 0.9, 0.4, 0.8, 1.2, 0.7]
OLD = [0.2, 0.1, 0.4, 0.3, 0.5, 0.2, 0.6, 0.1, 0.7, 0.3]
RIGHT, BEFORE = [1, 1, 1, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 1, 1, 0]
RATES, RATES_BEFORE = [0.5, 1, 0.25, 0.75, 1, 1, 0.5, 0.75], [0.25, 0.5, 0.25, 0.5, 0.75, 1, 0, 0.25]
FALLING = [[3 - 0.2 * look + 0.05 * ((7 * look + place) % 5) for place in range(8)] for look in range(8)]
LEVELLED = [FALLING[min(look, 4)] for look in range(9)]
_RULE = StoppingRule(0.3, 3, 20)

KNOWN: dict[str, tuple[Callable[[], Any], Any]] = {
    "proportion": (lambda: proportion(7, 20), (0.35, 0.1539092048, 0.5921885345, 20)),
    "proportion of none": (lambda: proportion(0, 5, level=0.9), (0.0, 0.0, 0.4507197283, 5)),
    "proportion of all": (lambda: proportion(5, 5), (1.0, 0.4781762499, 1.0, 5)),
    "mean": (lambda: mean(NEW), (0.57, 0.326708529, 0.813291471, 10)),
    "mean of zeros and ones": (lambda: mean([1, 0, 1, 1]), (0.75, 0.1941204497, 0.9936905368, 4)),
    "mean rate": (lambda: mean_rate([0, 0.25, 0.5, 1, 1, 0.75, 0, 0.5]), (0.5, 0.2036548857, 0.7963451143, 8)),
    "mean rate of zeros and ones": (lambda: mean_rate([1, 0, 1, 1]), (0.75, 0.1941204497, 0.9936905368, 4)),
    "clustered": (lambda: clustered([1, 0, 1, 1, 0, 1, 0, 0], "aabbbccd"), (0.5, 0.1570127705, 0.8429872295, 4)),
    "clustered scores": (lambda: clustered(NEW, "aabbbccddd"), (0.57, 0.0739906806, 1.0660093194, 4)),
    "clustered, all right": (lambda: clustered([1, 1, 1, 1], "aabb"), (1.0, 0.158113883, 1.0, 2)),
    "clustered rate": (lambda: clustered_rate([0.9, 1, 0.95, 1, 0.2, 1], "aabbcc"), (0.8416666667, 0.3208363248, 1.0, 3)),
    "paired": (lambda: paired(NEW, OLD), (0.23, -0.0179216002, 0.4779216002, 10)),
    "paired by name": (lambda: paired([1, 2, 4], [1, 3, 1.5], ("abc", "cab")), (0.5, -5.7103442794, 6.7103442794, 3)),
    "paired zeros and ones": (lambda: paired(RIGHT, BEFORE), (0.375, -0.3033578467, 0.8488123921, 8)),
    "paired, all gained": (lambda: paired([1] * 12, [0] * 12), (1.0, 0.4590248452, 1.0, 12)),
    "ratio": (lambda: ratio([3, 5, 2, 8], [2, 4, 1, 5]), (1.5, 1.0839036051, 1.9160963949, 4)),
    "bits per byte": (lambda: bits_per_byte([30, 52, 17], [20, 40, 15]), (1.904357454, 1.4807792346, 2.3279356733, 3)),
    "pass@3": (lambda: pass_at_k(6, 2, 3), 0.8),
    "majority": (lambda: majority(["a", "b", "a", "b", None, "c"], [True, False, True, False, False, False]), 0.5),
    "standard errors": (lambda: standard_errors(0.95, 7), 2.3646242516),
    "paired effect": (lambda: paired_effect(NEW, OLD), (0.23, 0.0859375, -0.0179216002, 0.4779216002, 10, 18)),
    "paired effect of zeros and ones": (lambda: paired_effect(RIGHT, BEFORE),
                                        (0.375, 0.2998847461, -0.3033578467, 0.8488123921, 8, 27)),
    "paired effect, all gained": (lambda: paired_effect([1] * 12, [0] * 12), (1.0, 0.00048828125, 0.4590248452, 1.0, 12, 3)),
    "paired effect of rates": (lambda: paired_effect(RATES, RATES_BEFORE), (0.28125, 0.03125, 0.0590067243, 0.45527899, 8, 6)),
    "effect of runs": (lambda: runs_effect([1, 1.2, 1.1, 1.3, 1.15], [0.9, 1, 0.95, 1.05]),
                       (0.175, 0.0396825397, 0.03214326, 0.31785674, 9, 6)),
    "effect of few runs": (lambda: runs_effect([2, 2.5, 2.2], [1, 1.1, 0.9]), (1.2333333333, 0.1, 0.0, 1.9060410058, 6, 4)),
    "sign flips": (lambda: sign_flip_p([0.3, -0.1, 0.2, 0.5, 0.4, -0.05, 0.25]), 0.0625),
    "sign flips of ones": (lambda: sign_flip_p([1, 1, -1, 1, 1, 0, 1]), 0.21875),
    "sign flips, drawn": (lambda: abs(sign_flip_p([place / 20 - 0.2 for place in range(20)]) - 0.0020) < BY_DRAWS, True),
    "permutations": (lambda: permutation_p([1, 1.2, 1.1, 1.3], [0.9, 1, 0.95, 1.05, 1.01]), 0.0396825397),
    "permutations, drawn": (lambda: abs(permutation_p([place / 11 for place in range(12)], [0.2 + place / 10 for place in range(13)])
                                        - 0.055) < BY_DRAWS, True),
    "Holm": (lambda: holm([0.04, 0.01, 0.03, 0.5]), (0.09, 0.04, 0.09, 0.5)),
    "needed": (lambda: (needed_pairs(0.1, 0.4), needed_runs(0.1, 0.12), fewest_runs()), (126, 24, 4)),
    "Welch": (lambda: welch_p(NEW, OLD), 0.0877386762),
    "difference of means without spread": (lambda: difference_of_means([1, 1], [0, 0]), (1.0, 1.0, 1.0, 4)),
    "difference of means": (lambda: difference_of_means(NEW, OLD[:8]), (0.27, 0.0006066763, 0.5393933237, 18)),
    "correlation": (lambda: correlation(NEW, OLD), (0.2720429465, -0.4315026329, 0.7698172853, 10)),
    "sequential": (lambda: (*sequential_bounds(3, 40), *sequential_bounds(0, 64), clean_samples_needed(0.05)),
                   (0.0056491676, 0.2741718126, 0.0, 0.084489376, 116)),
    "Mann–Kendall": (lambda: mann_kendall_p([1, 2, 1.5, 3, 4, 3.5]), 0.0277777778),
    "noise": (lambda: (lambda noise: (noise.per_sequence, noise.sequences, noise.of_mean))(paired_noise(FALLING[0], FALLING[3])),
              (0.0883883476, 8, 0.03125)),
    "loss fell": (lambda: compare_losses(FALLING[0], FALLING[3]).change, (-0.58125, -0.6551445079, -0.5073554921, 8)),
    "loss fell, in words": (lambda: [compare_losses(FALLING[0], FALLING[look]).verdict for look in (3, 0)], ("better", "not shown")),
    "loss rose, in words": (lambda: compare_losses(FALLING[3], FALLING[0]).verdict, "worse"),
    "best evaluation": (lambda: _chosen(FALLING), (7, 7, ())),
    "best of three": (lambda: _chosen([FALLING[2], FALLING[3], FALLING[1]]), (1, 2, ())),
    "best of ties": (lambda: _chosen([FALLING[1], FALLING[3], FALLING[3], FALLING[2]]), (1, 3, (2,))),
    "stopping rule": (lambda: (lambda rule: (rule.risk, rule.before_first_look))(
        plan_stopping(paired_noise(FALLING[0], FALLING[3]), 0.3, patience=3, evaluations=20)), (0.0038461538, 7)),
    "stop": (lambda: _decided(LEVELLED), (True, 0.0, -0.2298782831, 0.2298782831, 8)),
    "no stop": (lambda: _decided(FALLING), (False, 0.6, 0.4553100611, 0.7446899389, 8)),
    "widening gap": (lambda: [widening_gap([3, 2.5, 2, 1.5, 1, 0.5, 0.2], losses) is None
                              for losses in ([3.1, 2.8, 2.6, 2.5, 2.6, 2.8, 3], [3.1, 2.6, 2.1, 1.6, 1.1, 0.6, 0.3])], (False, True)),
    "collapse bound": (lambda: collapse_bound(5), 0.4507197283),
    "two modes": (lambda: [mode.seeds for mode in stability({42: 1.0696, 314: 1.1214, 1337: 1.1214}).modes], ((42,), (314, 1337))),
    "one mode": (lambda: [mode.seeds for mode in stability({1: 1.07, 2: 1.071, 3: 1.069}).modes], ((1, 2, 3),)),
}
OF_COUNTS: dict[str, tuple[Callable[[], Any], Any]] = {  # apart: they import scipy.stats, for half a second
    "effect of counts": (lambda: counts_effect(5, 6, 1, 6), (0.6666666667, 0.0385742188, 0.0, 0.9957574705, 12, 9)),
    "Boschloo": (lambda: (boschloo_p(5, 6, 1, 6), boschloo_p(2, 9, 5, 7)), (0.0385742188, 0.0711000629)),
    "Fisher": (lambda: boschloo_p(60, 110, 40, 120), 0.0014017042),
    "power": (lambda: counts_power(8, 0.9, 0.3), 0.6568040792),
    "needed counts": (lambda: (needed_counts(0.9, 0.3), needed_counts(0.5, 0.4)), (10, 385)),
}


def check_statistics(*, of_counts: bool = False) -> Verdict:
    """Check, before anything is claimed, that every interval, test and rule gives its known answers. `of_counts` includes those that
    `compare` uses."""
    known = KNOWN | OF_COUNTS if of_counts else KNOWN
    wrong = [words for name, (answer, due) in known.items() if (words := _wrong(name, answer, due)) is not None]
    if wrong:
        return refuted("statistics", f"{len(wrong)} of {len(known)} known answers do not come out, so no interval here can be believed: "
                                     f"{'; '.join(wrong[:3])}", wrong=wrong)
    return proven("statistics", f"intervals, tests and stopping rules give {len(known)} known answers")


def _wrong(name: str, answer: Callable[[], Any], due: Any) -> str | None:
    found = _plain(answer())
    return None if _same(found, _plain(due)) else f"{name} is {found}, known is {due}"


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return value.mean, value.low, value.high, value.n
    if isinstance(value, Effect):
        interval = value.interval(0.95)
        return value.mean, value.p, interval.low, interval.high, value.n, value.needed(0.95)
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _same(found: Any, due: Any) -> bool:
    if isinstance(due, tuple):
        return isinstance(found, tuple) and len(found) == len(due) and all(map(_same, found, due))
    if isinstance(due, float):
        return isinstance(found, float) and math.isclose(found, due, rel_tol=_CLOSE, abs_tol=1e-9)
    return type(found) is type(due) and bool(found == due)


def _chosen(history: list[list[float]]) -> tuple[int, int, tuple[int, ...]]:
    found = choose_best(history)
    return found.best, found.last, found.ties


def _decided(history: list[list[float]]) -> tuple[Any, ...]:
    found = should_stop(history, _RULE)
    return found.stop, *_plain(found.evidence["improvement"])
