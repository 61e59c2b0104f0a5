"""The Triton kernels of log-probability and entropy in Triton's interpreter, on the CPU. Run by test_interpreted.py.

Every comparison is with the plain twin in float64; blocks are shrunk, so that a row takes several and ends inside one.
"""

import pytest
import torch

from assay.kernels import softcap_ce
from assay.kernels.linear_entropy import linear_logprobs_entropy

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's exp, overflowing to inf as it should
N, D = 9, 36  # neither is a power of two; each row is a program


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(softcap_ce, "MAX_BLOCK", 64)


def twin(hidden, head, targets, softcap, temperature):
    logits = hidden @ head.T
    scores = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    logprobs = scores.log_softmax(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def apart(found, due):
    return ((found.double() - due).abs().max() / due.abs().max()).item()


@pytest.mark.parametrize(("V", "softcap", "dtype", "bound"), [
    (203, None, torch.float32, 1e-5), (203, 6.0, torch.float32, 1e-5), (203, 6.0, torch.bfloat16, 2e-2), (256, 6.0, torch.float32, 1e-5),
    (256, None, torch.bfloat16, 2e-2), (5, None, torch.float32, 1e-5), (5, 6.0, torch.bfloat16, 2e-2)])
def test_values_and_gradients(V, softcap, dtype, bound):
    rng = torch.Generator().manual_seed(V)
    hidden, head = (torch.randn(n, D, generator=rng).to(dtype).requires_grad_() for n in (N, V))
    targets = torch.randint(0, V, (N,), generator=rng)
    targets[0], targets[1] = V - 1, 0  # the ends of the row
    back = torch.randn(2, N, generator=rng)
    back[:, 3] = 0.0  # a token that does not count, one without entropy, one with nothing else
    back[1, 4], back[0, 5] = 0.0, 0.0
    found = linear_logprobs_entropy(hidden, head, targets, softcap=softcap, temperature=0.7, chunk=8, fused=True)
    (torch.stack(found) * back).sum().backward()
    hidden64, head64 = (x.detach().double().requires_grad_() for x in (hidden, head))
    due = twin(hidden64, head64, targets, softcap, 0.7)
    (torch.stack(due) * back.double()).sum().backward()
    for one, two in zip(found, due, strict=True):
        assert one.dtype == torch.float32
        assert apart(one.detach(), two.detach()) < 1e-5  # the logits are not rounded, whatever the products are of
    assert (hidden.grad.dtype, head.grad.dtype) == (dtype, dtype)
    assert apart(hidden.grad, hidden64.grad) < bound
    assert apart(head.grad, head64.grad) < bound
    assert not hidden.grad[3].any()


def test_far_apart_logits_and_one_that_is_certain():
    hidden, head = torch.eye(2) * 300, torch.zeros(150, 2)
    head[140, 0], head[3, 0] = 1.0, -1.0
    logp, entropy = linear_logprobs_entropy(hidden, head, torch.tensor([140, 7]), fused=True)
    assert logp.tolist() == pytest.approx([0.0, -torch.tensor(150.0).log().item()])
    assert entropy.tolist() == pytest.approx([0.0, torch.tensor(150.0).log().item()], abs=1e-6)


def test_a_target_outside_the_vocabulary_is_nan():
    logp, entropy = linear_logprobs_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([4, -1]), fused=True)
    assert logp.isnan().all()
    assert entropy.tolist() == pytest.approx([torch.tensor(4.0).log().item()] * 2)
