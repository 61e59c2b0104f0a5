"""RMS norm beside its stream: the plain twin against its formula. Its kernels: interpreted_block.py."""

import torch

from assay.kernels.rms_norm import plain_stream_and_norm, uses_fused_norm


def test_the_twin_is_its_formula():
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 7, generator=g, dtype=torch.float64), torch.randn(7, generator=g, dtype=torch.float64)
    stream, normed = plain_stream_and_norm(x, weight, 1e-5)
    assert stream is x
    torch.testing.assert_close(normed, x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight, rtol=1e-12, atol=0)


def test_nothing_is_fused_on_the_cpu():
    assert not uses_fused_norm(torch.zeros(2, 64, dtype=torch.bfloat16))
