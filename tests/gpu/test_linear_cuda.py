"""A linear layer's gradient in fp32 on CUDA: against float64, compiled, and only where an fp32 matrix trains in bf16."""

import pytest
import torch
import torch.nn.functional as F

from assay.kernels.linear import linear, plain_linear, register_weight_gradient, wide_linear
from assay.model import transformer
from assay.model.placement import place_for_training
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config

pytestmark = pytest.mark.gpu


def problem(*shape, out):
    g = torch.Generator("cuda").manual_seed(out)
    draw = lambda *shape: torch.randn(*shape, generator=g, device="cuda")
    return draw(*shape).bfloat16(), draw(out, shape[-1]), draw(*shape[:-1], out).bfloat16()


def gradients(function, x, weight, d_out):
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    function(x, weight).backward(d_out)
    return x.grad, weight.grad


def apart(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize(("shape", "out"), [((16, 1024, 576), 960), ((4, 512, 576), 3072), ((77, 40), 9)])
def test_the_weights_gradient_is_not_rounded_to_bf16(shape, out):
    x, weight, d_out = problem(*shape, out=out)
    exact = gradients(F.linear, x.double(), weight.bfloat16().double(), d_out.double())
    d_x, d_weight = gradients(wide_linear, x, weight, d_out)
    usual = gradients(lambda x, weight: plain_linear(x, weight, None), x, weight, d_out)
    assert d_weight.dtype == torch.float32
    assert apart(d_weight, exact[1]) < 2e-4  # tensor cores cut off as they sum
    assert apart(usual[1], exact[1]) > 1e-3
    assert apart(d_x, exact[0]) < 2.5e-3


def test_compiled_in_one_graph_it_gives_the_same():
    torch._dynamo.reset()
    register_weight_gradient()
    x, weight, d_out = problem(4, 256, 576, out=960)
    compiled = torch.compile(lambda x, weight: linear(x, weight, None), fullgraph=True, dynamic=False)
    (d_x, d_weight), due = gradients(compiled, x, weight, d_out), gradients(wide_linear, x, weight, d_out)
    assert apart(d_x, due[0]) < 2.5e-3
    assert apart(d_weight, due[1]) < 1e-5


def test_only_an_fp32_matrix_that_trains_in_bf16_has_it():
    x, weight, _ = problem(8, 64, out=32)
    x, trained = x.requires_grad_(), weight.clone().requires_grad_()
    assert linear(x, trained, None).grad_fn.name() == "_WideBackward"
    for other in (linear(x, weight, None), linear(x, trained.bfloat16(), None), linear(x.float(), trained, None),
                  linear(x, trained, weight[:, 0])):
        assert other.grad_fn.name() != "_WideBackward"


def test_a_compiled_model_trains_as_with_the_usual_layer(monkeypatch):
    tokens = torch.randint(0, 320, (4, 96), generator=torch.Generator().manual_seed(0)).cuda()

    def trained():
        torch._dynamo.reset()
        model = place_for_training(initialised(tiny_config(), 0), "cuda", compile=False)
        for block in model.blocks:
            block.compile(dynamic=False, fullgraph=True)
        model(tokens).float().square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    found = trained()
    monkeypatch.setattr(transformer, "linear", plain_linear)
    for name, gradient in trained().items():
        assert found[name].dtype == torch.float32
        assert apart(found[name], gradient) < 2e-2, name
