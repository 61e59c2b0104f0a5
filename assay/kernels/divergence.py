"""Distillation kernel: divergence, cross-entropy and their gradient from student and teacher logits, a program a row.

Its plain PyTorch twin is `learn/distillation.py`, which says what each divergence is and runs wherever CUDA does not. There some
forty passes over the logits of a chunk cost more than both models' layers; here three reads and one write are left.

Shapes: C tokens in a chunk, V the student's vocabulary, W the teacher's.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.kernels.softcap_ce import launch_shape
from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

DIVERGENCE_KINDS = {"forward": 0, "reverse": 1, "jsd": 2}


@dataclass(frozen=True)
class DivergenceSpec:
    """Divergence to compute, with the fields of DistillationSettings. `vocab` is how many ids both distributions are over; `softcap` the
    student's, which its logits have been through."""

    divergence: str
    temperature: float
    kd_weight: float
    ce_weight: float
    beta: float
    vocab: int
    softcap: float | None


def fused_divergence(student_CV: Tensor, teacher_CW: Tensor, targets_C: Tensor, weight_C: Tensor, asked: DivergenceSpec,
                gradient: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """(C, 2) in fp32: τ² · divergence and cross-entropy of each token; and in `gradient`'s dtype, where there is one, the gradient of
    Σ weight · (kd_weight · τ² · divergence + ce_weight · cross-entropy) in the student's logits before their cap.

    On CUDA, or in Triton's interpreter. A token of weight 0 has terms of 0 and no gradient, whatever its logits.
    """
    for name, logits in (("student", student_CV), ("teacher", teacher_CW)):
        if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1 or not 1 < asked.vocab <= logits.shape[1]:
            raise UsageError(f"divergence: the {name}'s logits are {logits.dtype} {tuple(logits.shape)}; expected float32 rows, one a "
                             f"token, of {asked.vocab} ids at least")
    (C, V), like = student_CV.shape, student_CV
    if not len(teacher_CW) == len(targets_C) == len(weight_C) == C:
        raise UsageError(f"divergence: {C} tokens of the student, {len(teacher_CW)} of the teacher, {len(targets_C)} targets and "
                         f"{len(weight_C)} weights; expected as many of each")
    terms_C2 = like.new_empty(C, 2)
    grads_CV = None if gradient is None else like.new_empty(C, V, dtype=gradient)
    written = terms_C2 if grads_CV is None else grads_CV
    block, warps = launch_shape(V)
    if C:
        jitted(_row_divergence)[(C,)](
            student_CV, teacher_CW, written, targets_C.contiguous(), weight_C.float().contiguous(), terms_C2,
            student_CV.stride(0), teacher_CW.stride(0), written.stride(0),
            1 / asked.temperature, asked.kd_weight * asked.temperature, asked.ce_weight, asked.beta,
            1.0 if asked.softcap is None else asked.softcap,
            V=V, SHARED=asked.vocab, KIND=DIVERGENCE_KINDS[asked.divergence], CAPPED=asked.softcap is not None,
                                      GRADIENT=grads_CV is not None,
            BLOCK=block, num_warps=warps)
    return terms_C2, grads_CV


def _row_divergence(student_ptr, teacher_ptr, grads_ptr, targets_ptr, weight_ptr, terms_ptr,
                    student_stride, teacher_stride, grads_stride, inverse_temperature, kd_slope, ce_slope, beta, cap,
                    V: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr, CAPPED: tl.constexpr, GRADIENT: tl.constexpr,
                    BLOCK: tl.constexpr):
    """Triton: one token. First what each row sums to, then the divergence, then the gradient: nothing is kept but the rows."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    grads_ptr += row * grads_stride
    weight = tl.load(weight_ptr + row)
    if weight == 0:
        tl.store(terms_ptr + 2 * row, 0.0)
        tl.store(terms_ptr + 2 * row + 1, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                tl.store(grads_ptr + cols, tl.zeros((BLOCK,), grads_ptr.dtype.element_ty), mask=cols < V)
        return

    q_top = float("-inf")  # the student's softened logits over the shared ids, the teacher's, and the student's own over all
    q_sum = 0.0
    p_top = float("-inf")
    p_sum = 0.0
    s_top = float("-inf")
    s_sum = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        s = tl.load(student_ptr + cols, mask=cols < V, other=float("-inf"))
        top = tl.maximum(s_top, tl.max(s, 0))
        s_sum = s_sum * tl.exp(s_top - top) + tl.sum(tl.exp(s - top), 0)
        s_top = top
        q = tl.where(cols < SHARED, s * inverse_temperature, float("-inf"))
        p = tl.load(teacher_ptr + cols, mask=cols < SHARED, other=float("-inf")) * inverse_temperature
        top = tl.maximum(q_top, tl.max(q, 0))
        q_sum = q_sum * tl.exp(q_top - top) + tl.sum(tl.exp(q - top), 0)
        q_top = top
        top = tl.maximum(p_top, tl.max(p, 0))
        p_sum = p_sum * tl.exp(p_top - top) + tl.sum(tl.exp(p - top), 0)
        p_top = top
    q_total = q_top + tl.log(q_sum)
    p_total = p_top + tl.log(p_sum)
    s_total = s_top + tl.log(s_sum)

    one = 0.0  # forward and reverse: the divergence; jsd: KL(q ‖ m)
    two = 0.0  # jsd: KL(p ‖ m)
    for start in range(0, SHARED, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        log_q = tl.load(student_ptr + cols, mask=cols < SHARED, other=0.0) * inverse_temperature - q_total
        log_p = tl.load(teacher_ptr + cols, mask=cols < SHARED, other=0.0) * inverse_temperature - p_total
        q = tl.where(cols < SHARED, tl.exp(log_q), 0.0)
        p = tl.where(cols < SHARED, tl.exp(log_p), 0.0)
        r = log_q - log_p
        if KIND == 0:
            one -= tl.sum(p * r, 0)
        elif KIND == 1:
            one += tl.sum(q * r, 0)
        else:
            over = tl.log(1 + tl.where(r > 0, beta, 1 - beta) * (tl.exp(-tl.abs(r)) - 1)) - tl.minimum(r, 0.0)  # log m/q
            one -= tl.sum(q * over, 0)
            two -= tl.sum(p * (r + over), 0)
    divergence = one
    if KIND == 2:
        divergence = beta * two + (1 - beta) * one

    target = tl.load(targets_ptr + row)
    known = (target >= 0) & (target < V)
    target_logit = tl.load(student_ptr + target, mask=known, other=float("nan"))
    tl.store(terms_ptr + 2 * row, divergence / (inverse_temperature * inverse_temperature))
    tl.store(terms_ptr + 2 * row + 1, s_total - target_logit)

    if GRADIENT:
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            s = tl.load(student_ptr + cols, mask=cols < V, other=0.0)
            log_q = s * inverse_temperature - q_total
            log_p = tl.load(teacher_ptr + cols, mask=cols < SHARED, other=0.0) * inverse_temperature - p_total
            q = tl.exp(log_q)
            r = log_q - log_p
            if KIND == 0:
                slope = q - tl.exp(log_p)
            elif KIND == 1:
                slope = q * (r - divergence)
            else:
                over = tl.log(1 + tl.where(r > 0, beta, 1 - beta) * (tl.exp(-tl.abs(r)) - 1)) - tl.minimum(r, 0.0)
                slope = q * (over + one) * (beta - 1)
            grad = tl.where(cols < SHARED, slope * kd_slope, 0.0)
            grad += ce_slope * (tl.exp(s - s_total) - tl.where(cols == target, 1.0, 0.0))
            if CAPPED:
                grad *= 1 - (s / cap) * (s / cap)
            tl.store(grads_ptr + cols, (grad * weight).to(grads_ptr.dtype.element_ty), mask=cols < V)
