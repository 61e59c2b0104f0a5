"""Log-probabilities and entropies by chunks: values and gradients of the plain twin, whatever the chunk."""

import pytest
import torch

from assay.errors import UsageError
from assay.kernels.linear_entropy import linear_logprobs_entropy, plain_linear_logprobs_entropy
from assay.kernels.softcap_ce import plain_linear_logprobs


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3, 7, None])
def test_it_is_the_plain_twin(softcap: float | None, temperature: float, chunk: int | None):
    rng = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 6, generator=rng).requires_grad_() for n in (7, 11))
    targets = torch.randint(0, 11, (7,), generator=rng)
    back = torch.randn(2, 7, generator=rng)
    options = {"softcap": softcap, "temperature": temperature}
    found = linear_logprobs_entropy(hidden, head, targets, **options, chunk=chunk)
    due = plain_linear_logprobs_entropy(hidden, head, targets, **options)
    assert torch.allclose(due[0], plain_linear_logprobs(hidden, head, targets, **options), atol=1e-6)
    for one, two in zip(found, due, strict=True):
        assert torch.allclose(one, two, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad((torch.stack(pair) * back).sum(), [hidden, head]) for pair in (found, due)]
    for one, two in zip(*gradients, strict=True):
        assert (one - two).norm() <= 2e-6 * two.norm()


def test_what_cannot_be_asked():
    with pytest.raises(UsageError, match="temperature is 0"):
        linear_logprobs_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), temperature=0)
