"""Fused linear cross-entropy: head, soft cap and loss in one step, so that the logits of a batch never exist whole.

`linear_cross_entropy` is for training: a weighted sum of token losses, with the gradients made during the forward pass.
`linear_logprobs` is for reinforcement learning: the log-probability of each target, for any gradient that comes back.
Both have a plain PyTorch twin here, which runs wherever CUDA does not and is what the kernel is tested against.

The fused path takes the tokens in chunks: cuBLAS makes a chunk of logits, one Triton program per token turns its row
into a loss and, in place, into the gradient of that row, and two more products carry it to hidden states and head.

Shapes: N tokens, D hidden, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.errors import UsageError
from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

IGNORE = -100
IGNORE_NONE = torch.iinfo(torch.int64).min  # the target that no token has
CHUNK_BYTES = 3 << 27  # of logits alive at once: 4,096 tokens of 49,152 logits in bf16, enough rows to keep cuBLAS busy
LANES = 64             # rows of logits are padded to a multiple of this: aligned for cuBLAS and for 16-byte accesses
MAX_BLOCK = 4096       # logits that one program holds at a time


# ── the main verbs ────────────────────────────────────────────────────────────────────────────────────────────────────

def linear_cross_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weight_N: Tensor, *,
                         softcap: float | None = None, ignore_index: int = IGNORE) -> tuple[Tensor, Tensor]:
    """(Σ weight · loss, losses_N): the sum is differentiable in hidden and head, the losses are detached.

    Both in fp32. A target equal to `ignore_index` has loss 0 and gives no gradient, whatever its weight. States in fp16 are widened:
    in fp16 the gradient of the logits would underflow before a loss scale reaches it.
    """
    hidden_ND = hidden_ND.float() if hidden_ND.dtype == torch.float16 else hidden_ND
    entropy = fused_linear_cross_entropy if hidden_ND.is_cuda else plain_linear_cross_entropy
    return entropy(hidden_ND, head_VD, targets_N, weight_N, softcap=softcap, ignore_index=ignore_index)


def linear_logprobs(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *,
                    softcap: float | None = None, temperature: float = 1.0) -> Tensor:
    """log p(target) in fp32 under softmax(cap(hidden @ head.T) / temperature), differentiable token by token."""
    logprobs = fused_linear_logprobs if hidden_ND.is_cuda else plain_linear_logprobs
    return logprobs(hidden_ND, head_VD, targets_N, softcap=softcap, temperature=temperature)


# ── the plain twins ───────────────────────────────────────────────────────────────────────────────────────────────────

def plain_linear_cross_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weight_N: Tensor, *,
                               softcap: float | None = None, ignore_index: int = IGNORE) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` with the logits whole and in fp32 (float64 if the inputs are)."""
    check_request(hidden_ND, head_VD, targets_N, softcap, weight_N=weight_N)
    logits_NV = _plain_logits(hidden_ND, head_VD, softcap)
    losses_N = F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="none")
    return (weight_N.to(losses_N.dtype) * losses_N).sum(), losses_N.detach()


def plain_linear_logprobs(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *,
                          softcap: float | None = None, temperature: float = 1.0) -> Tensor:
    """`linear_logprobs` with the logits whole and in fp32 (float64 if the inputs are)."""
    check_request(hidden_ND, head_VD, targets_N, softcap, temperature)
    logits_NV = _plain_logits(hidden_ND, head_VD, softcap) / temperature
    return logits_NV.log_softmax(-1).gather(-1, targets_N[:, None]).squeeze(-1)


def _plain_logits(hidden_ND: Tensor, head_VD: Tensor, softcap: float | None) -> Tensor:
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        logits_NV = hidden_ND.to(dtype) @ head_VD.to(dtype).T
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)


# ── the fused path ────────────────────────────────────────────────────────────────────────────────────────────────────

def fused_linear_cross_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weight_N: Tensor, *,
                               softcap: float | None = None, ignore_index: int = IGNORE,
                               chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` on CUDA (or in Triton's interpreter), `chunk` tokens at a time.

    Products run in the autocast dtype, else in hidden's. Whatever is summed over the vocabulary or over tokens is
    summed in fp32, and each gradient is rounded once, to the dtype of what it belongs to. Nothing waits for the GPU, so
    a target outside the vocabulary cannot raise: its loss and its gradients are NaN.
    """
    check_request(hidden_ND, head_VD, targets_N, softcap, weight_N=weight_N)
    compute = _compute_dtype(hidden_ND)
    sweep = _Sweep(softcap, 1.0, ignore_index, compute=compute, logits=compute, chunk=chunk)
    with torch.autocast(hidden_ND.device.type, enabled=False):  # its dtype is already taken up in `compute`
        return _CrossEntropy.apply(hidden_ND, head_VD, targets_N, weight_N, sweep, torch.is_grad_enabled())


def fused_linear_logprobs(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, softcap: float | None = None,
                          temperature: float = 1.0, chunk: int | None = None) -> Tensor:
    """`linear_logprobs` on CUDA (or in Triton's interpreter); backward makes each chunk of logits again.

    The logits are not rounded to bf16 on the way: a policy ratio of 1 has to come out as 1.
    """
    check_request(hidden_ND, head_VD, targets_N, softcap, temperature)
    compute = _compute_dtype(hidden_ND)
    sweep = _Sweep(softcap, temperature, IGNORE_NONE, compute=compute, logits=torch.float32, chunk=chunk)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return _LogProbs.apply(hidden_ND, head_VD, targets_N, sweep)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weight_N: Tensor,
                sweep: _Sweep, grad_enabled: bool) -> tuple[Tensor, Tensor]:
        wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:2]]
        weight_N = weight_N.to(torch.float32)
        losses_N, d_hidden_ND, d_head_VD = sweep(hidden_ND, head_VD, targets_N, weight_N, *wanted)
        ctx.dtypes = hidden_ND.dtype, head_VD.dtype
        ctx.save_for_backward(d_hidden_ND, d_head_VD)
        ctx.mark_non_differentiable(losses_N)
        return (weight_N * losses_N).sum(), losses_N

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because these are the largest tensors of the step. Autograd counts the writes to what it saved, so
        # a second backward through the same graph is an error, not a gradient scaled twice.
        grads = [d if d is None else d.mul_(grad_total).to(dtype)
                 for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return (*grads, None, None, None, None)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, sweep: _Sweep) -> Tensor:
        ctx.save_for_backward(hidden_ND, head_VD, targets_N)
        ctx.sweep = sweep
        losses_N, _, _ = sweep(hidden_ND, head_VD, targets_N, None, False, False)
        return losses_N.neg_()

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, head_VD, targets_N = ctx.saved_tensors
        weight_N = -grad_N.to(torch.float32)  # logp is minus the loss
        _, d_hidden_ND, d_head_VD = ctx.sweep(hidden_ND, head_VD, targets_N, weight_N, *ctx.needs_input_grad[:2])
        return (None if d_hidden_ND is None else d_hidden_ND.to(hidden_ND.dtype),
                None if d_head_VD is None else d_head_VD.to(head_VD.dtype), None, None)


@dataclass(frozen=True)
class _Sweep:
    """Settings of one pass over all tokens, a chunk of logits at a time; the fields say which loss, in which precision."""

    softcap: float | None
    temperature: float
    ignore_index: int
    compute: torch.dtype
    logits: torch.dtype
    chunk: int | None

    def __call__(self, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weight_N: Tensor | None,
                 want_hidden: bool, want_head: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Losses, and where wanted the gradients of Σ weight · loss with respect to hidden and head; all in fp32."""
        hidden_ND, head_VD = hidden_ND.to(self.compute), head_VD.to(self.compute)
        (N, _), V = hidden_ND.shape, len(head_VD)
        losses_N = hidden_ND.new_empty(N, dtype=torch.float32)
        d_hidden_ND = torch.empty_like(hidden_ND, dtype=torch.float32) if want_hidden else None
        made = torch.empty_like if N else torch.zeros_like  # the first chunk writes, the others add
        d_head_VD = made(head_VD, dtype=torch.float32) if want_head else None
        in_place = self.logits == self.compute
        gradient = want_hidden or want_head
        chunk = self.chunk or even_chunk(N, V, self.logits.itemsize + (0 if in_place else self.compute.itemsize))
        logits_CV = padded_rows(hidden_ND, min(chunk, N), V, self.logits)
        grads_CV = logits_CV if in_place or not gradient else padded_rows(hidden_ND, min(chunk, N), V, self.compute)
        for start in range(0, N, chunk):
            part = slice(start, min(start + chunk, N))
            logits, grads = logits_CV[: part.stop - start], grads_CV[: part.stop - start]
            matmul_into(hidden_ND[part], head_VD.T, out=logits)
            self._rows(logits, grads if gradient else None, targets_N[part], losses_N[part],
                       None if weight_N is None else weight_N[part])
            if d_hidden_ND is not None:
                matmul_into(grads, head_VD, out=d_hidden_ND[part])
            if d_head_VD is not None:
                matmul_into(grads.T, hidden_ND[part], out=d_head_VD, add=start > 0)
        return losses_N, d_hidden_ND, d_head_VD

    def _rows(self, logits_CV: Tensor, grads_CV: Tensor | None, targets_C: Tensor, losses_C: Tensor,
              weight_C: Tensor | None) -> None:
        C, V = logits_CV.shape
        block, warps = launch_shape(V)
        targets_C = targets_C.contiguous()
        jitted(_row_loss)[(C,)](
            logits_CV, logits_CV if grads_CV is None else grads_CV, targets_C,
            losses_C if weight_C is None else weight_C.contiguous(), losses_C,
            self.ignore_index, 1.0 if self.softcap is None else self.softcap, 1 / self.temperature,
            V=V, WIDTH=logits_CV.stride(0), CAPPED=self.softcap is not None, GRADIENT=grads_CV is not None,
            BLOCK=block, num_warps=warps)


def launch_shape(vocab: int) -> tuple[int, int]:
    """(logits a program holds at a time, warps it runs on): 16 logits a thread, so that programs share an SM."""
    block = min(MAX_BLOCK, 1 << (vocab - 1).bit_length())
    return block, max(1, block // 512)


def even_chunk(N: int, V: int, bytes_per_logit: int) -> int:
    """Tokens a chunk, so that its logits stay within CHUNK_BYTES and the last chunk is about as long as the others."""
    most = max(128, CHUNK_BYTES // (bytes_per_logit * V))
    even = math.ceil(N / math.ceil(N / most)) if N else 1
    return min(most, math.ceil(even / 128) * 128)


def padded_rows(like: Tensor, rows: int, V: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(rows, math.ceil(V / LANES) * LANES, dtype=dtype)[:, :V]


def matmul_into(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """out = a @ b (+ out), summed in fp32 and rounded once, to out's dtype."""
    if not a.is_cuda:  # PyTorch has no product of mixed precision on the CPU
        wide = torch.promote_types(out.dtype, torch.float32)
        made = a.to(wide) @ b.to(wide)
        out.copy_(made + out if add else made)
    elif a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=float(add), out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=float(add), out=out)


def _row_loss(logits_ptr, grads_ptr, targets_ptr, weight_ptr, losses_ptr,
              ignore_index, cap, inverse_temperature,
              V: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: one token's loss and, if GRADIENT, weight · d loss / d logits of its row, which may overwrite the logits.

    Loads and stores are masked by the padded WIDTH of a row, which keeps them 16 bytes wide for any vocabulary. The
    padding is cut off by value, and after the cap, which would lift a masked -inf to -cap; its gradient is never read.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * WIDTH
    grads_ptr += row * WIDTH
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, WIDTH, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                tl.store(grads_ptr + cols, tl.zeros((BLOCK,), grads_ptr.dtype.element_ty), mask=cols < WIDTH)
        return
    known = (target >= 0) & (target < V)
    target_score = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    if CAPPED:
        target_score = cap * (1 - 2 / (1 + tl.exp(target_score * (2 / cap))))
    target_score *= inverse_temperature

    top = float("-inf")
    total = 0.0
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        score = tl.load(logits_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
        if CAPPED:  # tanh, through exp: exact to fp32 rounding of the cap, and it exists in the interpreter
            score = cap * (1 - 2 / (1 + tl.exp(score * (2 / cap))))
        score = tl.where(cols < V, score * inverse_temperature, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(score - new_top), 0)
        top = new_top
    log_total = top + tl.log(total)
    tl.store(losses_ptr + row, log_total - target_score)

    if GRADIENT:
        scale = tl.load(weight_ptr + row) * inverse_temperature
        scale = tl.where(known, scale, float("nan"))
        for start in range(0, WIDTH, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            score = tl.load(logits_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
            slope = scale
            if CAPPED:
                tanh = 1 - 2 / (1 + tl.exp(score * (2 / cap)))
                score = cap * tanh
                slope = scale * (1 - tanh * tanh)
            probability = tl.exp(score * inverse_temperature - log_total)
            grad = slope * (probability - tl.where(cols == target, 1.0, 0.0))
            tl.store(grads_ptr + cols, grad.to(grads_ptr.dtype.element_ty), mask=cols < WIDTH)


# ── what may be asked ─────────────────────────────────────────────────────────────────────────────────────────────────

def check_request(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, softcap: float | None,
           temperature: float = 1.0, weight_N: Tensor | None = None) -> None:
    """The kernel reads through bare pointers: a wrong shape must not reach it."""
    if hidden_ND.ndim != 2 or head_VD.ndim != 2 or hidden_ND.shape[1] != head_VD.shape[1]:
        raise UsageError(f"linear loss: hidden is {tuple(hidden_ND.shape)} and head {tuple(head_VD.shape)}; "
                         "expected (N, D) and (V, D): flatten batch and time first")
    for name, tensor in (("targets", targets_N), ("weight", weight_N)):
        if tensor is not None and tensor.shape != hidden_ND.shape[:1]:
            raise UsageError(f"linear loss: {name} is {tuple(tensor.shape)}; expected ({len(hidden_ND)},), one a token")
    if targets_N.dtype != torch.int64:
        raise UsageError(f"linear loss: targets are {targets_N.dtype}; expected torch.int64")
    if softcap is not None and not softcap > 0:
        raise UsageError(f"linear loss: softcap is {softcap}; expected a positive number, or None for no cap")
    if not temperature > 0:
        raise UsageError(f"linear loss: temperature is {temperature}; expected a positive number")


def _compute_dtype(hidden_ND: Tensor) -> torch.dtype:
    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise UsageError(f"fused linear loss: would compute in {dtype}; expected bfloat16 or float32 "
                         "(float16 underflows in the gradient of the logits)")
    return dtype
