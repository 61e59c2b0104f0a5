"""Training step faults: the loss, its gradient, accumulation over micro-batches, the optimizer, and what the log says."""

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
from assay.guard.loss_preflight import Gradients, check_precision, loss_gradients
from assay.guard.training_guards import check_detectors, check_gradients, check_replicas, parameter_digests
from assay.learn import loop, objectives
from assay.learn.loop import Accumulated, Step
from assay.learn.objectives import Loss, Objective
from assay.model import attention, transformer
from assay.model.transformer import Block, Transformer
from assay.testing import tiny_training
from assay.testing.fault_injection import Plant, fault, in_place_of, swap, together
from assay.testing.tiny_models import tiny_model
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
        _, found = accumulated_gradients(model, batch)
    return [check_gradients(found, names)]


def as_it_will_run(folder: Path, plant: Plant) -> list[Verdict]:
    """A batch as the run computes it, where a kernel may be wrong, against fp32 with none. The tiny model itself computes in fp32 here,
    since not every CPU multiplies in bf16: rounding is none of the fault."""
    model, batch = tiny_model(), TinyRun().order().batch(0)
    with plant(folder):
        found = accumulated_gradients(model, batch)
    return [check_precision(model, objectives.next_token, batch, found)]


def accumulated_gradients(model: Transformer, batch: Batch) -> Gradients:
    weight = float(batch.weight.sum())
    return loss_gradients(model, lambda: loop.accumulated(model, objectives.next_token, batch, MICRO_ROWS, weight).loss, backward=False)


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


fault("mean of micro-batch means", rows=("L01",), stage="loss", check="accumulation", job=a_loss_preflight())(
    # Every micro-batch divides by its own weight: short ones count as much as long ones.
    lambda _: accumulating(lambda loss, own_weight, parts, weight: loss / own_weight / parts))
fault("micro-batches never averaged", rows=("L02",), stage="loss", check="accumulation", job=a_loss_preflight())(
    # The count of micro-batches is lost on its way: their means are summed.
    lambda _: accumulating(lambda loss, own_weight, parts, weight: loss / own_weight))


@fault("objective that takes a mean", rows=("L03",), stage="loss", check="accumulation", job=a_loss_preflight())
@in_place_of(objectives, "next_token")
def objective_that_takes_a_mean(usual: Any, model: Transformer, batch: Batch) -> Loss:
    """A loss of one's own that ignores the count it is given, where the loop counts on a sum."""
    loss = usual(model, batch)
    return loss._replace(total=loss.total / loss.weight)


@fault("divided by the configured window", rows=("L04",), stage="loss", check="accumulation", job=a_loss_preflight())
def configured_window(_: Path) -> AbstractContextManager[None]:
    """Right for every window but the last of an epoch, which is shorter than the first was."""
    configured: list[float] = []

    def share(loss: Tensor, own_weight: float, parts: int, weight: float) -> Tensor:
        configured.append(float(parts))
        return loss / weight * (parts / configured[0])

    return accumulating(share)

# ---------------------------------------------------------------- what the loss is of


fault("shifted twice", rows=("L05",), stage="loss", check="loss", job=a_loss_preflight())(
    # The token after the next is learned, and the loss falls all the same.
    lambda _: learning_from(targets=lambda tokens: tokens.roll(-2, 1)))
fault("not shifted", rows=("L06",), stage="loss", check="loss", job=a_loss_preflight())(
    # The model learns to copy its input.
    lambda _: learning_from(targets=lambda tokens: tokens))
fault("padding counted", rows=("L07",), stage="loss", check="padding", job=a_loss_preflight())(
    # Labels are a clone of the input, without a mask.
    lambda _: learning_from(weight=torch.ones_like))


@fault("gradient scaled by the first token's", rows=("L11", "S6"), stage="kernel", check="loss", job=a_loss_preflight())
@in_place_of(objectives, "linear_cross_entropy")
def first_tokens_gradient(_: Any, hidden: Tensor, head: Tensor, targets: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The fused kernel's forward is right; its backward takes grad_output[0] for every token."""
    losses = F.cross_entropy(hidden.float() @ head.T, targets, reduction="none")
    backward = weight[0] * losses.sum()
    return backward - backward.detach() + (weight * losses).sum().detach(), losses.detach()


fault("window ignored by attention", rows=("L12",), stage="kernel", check="attention", job=a_loss_preflight("mistral"))(
    # The backend has no sliding window and says nothing.
    in_place_of(attention, "document_causal_mask")(lambda usual, q, q_place, k, k_place, window: usual(q, q_place, k, k_place, None)))
fault("soft cap ignored by the model", rows=("L12",), stage="kernel", check="attention", job=a_loss_preflight("assay"))(
    lambda _: swap(transformer, "softcap", lambda logits, cap: logits))
fault("soft cap ignored by the loss", rows=("L12",), stage="kernel", check="loss", job=a_loss_preflight("assay"))(
    in_place_of(objectives, "linear_cross_entropy")(lambda usual, *parts, softcap=None, **options: usual(*parts, **options)))


@fault("backward of a fused kernel gives twice the gradient", rows=("L12",), stage="kernel", check="precision", job=as_it_will_run)
@in_place_of(transformer, "gated")
def doubled_backward(usual: Any, inner: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Values are right, so that only a comparison of gradients can tell."""
    out = usual(inner, activation)
    return 2 * out - out.detach()


fault("values of the first layer not mixed in", rows=("L12",), stage="kernel", check="attention", job=a_loss_preflight("mixed"))(
    lambda _: swap(transformer, "mix_values", lambda v, first, shares: v))
fault("gates of the heads ignored", rows=("L12",), stage="kernel", check="attention", job=a_loss_preflight("mixed"))(
    lambda _: swap(transformer, "gate_heads", lambda attended, gates: attended))

# ---------------------------------------------------------------- evaluation that is still training


fault("dropout in evaluation", rows=("E01",), stage="eval", check="determinism", job=a_loss_preflight())(
    # Attention is handed its dropout whatever the mode.
    lambda _: together(torch.random.fork_rng(), swap(
        F, "scaled_dot_product_attention", partial(F.scaled_dot_product_attention, dropout_p=0.1))))
fault("never in evaluation mode", rows=("E02",), stage="eval", check="determinism", job=a_loss_preflight())(
    lambda _: swap(Transformer, "eval", lambda self: self))

# ---------------------------------------------------------------- updates that do not happen


@fault("updates below the rounding", rows=("O01",), stage="precision", check="movement", job=a_training_run(TinyRun(lr=2e-6, in_bf16=True)))
@in_place_of(loop, "guarded_step")
def updates_below_the_rounding(usual: Any, optimizer: torch.optim.Optimizer, alarm: loop.Alarm) -> None:
    """The weights are bf16, and a step is smaller than half of what they can tell apart."""
    usual(optimizer, alarm)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.copy_(parameter.bfloat16())


fault("every step skipped", rows=("O02",), stage="precision", check="steps", job=a_training_run())(
    # A gradient scaler finds an overflow each time, and the loop counts on.
    lambda _: swap(loop, "guarded_step", lambda optimizer, alarm: None))


@fault("optimizer of tensors before wrapping", rows=("O07",), stage="optimizer", check="optimizer", job=a_training_run())
@in_place_of(tiny_training, "make_optimizer")
def optimizer_before_wrapping(_: Any, model: Transformer, lr: float) -> torch.optim.Optimizer:
    """The wrapper gives the model parameters of its own; the optimizer steps on the old ones."""
    optimizer = make_optimizer(model, lr)
    for name, parameter in list(model.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, nn.Parameter(parameter.detach().clone()))
    return optimizer


@fault("layer frozen by mistake", rows=("O07", "O10"), stage="optimizer", check="optimizer", job=a_training_run())
@in_place_of(tiny_training, "make_optimizer")
def layer_frozen_by_mistake(_: Any, model: Transformer, lr: float) -> torch.optim.Optimizer:
    """The plan lists a layer as trainable that was frozen on the way."""
    model.get_parameter("blocks.1.mlp.down.weight").requires_grad_(False)
    return make_optimizer(model, lr)


fault("gradient cut by checkpointing", rows=("O05",), stage="optimizer", check="gradients", job=a_backward_pass)(
    # Recomputed blocks whose inputs ask for no gradient pass none on.
    in_place_of(Block, "forward")(lambda usual, self, x, *rest: usual(self, x.detach(), *rest)))


@fault("scheduler stepped per micro-batch", rows=("O08",), stage="optimizer", check="learning_rate", job=a_training_run(TinyRun(steps=6)))
@in_place_of(loop, "train")
def scheduler_per_micro_batch(usual: Any, *parts: Any, schedule: Callable[[int], float], **options: Any) -> Iterator[Step]:
    """It reaches its end long before the run does."""
    return usual(*parts, schedule=lambda step: schedule(ROWS_A_STEP // MICRO_ROWS * step), **options)


fault("replicas part", rows=("O12", "O13"), stage="distributed", check="replicas", job=two_ranks)(
    # The gradients of the norms are not reduced: each rank steps on its own.
    in_place_of(tiny_training, "reduce_gradient")(lambda usual, name, copies: None if "norm" in name else usual(name, copies)))

# ---------------------------------------------------------------- values that are not numbers


fault("NaN filtered from the log", rows=("O03",), stage="logging", check="finite", job=a_training_run())(
    # One micro-batch is NaN. What is logged is the mean of what came before: only the raw values know.
    lambda _: together(nan_in_one_micro_batch(), filtered_log()))
fault("NaN stepped on", rows=("O03",), stage="logging", check="weights", job=a_training_run())(
    # The filter sits before the alarm as well: the curve is plausible to the end, and the weights are gone.
    lambda _: together(nan_in_one_micro_batch(), filtered_log(), swap(loop, "_raise_if_bad", lambda index, values: None)))


@fault("NaN counter that never counts", rows=("O04",), stage="logging", check="self_test", job=the_alarms)
@in_place_of(series_checks, "check_finite")
def counter_that_never_counts(_: Any, values: Any, name: str = "loss") -> Verdict:
    """NaN is not equal to NaN, so nothing is ever found."""
    found = sum(value == math.nan for value in values)
    return proven("finite", f"{found} nan iterations in {name}")


fault("alarm that never rings", rows=("O04",), stage="logging", check="self_test", job=the_alarms)(
    lambda _: swap(loop, "_raise_if_bad", lambda index, values: None))

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
