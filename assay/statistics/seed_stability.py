"""Stability over seeds of one recipe: a mean, or two modes, and when a seed left the others.

    >>> stability({42: 1.0696, 314: 1.1214, 1337: 1.1214}, metric="bpb").sentence
    'two modes: {42} near 1.0696 and {314, 1337} near 1.1214; a mean is not a summary; worst seed 1.1214 (314); …'

The better mode is the healthy one, however few its seeds. Two modes are parted, going from the best value to the worst,
by the first gap of at least 6 times the ordinary noise between seeds and 3 times any gap within the better mode. On
normal noise of twice the assumed size that happens by chance in at most 2 of 100 sets of 3, 5 or 8 seeds, on noise of
the assumed size in fewer than 1 of 1,000. A smaller difference is noise, as far as these seeds can show.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from assay.errors import DataError
from assay.statistics.estimate import Array, Estimate, mean, proportion
from assay.verdict import Verdict, proven, refuted, unproven

_Curve = Sequence[tuple[int, float]]  # (step, value), steps ascending
Curves = Mapping[str, Mapping[int, _Curve]]  # by metric, then by seed

GAP_IN_NOISE = 6.0
GAP_IN_GAPS = 3.0
NOISE_OF_A_LOSS = 0.005  # of its value: generous, seeds of one pretraining recipe end within 0.1 % of each other
FEWEST_FOR_JITTER = 8
LEFT_IN_JITTER = 4.0
LEFT_IN_FINAL = 0.2  # of how far away the seed ended: ordinary offsets between seeds stay below this


@dataclass(frozen=True)
class Mode:
    seeds: tuple[int, ...]
    near: float
    low: float
    high: float

    def __str__(self) -> str:
        names, low, high = ", ".join(map(str, self.seeds)), f"{self.low:.6g}", f"{self.high:.6g}"
        spread = "" if low == high else f" ({low} to {high})"
        return f"{{{names}}} near {self.near:.6g}{spread}"


@dataclass(frozen=True)
class Departure:
    """Divergence of one seed: from `step` on, `metric` of `seed` stayed away from the healthy seeds; `others` is their mean there."""

    seed: int
    metric: str
    step: int
    value: float
    others: float

    def __str__(self) -> str:
        where = f"{self.metric} ({self.value:.6g} against {self.others:.6g})"
        return f"seed {self.seed} left the others at step {self.step} in {where}"


@dataclass(frozen=True)
class SeedsVerdict:
    """`modes` is empty where they could not be judged; `mean` is None where there is none to give."""

    metric: str
    n: int
    mean: Estimate | None
    worst_seed: int
    worst: float
    modes: tuple[Mode, ...]
    not_finite: tuple[int, ...]
    noise: float | None
    departures: tuple[Departure, ...]

    @property
    def collapsed(self) -> tuple[int, ...]:
        """The seeds of the worse mode, and those that ended without a number."""
        return _collapsed(self.modes, self.not_finite)

    @property
    def sentence(self) -> str:
        parts = []
        if self.not_finite:
            parts.append(f"{self.metric} of seed(s) {', '.join(map(str, self.not_finite))} is not finite: collapsed")
        if len(self.modes) == 2:
            parts.append(f"two modes: {self.modes[0]} and {self.modes[1]}; a mean is not a summary")
        elif self.mean is not None:
            parts.append(f"{'one mode' if self.modes else 'modes not judged, give noise'}: {self.metric} {self.mean}")
        parts += [f"worst seed {self.worst:.6g} ({self.worst_seed})", *map(str, self.departures)]
        bad = len(self.collapsed)
        if bad:
            parts.append(f"{bad} of {self.n} seeds collapsed, a rate of {proportion(bad, self.n)}")
        elif self.modes:
            bound = 100 * collapse_bound(self.n)
            parts.append(f"{self.n} of {self.n} clean only bounds the collapse rate below {bound:.0f} %")
        return "; ".join(parts)

    def verdict(self) -> Verdict:
        evidence = {"metric": self.metric, "n": self.n, "noise": self.noise, "worst_seed": self.worst_seed,
                    "collapsed": list(self.collapsed), "modes": list(map(str, self.modes)), "departures": list(map(str, self.departures))}
        if self.collapsed:
            return refuted("seeds", self.sentence, **evidence)
        judged = self.n > 1 and self.modes
        return (proven if judged else unproven)("seeds", self.sentence, **evidence)


def stability(final: Mapping[int, float], curves: Curves | None = None, *, metric: str = "loss", lower_is_better: bool = True,
              noise: float | None = None) -> SeedsVerdict:
    """Verdict on the stability of a recipe over seeds, from one final value of `metric` per seed, and the curves of any metrics: {metric:
    {seed: [(step, value), …]}}.

    `noise` is the standard deviation between healthy seeds, evaluation included. Without it a metric that is better
    when lower is taken for a loss (0.5 % of its value, or the scatter of its own curves if larger), and any other is
    judged by the scatter of its curves; with neither, modes are not judged.
    """
    if not final:
        raise DataError("stability needs the final value of at least one seed")
    curves = curves or {}
    best_first = sorted((seed for seed in final if math.isfinite(final[seed])), key=lambda seed: final[seed], reverse=not lower_is_better)
    lost = tuple(seed for seed in final if seed not in best_first)
    if noise is None:
        noise = _ordinary_noise(final, best_first, curves.get(metric, {}), lower_is_better)
    modes = _modes(final, best_first, noise)
    collapsed = _collapsed(modes, lost)
    left = [_departure(seed, final.keys() - set(collapsed), curves) for seed in collapsed]
    average = mean(list(final.values())) if len(final) > 1 and not lost else None
    worst_seed = lost[0] if lost else next(seed for seed in final if final[seed] == final[best_first[-1]])
    departures = tuple(departure for departure in left if departure is not None)
    return SeedsVerdict(metric, len(final), average, worst_seed, final[worst_seed], modes, lost, noise, departures)


def collapse_bound(n: int, *, level: float = 0.95) -> float:
    """The collapse rate that n clean seeds of n exclude at `level`: a higher one would have shown itself."""
    return 1 - (1 - level) ** (1 / n)


def _collapsed(modes: tuple[Mode, ...], not_finite: tuple[int, ...]) -> tuple[int, ...]:
    return (*(modes[1].seeds if len(modes) == 2 else ()), *not_finite)


def _modes(final: Mapping[int, float], best_first: Sequence[int], noise: float | None) -> tuple[Mode, ...]:
    if noise is None or not best_first:
        return ()
    gaps = np.abs(np.diff([final[seed] for seed in best_first]))
    for i, gap in enumerate(gaps):
        if gap > 0 and gap >= GAP_IN_NOISE * noise and gap >= GAP_IN_GAPS * max(gaps[:i], default=0.0):
            return _mode(final, best_first[: i + 1]), _mode(final, best_first[i + 1 :])
    return (_mode(final, best_first),)


def _mode(final: Mapping[int, float], seeds: Sequence[int]) -> Mode:
    values = [final[seed] for seed in seeds]
    return Mode(tuple(sorted(seeds)), float(np.mean(values)), min(values), max(values))


def _ordinary_noise(final: Mapping[int, float], best_first: Sequence[int], curves: Mapping[int, _Curve],
                    lower_is_better: bool) -> float | None:
    """How far healthy seeds may end apart: a share of a loss, and at least the scatter of the metric's own curves."""
    known = [NOISE_OF_A_LOSS * abs(final[best_first[0]])] if lower_is_better and best_first else []
    long_enough = [curves[seed] for seed in best_first if len(curves.get(seed, ())) >= FEWEST_FOR_JITTER]
    if long_enough:
        later_halves = [np.array([value for _, value in curve[len(curve) // 2 :]]) for curve in long_enough]
        known.append(float(np.median([_jitter(values) for values in later_halves])))
    return max(known, default=None)


def _jitter(values: Array) -> float:
    """The scatter about the trend, from second differences; their median is not moved by a few jumps."""
    bends = np.abs(np.diff(values[np.isfinite(values)], n=2))
    return float(np.median(bends)) / (0.6745 * math.sqrt(6)) if bends.size else 0.0


def _departure(seed: int, healthy: set[int], curves: Curves) -> Departure | None:
    """The earliest over all metrics."""
    found = [_departure_in(metric, seed, healthy, by_seed) for metric, by_seed in curves.items()]
    return min((one for one in found if one is not None), key=lambda one: one.step, default=None)


def _departure_in(metric: str, seed: int, healthy: set[int], by_seed: Mapping[int, _Curve]) -> Departure | None:
    """The step from which on the seed stays farther outside the healthy seeds than jitter and ordinary offsets go."""
    own = dict(by_seed.get(seed, ()))
    others = [dict(by_seed[other]) for other in healthy if other in by_seed]
    steps = [step for step in sorted(own) if all(step in other for other in others)]
    if not steps:
        return None
    values = np.array([own[step] for step in steps])
    around = np.array([[other[step] for step in steps] for other in others]).reshape(len(others), len(steps))
    away = _away(values, around)
    if not away[-1]:
        return None
    first = int(np.flatnonzero(~away).max(initial=-1)) + 1
    expected = float(around[:, first].mean()) if others else math.nan
    return Departure(seed, metric, steps[first], float(values[first]), expected)


def _away(values: Array, around: Array) -> np.ndarray:
    """Mask of values that are not finite, or clearly outside the range of those around them."""
    away = ~np.isfinite(values)
    if around.size:
        outside = np.maximum(values - around.max(axis=0), around.min(axis=0) - values)
        final = outside[-1] if np.isfinite(outside[-1]) else 0.0
        away |= outside > max(LEFT_IN_JITTER * _jitter(values - around.mean(axis=0)), LEFT_IN_FINAL * final)
    return away
