"""The Triton kernel in Triton's interpreter, on the CPU. Run by test_interpreted.py.

Every comparison is with the plain twin in float64 on the same inputs. Blocks are shrunk to 128 logits, so that a row of
203 takes two of them and ends inside one.
"""

import pytest
import torch

from assay.kernels import softcap_ce
from assay.kernels.softcap_ce import (
    IGNORE,
    fused_linear_cross_entropy,
    fused_linear_logprobs,
    plain_linear_cross_entropy,
    plain_linear_logprobs,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's exp, overflowing to inf as it should
N, D = 9, 36  # neither is a power of two; each row is a program


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(softcap_ce, "MAX_BLOCK", 128)


def problem(V=203, *, dtype=torch.float32, head_dtype=None, spread=1.0):
    rng = torch.Generator().manual_seed(V)
    hidden = (torch.randn(N, D, generator=rng) * spread).to(dtype).requires_grad_()
    head = torch.randn(V, D, generator=rng).to(head_dtype or dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=rng)
    targets[0], targets[1] = V - 1, 0  # the ends of the row
    targets[3:5] = IGNORE
    weight = torch.rand(N, generator=rng)
    weight[7] = 0.0
    return hidden, head, targets, weight


def doubled(hidden, head, rounded_to=None):
    """The same numbers in float64 (after the rounding that the kernel's own inputs get)."""
    return [x.detach().to(rounded_to or x.dtype).double().requires_grad_() for x in (hidden, head)]


def apart(found, expected):
    """Largest difference, relative to the largest entry."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("V", [203, 256, 5])
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_values_and_gradients_in_fp32(V, softcap):
    hidden, head, targets, weight = problem(V)
    total, losses = fused_linear_cross_entropy(hidden, head, targets, weight, softcap=softcap, chunk=8)
    (0.37 * total).backward()
    hidden64, head64 = doubled(hidden, head)
    total64, losses64 = plain_linear_cross_entropy(hidden64, head64, targets, weight.double(), softcap=softcap)
    (0.37 * total64).backward()
    assert total.dtype == losses.dtype == torch.float32
    assert not losses.requires_grad
    assert apart(total, total64) < 5e-7
    assert apart(losses, losses64) < 5e-7
    assert apart(hidden.grad, hidden64.grad) < 2e-6
    assert apart(head.grad, head64.grad) < 2e-6
    assert (hidden.grad[3:5] == 0).all()
    assert (hidden.grad[7] == 0).all()


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_bf16_is_off_by_its_rounding_only(softcap):
    hidden, head, targets, weight = problem(dtype=torch.bfloat16)
    total, losses = fused_linear_cross_entropy(hidden, head, targets, weight, softcap=softcap, chunk=8)
    total.backward()
    hidden64, head64 = doubled(hidden, head)
    total64, losses64 = plain_linear_cross_entropy(hidden64, head64, targets, weight.double(), softcap=softcap)
    total64.backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16
    assert apart(total, total64) < 2e-3
    assert apart(losses, losses64) < 4e-3
    assert apart(hidden.grad, hidden64.grad) < 1.5e-2
    assert apart(head.grad, head64.grad) < 1.5e-2


def test_the_heads_gradient_is_summed_in_fp32_over_the_chunks():
    grads = []
    for chunk in (1, N):
        hidden, head, targets, weight = problem(dtype=torch.bfloat16, head_dtype=torch.float32)
        fused_linear_cross_entropy(hidden, head, targets, weight, chunk=chunk)[0].backward()
        grads.append(head.grad)
    assert grads[0].dtype == torch.float32
    assert apart(grads[0], grads[1].double()) < 1e-6  # summed in bf16 they would differ by 1e-2


def test_autocast_chooses_the_compute_dtype_and_master_weights_keep_theirs():
    hidden, head, targets, weight = problem()
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = fused_linear_cross_entropy(hidden, head, targets, weight)
    total.backward()
    hidden64, head64 = doubled(hidden, head, rounded_to=torch.bfloat16)
    plain_linear_cross_entropy(hidden64, head64, targets, weight.double())[0].backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.float32
    assert 1e-5 < apart(head.grad, head64.grad) < 1.5e-2


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_logits_of_a_thousand_neither_overflow_nor_vanish(softcap):
    hidden, head, targets, weight = problem(spread=100.0)
    total, losses = fused_linear_cross_entropy(hidden, head, targets, weight, softcap=softcap)
    total.backward()
    hidden64, head64 = doubled(hidden, head)
    total64, losses64 = plain_linear_cross_entropy(hidden64, head64, targets, weight.double(), softcap=softcap)
    total64.backward()
    assert losses64.max() > (10 if softcap else 1000)
    assert apart(losses, losses64) < 2e-6
    assert apart(head.grad, head64.grad) < 1e-3  # fp32's rounding of the logits themselves, 1000 · 2⁻²⁴, through exp


def test_all_ignored_is_exactly_nothing():
    hidden, head, targets, weight = problem()
    total, losses = fused_linear_cross_entropy(hidden, head, torch.full_like(targets, IGNORE), weight, softcap=6.0)
    total.backward()
    for tensor in (total, losses, hidden.grad, head.grad):
        assert (tensor == 0).all()


def test_another_ignore_index():
    hidden, head, targets, weight = problem()
    targets[3:5] = 3
    _, losses = fused_linear_cross_entropy(hidden, head, targets, weight, ignore_index=3)
    assert torch.equal(losses == 0, targets == 3)


@pytest.mark.parametrize("outside", [203, -1, 10**12])
def test_a_target_outside_the_vocabulary_is_nan_and_touches_no_other_loss(outside):
    hidden, head, targets, weight = problem()
    _, sound = fused_linear_cross_entropy(hidden, head, targets, weight)
    targets[2] = outside
    total, losses = fused_linear_cross_entropy(hidden, head, targets, weight)
    total.backward()
    assert losses.isnan().nonzero().tolist() == [[2]]
    assert torch.equal(losses[3:], sound[3:])
    assert total.isnan()
    assert hidden.grad[2].isnan().all()
    assert head.grad.isnan().all()


def test_only_the_products_that_are_needed_are_made(monkeypatch):
    hidden, head, targets, weight = problem()
    product, calls = softcap_ce.matmul_into, []
    monkeypatch.setattr(softcap_ce, "matmul_into", lambda *args, **named: (calls.append(1), product(*args, **named)))
    total, losses = fused_linear_cross_entropy(hidden, head, targets, weight)
    total.backward()
    assert len(calls) == 3
    both, hidden.grad, head.grad = hidden.grad, None, None
    fused_linear_cross_entropy(hidden, head.detach(), targets, weight)[0].backward()  # a frozen head, as under LoRA
    assert len(calls) == 3 + 2
    assert torch.equal(hidden.grad, both)
    with torch.no_grad():
        forward_only, same_losses = fused_linear_cross_entropy(hidden, head, targets, weight)
    assert len(calls) == 3 + 2 + 1
    assert not forward_only.requires_grad
    assert torch.equal(losses, same_losses)


def test_a_second_backward_is_refused_rather_than_scaled_twice():
    total, _ = fused_linear_cross_entropy(*problem())
    (2 * total).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2 * total).backward()


def test_no_tokens_at_all():
    hidden, head, targets, weight = problem()
    total, losses = fused_linear_cross_entropy(hidden[:0], head, targets[:0], weight[:0])
    total.backward()
    assert total == 0
    assert losses.shape == (0,)
    assert (head.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_logprobs_and_their_gradients_for_any_gradient_per_token(dtype, softcap):
    hidden, head, targets, _ = problem(dtype=dtype)
    targets = targets.clamp_min(0)
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(1))
    logp = fused_linear_logprobs(hidden, head, targets, softcap=softcap, temperature=0.7, chunk=8)
    logp.backward(upstream)
    hidden64, head64 = doubled(hidden, head)
    logp64 = plain_linear_logprobs(hidden64, head64, targets, softcap=softcap, temperature=0.7)
    logp64.backward(upstream.double())
    assert logp.dtype == torch.float32
    assert apart(logp, logp64) < 5e-7  # in bf16 too: the logits are kept in fp32
    tolerance = 3e-6 if dtype == torch.float32 else 8e-3
    assert apart(hidden.grad, hidden64.grad) < tolerance
    assert apart(head.grad, head64.grad) < tolerance


def test_logprobs_know_no_ignore_index():
    hidden, head, targets, _ = problem()
    assert fused_linear_logprobs(hidden, head, targets).isnan().nonzero().flatten().tolist() == [3, 4]
