"""Linear head to log-probability and entropy of each token, a chunk of logits at a time.

`softcap_ce.linear_logprobs` is for where nobody asks for the entropy. Here both come out of one pass over the logits, and both
carry gradients: backward makes each chunk of logits again, so that those of a batch never exist whole. On CUDA one Triton program
per token reads its row of logits once, and once more to turn it into the row's gradient; elsewhere PyTorch does.

Shapes: N tokens, D hidden, V vocabulary, C tokens in a chunk.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from assay.kernels.softcap_ce import check_request, even_chunk, launch_shape, matmul_into, padded_rows
from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

LOWEST = -1e30  # before the first logit: unlike -inf, it may be subtracted from itself


def linear_logprobs_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, softcap: float | None = None,
                            temperature: float = 1.0, chunk: int | None = None, fused: bool | None = None) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) in fp32 of softmax(cap(hidden @ head.T) / temperature), both differentiable token by token.

    Products run in hidden's dtype and are summed in fp32. `fused`: by the kernels, which is what happens on CUDA.
    """
    check_request(hidden_ND, head_VD, targets_N, softcap, temperature)
    asked = EntropyRequest(softcap, temperature, chunk, hidden_ND.is_cuda if fused is None else fused)
    return _LogprobsEntropy.apply(hidden_ND, head_VD, targets_N, asked)


def plain_linear_logprobs_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, softcap: float | None = None,
                                  temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy with the logits whole and gradients by autograd."""
    logits_NV = hidden_ND.float() @ head_VD.float().T
    logits_NV = logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)
    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1), -(logprobs_NV.exp() * logprobs_NV).sum(-1)


@dataclass(frozen=True)
class EntropyRequest:
    softcap: float | None
    temperature: float
    chunk: int | None
    fused: bool


class _LogprobsEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, asked: EntropyRequest) -> tuple[Tensor, Tensor]:
        rows = _fused_rows if asked.fused else _plain_rows
        logp_N, entropy_N, total_N = (hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32) for _ in range(3))
        for part, logits_CV in _chunks_of_logits(hidden_ND, head_VD, asked):
            rows(logits_CV, targets_N[part], asked, logp_N[part], entropy_N[part], total_N[part])
        ctx.save_for_backward(hidden_ND, head_VD, targets_N, entropy_N, total_N)
        ctx.asked = asked
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, d_logp_N: Tensor, d_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient, with s the scores that softmax sees: d logp / ds = onehot − p, d entropy / ds = −p · (log p + entropy)."""
        hidden_ND, head_VD, targets_N, entropy_N, total_N = ctx.saved_tensors
        gradients = _fused_gradients if ctx.asked.fused else _plain_gradients
        d_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        d_head_VD = torch.zeros_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        head = head_VD.to(hidden_ND.dtype)
        for part, logits_CV in _chunks_of_logits(hidden_ND, head_VD, ctx.asked):
            grads_CV = gradients(logits_CV, targets_N[part], ctx.asked, d_logp_N[part], d_entropy_N[part], entropy_N[part], total_N[part],
                                 hidden_ND.dtype)
            if d_hidden_ND is not None:
                matmul_into(grads_CV, head, out=d_hidden_ND[part])
            if d_head_VD is not None:
                matmul_into(grads_CV.T, hidden_ND[part], out=d_head_VD, add=True)
        return d_hidden_ND, None if d_head_VD is None else d_head_VD.to(head_VD.dtype), None, None


def _chunks_of_logits(hidden_ND: Tensor, head_VD: Tensor, asked: EntropyRequest) -> Iterator[tuple[slice, Tensor]]:
    """fp32 and not rounded to bf16 on the way: a policy ratio of 1 has to come out as 1. Each is overwritten by the next."""
    (N, _), V, head_DV = hidden_ND.shape, len(head_VD), head_VD.to(hidden_ND.dtype).T
    chunk = asked.chunk or even_chunk(N, V, torch.float32.itemsize + hidden_ND.dtype.itemsize)
    buffer_CV = padded_rows(hidden_ND, min(chunk, N), V, torch.float32)
    for start in range(0, N, chunk):
        part = slice(start, min(start + chunk, N))
        logits_CV = buffer_CV[: part.stop - start]
        matmul_into(hidden_ND[part], head_DV, out=logits_CV)
        yield part, logits_CV


# ---------------------------------------------------------------- by PyTorch


def _plain_rows(logits_CV: Tensor, targets_C: Tensor, asked: EntropyRequest, logp_C: Tensor, entropy_C: Tensor, total_C: Tensor) -> None:
    scores_CV, _ = _scores(logits_CV, asked)
    total_C.copy_(scores_CV.logsumexp(-1))
    logprobs_CV = scores_CV - total_C[:, None]
    logp_C.copy_(logprobs_CV.gather(-1, targets_C[:, None]).squeeze(-1))
    entropy_C.copy_(-(logprobs_CV.exp() * logprobs_CV).sum(-1))


def _plain_gradients(logits_CV: Tensor, targets_C: Tensor, asked: EntropyRequest, d_logp_C: Tensor, d_entropy_C: Tensor, entropy_C: Tensor,
                     total_C: Tensor, dtype: torch.dtype) -> Tensor:
    scores_CV, slope_CV = _scores(logits_CV, asked)
    logprobs_CV = scores_CV - total_C[:, None]
    grads_CV = -logprobs_CV.exp() * (d_logp_C[:, None] + d_entropy_C[:, None] * (logprobs_CV + entropy_C[:, None]))
    grads_CV.scatter_add_(-1, targets_C[:, None], d_logp_C[:, None])
    return (grads_CV / asked.temperature if slope_CV is None else grads_CV * slope_CV / asked.temperature).to(dtype)


def _scores(logits_CV: Tensor, asked: EntropyRequest) -> tuple[Tensor, Tensor | None]:
    """Scores that softmax sees, and where there is a cap its slope at each logit."""
    if asked.softcap is None:
        return logits_CV / asked.temperature, None
    tanh_CV = torch.tanh(logits_CV / asked.softcap)
    return asked.softcap * tanh_CV / asked.temperature, 1 - tanh_CV.square()


# ---------------------------------------------------------------- by Triton, or in its interpreter


def _fused_rows(logits_CV: Tensor, targets_C: Tensor, asked: EntropyRequest, logp_C: Tensor, entropy_C: Tensor, total_C: Tensor) -> None:
    (C, V), (block, warps) = logits_CV.shape, launch_shape(logits_CV.shape[1])
    jitted(_row_values)[(C,)](
        logits_CV, targets_C.contiguous(), logp_C, entropy_C, total_C,
        1.0 if asked.softcap is None else asked.softcap, 1 / asked.temperature,
        V=V, WIDTH=logits_CV.stride(0), CAPPED=asked.softcap is not None, LOWEST=LOWEST, BLOCK=block, num_warps=warps)


def _fused_gradients(logits_CV: Tensor, targets_C: Tensor, asked: EntropyRequest, d_logp_C: Tensor, d_entropy_C: Tensor, entropy_C: Tensor,
                     total_C: Tensor, dtype: torch.dtype) -> Tensor:
    (C, V), (block, warps) = logits_CV.shape, launch_shape(logits_CV.shape[1])
    grads_CV = padded_rows(logits_CV, C, V, dtype)
    jitted(_row_gradients)[(C,)](
        logits_CV, grads_CV, targets_C.contiguous(), d_logp_C.contiguous(), d_entropy_C.contiguous(), entropy_C, total_C,
        1.0 if asked.softcap is None else asked.softcap, 1 / asked.temperature,
        V=V, WIDTH=logits_CV.stride(0), CAPPED=asked.softcap is not None, BLOCK=block, num_warps=warps)
    return grads_CV


def _row_values(logits_ptr, targets_ptr, logp_ptr, entropy_ptr, total_ptr, cap, inverse_temperature,
                V: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: one token. Σ e^s and Σ s · e^s, both relative to the largest score so far, in one read of the row.

    Loads are masked by the padded WIDTH of a row, which keeps them 16 bytes wide for any vocabulary; padding is cut off by value.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * WIDTH
    target = tl.load(targets_ptr + row)
    target_score = tl.load(logits_ptr + target, mask=(target >= 0) & (target < V), other=float("nan"))
    if CAPPED:
        target_score = cap * (1 - 2 / (1 + tl.exp(target_score * (2 / cap))))
    target_score *= inverse_temperature

    top = LOWEST
    total = 0.0
    moment = 0.0
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        score = tl.load(logits_ptr + cols, mask=cols < WIDTH, other=0.0)
        if CAPPED:  # tanh, through exp: exact to fp32 rounding of the cap, and it exists in the interpreter
            score = cap * (1 - 2 / (1 + tl.exp(score * (2 / cap))))
        score = tl.where(cols < V, score * inverse_temperature, LOWEST)
        new_top = tl.maximum(top, tl.max(score, 0))
        shrink = tl.exp(top - new_top)
        moment = shrink * (moment + (top - new_top) * total)
        total = shrink * total
        below = score - new_top
        mass = tl.exp(below)
        total += tl.sum(mass, 0)
        moment += tl.sum(mass * below, 0)
        top = new_top
    log_total = tl.log(total)
    tl.store(logp_ptr + row, target_score - top - log_total)
    tl.store(entropy_ptr + row, log_total - moment / total)
    tl.store(total_ptr + row, top + log_total)


def _row_gradients(logits_ptr, grads_ptr, targets_ptr, d_logp_ptr, d_entropy_ptr, entropy_ptr, total_ptr, cap, inverse_temperature,
                   V: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: one token's gradient in its row of logits; the padding's is never read. What does not count is not read either."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * WIDTH
    grads_ptr += row * WIDTH
    d_logp = tl.load(d_logp_ptr + row)
    d_entropy = tl.load(d_entropy_ptr + row)
    if (d_logp == 0) & (d_entropy == 0):
        for start in range(0, WIDTH, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            tl.store(grads_ptr + cols, tl.zeros((BLOCK,), grads_ptr.dtype.element_ty), mask=cols < WIDTH)
        return
    target = tl.load(targets_ptr + row)
    entropy = tl.load(entropy_ptr + row)
    log_total = tl.load(total_ptr + row)
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        score = tl.load(logits_ptr + cols, mask=cols < WIDTH, other=0.0)
        slope = inverse_temperature
        if CAPPED:
            tanh = 1 - 2 / (1 + tl.exp(score * (2 / cap)))
            score = cap * tanh
            slope = inverse_temperature * (1 - tanh * tanh)
        logprob = score * inverse_temperature - log_total
        grad = tl.where(cols == target, d_logp, 0.0) - tl.exp(logprob) * (d_logp + d_entropy * (logprob + entropy))
        tl.store(grads_ptr + cols, (slope * grad).to(grads_ptr.dtype.element_ty), mask=cols < WIDTH)
