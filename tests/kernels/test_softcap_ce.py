"""Linear + soft-capped cross-entropy: the plain twin against its formula."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from assay.errors import UsageError
from assay.kernels.softcap_ce import (
    IGNORE,
    fused_linear_cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
    plain_linear_cross_entropy,
    plain_linear_logprobs,
)

ROOT = Path(__file__).parents[2]


def problem(N=7, D=6, V=11):
    rng = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, D, generator=rng, dtype=torch.float64).requires_grad_() for n in (N, V))
    targets = torch.randint(0, V, (N,), generator=rng)
    return hidden, head, targets, torch.rand(N, generator=rng, dtype=torch.float64)


def by_formula(hidden, head, softcap, temperature=1.0):
    logits = hidden.detach().numpy() @ head.detach().numpy().T
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    return log_softmax(logits / temperature, axis=-1)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_twin_is_its_formula(softcap):
    hidden, head, targets, weight = problem()
    expected = -by_formula(hidden, head, softcap)[np.arange(7), targets]
    targets[3], expected[3] = IGNORE, 0
    total, losses = plain_linear_cross_entropy(hidden, head, targets, weight, softcap=softcap)
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(total.item(), (weight.numpy() * expected).sum(), rtol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_twins_gradients_are_the_differences_of_its_values(softcap):
    hidden, head, targets, weight = problem()
    entropy = lambda h, w: plain_linear_cross_entropy(h, w, targets, weight, softcap=softcap)[0]
    logprobs = lambda h, w: plain_linear_logprobs(h, w, targets, softcap=softcap, temperature=0.7)
    assert torch.autograd.gradcheck(entropy, (hidden, head))
    assert torch.autograd.gradcheck(logprobs, (hidden, head))


def test_the_twins_logprobs_follow_the_temperature():
    hidden, head, targets, _ = problem()
    found = plain_linear_logprobs(hidden, head, targets, softcap=2.0, temperature=0.7)
    np.testing.assert_allclose(found.detach().numpy(), by_formula(hidden, head, 2.0, 0.7)[np.arange(7), targets],
                               rtol=1e-12)


def test_without_cuda_the_twin_answers_in_fp32_even_under_autocast():
    hidden, head, targets, weight = (x.detach().float() if x.is_floating_point() else x for x in problem())
    with torch.autocast("cpu", torch.bfloat16):
        total, losses = linear_cross_entropy(hidden, head, targets, weight, softcap=2.0)
        logp = linear_logprobs(hidden, head, targets, softcap=2.0)
    assert torch.equal(total, plain_linear_cross_entropy(hidden, head, targets, weight, softcap=2.0)[0])
    torch.testing.assert_close(logp, -losses, rtol=1e-6, atol=0)


def test_importing_and_using_the_twin_needs_no_triton():
    code = ("import sys; sys.modules['triton'] = None\n"
            "import torch; from assay.kernels.softcap_ce import linear_cross_entropy as loss\n"
            "print(loss(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1]), torch.ones(2))[0].item())")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(2 * np.log(4))


@pytest.mark.parametrize(("change", "sentence"), [
    ({"hidden": torch.ones(2, 7, 6)}, r"hidden is \(2, 7, 6\).*flatten batch and time"),
    ({"head": torch.ones(11, 5)}, r"head \(11, 5\)"),
    ({"targets": torch.zeros(6, dtype=torch.int64)}, r"targets is \(6,\); expected \(7,\)"),
    ({"targets": torch.zeros(7, dtype=torch.int32)}, "targets are torch.int32; expected torch.int64"),
    ({"weight": torch.ones(8)}, r"weight is \(8,\); expected \(7,\)"),
    ({"softcap": 0.0}, "softcap is 0.0; expected a positive number"),
    ({"softcap": float("nan")}, "softcap is nan"),
])
def test_what_cannot_be_asked(change, sentence):
    hidden, head, targets, weight = problem()
    asked = {"hidden": hidden, "head": head, "targets": targets, "weight": weight, "softcap": None, **change}
    softcap = asked.pop("softcap")
    for entropy in (plain_linear_cross_entropy, fused_linear_cross_entropy):
        with pytest.raises(UsageError, match=sentence):
            entropy(*asked.values(), softcap=softcap)


def test_no_temperature_of_zero_and_no_float16():
    hidden, head, targets, weight = problem()
    with pytest.raises(UsageError, match="temperature is 0"):
        linear_logprobs(hidden, head, targets, temperature=0)
    with pytest.raises(UsageError, match=r"would compute in torch\.float16"):
        fused_linear_cross_entropy(hidden.half(), head.half(), targets, weight)
