"""Early stopping and model selection by held-out loss: per sequence, paired, and only on evidence.

    rule = plan_stopping(paired_noise(history[0], history[1]), 0.01, patience=3, evaluations=24)
    if should_stop(history, rule).stop: ...
    choose_best(history)                    best and last, and what ties with the best

A history holds one array per evaluation: the losses of the same held-out sequences in the same order.
Shapes: E evaluations, S sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from assay.errors import DataError, UsageError
from assay.statistics.estimate import Array, Estimate, finite_vector, paired, standard_errors

STOPPING_POWER = 0.8  # how surely a planned look stops a run that improves no more
FEWEST_TO_SEE_JITTER = 7
RECENT = 24  # second differences, from which the scatter between evaluations is read
GAP_WORTH_SAYING = 0.01  # of the held-out loss


@dataclass(frozen=True)
class LossChange:
    """`change` is after − before: a loss that fell is negative."""

    change: Estimate
    verdict: Literal["better", "worse", "not shown"]


@dataclass(frozen=True)
class Noise:
    """`per_sequence`: standard deviation, over sequences, of one sequence's change between two evaluations."""

    per_sequence: float
    sequences: int

    @property
    def of_mean(self) -> float:
        return self.per_sequence / math.sqrt(self.sequences)


@dataclass(frozen=True)
class StoppingRule:
    """Stop once the trend of the last `patience` evaluations gains less than `min_improvement` over all of them.

    While it gains that much, the chance of a stop is below 1 − level over the whole run: each of the looks that
    `evaluations` allow may err with its share of it.
    """

    min_improvement: float
    patience: int
    evaluations: int
    level: float = 0.95

    def __post_init__(self) -> None:
        if not (self.min_improvement > 0 and self.patience >= 1 and 0 < self.level < 1):
            raise UsageError(f"a stopping rule needs min_improvement > 0, patience >= 1 and a level between 0 and 1, found {self}")
        if self.evaluations <= self.before_first_look:
            raise UsageError(f"{self.evaluations} evaluations leave no look for a patience of {self.patience}; evaluate at least "
                             f"{self.before_first_look + 1} times")

    @property
    def before_first_look(self) -> int:
        """A window of `patience` + 1, and enough evaluations to see how much they scatter about their trend."""
        return max(self.patience, FEWEST_TO_SEE_JITTER)

    @property
    def risk(self) -> float:
        return (1 - self.level) / (self.evaluations - self.before_first_look)


@dataclass(frozen=True)
class Decision:
    stop: bool
    reason: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class BestEvaluation:
    """Indices into the history. `ties` are the evaluations not shown to be worse than the best one."""

    best: int
    last: int
    ties: tuple[int, ...]
    reason: str


def compare_losses(before: ArrayLike, after: ArrayLike, *, level: float = 0.95) -> LossChange:
    """The change in held-out loss on the same sequences; 'better' or 'worse' only where its interval excludes 0."""
    change = paired(after, before, level=level)
    if change.contains(0):
        return LossChange(change, "not shown")
    return LossChange(change, "better" if change.mean < 0 else "worse")


def paired_noise(before: ArrayLike, after: ArrayLike) -> Noise:
    """Noise of an improvement, from two evaluations of the same sequences, best as far apart as the rule will compare."""
    change = np.diff(_same_sequences([before, after]), axis=0)[0]
    return Noise(float(change.std(ddof=1)), change.size)


def plan_stopping(noise: Noise, min_improvement: float, *, patience: int, evaluations: int, level: float = 0.95) -> StoppingRule:
    """The rule, or a refusal where `noise` is too large for `min_improvement` to be told from none.

    Accepted only if a look would stop a run that improves no more 8 times in 10, as far as the sequences decide that;
    the scatter between evaluations is not known yet, and can only make the rule stop later.
    """
    rule = StoppingRule(min_improvement, patience, evaluations, level)
    reach = _normal(1 - rule.risk) + _normal(STOPPING_POWER)
    needed = math.ceil((reach * noise.per_sequence / min_improvement) ** 2)
    if needed > noise.sequences:
        raise UsageError(f"stopping refused: the mean over {noise.sequences} held-out sequences moves by ±{noise.of_mean:.2g} between "
                         f"evaluations by chance, so an improvement of {min_improvement:g} cannot be told from none and a patience of "
                         f"{patience} would stop on noise; hold out at least {needed} sequences, or ask for a min_improvement of "
                         f"{reach * noise.of_mean:.2g}")
    return rule


def should_stop(history: Sequence[ArrayLike], rule: StoppingRule) -> Decision:
    """Decide, after every evaluation, with all of them so far, whether to stop; a stop needs evidence that the trend improves no more.

    Two things blur the trend, and both are counted: which sequences were held out, and the scatter of the whole model
    from one evaluation to the next, which no number of sequences averages away. That scatter is taken as independent
    between evaluations: false stops are at most 4 % then, measured, but 5 to 48 % if it is correlated by 0.5.
    """
    losses_ES = _same_sequences(history)
    seen = len(losses_ES)
    if not rule.before_first_look < seen <= rule.evaluations:
        first, last = rule.before_first_look + 1, rule.evaluations
        return Decision(False, f"evaluation {seen}: looks are planned from {first} to {last}", {})
    improvement = _trend_improvement(losses_ES, rule.patience, 1 - 2 * rule.risk)
    evidence = {"evaluations": seen, "improvement": improvement, "min_improvement": rule.min_improvement}
    found = (f"over the last {rule.patience} evaluations the held-out loss improved by {improvement.mean:.3g}, "
             f"by {improvement.high:.3g} at most")
    if improvement.high < rule.min_improvement:
        return Decision(True, f"{found}: less than the {rule.min_improvement:g} asked for", evidence)
    return Decision(False, f"{found}; a stop needs that below {rule.min_improvement:g}", evidence)


def choose_best(history: Sequence[ArrayLike], *, level: float = 0.95) -> BestEvaluation:
    """The evaluation with the lowest mean loss, the last one, and those not shown to be worse than the best."""
    losses_ES = _same_sequences(history)
    best, last = int(losses_ES.mean(axis=1).argmin()), len(losses_ES) - 1
    against_best = [compare_losses(losses_ES[best], losses, level=level) for losses in losses_ES]
    ties = tuple(i for i, found in enumerate(against_best) if i != best and found.verdict != "worse")
    if best == last:
        reason = f"the last evaluation ({last}) is the best"
    elif last in ties:
        reason = f"evaluation {best} has the lowest mean; the last ({last}) is not shown to be worse"
    else:
        reason = f"evaluation {best} is the best; the last ({last}) is worse by {against_best[last].change}"
    return BestEvaluation(best, last, ties, reason)


def widening_gap(train_losses: ArrayLike, held_out_losses: ArrayLike, *, level: float = 0.99) -> str | None:
    """A sentence where the gap between train and held-out loss widens over the evaluations, None where not shown.

    Widening means an upward trend (Mann–Kendall, one-sided, at `level`) that has grown by 1 % of the held-out loss.
    """
    train, held_out = finite_vector("train loss", train_losses), finite_vector("held-out loss", held_out_losses)
    if train.size != held_out.size:
        raise DataError(f"{train.size} train and {held_out.size} held-out losses: give one of each per evaluation")
    gaps = held_out - train
    if mann_kendall_p(gaps) > 1 - level or gaps[-1] - gaps[0] < GAP_WORTH_SAYING * abs(held_out[-1]):
        return None
    best = int(held_out.argmin())
    said = f"the gap between train and held-out loss widened from {gaps[0]:.3g} to {gaps[-1]:.3g}"
    if mann_kendall_p(held_out[best:]) <= 1 - level:
        was, now = held_out[best], held_out[-1]
        return f"{said}, and held-out loss rose from {was:.4g} at evaluation {best} to {now:.4g}: over-fitting"
    return f"{said} over {gaps.size} evaluations: the training text is learned by heart faster than the language"


def mann_kendall_p(values: ArrayLike) -> float:
    """Mann–Kendall: the chance that values in random order rise as steadily as these. Fewer than 4 cannot show 5 %."""
    series = finite_vector("value", values)
    n = series.size
    rises = sum(float(np.sign(series[i + 1 :] - series[i]).sum()) for i in range(n - 1))
    inversions = math.floor((n * (n - 1) / 2 - rises) / 2)
    return float(_inversion_chances(n)[: inversions + 1].sum())


def _inversion_chances(n: int) -> Array:
    """How likely a random order of n values has 0, 1, 2, … pairs the wrong way round."""
    chances = np.ones(1)
    for k in range(2, n + 1):
        chances = np.convolve(chances, np.full(k, 1 / k))
    return chances


def _trend_improvement(losses_ES: Array, patience: int, level: float) -> Estimate:
    """How far the least-squares line through the last `patience` + 1 evaluations falls over them."""
    times = np.arange(patience + 1) - patience / 2
    weights = -times * patience / (times**2).sum()
    improvement_S = weights @ losses_ES[-patience - 1 :]
    by_sequences = improvement_S.var(ddof=1) / improvement_S.size
    jitter, degrees = _jitter_variance(losses_ES.mean(axis=1))
    by_jitter = jitter * (weights**2).sum()
    total = by_sequences + by_jitter
    # Welch–Satterthwaite: the degrees of freedom of a sum of two estimated variances
    spread = by_sequences**2 / (improvement_S.size - 1) + by_jitter**2 / degrees
    half = standard_errors(level, total**2 / spread) * math.sqrt(total) if total else 0.0
    middle = float(improvement_S.mean())
    return Estimate(middle, middle - half, middle + half, improvement_S.size, level)


def _jitter_variance(means_E: Array) -> tuple[float, float]:
    """The variance of recent evaluations about their trend, and its degrees of freedom.

    From second differences: a line has none, and independent scatter gives them 6 times its variance. They overlap, so
    m of them are worth m / 1.94. A bend in the trend adds to them, which errs on the side of training on.
    """
    bends = np.diff(means_E, n=2)[-RECENT:]
    return float((bends**2).mean()) / 6, bends.size / (1 + 2 * ((4 / 6) ** 2 + (1 / 6) ** 2))


def _same_sequences(history: Sequence[ArrayLike]) -> Array:
    """The history as a matrix [evaluation, sequence]."""
    evaluations = [finite_vector(f"loss of evaluation {i}, sequence", losses) for i, losses in enumerate(history)]
    sizes = sorted({losses.size for losses in evaluations})
    if len(sizes) != 1 or sizes[0] < 2:
        raise DataError(f"expected the same 2 or more sequences at every evaluation, found sizes {sizes}")
    return np.stack(evaluations)


def _normal(quantile: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(quantile))
