"""Loss scaling: the gradient of the unscaled loss, a batch computed again where it overflowed, and stops where no scale helps."""

import pytest
import torch

from assay.data.batch import Batch
from assay.errors import GuardStop, UsageError
from assay.learn import loss_scaling
from assay.learn.loop import accumulated, train
from assay.learn.loss_scaling import FIRST_SCALE, ScaledAccumulate
from assay.learn.objectives import Loss, next_token
from assay.learn.optim import adamw
from assay.model.transformer import Transformer
from assay.recipes.compute_dtype import refuse_fp16
from assay.recipes.options import Sft
from assay.testing.tiny_models import tiny_config, tiny_model


@pytest.fixture
def model() -> Transformer:
    made = tiny_model("llama")
    made.compute_dtype = torch.float16
    return made


@pytest.fixture
def batch() -> Batch:
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    return Batch(tokens, (torch.arange(16) > 0).float().expand(4, 16).clone())


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def faint(model: Transformer, batch: Batch) -> Loss:
    """A loss so small that its gradients are lost in fp16 unless it is scaled."""
    found = next_token(model, batch)
    return Loss(found.total * 1e-5, found.weight, found.losses)


def test_scaled_gradients_are_those_of_the_loss_and_unscaled_ones_are_lost(model: Transformer, batch: Batch):
    model.compute_dtype = torch.float32
    due_loss = accumulated(model, faint, batch, 2, 64.0).loss
    due = gradients(model)
    model.compute_dtype = torch.float16
    errors = {}
    for name, accumulate in (("scaled", ScaledAccumulate(accumulated)), ("unscaled", accumulated)):
        model.zero_grad()
        assert float(accumulate(model, faint, batch, 2, 64.0).loss) == pytest.approx(float(due_loss), rel=1e-3)
        errors[name] = max(float((found - due[key]).norm() / due[key].norm()) for key, found in gradients(model).items())
    assert errors["scaled"] < 1e-2
    assert errors["unscaled"] > 0.1


def test_what_overflows_is_computed_again_and_no_step_is_lost(model: Transformer, batch: Batch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss_scaling, "FIRST_SCALE", 2.0**40)
    scaling, optimizer = ScaledAccumulate(accumulated), adamw(model.named_parameters(), 1e-3)
    steps = list(train(model, optimizer, [batch] * 3, next_token, micro=2, accumulate=scaling))
    assert [step.index for step in steps] == [0, 1, 2]
    assert scaling.recomputed == torch.tensor(2.0**40 / scaling.scale).log2() > 5
    assert all(float(step.grad_norm) < 1e3 for step in steps)
    again = ScaledAccumulate(accumulated)
    again.restore(scaling.state())
    assert again.state() == scaling.state() != ScaledAccumulate(accumulated).state()


def test_where_no_scale_helps_it_stops_in_words(model: Transformer, batch: Batch):
    def steep(model: Transformer, batch: Batch) -> Loss:
        found = next_token(model, batch)
        return Loss(found.total * 1e12, found.weight, found.losses)

    with pytest.raises(GuardStop, match="overflow fp16 even unscaled"):
        ScaledAccumulate(accumulated)(model, steep, batch, 2, 64.0)
    with torch.no_grad():
        model.embed.weight.mul_(1e6)
    with pytest.raises(GuardStop, match="exceeds 65,504"):
        ScaledAccumulate(accumulated)(model, next_token, batch, 2, 64.0)


def test_the_scale_doubles_after_clean_steps(model: Transformer, batch: Batch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss_scaling, "CLEAN_STEPS", 2)
    scaling, seen = ScaledAccumulate(accumulated), []
    for _ in range(4):
        model.zero_grad()
        scaling(model, faint, batch, 2, 64.0)
        seen.append(scaling.scale / FIRST_SCALE)
    assert seen == [1, 2, 2, 4]


def test_a_model_that_overflows_by_nature_is_refused():
    with pytest.raises(UsageError, match="train it with --dtype bf16"):
        refuse_fp16(Sft(data=(), out="", dtype="fp16"), tiny_config("gemma2"))
    refuse_fp16(Sft(data=(), out="", dtype="bf16"), tiny_config("gemma2"))
