"""From a fused product to q, k and v: the plain twin against its formula. Its kernel: interpreted_block.py."""

import torch

from assay.kernels.rotary import plain_rotated, rotated


def product(B=2, T=5, H=3, K=1, d=8, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    angle = torch.randn(1, T, 1, d // 2, generator=g)
    return torch.randn(B, T, (H + 2 * K) * d, generator=g).to(dtype), angle.cos(), angle.sin(), H, K


def test_the_twin_is_its_formula():
    """A pair of a head is a complex number, and its position turns it; values stay as they are."""
    qkv, cos, sin, H, K = product()
    whole = qkv.view(2, 5, 5, 8)
    turned = torch.complex(whole[..., :4], whole[..., 4:]) * torch.complex(cos, sin)
    due = torch.cat([turned.real, turned.imag], -1)
    q, k, v = plain_rotated(qkv, cos, sin, H, K)
    torch.testing.assert_close(q, due[:, :, :3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(k, due[:, :, 3:4], rtol=1e-5, atol=1e-6)
    assert torch.equal(v, whole[:, :, 4:])


def test_angles_stay_in_fp32_where_the_product_is_bf16():
    qkv, cos, sin, H, K = product(dtype=torch.bfloat16)
    found, due = plain_rotated(qkv, cos, sin, H, K), plain_rotated(qkv.float(), cos, sin, H, K)
    assert all(torch.equal(one, other.bfloat16()) for one, other in zip(found, due, strict=True))


def test_on_the_cpu_the_twin_answers():
    qkv, *rest = product(dtype=torch.bfloat16)
    outs = rotated(qkv.requires_grad_(), *rest)
    assert [out.grad_fn.name() for out in outs] == ["SplitWithSizesBackward0"] * 3
