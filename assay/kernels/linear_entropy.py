"""Linear head, soft cap and temperature to log-probability and entropy of each token, a chunk of logits at a time.

`softcap_ce.linear_logprobs` is the faster one where nobody asks for the entropy. Here both come out of one pass over the
logits, and both carry gradients: backward makes each chunk of logits again, so that those of a batch never exist whole.

Shapes: N tokens, D hidden, V vocabulary, C tokens in a chunk.
"""

from typing import Any

import torch
from torch import Tensor

from assay.kernels.softcap_ce import _check as check_request

CHUNK_LOGITS = 1 << 26  # of a chunk, in fp32 256 MiB: large enough for a GPU, and a tiny model needs only one


def linear_logprobs_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, softcap: float | None = None,
                            temperature: float = 1.0, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) in fp32 of softmax(cap(hidden @ head.T) / temperature), both differentiable token by token."""
    check_request(hidden_ND, head_VD, targets_N, softcap, temperature)
    rows = chunk or max(1, CHUNK_LOGITS // len(head_VD))
    return _LogprobsEntropy.apply(hidden_ND, head_VD, targets_N, softcap, temperature, rows)


def plain_linear_logprobs_entropy(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, softcap: float | None = None,
                                  temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same with the logits whole and gradients by autograd."""
    logits_NV = hidden_ND.float() @ head_VD.float().T
    logits_NV = logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)
    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1), -(logprobs_NV.exp() * logprobs_NV).sum(-1)


class _LogprobsEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, softcap: float | None, temperature: float,
                rows: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, head_VD, targets_N)
        ctx.asked = softcap, temperature, rows
        logp_N, entropy_N = (hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32) for _ in range(2))
        for part in _chunks(len(hidden_ND), rows):
            logprobs_CV, _ = _logprobs(hidden_ND[part], head_VD, softcap, temperature)
            logp_N[part] = logprobs_CV.gather(-1, targets_N[part, None]).squeeze(-1)
            entropy_N[part] = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, d_logp_N: Tensor, d_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        """With s the scores that softmax sees: d logp / ds = onehot − p, d entropy / ds = −p · (log p + entropy)."""
        hidden_ND, head_VD, targets_N = ctx.saved_tensors
        softcap, temperature, rows = ctx.asked
        d_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        d_head_VD = torch.zeros_like(head_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden_ND), rows):
            logprobs_CV, slope_CV = _logprobs(hidden_ND[part], head_VD, softcap, temperature)
            p_CV = logprobs_CV.exp()
            entropy_C1 = -(p_CV * logprobs_CV).sum(-1, keepdim=True)
            grad_CV = -p_CV * (d_logp_N[part, None] + d_entropy_N[part, None] * (logprobs_CV + entropy_C1))
            grad_CV.scatter_add_(-1, targets_N[part, None], d_logp_N[part, None])
            grad_CV = (grad_CV / temperature if slope_CV is None else grad_CV * slope_CV / temperature).to(hidden_ND.dtype)
            if d_hidden_ND is not None:
                d_hidden_ND[part] = grad_CV @ head_VD.to(grad_CV.dtype)
            if d_head_VD is not None:
                d_head_VD += _product(grad_CV.T, hidden_ND[part])
        return d_hidden_ND, None if d_head_VD is None else d_head_VD.to(head_VD.dtype), None, None, None, None


def _chunks(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def _logprobs(hidden_CD: Tensor, head_VD: Tensor, softcap: float | None, temperature: float) -> tuple[Tensor, Tensor | None]:
    """fp32 log-probabilities, and where there is a cap its slope at each logit. Products run in hidden's dtype, summed in fp32."""
    logits_CV = _product(hidden_CD, head_VD.to(hidden_CD.dtype).T)
    if softcap is None:
        return (logits_CV / temperature).log_softmax(-1), None
    tanh_CV = torch.tanh(logits_CV / softcap)
    return (softcap * tanh_CV / temperature).log_softmax(-1), 1 - tanh_CV.square()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """In fp32, not rounded to bf16 on the way: a policy ratio of 1 has to come out as 1."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
