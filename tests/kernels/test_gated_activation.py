"""The gated activation: the plain twin against its formula."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from assay.kernels.gated_activation import gated, plain_gated

ROOT = Path(__file__).parents[2]


def test_the_twin_is_its_formula():
    inner = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gate, up = inner[:, :5], inner[:, 5:]
    torch.testing.assert_close(plain_gated(inner, F.silu), gate / (1 + torch.exp(-gate)) * up, rtol=1e-14, atol=0)


@pytest.mark.parametrize("activation", [F.silu, torch.relu])
def test_on_the_cpu_the_twin_answers_bit_for_bit(activation):
    for dtype in (torch.float32, torch.bfloat16):
        inner = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        due = inner.detach().clone().requires_grad_()
        found = gated(inner, activation)
        found.sum().backward()
        gate, up = due.chunk(2, -1)
        (activation(gate) * up).sum().backward()
        assert torch.equal(found, activation(gate) * up)
        assert torch.equal(inner.grad, due.grad)


def test_training_on_the_cpu_needs_no_triton_and_registers_nothing():
    code = ("import sys; sys.modules['triton'] = None\n"
            "from assay.model.placement import place_for_training\n"
            "from assay.testing.tiny_models import tiny_config\n"
            "from assay.model.transformer import initialised\n"
            "import torch; model = place_for_training(initialised(tiny_config(), 0), 'cpu')\n"
            "model(torch.tensor([[1, 2, 3]])).sum().backward()\n"
            "made = ('gated_backward', 'norm_backward', 'rotated_backward', 'weight_gradient')\n"
            "assert not any(hasattr(torch.ops.assay, name) for name in made)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
