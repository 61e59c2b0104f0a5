"""Metric series checks: what a run's losses, norms, rates and step times must look like.

Each takes plain floats, raw and unsmoothed, in the order of the steps, after they were read back, so that no step waits; each
returns a Verdict. They look at values only: where the values came from is for update accounting and the data ledger.
"""

import math
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from assay.verdict import Outcome, Verdict, proven, refuted, unproven

_Array = NDArray[np.float64]

# What placeholders and losses without a signal look like: the tolerance of ln 2 is a log rounded to four decimals.
SENTINELS = {"0.0": (0.0, 0.0), "1.0": (1.0, 0.0), "ln 2": (math.log(2), 5e-5)}
SENTINEL_STEPS = 3  # a preference loss is ln 2 at step 0, and once more where the first learning rate is 0

STEPS_BEFORE = 16  # whose median says how long a step takes: a few of them may compile
FAST_STEPS = 3
TOO_FAST = 5.0

_WINDOW = 64
ALLOWANCE, CLIP, ALARM, _AT_ONCE, CLIMB = 2.0, 6.0, 16.0, 25.0, 10.0
LEAST_SCATTER = 0.005  # of the first losses: less is no collapse where a run hardly scatters or knows its text by heart


def check_finite(values: ArrayLike, name: str = "loss") -> Verdict:
    """Every raw value is a number: no filter before, no average."""
    series = np.asarray(values, dtype=np.float64)
    if not series.size:
        return unproven("finite", f"no value of {name} was given")
    bad = np.flatnonzero(~np.isfinite(series))
    if bad.size:
        at = int(bad[0])
        reason = f"{name} is {series[at]} at {at} ({bad.size} of {series.size} are not finite)"
        return refuted("finite", reason, name=name, at=at, count=int(bad.size))
    return proven("finite", f"{series.size} value(s) of {name} are finite", name=name, count=int(series.size))


def check_detector(detector: Callable[[list[float]], Verdict] = check_finite) -> Verdict:
    """The detector itself is alive: it refutes a NaN or an infinity planted anywhere, and stays silent without one."""
    clean = [4.0, 3.5, 3.2, 3.1, 3.05]
    if detector(clean).outcome != Outcome.PROVEN:
        return refuted("self_test", "the detector refuses a finite series, so its alarms mean nothing")
    for bad in (math.nan, math.inf, -math.inf):
        for at in range(len(clean)):
            if detector([*clean[:at], bad, *clean[at + 1:]]).outcome != Outcome.REFUTED:
                return refuted("self_test", f"a planted {bad} went unnoticed: the detector does not work", at=at)
    return proven("self_test", "15 planted values that are not finite were all found")


def check_constant_loss(values: ArrayLike, *, repeats: int = 5) -> Verdict:
    """Check for a frozen loss: no value stands `repeats` times in a row, no stretch of that length comes back bit for bit, no placeholder
    stays.

    For losses as float32 gives them, which do not repeat by chance; rounded logs need a larger `repeats`.
    """
    series = np.asarray(values, dtype=np.float64)
    for found in (_placeholder(series), _repetition(series, repeats)):
        if found is not None:
            return found
    if series.size < repeats:
        return unproven("constant_loss", f"{series.size} losses are too few; {repeats} are needed")
    return proven("constant_loss", f"{series.size} losses, no repetition and no placeholder", steps=int(series.size))


def check_initial_loss(first_loss: float, vocab: int, *, logit_std: float = 1.0, slack: float = 0.1) -> Verdict:
    """A model that knows nothing starts near ln V: not below it, and above by what its random logits cost.

    Logits of standard deviation s cost s²/2 nats on average: 0.5 at the default of 1, which an initialisation of 0.02
    reaches at a width of 2,500. `slack` covers a first batch of a thousand tokens. Below the band the model has seen
    the text or the labels; above it the initialisation or the loss is wrong.
    """
    low, high = math.log(vocab) - slack, math.log(vocab) + logit_std**2 / 2 + slack
    evidence = {"first_loss": str(first_loss), "low": low, "high": high}
    where = f"the first loss is {first_loss:.4g}, ln {vocab} is {math.log(vocab):.4g}"
    if low <= first_loss <= high:
        return proven("initial_loss", where, **evidence)
    return refuted("initial_loss", f"{where}; a fresh model starts between {low:.4g} and {high:.4g}", **evidence)


def check_inherited_loss(first_loss: float, parent_loss: float, *, tolerance: float = 0.02) -> Verdict:
    """A child starts where its parent stands: the same batch, scored by the parent, before the first step."""
    evidence = {"first_loss": str(first_loss), "parent_loss": str(parent_loss), "tolerance": tolerance}
    where = f"the first loss is {first_loss:.4g}, the parent's on the same batch {parent_loss:.4g}"
    if abs(first_loss - parent_loss) <= tolerance:
        return proven("inherited_loss", where, **evidence)
    return refuted("inherited_loss", f"{where}: these are not the parent's weights, or not its inputs", **evidence)


def check_step_time(seconds: ArrayLike, *, floor: float = 0.0) -> Verdict:
    """Check that no three steps in a row take less than a fifth of the usual time: steps that fast did no work.

    `floor` is the least a step can take on this machine (its FLOPs over the peak rate), where known. Slow steps are not
    this check's business: saving, compiling and other tenants make them.
    """
    times = np.asarray(seconds, dtype=np.float64)
    impossible = np.flatnonzero(~(times > floor))  # so that a NaN is impossible too
    if impossible.size:
        at = int(impossible[0])
        return refuted("step_time", f"step {at} took {times[at]:.3g} s; it must take more than {floor:.3g} s", at=at)
    if times.size < STEPS_BEFORE + FAST_STEPS:
        return unproven("step_time", f"{times.size} steps are too few; {STEPS_BEFORE + FAST_STEPS} are needed")
    windows = sliding_window_view(times, STEPS_BEFORE + FAST_STEPS)
    usual, fast = np.median(windows[:, :STEPS_BEFORE], axis=1), windows[:, STEPS_BEFORE:].max(axis=1)
    hits = np.flatnonzero(fast < usual / TOO_FAST)
    if hits.size:
        first, at = int(hits[0]), int(hits[0]) + STEPS_BEFORE
        took = f"from step {at} on, {FAST_STEPS} steps took {fast[first]:.3g} s or less, {usual[first]:.3g} s is usual"
        return refuted("step_time", f"{took}: they did no work", at=at, usual=float(usual[first]))
    middle = float(np.median(times))
    return proven("step_time", f"{times.size} steps, {middle:.3g} s in the middle", median=middle)


def check_learning_rate(
    observed: Sequence[float], planned: Callable[[int], float], *, start: int = 0, last_step: int | None = None
) -> Verdict:
    """The learning rate of step `start` + i is the plan's, to float32; and not 0 before `last_step`, where given."""
    rates = list(observed)
    if not rates:
        return unproven("learning_rate", "no learning rate was given")
    for step, rate in enumerate(rates, start):
        if not _same_rate(rate, planned(step)):
            reason = f"step {step} used {rate:.6g}, the plan says {planned(step):.6g}"
            cause = _stepped_too_often(rates, planned, start)
            return refuted("learning_rate", reason + cause, step=step, observed=str(rate), planned=planned(step))
        if rate == 0 and last_step is not None and 0 < step < last_step:
            return refuted("learning_rate", f"it is 0 at step {step} of {last_step}: nothing is learned", step=step)
    return proven("learning_rate", f"{len(rates)} steps as planned", first=rates[0], last=rates[-1])


class ChangePoint:
    """Detector of a jump, a drop or a slow climb of a loss, fed as the values come in, in pieces of any size.

    What the last 64 losses allow for the next one is a corridor: not above where their later half lies, for a loss
    falls; not below their trend continued at twice its pace. Outside it, distance counts in robust standard deviations
    z of the 64 about their trend. The alarm goes at z > 25; when the sum of min(z, 6) − 2, kept at 0 or above (Page's
    CUSUM), reaches 16, as four losses in a row far outside make it; or when the later half lies 10 deviations above
    its lowest.

    False alarms: fewer than 1 in 10,000 steps of raw losses. Measured over a million steps each of falling power laws
    with warm-up: none for normal noise of 0.4 to 7 % of the loss, 0.6 in 10,000 where it is correlated by 0.6 with the
    tails of a Student t of 4 degrees of freedom. Smoothed losses are not for it: correlated by 0.9 they give 7 in 10,000.
    Found: a rise of 10 deviations within 9 steps, of 40 within 4; one of 3 deviations is not.
    """

    def __init__(self) -> None:
        self._recent: _Array = np.empty(0)
        self._steps = 0
        self._start = 0.0  # the middle of the first window: how large the loss was when all was still to be learned
        self._lowest = math.inf
        self._risen = self._fallen = 0.0
        self._alarm: Verdict | None = None

    def feed(self, losses: ArrayLike) -> Verdict:
        """The verdict on all losses so far. An alarm stands: what follows a change has another past."""
        series = np.asarray(losses, dtype=np.float64)
        usable = series[: int(np.append(~np.isfinite(series), True).argmax())]
        if self._alarm is None:
            self._alarm = self._first_alarm(usable)
        if self._alarm is None and usable.size < series.size:
            reason = f"the loss is {series[usable.size]} at step {self._steps}"
            self._alarm = refuted("change_point", reason, step=self._steps, cause="not finite")
        if self._alarm is not None:
            return self._alarm
        if self._steps <= _WINDOW:
            return unproven("change_point", f"{self._steps} losses; the first {_WINDOW} only tell what is usual")
        return proven("change_point", f"no change in {self._steps} losses", steps=self._steps)

    def _first_alarm(self, losses: _Array) -> Verdict | None:
        past = np.concatenate([self._recent, losses])
        judged = past[_WINDOW:]
        self._steps, self._recent = self._steps + losses.size, past[-_WINDOW:]
        if not judged.size:
            return None
        first = self._steps - judged.size
        if first == _WINDOW:
            self._start = float(np.median(past[:_WINDOW]))
        windows = sliding_window_view(past, _WINDOW)[:-1]
        distances = _distances(windows, judged, LEAST_SCATTER * abs(self._start))
        for step, loss, up, down, level, scatter in zip(count(first), judged.tolist(), *distances, strict=False):
            cause = self._cause(up, down, level, scatter)
            if cause:
                reason = f"{cause} at or just before step {step} (loss {loss:.4g}, usual {level:.4g} ± {scatter:.2g})"
                return refuted("change_point", reason, step=step, cause=cause, loss=loss, usual=level, scatter=scatter)
        return None

    def _cause(self, up: float, down: float, level: float, scatter: float) -> str:
        """Message about what the next loss shows, or nothing."""
        self._risen = max(0.0, self._risen + min(up, CLIP) - ALLOWANCE)
        self._fallen = max(0.0, self._fallen + min(down, CLIP) - ALLOWANCE)
        self._lowest = min(self._lowest, level)
        if up > _AT_ONCE or self._risen >= ALARM:
            return "the loss jumped up"
        if down > _AT_ONCE or self._fallen >= ALARM:
            return "the loss dropped"
        return "the loss climbed" if level - self._lowest >= CLIMB * scatter else ""


def _distances(windows_NW: _Array, next_N: _Array, least_scatter: float) -> tuple[list[float], ...]:
    """Distances of the next loss from each window's corridor, in scatters above and below, with the window's level and scatter."""
    half = _WINDOW // 2
    earlier, later = np.median(windows_NW[:, :half], axis=1), np.median(windows_NW[:, half:], axis=1)
    slope = (later - earlier) / half
    about_trend = windows_NW - slope[:, None] * (np.arange(_WINDOW) - (_WINDOW - 1) / 2)
    deviation = np.abs(about_trend - np.median(about_trend, axis=1)[:, None])
    scatter = np.median(deviation, axis=1) / 0.6745  # of a normal distribution, this is the standard deviation
    floor = later + 2 * np.minimum(slope, 0) * (half / 2 + 0.5)
    scatter = np.maximum(scatter, max(least_scatter, 1e-12))
    return tuple(x.tolist() for x in ((next_N - later) / scatter, (floor - next_N) / scatter, later, scatter))


def _placeholder(series: _Array) -> Verdict | None:
    unmoved = np.diff(series) == 0
    for name, (value, tolerance) in SENTINELS.items():
        start = _first_run(unmoved & (np.abs(series[1:] - value) <= tolerance), SENTINEL_STEPS - 1)
        if start is not None:
            reason = f"the loss is {name} {SENTINEL_STEPS} times in a row from {start} on: a placeholder, or no signal"
            return refuted("constant_loss", reason, at=start, value=name)
    return None


def _repetition(series: _Array, repeats: int) -> Verdict | None:
    """The first stretch that stands still, or that stood in the series before."""
    start = _first_run(np.diff(series) == 0, repeats - 1)
    if start is not None:
        reason = f"the loss is exactly {series[start]:.6g} {repeats} times in a row from step {start} on"
        return refuted("constant_loss", reason, at=start, value=float(series[start]))
    seen: dict[bytes, int] = {}
    for at in range(series.size - repeats + 1):
        before = seen.setdefault(series[at : at + repeats].tobytes(), at)
        if before != at:
            reason = f"the losses from step {at} on are those from {before} on, bit for bit: the weights do not move"
            return refuted("constant_loss", reason, at=at, before=before)
    return None


def _first_run(hits: NDArray[np.bool_], length: int) -> int | None:
    """Place where `length` hits in a row first begin."""
    if hits.size < length:
        return None
    runs = np.flatnonzero(sliding_window_view(hits, length).all(axis=1))
    return int(runs[0]) if runs.size else None


def _same_rate(observed: float, planned: float) -> bool:
    return math.isclose(observed, planned, rel_tol=1e-6, abs_tol=1e-15)


def _stepped_too_often(rates: Sequence[float], planned: Callable[[int], float], start: int) -> str:
    """The usual cause: a scheduler stepped once per process or per micro-batch."""
    for times in range(2, 65):
        if all(_same_rate(rate, planned(times * step)) for step, rate in enumerate(rates, start)):
            return f"; each rate is the plan's of {times} times its step: the scheduler is stepped {times} times a step"
    return ""
