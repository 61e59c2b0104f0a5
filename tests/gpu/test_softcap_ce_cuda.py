"""The fused linear cross-entropy on CUDA: values and gradients against float64, memory, and no wait for the device."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from assay.kernels.softcap_ce import (
    IGNORE,
    fused_linear_cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
    plain_linear_cross_entropy,
    plain_linear_logprobs,
)

pytestmark = pytest.mark.gpu
N, D = 1000, 576


def problem(V, dtype, N=N):
    rng = torch.Generator("cuda").manual_seed(V)
    draw = lambda n: torch.randn(n, D, generator=rng, device="cuda")
    hidden = draw(N).to(dtype).requires_grad_()
    head = (draw(V) * D**-0.5 * 3).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=rng, device="cuda")
    targets[0], targets[1], targets[5:200] = V - 1, 0, IGNORE
    return hidden, head, targets, torch.rand(N, generator=rng, device="cuda")


def eager(hidden, head, targets, weight, softcap):
    """Eager loss, as one writes it without a kernel: a bf16 product, the rest in fp32."""
    logits = (hidden @ head.T).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (weight * F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")).sum()


def doubled(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def apart(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("V", [49_152, 50_257, 263])
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_fp32_is_exact_to_rounding(V, softcap):
    hidden, head, targets, weight = problem(V, torch.float32)
    total, losses = linear_cross_entropy(hidden, head, targets, weight, softcap=softcap)
    (0.37 * total).backward()
    hidden64, head64 = doubled(hidden, head)
    total64, losses64 = plain_linear_cross_entropy(hidden64, head64, targets, weight, softcap=softcap)
    (0.37 * total64).backward()
    assert apart(total, total64) < 1e-6
    assert apart(losses, losses64) < 1e-6
    assert apart(hidden.grad, hidden64.grad) < 1e-5
    assert apart(head.grad, head64.grad) < 1e-5


@pytest.mark.parametrize("V", [49_152, 50_257])
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_bf16_is_no_further_off_than_eager_bf16(V, softcap):
    hidden, head, targets, weight = problem(V, torch.bfloat16)
    linear_cross_entropy(hidden, head, targets, weight, softcap=softcap)[0].backward()
    hidden64, head64 = doubled(hidden, head)
    plain_linear_cross_entropy(hidden64, head64, targets, weight, softcap=softcap)[0].backward()
    eager_hidden, eager_head = (x.detach().clone().requires_grad_() for x in (hidden, head))
    eager(eager_hidden, eager_head, targets, weight, softcap).backward()
    for found, usual, exact in ((hidden.grad, eager_hidden.grad, hidden64.grad),
                                (head.grad, eager_head.grad, head64.grad)):
        assert apart(found, exact) < 1e-2
        assert apart(found, exact) < 1.2 * apart(usual, exact)


@pytest.fixture
def summed_in_fp32() -> Iterator[None]:
    """cuBLAS may add the parts of a product in bf16 unless told not to. What it says of that when asked, a bool or with a second one for
    split-K, is not what every torch takes when told, so that monkeypatch could not put it back: a plain bool is."""
    matmul = torch.backends.cuda.matmul
    said = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = bool(said[0] if isinstance(said, tuple) else said)


@pytest.mark.usefixtures("summed_in_fp32")
def test_chunks_are_summed_in_fp32_into_a_master_head():
    """63 chunks are no further off than one; summed in bf16 they would be, and bf16 in cuBLAS would blur 16 rows' logits by as much."""
    errors = []
    for chunk in (16, N):
        hidden, head, targets, weight = problem(50_257, torch.bfloat16)
        head = head.detach().float().requires_grad_()
        fused_linear_cross_entropy(hidden, head, targets, weight, chunk=chunk)[0].backward()
        hidden64, head64 = doubled(hidden, head)
        plain_linear_cross_entropy(hidden64, head64, targets, weight)[0].backward()
        assert head.grad.dtype == torch.float32
        errors.append(apart(head.grad, head64.grad))
    assert errors[0] < 1.05 * errors[1]


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_logprobs_keep_fp32_logits_and_take_any_gradient(softcap):
    hidden, head, targets, weight = problem(50_257, torch.bfloat16)
    targets, upstream = targets.clamp_min(0), weight - 0.5
    logp = linear_logprobs(hidden, head, targets, softcap=softcap, temperature=0.7)
    logp.backward(upstream)
    hidden64, head64 = doubled(hidden, head)
    logp64 = plain_linear_logprobs(hidden64, head64, targets, softcap=softcap, temperature=0.7)
    logp64.backward(upstream.double())
    assert (logp - logp64).abs().max() < 3e-5
    assert apart(hidden.grad, hidden64.grad) < 6e-3
    assert apart(head.grad, head64.grad) < 6e-3


def test_the_same_inputs_give_the_same_bits():
    grads = []
    for _ in range(2):
        hidden, head, targets, weight = problem(49_152, torch.bfloat16)
        linear_cross_entropy(hidden, head, targets, weight, softcap=15.0)[0].backward()
        grads.append((hidden.grad, head.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_nothing_waits_for_the_device():
    hidden, head, targets, weight = problem(49_152, torch.bfloat16)
    linear_cross_entropy(hidden, head, targets, weight)[0].backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, head, targets, weight)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_peak_memory_is_an_eighth_of_eager():
    peaks = []
    for loss in (lambda *given: linear_cross_entropy(*given, softcap=15.0)[0], lambda *given: eager(*given, 15.0)):
        given = problem(49_152, torch.bfloat16, N=16_384)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(*given).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del given
    assert peaks[0] < peaks[1] / 8
