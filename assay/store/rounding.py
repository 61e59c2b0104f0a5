"""Matrices in fewer bits: each row in whole steps of a size of its own, so that value = code · step.

One dial sets the precision: a row's step is 4 rms / levels, from 127 levels (int8) over 63 (int7) and 31 (int6) down to 15
(int5), and all between. Weights beyond 4 rms are not cut off: they keep their codes up to 127 steps, because an entropy
coder makes rare codes long and common ones short. Normal weights have the most entropy for their rms: no others take more
bytes. A step need not be precise, only known: it is one byte, a power of 2^(1/16) times its matrix's unit.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FINEST, COARSEST = 127, 15  # levels: int8, int5
REACH = 4.0  # rms of a row that its levels cover
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of a row's largest weight, where 127 codes do not reach it at this step
STEP_CODES = 16  # a factor of two, in steps of 4.4 %


@dataclass(frozen=True)
class Rounded:
    codes: NDArray[np.int8]
    step_codes: NDArray[np.uint8]  # one a row
    unit: np.float32


def rounded_rows(matrix: NDArray[np.float32], levels: int) -> Rounded:
    """Each row in steps of 4 rms / levels, or of as much as 127 codes need to reach its large weights."""
    rms = np.sqrt(np.square(matrix, dtype=np.float64).mean(1))
    wanted = np.maximum(REACH / levels * rms, _least_steps(matrix, REACH / levels * rms))
    unit = np.float32(max(wanted.max() * 2.0 ** (-255 / STEP_CODES), np.finfo(np.float32).tiny))
    with np.errstate(divide="ignore"):  # a row of zeros has no step of its own, and needs none
        exponents = np.ceil(STEP_CODES * np.log2(wanted / unit) - 1e-4)
    step_codes = exponents.clip(0, 255).astype(np.uint8)
    codes = np.rint(matrix / steps_of(step_codes, unit)[:, None]).clip(-FINEST, FINEST)
    return Rounded(codes.astype(np.int8), step_codes, unit)


def unrounded(codes: NDArray[np.int8], steps: NDArray[np.float32]) -> NDArray[np.float32]:
    return codes.astype(np.float32) * steps[:, None]


def steps_of(step_codes: NDArray[np.uint8], unit: np.float32) -> NDArray[np.float32]:
    """Computed in float64 and rounded once, so that writer and reader agree to the last bit."""
    return (np.float64(unit) * np.exp2(step_codes.astype(np.float64) / STEP_CODES)).astype(np.float32)


def most_bits(levels: int) -> float:
    """Of one coded weight: the entropy of a normal one at these levels, and the 1.2 % that Huffman codes may add."""
    return 1.012 * (math.log2(levels / REACH) + 0.5 * math.log2(2 * math.pi * math.e))


def _least_steps(matrix: NDArray[np.float32], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The step that 127 codes need; where it exceeds the wanted one, cutting off a few large weights may lose less."""
    largest = np.abs(matrix).max(1).astype(np.float64)
    least = np.zeros_like(largest)
    short = np.flatnonzero(largest / FINEST > wanted)
    if short.size:
        rows = matrix[short].astype(np.float64)
        tried = np.array([clip * largest[short] / FINEST for clip in CLIPS])
        errors = np.array([_squared_error(rows, steps) for steps in tried])
        least[short] = tried[errors.argmin(0), np.arange(short.size)]
    return least


def _squared_error(rows: NDArray[np.float64], steps: NDArray[np.float64]) -> NDArray[np.float64]:
    codes = np.rint(rows / steps[:, None]).clip(-FINEST, FINEST)
    return np.square(codes * steps[:, None] - rows).sum(1)
