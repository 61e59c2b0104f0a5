"""Number format faults: the loss scale of fp16, masters in bf16, and moments in 8 bits. Bases in few bits are with the adapters."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.guard.loss_preflight import check_precision, loss_gradients
from assay.guard.training_guards import UpdateAccount, check_coded_moments
from assay.learn import loop, loss_scaling, low_bit_adamw, objectives
from assay.learn.loop import Accumulated
from assay.learn.loss_scaling import ScaledAccumulate
from assay.learn.low_bit_adamw import adamw_8bit, adamw_bf16_masters
from assay.model.placement import place_for_training
from assay.model.transformer import Transformer
from assay.testing.fault_injection import Plant, fault, in_place_of, swap
from assay.testing.tiny_models import tiny_model
from assay.testing.tiny_training import MICRO_ROWS, TinyRun, run_guarded
from assay.verdict import Verdict

TOO_LARGE = 2.0**26  # a scale at which gradients overflow
SMALL_RATE, LARGE = 1e-4, 10.0  # steps, and weights at which bf16 tells nothing apart that is so close

# ---------------------------------------------------------------- jobs


class HalfRun(TinyRun):
    """The tiny run, computed in fp16."""

    def model(self) -> Transformer:
        model = super().model()
        model.compute_dtype = torch.float16
        return model


def a_run_in_fp16(folder: Path, plant: Plant) -> list[Verdict]:
    """Its first gradients overflow, and the scale must find its size."""
    with plant(folder), swap(loss_scaling, "FIRST_SCALE", TOO_LARGE):
        scaling = ScaledAccumulate(loop.accumulated)
        with swap(loop, "train", lambda *given, train=loop.train, **named: train(*given, accumulate=scaling, **named)):
            return run_guarded(HalfRun(steps=3))


def a_scaled_gradient(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: the gradient of one batch as the run computes it, against fp32 without a scale."""
    model, batch = HalfRun().model(), TinyRun().order().batch(0)
    weight = float(batch.weight.sum())
    with plant(folder):
        scaling = ScaledAccumulate(loop.accumulated)
        found = loss_gradients(model, lambda: scaling(model, objectives.next_token, batch, MICRO_ROWS, weight).loss, backward=False)
    return [check_precision(model, objectives.next_token, batch, found)]


def a_run_on_bf16_masters(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: a run on large weights, whose neighbours in bf16 are farther away than any step."""
    run = TinyRun(lr=SMALL_RATE)
    model = run.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(LARGE)
    model = place_for_training(model, "cpu", compute=torch.float32, masters=torch.bfloat16)
    optimizer, account = adamw_bf16_masters(model.named_parameters(), run.lr, seed=run.seed), UpdateAccount(model, drawn=True)
    batches = (run.order().batch(step) for step in range(run.steps))
    with plant(folder):
        for _ in loop.train(model, optimizer, batches, objectives.next_token, micro=run.micro):
            account.record_step(1.0, run.lr)
    return [account.check_moved()]


def moments_in_8_bits(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return check_coded_moments(adamw_8bit(tiny_model().named_parameters(), 1e-3))

# ---------------------------------------------------------------- faults


@fault("loss scale left in the gradients", rows=("O02",), stage="precision", check="precision", job=a_scaled_gradient)
@in_place_of(ScaledAccumulate, "__call__")
def scale_left_in(usual: Any, scaling: ScaledAccumulate, model: Transformer, *given: Any) -> Accumulated:
    """What the loss was multiplied by is never taken out: clipping then decides every step, and the loss falls all the same."""
    found = usual(scaling, model, *given)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scaling.scale)
    return found


fault("loss scale never lowered", rows=("O02",), stage="precision", check="finite", job=a_run_in_fp16)(
    # An overflow is not looked for: a step is taken on what is no number.
    lambda _: swap(loss_scaling, "_finite", lambda loss, gradients: (True, False)))
fault("bf16 masters rounded to the nearest", rows=("O01",), stage="precision", check="movement", job=a_run_on_bf16_masters)(
    # Steps of less than half the distance between two numbers are lost, every one of them.
    lambda _: swap(low_bit_adamw, "stochastically_rounded", lambda values, key, step: values.bfloat16()))


fault("moments in 8 bits that are never read", rows=("O01",), stage="optimizer", check="moments", job=moments_in_8_bits)(
    # Every step is taken as if it were the first: codes are right, and nobody asks for them.
    lambda _: swap(low_bit_adamw, "_read", lambda state, name, shape, signed: torch.zeros(shape)))


@fault("moments with the scale of the block before", rows=("O01",), stage="optimizer", check="moments", job=moments_in_8_bits)
@in_place_of(low_bit_adamw, "decode_moments")
def scale_of_the_block_before(usual: Any, codes: Tensor, scale: Tensor, shape: torch.Size, signed: bool) -> Tensor:
    """Where neighbours are about as large, nothing is seen; where they are not, elements take steps that others' gradients sized."""
    return usual(codes, scale.roll(1), shape, signed)
