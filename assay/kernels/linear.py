"""Linear layer with fp32 weights in a bf16 stream: the weights' gradient leaves its product in fp32, not rounded.

Autograd rounds a gradient to the dtype of what was multiplied, and converts it to the weight's in a kernel of its own.

Shapes: N rows, I entries in, O entries out.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.softcap_ce import matmul_into


def linear(x: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
    """Linear layer in the dtype of x, to which the weight is rounded. With the gradient in fp32 where an fp32 matrix trains in bf16 on a
    GPU."""
    if x.is_cuda and bias is None and trains_wide(x, weight_OI):
        return wide_linear(x, weight_OI)
    return plain_linear(x, weight_OI, bias)


def trains_wide(x: Tensor, weight_OI: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and weight_OI.dtype == torch.float32 and weight_OI.requires_grad and torch.is_grad_enabled()


def plain_linear(x: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight_OI.to(x.dtype), bias)


def wide_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():  # a compiler cannot trace a registration: whoever compiles has registered before
        register_weight_gradient()
    return _Wide.apply(x, weight_OI)


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
        rounded_OI = weight_OI.to(x.dtype)
        ctx.save_for_backward(x, rounded_OI)
        return F.linear(x, rounded_OI)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        x, rounded_OI = ctx.saved_tensors
        return d_out @ rounded_OI, torch.ops.assay.weight_gradient(d_out.flatten(0, -2), x.flatten(0, -2))


@functools.cache
def register_weight_gradient() -> None:
    """Register `torch.ops.assay.weight_gradient`, which compiled graphs call as it is: not every release compiles a product's
    `out_dtype`."""
    operator = torch.library.custom_op("assay::weight_gradient", weight_gradient, mutates_args=(),
                                       schema="(Tensor d_out_NO, Tensor x_NI) -> Tensor")
    operator.register_fake(lambda d_out, x: x.new_empty((d_out.shape[1], x.shape[1]), dtype=torch.float32))


def weight_gradient(d_out_NO: Tensor, x_NI: Tensor) -> Tensor:
    d_weight_OI = x_NI.new_empty((d_out_NO.shape[1], x_NI.shape[1]), dtype=torch.float32)
    matmul_into(d_out_NO.T, x_NI, out=d_weight_OI)
    return d_weight_OI
