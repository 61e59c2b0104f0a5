"""Quantised frozen weights (NF4, int8): codes and scales on the device, and a linear layer that dequantises its matrix at every use.

A row is cut into blocks of 64; a block has one scale and a code for each weight. NF4 (Dettmers et al., QLoRA, arXiv 2305.14314) has 16
levels at the quantiles of a normal distribution, times the block's largest weight; int8 has 255 evenly spaced ones. What the codes
stand for, `dequantised`, is one fp32 product rounded to bf16: the same bits on every device, so that it has a digest. A live layer
computes what a dense one with those weights would, and keeps no more of them than one matrix at a time.

Ours and not torchao's or bitsandbytes': blocks within rows leave q, k and v of one matrix what they are apart, no mean of scales is
taken (its bits depend on the device), and a witness can make the weights again from 16 numbers. The values are bitsandbytes'
wherever rows are whole blocks.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assay.errors import ArtifactError, UsageError
from assay.kernels.unpack_codes import unpacked
from assay.model.transformer import ExpertLinear, Linear, Transformer

QuantisedKind = Literal["nf4", "int8"]
BLOCK = 64  # weights that share a scale
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
ROUNDED = 2.0**-8  # relative, to bf16
# The farthest that a weight can be from what stands for it, as a share of its block's largest.
FARTHEST = {"nf4": max(b - a for a, b in itertools.pairwise(NF4)) / 2 + ROUNDED, "int8": 0.5 / 127 + ROUNDED}
STORED_BITS = {"int8": 8 + 32 / BLOCK, "nf4": 4 + 32 / BLOCK}  # of a weight, its share of a scale included
_AT_ONCE = 1 << 24  # weights that are looked at together


class QuantisedMatrix(NamedTuple):
    """Codes (nf4: uint8, two a byte, the first in its upper half; int8: int8) and a scale for each block of a row."""

    codes: Tensor
    scale: Tensor

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)


def is_quantisable(name: str, shape: Sequence[int]) -> bool:
    """Matrices of the blocks. Embedding, head and routers stay: they are few, and what they choose between are single rows."""
    return name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2 and not name.endswith((
        ".router.weight", ".shared_gate.weight", ".gate.weight"))

# ---------------------------------------------------------------- to codes and back


@torch.no_grad()
def quantise(weight: Tensor, kind: QuantisedKind) -> QuantisedMatrix:
    """Quantise a matrix on its own device, some rows at a time."""
    if weight.shape[1] % 2:
        raise UsageError(f"a matrix of {weight.shape[1]} columns has no {kind} form: two weights share a byte; expected an even number")
    parts = [_quantise_rows(rows, kind) for rows in _some_rows(weight, weight.shape[1])]
    return QuantisedMatrix(torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts]))


def _quantise_rows(rows: Tensor, kind: QuantisedKind) -> tuple[Tensor, Tensor]:
    columns = rows.shape[1]
    blocks = F.pad(rows.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    scale = largest if kind == "nf4" else largest / torch.full_like(largest, 127.0)  # by a tensor: CUDA may multiply by 1/127
    shares = blocks / torch.where(scale > 0, scale, 1.0)[..., None]
    if kind == "int8":
        return shares.round().to(torch.int8).flatten(1)[:, :columns].contiguous(), scale
    codes = torch.bucketize(shares, _halfway(shares.device)).to(torch.uint8).flatten(1)[:, :columns]
    return codes[:, 0::2] << 4 | codes[:, 1::2], scale


@torch.no_grad()
def dequantised(matrix: QuantisedMatrix) -> Tensor:
    """The matrix that the codes stand for, in bf16."""
    codes, scale = matrix
    if codes.is_cuda:
        return unpacked(codes, scale, _levels(codes.device) if codes.dtype == torch.uint8 else None, BLOCK)
    return plain_dequantised(matrix)


@torch.no_grad()
def plain_dequantised(matrix: QuantisedMatrix) -> Tensor:
    """The kernel's twin. The only temporaries are of some rows."""
    codes, scale = matrix
    made = torch.empty(len(codes), matrix.columns, dtype=torch.bfloat16, device=codes.device)
    parts = zip(*(_some_rows(tensor, matrix.columns) for tensor in (made, codes, scale)), strict=True)
    for target, some, their in parts:
        packed = codes.dtype == torch.uint8
        values = _levels(codes.device)[torch.stack([some >> 4, some & 15], -1).flatten(1).int()] if packed else some.float()
        if matrix.columns % BLOCK:
            target.copy_(values.mul_(their.repeat_interleave(BLOCK, 1)[:, : matrix.columns]))
        else:
            target.copy_(values.unflatten(1, (-1, BLOCK)).mul_(their[..., None]).flatten(1))
    return made


def _some_rows(tensor: Tensor, columns: int) -> Iterator[Tensor]:
    return iter(tensor.split(max(1, _AT_ONCE // columns)))


@functools.cache
def _halfway(device: torch.device) -> Tensor:
    levels = _levels(torch.device("cpu"))
    return ((levels[1:] + levels[:-1]) / 2).to(device)


@functools.cache
def _levels(device: torch.device) -> Tensor:
    """NF4 levels, on their device before a graph is captured there, since a capture cannot copy from the host: whoever captures warms up
    first."""
    return torch.tensor(NF4).to(device)


def refuse_far_codes(name: str, weight: Tensor, made: Tensor, kind: QuantisedKind) -> float:
    """Refuse codes where a weight is farther from its file's than the levels of its own block allow: a scale of another block, or a wrong
    table, shows. Returns the summed square of all differences."""
    apart = 0.0
    for ours, theirs in zip(_some_rows(made, made.shape[1]), _some_rows(weight, weight.shape[1]), strict=True):
        due = theirs.float()
        pooled = F.max_pool1d(due.abs(), BLOCK, ceil_mode=True)  # not as the blocks were made
        largest = pooled.repeat_interleave(BLOCK, 1)[:, : due.shape[1]]
        off = (ours.float() - due).abs()
        beyond = ~(off <= FARTHEST[kind] * largest)
        if beyond.any():
            raise ArtifactError(f"{name}: {int(beyond.sum())} weights in {kind} are farther from the file's than a level of their block "
                                f"({FARTHEST[kind]:.3f} of its largest weight): a scale or a code is another block's, or the file holds "
                                "values that are no numbers")
        apart += float(off.square().sum())
    return apart

# ---------------------------------------------------------------- live layers


class QuantisedLinear(Linear):
    """A frozen linear layer whose matrix is dequantised at every use, in the forward and in the backward pass."""

    def __init__(self, matrix: QuantisedMatrix, bias: nn.Parameter | None):
        nn.Module.__init__(self)
        self.out_features, self.in_features = len(matrix.codes), matrix.columns
        self.codes, self.scale = (nn.Parameter(tensor, requires_grad=False) for tensor in matrix)
        self.register_parameter("bias", bias)
        self.unlisted = self.out_features * self.in_features - self.codes.numel() - self.scale.numel()

    @property
    def matrix(self) -> QuantisedMatrix:
        return QuantisedMatrix(self.codes, self.scale)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Dequantised weight, made when it is asked for."""
        return dequantised(self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        return quantised_linear(x, self.matrix, self.bias)


class QuantisedExperts(QuantisedLinear, ExpertLinear):
    """Frozen quantised layer whose matrix holds one matrix an expert; one expert's is dequantised at a time."""

    def __init__(self, matrix: QuantisedMatrix, bias: nn.Parameter | None, experts: int):
        super().__init__(matrix, bias)
        self.experts = experts

    def forward(self, x_ND: Tensor, counts: Sequence[int]) -> Tensor:  # type: ignore[override]
        biases = [None] * self.experts if self.bias is None else self.bias.chunk(self.experts)
        parts = zip(x_ND.split(list(counts)), self.codes.chunk(self.experts), self.scale.chunk(self.experts), biases, strict=True)
        return torch.cat([quantised_linear(part, QuantisedMatrix(codes, scale), bias) for part, codes, scale, bias in parts])


def hold_quantised(model: Transformer, tensors: dict[str, Tensor]) -> None:
    """Put a quantised layer, still empty, where `tensors` hold codes instead of a weight."""
    for name in [name for name in tensors if name.endswith(".codes")]:
        owner, leaf = name.removesuffix(".codes").rpartition(".")[::2]
        layer = model.get_submodule(f"{owner}.{leaf}")
        assert isinstance(layer, Linear), f"{name} is not of a linear layer"
        matrix = QuantisedMatrix(torch.empty_like(tensors[name], device="meta"),
                                 torch.empty_like(tensors[f"{owner}.{leaf}.scale"], device="meta"))
        experts = isinstance(layer, ExpertLinear)
        made = QuantisedExperts(matrix, layer.bias, layer.experts) if experts else QuantisedLinear(matrix, layer.bias)  # type: ignore[arg-type]
        setattr(model.get_submodule(owner), leaf, made)


def is_code(name: str) -> bool:
    """Whether a parameter is part of a quantised matrix: no dtype but its own means anything."""
    return name.endswith((".codes", ".scale"))


def quantised_linear(x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias in the dtype of x. Where x is on a GPU each product is one operator to a compiler, which would otherwise make the
    matrix once for both ways and keep it."""
    if x.is_cuda and not torch.compiler.is_compiling():  # a compiler cannot trace a registration: whoever compiles has registered before
        register_quantised_product()
    return _Quantised.apply(x, *matrix, bias)


class _Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return _product(x)(x, codes, scale, bias, False)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scale = ctx.saved_tensors
        return _product(d_out)(d_out, codes, scale, None, True), None, None, None


def _product(x: Tensor) -> Any:
    return torch.ops.assay.quantised_product if x.is_cuda else quantised_product


def quantised_product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, back: bool) -> Tensor:
    """x Wᵀ + bias, or in the backward pass x W."""
    weight = dequantised(QuantisedMatrix(codes, scale)).to(x.dtype)
    return x @ weight if back else F.linear(x, weight, None if bias is None else bias.to(x.dtype))


@functools.cache
def register_quantised_product() -> None:
    operator = torch.library.custom_op("assay::quantised_product", quantised_product, mutates_args=(),
                                       schema="(Tensor x, Tensor codes, Tensor scale, Tensor? bias, bool back) -> Tensor")

    def shaped(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, back: bool) -> Tensor:
        return x.new_empty((*x.shape[:-1], QuantisedMatrix(codes, scale).columns if back else codes.shape[0]))

    operator.register_fake(shaped)
