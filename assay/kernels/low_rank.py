"""Linear layer with a frozen matrix and low-rank adapters (LoRA) of some of its rows: what they add goes into the matrix's own output.

Autograd's way writes what each adapter adds, joins it and adds it up, three more passes over an output that is 24,576 wide in an 8B; and
its gradient is scaled by another. Here a product of the adapters' rank adds to the output where it lies, the scale is a factor of that
product, and all right factors read the input together. The factors' gradients leave their products in fp32, not rounded.

Shapes: N rows, I entries in, O entries out, R the ranks of all adapters together.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.softcap_ce import matmul_into

Ranges = Sequence[tuple[int, int, float]]  # of the rows that each adapter changes: first, last + 1, and its scale


def adapts_in_place(x: Tensor, weight_OI: Tensor, bias: Tensor | None) -> bool:
    """Whether `adapted_linear` is for x: what trains in half precision on a GPU over a frozen matrix of the same dtype."""
    half = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight_OI.dtype
    return x.is_cuda and half and bias is None and not weight_OI.requires_grad and torch.is_grad_enabled()


# ── the plain twin ────────────────────────────────────────────────────────────────────────────────────────────────────

def plain_adapted_linear(x: Tensor, weight_OI: Tensor, ranges: Ranges, lefts: Iterable[Tensor], rights: Iterable[Tensor]) -> Tensor:
    return F.linear(x, weight_OI) + low_rank_output(x, len(weight_OI), ranges, lefts, rights)


def low_rank_output(x: Tensor, width: int, ranges: Ranges, lefts: Iterable[Tensor], rights: Iterable[Tensor]) -> Tensor:
    """scale · left (right x) in the columns of each range, nothing in the others."""
    done, found = 0, []
    for (start, stop, scale), left, right in zip(ranges, lefts, rights, strict=True):
        if start > done:
            found.append(x.new_zeros(()).expand(*x.shape[:-1], start - done))
        found.append(scale * F.linear(F.linear(x, right.to(x.dtype)), left.to(x.dtype)))
        done = stop
    if done < width:
        found.append(x.new_zeros(()).expand(*x.shape[:-1], width - done))
    return torch.cat(found, -1) if len(found) > 1 else found[0]


# ── the fused path ────────────────────────────────────────────────────────────────────────────────────────────────────

def adapted_linear(x: Tensor, weight_OI: Tensor, ranges: Ranges, lefts: Iterable[Tensor], rights: Iterable[Tensor]) -> Tensor:
    """`plain_adapted_linear` on CUDA (or in fewer steps anywhere), over a matrix that does not train."""
    if not torch.compiler.is_compiling():  # a compiler cannot trace a registration: whoever compiles has registered before
        register_adapted_linear()
    factors = [factor for side in (lefts, rights) for factor in side]  # a ParameterList is not unpacked by every release's compiler
    return _Adapted.apply(x, weight_OI, tuple(ranges), *factors)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, ranges: Ranges, *factors: Tensor) -> Tensor:
        starts, scales = [start for start, _, _ in ranges], [scale for _, _, scale in ranges]
        lefts, rights = ([factor.to(x.dtype) for factor in side] for side in (factors[: len(ranges)], factors[len(ranges) :]))
        right_RI = torch.cat(rights) if len(rights) > 1 else rights[0]
        out, inner_NR = torch.ops.assay.adapted_forward(x.flatten(0, -2), weight_OI, right_RI, lefts, starts, scales)
        ctx.save_for_backward(x, weight_OI, inner_NR, right_RI, *lefts)
        ctx.ranges = starts, scales
        return out.view(*x.shape[:-1], len(weight_OI))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, inner_NR, right_RI, *lefts = ctx.saved_tensors
        d_x, d_right_RI, d_left = torch.ops.assay.adapted_backward(
            d_out.flatten(0, -2), x.flatten(0, -2), weight_OI, inner_NR, right_RI, lefts, *ctx.ranges)
        d_lefts = [part.view(left.shape) for part, left in zip(d_left.split([left.numel() for left in lefts]), lefts, strict=True)]
        return d_x.view(x.shape), None, None, *d_lefts, *d_right_RI.split([left.shape[1] for left in lefts])


@functools.cache
def register_adapted_linear() -> None:
    """Register `torch.ops.assay.adapted_forward` and `adapted_backward`, which compiled graphs call as they are."""
    forward = torch.library.custom_op("assay::adapted_forward", adapted_forward, mutates_args=(), schema=(
        "(Tensor x_NI, Tensor weight_OI, Tensor right_RI, Tensor[] lefts, int[] starts, float[] scales) -> (Tensor, Tensor)"))
    forward.register_fake(lambda x, weight, right, lefts, starts, scales: (
        x.new_empty((len(x), len(weight))), x.new_empty((len(x), len(right)))))
    backward = torch.library.custom_op("assay::adapted_backward", adapted_backward, mutates_args=(), schema=(
        "(Tensor d_out_NO, Tensor x_NI, Tensor weight_OI, Tensor inner_NR, Tensor right_RI, Tensor[] lefts, int[] starts, float[] scales)"
        " -> (Tensor, Tensor, Tensor)"))
    backward.register_fake(lambda d_out, x, weight, inner, right, lefts, starts, scales: (
        x.new_empty(x.shape), right.new_empty(right.shape, dtype=torch.float32),
        right.new_empty((sum(left.numel() for left in lefts),), dtype=torch.float32)))


def adapted_forward(x_NI: Tensor, weight_OI: Tensor, right_RI: Tensor, lefts: Sequence[Tensor], starts: Sequence[int],
                    scales: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The output, and what the right factors make of the input."""
    out_NO, inner_NR = x_NI @ weight_OI.T, x_NI @ right_RI.T
    for added, inner, left, scale in _adapters(out_NO, inner_NR, lefts, starts, scales):
        torch.addmm(added, inner, left.T, alpha=scale, out=added)
    return out_NO, inner_NR


def adapted_backward(d_out_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, inner_NR: Tensor, right_RI: Tensor, lefts: Sequence[Tensor],
                     starts: Sequence[int], scales: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the input, of all right factors and, one behind the other, of the left ones."""
    d_inner_NR, d_right_RI = torch.empty_like(inner_NR), torch.empty_like(right_RI, dtype=torch.float32)
    d_left = right_RI.new_empty(sum(left.numel() for left in lefts), dtype=torch.float32)
    done = 0
    for (d_added, inner, left, scale), d_inner in zip(_adapters(d_out_NO, inner_NR, lefts, starts, scales),
                                                      d_inner_NR.split([left.shape[1] for left in lefts], 1), strict=True):
        torch.addmm(d_inner, d_added, left, beta=0, alpha=scale, out=d_inner)
        part = d_left[done : done + left.numel()].view(left.shape)
        matmul_into(d_added.T, inner, out=part)
        part.mul_(scale)
        done += left.numel()
    d_x_NI = d_out_NO @ weight_OI
    torch.addmm(d_x_NI, d_inner_NR, right_RI, out=d_x_NI)
    matmul_into(d_inner_NR.T, x_NI, out=d_right_RI)
    return d_x_NI, d_right_RI, d_left


def _adapters(out_NO: Tensor, inner_NR: Tensor, lefts: Sequence[Tensor], starts: Sequence[int], scales: Sequence[float]
              ) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Of each adapter: the columns of the output that it adds to, its own of the inner product, its left factor, its scale."""
    inners = inner_NR.split([left.shape[1] for left in lefts], 1)
    for start, inner, left, scale in zip(starts, inners, lefts, scales, strict=True):
        yield out_NO[:, start : start + len(left)], inner, left, scale
