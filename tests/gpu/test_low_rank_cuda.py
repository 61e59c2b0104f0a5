"""Low-rank adapters in a layer's own output on CUDA: against float64, compiled, and only over a frozen matrix in half precision."""

import pytest
import torch

from assay.kernels.low_rank import adapted_linear, adapts_in_place, plain_adapted_linear
from assay.model import lora
from assay.model.lora import attach, fresh, plan
from assay.model.placement import place_for_training
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config

pytestmark = pytest.mark.gpu

RANGES = [(0, 512, 2.0), (512, 768, 0.5), (768, 1024, 1.0)]


def problem(*shape, rank=16, out=1024):
    g = torch.Generator("cuda").manual_seed(rank)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")
    factors = [draw(stop - start, rank) for start, stop, _ in RANGES] + [draw(rank, shape[-1]) for _ in RANGES]
    return draw(*shape).bfloat16(), draw(out, shape[-1]).bfloat16(), factors, draw(*shape[:-1], out).bfloat16()


def gradients(function, x, weight, factors, d_out):
    x, *factors = (tensor.detach().clone().requires_grad_() for tensor in (x, *factors))
    out = function(x, weight, RANGES, factors[:3], factors[3:])
    out.backward(d_out)
    return [out.detach(), x.grad, *(factor.grad for factor in factors)]


def apart(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize(("shape", "rank"), [((4, 512, 576), 16), ((77, 40), 3)])
def test_values_and_gradients_against_float64(shape, rank):
    x, weight, factors, d_out = problem(*shape, rank=rank)
    rounded = [factor.bfloat16() for factor in factors]
    exact = gradients(plain_adapted_linear, x.double(), weight.double(), [factor.double() for factor in rounded], d_out.double())
    found, usual = gradients(adapted_linear, x, weight, factors, d_out), gradients(plain_adapted_linear, x, weight, factors, d_out)
    for made, plain, due in zip(found, usual, exact, strict=True):
        assert apart(made, due) < 6e-3
        assert apart(made, due) < 1.05 * apart(plain, due)
    assert all(gradient.dtype == torch.float32 for gradient in found[2:])


def test_only_what_trains_in_half_precision_over_a_frozen_matrix_has_it():
    x, weight, *_ = problem(8, 64)
    assert adapts_in_place(x, weight, None)
    assert adapts_in_place(x.half(), weight.half(), None)
    for other in ((x.float(), weight.float(), None), (x, weight.float(), None), (x, weight, weight[:, 0]),
                  (x, weight.clone().requires_grad_(), None), (x.cpu(), weight.cpu(), None)):
        assert not adapts_in_place(*other)
    with torch.no_grad():
        assert not adapts_in_place(x, weight, None)


def test_a_compiled_model_trains_as_with_the_plain_twin(monkeypatch):
    config = tiny_config()
    tokens = torch.randint(0, 320, (4, 96), generator=torch.Generator().manual_seed(0)).cuda()

    def trained():
        torch._dynamo.reset()
        model = initialised(config, 0).bfloat16()
        patch = fresh(config, plan(config), 8, 2.0, 0, None)
        g = torch.Generator().manual_seed(1)
        attach(model, patch)
        for name, parameter in model.named_parameters():
            if ".lefts." in name:
                parameter.data = torch.randn(parameter.shape, generator=g) * 0.05
        place_for_training(model, "cuda", compile=False)
        for block in model.blocks:
            block.compile(dynamic=False, fullgraph=True)
        model(tokens).float().square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    found = trained()
    monkeypatch.setattr(lora, "adapts_in_place", lambda *given: False)
    due = trained()
    assert found.keys() == due.keys()
    for name, gradient in due.items():
        assert apart(found[name], gradient) < 3e-2, name
