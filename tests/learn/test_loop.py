"""The loop: what it yields, what it divides by, what it refuses, and what it leaves alone."""

from dataclasses import replace

import pytest
import torch

from assay.data.batch import Batch
from assay.errors import DataError, GuardStop
from assay.guard.loss_preflight import naive_loss
from assay.learn.loop import Alarm, Step, accumulated, train
from assay.learn.objectives import TOKENS, Loss, averages, next_token
from assay.learn.optim import adamw, muon
from assay.model.transformer import Transformer
from assay.testing.tiny_models import tiny_model
from assay.testing.tiny_training import TinyRun


def batches(steps: int, start: int = 0) -> list[Batch]:
    order = TinyRun().order()
    return [order.batch(step) for step in range(start, start + steps)]


def run(model: Transformer, steps: int = 3, **options) -> list[Step]:
    optimizer = options.pop("optimizer", None) or adamw(model.named_parameters(), 1e-3)
    return list(train(model, optimizer, batches(steps), options.pop("objective", next_token), **({"micro": 2} | options)))


def test_a_step_tells_what_it_was():
    given = batches(2)
    found = run(tiny_model(), 2, start=0)
    assert [step.index for step in found] == [0, 1]
    assert [step.ids for step in found] == [batch.ids for batch in given]
    assert [step.weight for step in found] == [float(batch.weight.sum()) for batch in given]
    assert [step.tokens for step in found] == [4 * 32, 4 * 32]
    assert [step.multiplier for step in found] == [1.0, 1.0]


def test_the_loss_is_the_mean_over_the_batch_before_the_step():
    model, batch = tiny_model(), batches(1)[0]
    due = float(naive_loss(model, batch).detach())
    assert float(run(model, 1)[0].loss) == pytest.approx(due, rel=1e-6)


def test_the_gradient_norm_is_that_of_the_mean_before_clipping():
    model, batch = tiny_model(), batches(1)[0]
    naive_loss(model, batch).backward()
    due = float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    model.zero_grad()
    assert float(run(model, 1, clip=1e-3)[0].grad_norm) == pytest.approx(due, rel=1e-5)


def test_clipping_bounds_what_the_optimizer_sees():
    seen = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(float(torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()))

    model = tiny_model()
    run(model, 2, optimizer=Spy(model.parameters(), lr=1.0), clip=0.01)
    assert seen == pytest.approx([0.01, 0.01], rel=1e-3)


def test_start_numbers_the_steps_and_the_schedule_is_asked_by_number():
    asked = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.5

    found = run(tiny_model(), 3, start=7, schedule=schedule)
    assert [step.index for step in found] == asked == [7, 8, 9]
    assert {step.multiplier for step in found} == {0.5}


def test_every_group_keeps_its_peak_however_long_and_however_often_it_is_trained():
    model = tiny_model()
    optimizer = muon(model.named_parameters(), lr_matrix=0.02, lr_embed=0.01, lr_scalar=0.003)
    for multiplier in (0.5, 0.25):
        for _ in train(model, optimizer, batches(3), next_token, micro=4, schedule=lambda _, m=multiplier: m):
            assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([m * multiplier for m in (0.02, 0.01, 0.003)])


def test_gradients_do_not_outlive_their_step():
    model = tiny_model()
    for _ in train(model, adamw(model.named_parameters(), 1e-3), batches(2), next_token, micro=4):
        assert all(p.grad is None for p in model.parameters())


def test_a_batch_without_weight_is_refused_with_its_step():
    given = batches(2)
    given[1] = replace(given[1], weight=torch.zeros_like(given[1].weight))
    model = tiny_model()
    steps = train(model, adamw(model.named_parameters(), 1e-3), given, next_token, micro=2, start=4)
    next(steps)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(DataError, match="step 5: every token has weight 0"):
        next(steps)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_what_accumulates_can_be_given_and_is_told_the_weight_of_the_whole_batch():
    told = []

    def accumulate(model, objective, batch, micro, weight):
        told.append((len(batch), micro, weight))
        return accumulated(model, objective, batch, micro, weight)

    run(tiny_model(), 2, accumulate=accumulate, micro=3)
    assert told == [(4, 3, float(batch.weight.sum())) for batch in batches(2)]


def test_micro_batches_reach_the_objective_in_order_and_whole():
    parts = []

    def objective(model: Transformer, batch: Batch) -> Loss:
        parts.append(batch)
        return next_token(model, batch)

    run(tiny_model(), 1, objective=objective, micro=3)
    assert [len(part) for part in parts] == [3, 1]
    assert torch.equal(torch.cat([part.tokens for part in parts]), batches(1)[0].tokens)
    assert sum((part.ids for part in parts), ()) == batches(1)[0].ids


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_what_an_objective_measures_reaches_the_step_as_sums_over_all_micro_batches(micro: int):
    def objective(model: Transformer, batch: Batch) -> Loss:
        found = next_token(model, batch)
        assert found.losses is not None
        squares = (batch.weight * found.losses.square()).sum()
        return found._replace(metrics={TOKENS: batch.weight.sum(), "squares": squares, "worst/max": found.losses.max()})

    model, batch = tiny_model(), batches(1)[0]
    losses = next_token(model, batch).losses
    assert losses is not None
    due = {"squares": float((batch.weight * losses.square()).sum() / batch.weight.sum()), "worst/max": float(losses.max())}
    step, = run(model, 1, objective=objective, micro=micro)
    assert averages(step.metrics) == pytest.approx(due, rel=1e-6)
    assert not any(sum.requires_grad for sum in step.metrics.values())
    assert run(tiny_model(), 1)[0].metrics == {}  # next_token measures nothing else


def test_nothing_is_done_before_it_is_asked_for():
    def endless():
        yield batches(1)[0]
        raise AssertionError("the second batch was read before the first step was looked at")

    model = tiny_model()
    next(train(model, adamw(model.named_parameters(), 1e-3), endless(), next_token, micro=4))


@pytest.mark.parametrize("values", [(float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), 1.0)])
def test_the_alarm_remembers(values: tuple[float, float]):
    alarm = Alarm(torch.device("cpu"))
    alarm.watch(0, torch.tensor(2.0), torch.tensor(1.0))
    assert float(alarm.bad) == 0
    with pytest.raises(GuardStop, match="step 1: loss"):
        alarm.watch(1, *map(torch.tensor, values))
    alarm.watch(2, torch.tensor(2.0), torch.tensor(1.0))
    assert float(alarm.bad) == 1  # on a GPU, every later step is skipped
