"""Log-probability and entropy by the kernels on CUDA: the plain twin's values and gradients, in fp32 and in bf16."""

import pytest
import torch

from assay.kernels.linear_entropy import linear_logprobs_entropy
from tests.kernels.interpreted_entropy import apart, twin

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("V", [49152, 50257, 320])
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize(("dtype", "values", "gradients"), [(torch.float32, 1e-4, 1e-3), (torch.bfloat16, 1e-4, 2e-2)])
def test_it_is_the_plain_twin(V, softcap, dtype, values, gradients):
    rng = torch.Generator(device="cuda").manual_seed(V)
    hidden = (torch.randn(300, 128, generator=rng, device="cuda")).to(dtype).requires_grad_()
    head = (torch.randn(V, 128, generator=rng, device="cuda") / 4).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (300,), generator=rng, device="cuda")
    back = torch.randn(2, 300, generator=rng, device="cuda")
    back[:, ::7] = 0.0
    found = linear_logprobs_entropy(hidden, head, targets, softcap=softcap, temperature=0.7, chunk=128)
    (torch.stack(found) * back).sum().backward()
    hidden64, head64 = (x.detach().double().requires_grad_() for x in (hidden, head))
    due = twin(hidden64, head64, targets, softcap, 0.7)
    (torch.stack(due) * back.double()).sum().backward()
    for one, two in zip(found, due, strict=True):
        assert apart(one.detach(), two.detach()) < values
    assert apart(hidden.grad, hidden64.grad) < gradients
    assert apart(head.grad, head64.grad) < gradients
