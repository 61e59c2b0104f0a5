"""Trend of a metric over its steps: upward, downward or neither, and whether its last moves are more than noise.

    >>> trend(Series("grpo", "reward", (0, 500), ((0.600,), (0.541,)), lower_is_better=False)).sentence
    'grpo: reward 0.6 at step 0, 0.541 at step 500: not shown to rise: it ended 0.059 lower; 2 points cannot show a trend, …'
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from assay.comparison.read_results import Series
from assay.statistics.early_stopping import mann_kendall_p
from assay.statistics.estimate import Array

BLOCKS = 20  # neighbouring steps of a long series resemble each other: means of blocks do so less
FEWEST_FOR_A_TREND = 4  # points; 5 for two sides at 5 %
FEWEST_TO_SEE_NOISE = 4
IN_NOISE = 2.0  # a move of fewer standard deviations is noise, as far as it shows


@dataclass(frozen=True)
class Trend:
    name: str
    metric: str
    steps: tuple[int, int]
    first: float
    last: float
    points: int
    direction: Literal["rises", "falls", "not shown"]
    p: float  # of the direction in which it went, one-sided
    lower_is_better: bool
    noise: float | None  # standard deviation of one evaluation about the course of its neighbours
    since_best: float  # how far the last lies on the wrong side of the best

    @property
    def improves(self) -> bool:
        return self.direction == ("falls" if self.lower_is_better else "rises")

    @property
    def sentence(self) -> str:
        where = (f"{self.name}: {self.metric} {self.first:.6g} at step {self.steps[0]}, {self.last:.6g} at step {self.steps[1]}")
        return f"{where}: {self._direction()}" + ("" if self.noise is None else f"; {self._noise()}")

    def _direction(self) -> str:
        wanted = "fall" if self.lower_is_better else "rise"
        if self.direction != "not shown":
            return f"shown: it {self.direction}, p = {self.p:.2g}" + ("" if self.improves else f"; it does not {wanted}")
        change = self.last - self.first
        ended = f"it ended {abs(change):.3g} {'higher' if change > 0 else 'lower'}" if change else "it ended where it began"
        few = self.points < FEWEST_FOR_A_TREND + 1
        why = f"{self.points} points cannot show a trend, give more" if few else f"p = {self.p:.2g} over {self.points} points"
        return f"not shown to {wanted}: {ended}; {why}"

    def _noise(self) -> str:
        assert self.noise is not None
        moved = f"the last lies {self.since_best:.3g} behind the best, and one evaluation moves by ±{self.noise:.2g} by chance"
        return f"{moved}: noise, not stagnation" if self.since_best <= IN_NOISE * math.sqrt(2) * self.noise else moved

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "metric": self.metric, "steps": list(self.steps), "first": self.first, "last": self.last,
                "points": self.points, "direction": self.direction, "improves": self.improves, "p": self.p, "noise": self.noise,
                "since_best": self.since_best, "sentence": self.sentence}


def trend(series: Series, *, level: float = 0.05) -> Trend:
    """Trend of a series by Mann–Kendall's test, two-sided, on the means of at most 20 blocks of neighbouring steps."""
    means = np.array([np.mean(scores) for scores in series.history])
    blocks = np.array([block.mean() for block in np.array_split(means, min(BLOCKS, means.size))])
    up, down = mann_kendall_p(blocks), mann_kendall_p(-blocks)
    direction: Literal["rises", "falls", "not shown"] = "not shown"
    if min(up, down) <= level / 2:
        direction = "rises" if up < down else "falls"
    behind = means[-1] - means.min() if series.lower_is_better else means.max() - means[-1]
    return Trend(series.name, series.metric, (series.steps[0], series.steps[-1]), float(means[0]), float(means[-1]), means.size,
                 direction, min(up, down), series.lower_is_better, _noise(means), float(behind))


def _noise(means: Array) -> float | None:
    """Standard deviation of the noise, from second differences: a straight course has none, and independent scatter gives them 6 times its
    variance."""
    if means.size < FEWEST_TO_SEE_NOISE:
        return None
    return float(np.sqrt((np.diff(means, n=2) ** 2).mean() / 6))
