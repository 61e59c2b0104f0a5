"""Learning-rate schedules: pure functions of the step that return the multiplier of every group's peak rate.

Steps count from 0. Warm-up never gives 0, so the first step moves; from step `total` on the multiplier is `floor`.
"""

import math

from assay.errors import UsageError


def cosine(step: float, total: float, warmup: float = 0, peak: float = 1.0, floor: float = 0.1) -> float:
    """Linear warm-up to `peak` at step `warmup`, then half a cosine down to `floor` at step `total`."""
    _check(step, total, warmup, total - warmup, peak, floor)
    if step < warmup:
        return _warming(step, warmup, peak)
    done = min(1.0, (step - warmup) / (total - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def warmup_stable_decay(step: float, total: float, warmup: float, decay: float, peak: float = 1.0,
                        floor: float = 0.0) -> float:
    """Linear warm-up to `peak` at step `warmup`, flat, then linearly down to `floor` over the last `decay` steps."""
    _check(step, total, warmup, decay, peak, floor)
    if step < warmup:
        return _warming(step, warmup, peak)
    left = min(1.0, max(0.0, (total - step) / decay))
    return floor + (peak - floor) * left


def _warming(step: float, warmup: float, peak: float) -> float:
    return peak * (step + 1) / (warmup + 1)


def _check(step: float, total: float, warmup: float, decay: float, peak: float, floor: float) -> None:
    if not step >= 0:
        raise UsageError(f"schedule: step is {step}; steps count from 0")
    if not (warmup >= 0 and decay > 0 and warmup + decay <= total):
        raise UsageError(f"schedule: {warmup} steps of warm-up and {decay} of decay do not fit into {total}; "
                         "train longer, or shorten them (decay needs at least one step)")
    if not 0 <= floor <= peak:
        raise UsageError(f"schedule: floor {floor} and peak {peak}; expected 0 ≤ floor ≤ peak")
