"""Correlation of two measures of the same examples, with Fisher's interval."""

import math

import numpy as np
from numpy.typing import ArrayLike

from assay.statistics.estimate import Estimate, finite_vector

FEWEST_CORRELATED = 10  # examples: of fewer the interval says nothing


def correlation(one: ArrayLike, other: ArrayLike) -> Estimate | None:
    """Pearson's, with a 95 % interval by Fisher's transformation; None of fewer than ten examples, or where one measure never varies."""
    x, y = finite_vector("measure", one), finite_vector("measure", other)
    if x.size != y.size or x.size < FEWEST_CORRELATED or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    found = float(np.clip(np.corrcoef(x, y)[0, 1], -1 + 1e-12, 1 - 1e-12))
    centre, half = math.atanh(found), 1.96 / math.sqrt(x.size - 3)
    return Estimate(found, math.tanh(centre - half), math.tanh(centre + half), int(x.size))
