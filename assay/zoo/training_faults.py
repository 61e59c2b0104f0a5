"""Training step faults: the loss, its gradient, accumulation over micro-batches, the optimizer, and what the log says."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assay.data.batch import Batch
from assay.guard import series_checks
from assay.guard.loss_preflight import check_precision, loss_gradients
from assay.guard.training_guards import check_detectors, check_gradients, check_replicas, parameter_digests
from assay.learn import loop, objectives
from assay.learn.loop import Accumulated, Step
from assay.learn.objectives import Loss, Objective
from assay.model import attention, transformer
from assay.model.transformer import Block, Transformer
from assay.testing import tiny_training
from assay.testing.fault_injection import Plant, fault
from assay.testing.tiny_models import swap, tiny_model
from assay.testing.tiny_training import MICRO_ROWS, ROWS_A_STEP, TinyRun, a_loss_preflight, a_training_run, make_optimizer
from assay.verdict import Verdict, proven

# ---------------------------------------------------------------- jobs of their own


def the_alarms(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [check_detectors()]


def a_backward_pass(folder: Path, plant: Plant) -> list[Verdict]:
    """One, through the loop's own accumulation: who got a gradient."""
    model, batch = tiny_model(), TinyRun().order().batch(0)
    names = [name for name, _ in model.named_parameters()]
    with plant(folder):
        _, found = loss_gradients(model, lambda: loop.accumulated(model, objectives.next_token, batch, MICRO_ROWS,
                                                                  float(batch.weight.sum())).loss,
                             backward=False)
    return [check_gradients(found, names)]


def as_it_will_run(folder: Path, plant: Plant) -> list[Verdict]:
    """A batch as the run computes it, where a kernel may be wrong, against fp32 with none. The tiny model itself computes in fp32 here,
    since not every CPU multiplies in bf16: rounding is none of the fault."""
    model, batch = tiny_model(), TinyRun().order().batch(0)
    with plant(folder):
        found = loss_gradients(model, lambda: loop.accumulated(model, objectives.next_token, batch, MICRO_ROWS,
                                                               float(batch.weight.sum())).loss,
                          backward=False)
    return [check_precision(model, objectives.next_token, batch, found)]


def two_ranks(folder: Path, plant: Plant) -> list[Verdict]:
    """Both step on the mean of their gradients, as replicas do; then each says what it holds."""
    ranks = [tiny_model(), tiny_model()]
    optimizers = [make_optimizer(model, 1e-3) for model in ranks]
    order = TinyRun().order()
    with plant(folder):
        for step in range(2):
            for rank, model in enumerate(ranks):
                batch = replace(order, rank=rank, world=len(ranks)).batch(step)
                loop.accumulated(model, objectives.next_token, batch, ROWS_A_STEP, float(batch.weight.sum()))
            tiny_training.reduce_gradients(ranks)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [check_replicas([parameter_digests(model) for model in ranks])]

# ---------------------------------------------------------------- how micro-batches add up


@fault("mean of micro-batch means", rows=("L01",), stage="loss", check="accumulation", job=a_loss_preflight())
def mean_of_means(_: Path) -> AbstractContextManager[None]:
    """Every micro-batch divides by its own weight: short ones count as much as long ones."""
    return accumulating(lambda loss, own_weight, parts, weight: loss / own_weight / parts)


@fault("micro-batches never averaged", rows=("L02",), stage="loss", check="accumulation", job=a_loss_preflight())
def never_averaged(_: Path) -> AbstractContextManager[None]:
    """The count of micro-batches is lost on its way: their means are summed."""
    return accumulating(lambda loss, own_weight, parts, weight: loss / own_weight)


@fault("objective that takes a mean", rows=("L03",), stage="loss", check="accumulation", job=a_loss_preflight())
def objective_that_takes_a_mean(_: Path) -> AbstractContextManager[None]:
    """A loss of one's own that ignores the count it is given, where the loop counts on a sum."""
    whole = objectives.next_token

    def averaged(model: Transformer, batch: Batch) -> Loss:
        loss = whole(model, batch)
        return loss._replace(total=loss.total / loss.weight)

    return swap(objectives, "next_token", averaged)


@fault("divided by the configured window", rows=("L04",), stage="loss", check="accumulation", job=a_loss_preflight())
def configured_window(_: Path) -> AbstractContextManager[None]:
    """Right for every window but the last of an epoch, which is shorter than the first was."""
    configured: list[float] = []

    def share(loss: Tensor, own_weight: float, parts: int, weight: float) -> Tensor:
        configured.append(float(parts))
        return loss / weight * (parts / configured[0])

    return accumulating(share)

# ---------------------------------------------------------------- what the loss is of


@fault("shifted twice", rows=("L05",), stage="loss", check="loss", job=a_loss_preflight())
def shifted_twice(_: Path) -> AbstractContextManager[None]:
    """The token after the next is learned, and the loss falls all the same."""
    return learning_from(targets=lambda tokens: tokens.roll(-2, 1))


@fault("not shifted", rows=("L06",), stage="loss", check="loss", job=a_loss_preflight())
def not_shifted(_: Path) -> AbstractContextManager[None]:
    """The model learns to copy its input."""
    return learning_from(targets=lambda tokens: tokens)


@fault("padding counted", rows=("L07",), stage="loss", check="padding", job=a_loss_preflight())
def _padding_counted(_: Path) -> AbstractContextManager[None]:
    """Labels are a clone of the input, without a mask."""
    return learning_from(weight=torch.ones_like)


@fault("gradient scaled by the first token's", rows=("L11", "S6"), stage="kernel", check="loss", job=a_loss_preflight())
def first_tokens_gradient(_: Path) -> AbstractContextManager[None]:
    """The fused kernel's forward is right; its backward takes grad_output[0] for every token."""
    def entropy(hidden: Tensor, head: Tensor, targets: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(hidden.float() @ head.T, targets, reduction="none")
        backward = weight[0] * losses.sum()
        return backward - backward.detach() + (weight * losses).sum().detach(), losses.detach()

    return swap(objectives, "linear_cross_entropy", entropy)


@fault("window ignored by attention", rows=("L12",), stage="kernel", check="attention", job=a_loss_preflight("mistral"))
def window_ignored(_: Path) -> AbstractContextManager[None]:
    """The backend has no sliding window and says nothing."""
    whole = attention.document_causal_mask
    return swap(attention, "document_causal_mask", lambda q, q_place, k, k_place, window: whole(q, q_place, k, k_place, None))


@fault("soft cap ignored by the model", rows=("L12",), stage="kernel", check="attention", job=a_loss_preflight("assay"))
def cap_ignored_by_the_model(_: Path) -> AbstractContextManager[None]:
    return swap(transformer, "softcap", lambda logits, cap: logits)


@fault("soft cap ignored by the loss", rows=("L12",), stage="kernel", check="loss", job=a_loss_preflight("assay"))
def cap_ignored_by_the_loss(_: Path) -> AbstractContextManager[None]:
    whole = objectives.linear_cross_entropy
    return swap(objectives, "linear_cross_entropy", lambda *parts, softcap=None, **options: whole(*parts, **options))


@fault("backward of a fused kernel gives twice the gradient", rows=("L12",), stage="kernel", check="precision", job=as_it_will_run)
def doubled_backward(_: Path) -> AbstractContextManager[None]:
    """Values are right, so that only a comparison of gradients can tell."""
    whole = transformer.gated

    def doubled(inner: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        out = whole(inner, activation)
        return 2 * out - out.detach()

    return swap(transformer, "gated", doubled)


@fault("values of the first layer not mixed in", rows=("L12",), stage="kernel", check="attention", job=a_loss_preflight("mixed"))
def values_not_mixed(_: Path) -> AbstractContextManager[None]:
    return swap(transformer, "mix_values", lambda v, first, shares: v)


@fault("gates of the heads ignored", rows=("L12",), stage="kernel", check="attention", job=a_loss_preflight("mixed"))
def gates_ignored(_: Path) -> AbstractContextManager[None]:
    return swap(transformer, "gate_heads", lambda attended, gates: attended)

# ---------------------------------------------------------------- evaluation that is still training


@fault("dropout in evaluation", rows=("E01",), stage="eval", check="determinism", job=a_loss_preflight())
@contextlib.contextmanager
def dropout_in_evaluation(_: Path) -> Iterator[None]:
    """Attention is handed its dropout whatever the mode."""
    dropping = partial(F.scaled_dot_product_attention, dropout_p=0.1)
    with torch.random.fork_rng(), swap(F, "scaled_dot_product_attention", dropping):
        yield


@fault("never in evaluation mode", rows=("E02",), stage="eval", check="determinism", job=a_loss_preflight())
def never_in_evaluation_mode(_: Path) -> AbstractContextManager[None]:
    return swap(Transformer, "eval", lambda self: self)

# ---------------------------------------------------------------- updates that do not happen


@fault("updates below the rounding", rows=("O01",), stage="precision", check="movement", job=a_training_run(TinyRun(lr=2e-6, in_bf16=True)))
def updates_below_the_rounding(_: Path) -> AbstractContextManager[None]:
    """The weights are bf16, and a step is smaller than half of what they can tell apart."""
    whole = loop.guarded_step

    def rounded(optimizer: torch.optim.Optimizer, alarm: loop.Alarm) -> None:
        whole(optimizer, alarm)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.bfloat16())

    return swap(loop, "guarded_step", rounded)


@fault("every step skipped", rows=("O02",), stage="precision", check="steps", job=a_training_run())
def every_step_skipped(_: Path) -> AbstractContextManager[None]:
    """A gradient scaler finds an overflow each time, and the loop counts on."""
    return swap(loop, "guarded_step", lambda optimizer, alarm: None)


@fault("optimizer of tensors before wrapping", rows=("O07",), stage="optimizer", check="optimizer", job=a_training_run())
def optimizer_before_wrapping(_: Path) -> AbstractContextManager[None]:
    """The wrapper gives the model parameters of its own; the optimizer steps on the old ones."""
    def wrapped_later(model: Transformer, lr: float) -> torch.optim.Optimizer:
        optimizer = make_optimizer(model, lr)
        for name, parameter in list(model.named_parameters()):
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, nn.Parameter(parameter.detach().clone()))
        return optimizer

    return swap(tiny_training, "make_optimizer", wrapped_later)


@fault("layer frozen by mistake", rows=("O07", "O10"), stage="optimizer", check="optimizer", job=a_training_run())
def layer_frozen_by_mistake(_: Path) -> AbstractContextManager[None]:
    """The plan lists a layer as trainable that was frozen on the way."""
    def frozen(model: Transformer, lr: float) -> torch.optim.Optimizer:
        model.get_parameter("blocks.1.mlp.down.weight").requires_grad_(False)
        return make_optimizer(model, lr)

    return swap(tiny_training, "make_optimizer", frozen)


@fault("gradient cut by checkpointing", rows=("O05",), stage="optimizer", check="gradients", job=a_backward_pass)
def gradient_cut(_: Path) -> AbstractContextManager[None]:
    """Recomputed blocks whose inputs ask for no gradient pass none on."""
    whole = Block.forward
    return swap(Block, "forward", lambda self, x, *rest: whole(self, x.detach(), *rest))


@fault("scheduler stepped per micro-batch", rows=("O08",), stage="optimizer", check="learning_rate", job=a_training_run(TinyRun(steps=6)))
def scheduler_per_micro_batch(_: Path) -> AbstractContextManager[None]:
    """It reaches its end long before the run does."""
    whole, often = loop.train, ROWS_A_STEP // MICRO_ROWS

    def train(*parts: Any, schedule: Callable[[int], float], **options: Any) -> Iterator[Step]:
        return whole(*parts, schedule=lambda step: schedule(often * step), **options)

    return swap(loop, "train", train)


@fault("replicas part", rows=("O12", "O13"), stage="distributed", check="replicas", job=two_ranks)
def replicas_part(_: Path) -> AbstractContextManager[None]:
    """The gradients of the norms are not reduced: each rank steps on its own."""
    whole = tiny_training.reduce_gradient
    return swap(tiny_training, "reduce_gradient", lambda name, copies: None if "norm" in name else whole(name, copies))

# ---------------------------------------------------------------- values that are not numbers


@fault("NaN filtered from the log", rows=("O03",), stage="logging", check="finite", job=a_training_run())
@contextlib.contextmanager
def nan_filtered_from_the_log(_: Path) -> Iterator[None]:
    """One micro-batch is NaN. What is logged is the mean of what came before: only the raw values know."""
    with nan_in_one_micro_batch(), filtered_log():
        yield


@fault("NaN stepped on", rows=("O03",), stage="logging", check="weights", job=a_training_run())
@contextlib.contextmanager
def nan_stepped_on(_: Path) -> Iterator[None]:
    """The filter sits before the alarm as well: the curve is plausible to the end, and the weights are gone."""
    with nan_in_one_micro_batch(), filtered_log(), swap(loop, "_raise_if_bad", lambda index, values: None):
        yield


@fault("NaN counter that never counts", rows=("O04",), stage="logging", check="self_test", job=the_alarms)
def counter_that_never_counts(_: Path) -> AbstractContextManager[None]:
    """NaN is not equal to NaN, so nothing is ever found."""
    def finite(values: Any, name: str = "loss") -> Verdict:
        found = sum(value == math.nan for value in values)
        return proven("finite", f"{found} nan iterations in {name}")

    return swap(series_checks, "check_finite", finite)


@fault("alarm that never rings", rows=("O04",), stage="logging", check="self_test", job=the_alarms)
def alarm_that_never_rings(_: Path) -> AbstractContextManager[None]:
    return swap(loop, "_raise_if_bad", lambda index, values: None)

# ---------------------------------------------------------------- where in our code they are planted


def accumulating(share: Callable[[Tensor, float, int, float], Tensor]) -> AbstractContextManager[None]:
    """`share` of (a micro-batch's summed loss, its weight, how many there are, the weight of all) goes backward."""
    def accumulated(model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> Accumulated:
        parts, total = list(batch.split(micro)), torch.zeros(())
        for part in parts:
            loss = share(objective(model, part).total, float(part.weight.sum()), len(parts), weight)
            loss.backward()
            total += loss.detach()
        return Accumulated(total, {})

    return swap(loop, "accumulated", accumulated)


def learning_from(*, targets: Callable[[Tensor], Tensor] = lambda tokens: tokens.roll(-1, 1),
                  weight: Callable[[Tensor], Tensor] = lambda weight: weight.roll(-1, 1)) -> AbstractContextManager[None]:
    """The objective with another idea of what to predict, or of what counts."""
    def next_token(model: Transformer, batch: Batch) -> Loss:
        states = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions)
        total, _ = objectives.linear_cross_entropy(states.flatten(0, 1), model.head_weight(), targets(batch.tokens).flatten(),
                                                   weight(batch.weight).flatten())
        return Loss(total, batch.weight.sum())

    return swap(objectives, "next_token", next_token)


def nan_in_one_micro_batch() -> AbstractContextManager[None]:
    """The ninth: step 4 of a practice, half of it."""
    whole, calls = objectives.next_token, iter(range(1 << 30))

    def next_token(model: Transformer, batch: Batch) -> Loss:
        loss = whole(model, batch)
        return loss._replace(total=loss.total * math.nan) if next(calls) == 8 else loss

    return swap(objectives, "next_token", next_token)


def filtered_log() -> AbstractContextManager[None]:
    """What is not finite is replaced by the last value that was."""
    last: dict[str, Tensor] = {}

    def kept(name: str, value: Tensor) -> Tensor:
        last[name] = value if bool(torch.isfinite(value)) else last[name] * 0.999
        return last[name]

    def step(index: int, loss: Tensor, grad_norm: Tensor, *rest: Any) -> Step:
        return Step(index, kept("loss", loss), kept("norm", grad_norm), *rest)

    return swap(loop, "Step", step)
