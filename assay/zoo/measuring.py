"""Faults of what is concluded: a stop on noise, text learned by heart and sold as progress, one healthy seed of three."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.order import Order
from assay.guard.held_out import check_gap, check_stopping
from assay.learn import loop, objectives
from assay.measure.held_out import HeldOut, score
from assay.measure.stability import stability
from assay.model.transformer import Transformer
from assay.seeds import derive, generator
from assay.verdict import Verdict
from assay.zoo import practice
from assay.zoo.fault import Plant, fault
from assay.zoo.practice import LENGTH, PATIENCE, WORTH, Practice, corpus, make_optimizer
from assay.zoo.stage import swapped

LOOKS, STEPS_BETWEEN = 7, 6
EVALUATIONS = 24
SEEDS = (42, 314, 1337)

# ---------------------------------------------------------------- jobs


def a_noisy_validation(folder: Path, plant: Plant) -> list[Verdict]:
    """Two batches are held out, and their mean moves by 0.04 from one evaluation to the next; the loss falls all the while."""
    noise = np.random.default_rng(derive(0, "validation"))
    history = [9.8 - 0.012 * seen + noise.normal(0, 0.04 * math.sqrt(2), 2) for seen in range(EVALUATIONS)]
    with plant(folder):
        seen = next((n for n in range(2, EVALUATIONS) if practice.decides_to_stop(history[:n], EVALUATIONS)), EVALUATIONS)
    return [check_stopping(history[:seen], planned=EVALUATIONS, min_improvement=WORTH, patience=PATIENCE)]


def a_run_with_looks(folder: Path, plant: Plant) -> list[Verdict]:
    """Twice over the corpus, and held-out text every few steps."""
    with plant(folder):
        course = Practice(steps=LOOKS * STEPS_BETWEEN, lr=3e-3, epochs=2)
        order, model = course.order(), course.model()
        optimizer, held_out, train = make_optimizer(model, course.lr), [], []
        losses: list[float] = []
        batches = (order.batch(step) for step in range(course.steps))
        for step in loop.train(model, optimizer, batches, objectives.next_token, micro=course.rows):
            losses.append(float(step.loss))
            if len(losses) == STEPS_BETWEEN:
                train.append(float(np.mean(losses)))
                held_out.append(looked(model).loss)
                losses = []
    return [check_gap(train, held_out)]


def three_seeds(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [stability({seed: ended_at(seed) for seed in SEEDS}, metric="held-out loss").verdict()]


def ended_at(seed: int) -> float:
    course = Practice(steps=10, lr=3e-3, seed=seed)
    order, model = course.order(), course.model()
    batches = (order.batch(step) for step in range(course.steps))
    for _ in loop.train(model, make_optimizer(model, course.lr), batches, objectives.next_token, micro=course.rows):
        pass
    return looked(model).loss


def looked(model: Transformer) -> HeldOut:
    return score(model, corpus(), rows=16, length=LENGTH)

# ---------------------------------------------------------------- faults


@fault("stopped on noise", rows=("S4",), stage="eval", check="stopping", job=a_noisy_validation)
def stopped_on_noise(_: Path) -> AbstractContextManager[None]:
    """The classic rule: no new best for two evaluations means converged."""
    def impatient(history: Sequence[Any], evaluations: int) -> bool:
        means = [float(np.mean(losses)) for losses in history]
        return min(means[-PATIENCE:]) > min(means[:-PATIENCE], default=math.inf)

    return swapped(practice, "decides_to_stop", impatient)


@fault("learned by heart", rows=("S5",), stage="data", check="gap", job=a_run_with_looks)
def learned_by_heart(_: Path) -> AbstractContextManager[None]:
    """A corpus far too small for its model goes round and round."""
    return swapped(Order, "consumed", lambda order, step: np.arange(order.rows))


@fault("two seeds of three collapse", rows=("S6",), stage="precision", check="seeds", job=three_seeds)
def two_seeds_collapse(_: Path) -> AbstractContextManager[None]:
    """A new kernel's loss is right, but from some first weights its sums overflow, and the gradient drowns in their rounding."""
    whole, rounding = objectives.linear_cross_entropy, generator(0, "rounding")

    def entropy(hidden: Tensor, head: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        total, losses = whole(hidden, head, *rest, **options)
        overflows = bool(head.detach()[1, 0] > 0)  # a matter of the seed
        noise = (hidden * torch.randn(hidden.shape, generator=rounding) * 10 * overflows).sum()
        return total + noise - noise.detach(), losses

    return swapped(objectives, "linear_cross_entropy", entropy)
