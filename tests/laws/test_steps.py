"""Laws of the step."""

import math
from dataclasses import replace

import pytest
import torch

from assay.errors import GuardStop
from assay.learn.loop import train
from assay.learn.objectives import Loss, next_token
from assay.learn.optim import adamw
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.testing.tiny_models import tiny_model
from assay.testing.tiny_training import TinyRun

LR = 1e-3


class BadGradient(torch.autograd.Function):
    """A right loss with a wrong gradient."""

    @staticmethod
    def forward(ctx, total, bad):
        ctx.bad = bad
        return total.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.bad, None


def ragged_batches(steps: int):
    """Eight rows a step, of which each counts for another number of tokens."""
    order = TinyRun(rows=8).order()
    for step in range(steps):
        batch = order.batch(step)
        kept = torch.arange(batch.tokens.shape[1])[None] < torch.randint(3, 33, (8, 1), generator=generator(0, "ragged", step))
        yield replace(batch, weight=batch.weight * kept)


def trained(micro: int) -> tuple[torch.Tensor, list[float]]:
    """Where three plain steps of descent end: each is its gradient, whose last bits stay last bits (Adam would divide by them)."""
    model = tiny_model("qwen3")
    steps = train(model, torch.optim.SGD(model.parameters(), 0.1), ragged_batches(3), next_token, micro=micro)
    losses = [float(step.loss) for step in steps]
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().double(), losses


@pytest.mark.arithmetic
@pytest.mark.parametrize("micro", [1, 2, 3, 5])
def test_micro_batch_size_does_not_change_a_step(micro: int):
    (end, losses), (whole, at_once) = trained(micro), trained(8)
    start = torch.nn.utils.parameters_to_vector(tiny_model("qwen3").parameters()).detach().double()
    assert losses == pytest.approx(at_once, rel=1e-6)
    assert float((end - whole).norm() / (whole - start).norm()) < 1e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_in_one_micro_batch_stops_before_the_step(bad: float, where: str):
    calls = iter(range(1000))

    def objective(model: Transformer, batch) -> Loss:
        loss = next_token(model, batch)
        if next(calls) != 9:  # the second micro-batch of the third step
            return loss
        return loss._replace(total=loss.total * bad if where == "loss" else BadGradient.apply(loss.total, bad))

    model = tiny_model("qwen3")
    steps = train(model, adamw(model.named_parameters(), LR), ragged_batches(4), objective, micro=2)
    assert [next(steps).index, next(steps).index] == [0, 1]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(GuardStop, match=r"step 2: .*the step was not taken"):
        next(steps)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
