"""Distillation: a student learns its teacher's distribution over the next token, computed online or stored before.

    for step in train(student, optimizer, batches, distillation(teacher, DistillationSettings(temperature=2.0)), micro=8): ...

One law with `next_token`: state t predicts token t + 1 and counts with the weight of token t + 1, for both models. With student q,
teacher p, both softened by a temperature τ, a token's loss is

    kd_weight · τ² · D(p, q)  +  ce_weight · cross-entropy at τ = 1.

D's gradient in the logits falls as 1/τ², so τ² keeps it comparable: for large τ it tends to (student − teacher logits) / V, each
about its mean.

Memory: both models' logits are made a chunk of tokens at a time and turned at once into losses and into the gradients of states
and head; a chunk with all that is computed from it stays near softcap_ce.CHUNK_BYTES (384 MiB, 128 tokens at least). What
remains for the backward pass is one (N, D) and one (V, D) tensor in fp32. On CUDA an online teacher's chunks go through the kernel
of kernels/divergence.py, whose plain twin stands here.

Shapes: N tokens, C tokens in a chunk, D student width, V vocabulary, K stored entries a token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import UsageError
from assay.kernels.divergence import DivergenceSpec, fused_divergence
from assay.kernels.softcap_ce import even_chunk, matmul_into
from assay.learn.objectives import TOKENS, Loss, Objective
from assay.model.transformer import Transformer, softcap

BYTES_PER_LOGIT = 40  # alive at once for each logit of a chunk: ten fp32 tensors, two models' logits among them
BYTES_FUSED = 12  # where the kernel reads: two models' logits in fp32, and the gradient

TermAndSlope = tuple[Tensor, Tensor]  # a divergence of each token, and its gradient in the student's softened logits
DivergenceFunction = Callable[[Tensor, Tensor], TermAndSlope]  # of the log-probabilities of student and teacher
TeacherTerms = Callable[[slice, Tensor], TermAndSlope]  # for the tokens of a chunk and the student's softened log-probabilities there
# For the tokens of a chunk, the student's logits and the dtype of gradients, if wanted: the terms (C, 2), and the weighted
# gradient of their blend in the logits before any cap. A token of weight 0 has terms of 0 and no gradient, whatever its logits.
ChunkTerms = Callable[[slice, Tensor, torch.dtype | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of a distillation loss. `vocab` is the size of the tokenizer that both models share, to be said where their tables were
    padded to different sizes: both distributions are then over its ids alone."""

    divergence: Literal["forward", "reverse", "jsd"] = "forward"  # KL(p‖q), KL(q‖p), or Jensen–Shannon
    temperature: float = 1.0
    kd_weight: float = 1.0
    ce_weight: float = 0.0
    beta: float = 0.5  # the teacher's share in the mixture of "jsd"
    vocab: int | None = None
    top_k: int | None = None  # online: so many of the likeliest tokens, all others being one more outcome; None: every token

    def __post_init__(self) -> None:
        if self.divergence not in ("forward", "reverse", "jsd"):
            raise UsageError(f"divergence {self.divergence!r} is not known; expected forward, reverse or jsd")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UsageError(f"temperature is {self.temperature}; expected a positive number")
        if not (self.kd_weight > 0 and self.ce_weight >= 0 and math.isfinite(self.kd_weight + self.ce_weight)):
            raise UsageError(f"kd_weight is {self.kd_weight} and ce_weight {self.ce_weight}; expected kd_weight above 0 (without a "
                             "teacher, train with next_token) and ce_weight not below 0")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k}; expected at least 1 token, or None for all of them")
        if not 0 < self.beta < 1:
            raise UsageError(f"beta is {self.beta}; expected a share between 0 and 1 (the ends are the two KL divergences: ask for "
                             "forward or reverse)")


# ── the objectives ────────────────────────────────────────────────────────────────────────────────────────────────────


def distillation(teacher: Transformer, blend: DistillationSettings | None = None) -> Objective:
    """Online: the teacher reads every batch beside the student, in the same layout, and never gets a gradient."""
    blend = blend or DistillationSettings()
    known: dict[str, DivergenceFunction] = {"forward": forward_kl, "reverse": reverse_kl, "jsd": partial(jensen_shannon, beta=blend.beta)}

    def objective(student: Transformer, batch: Batch) -> Loss:
        vocab = shared_vocab(student, teacher, blend.vocab)
        divergence, coarse = known[blend.divergence], blend.top_k is not None and blend.top_k < vocab
        if blend.top_k is not None and coarse:
            divergence = partial(among_top_k, divergence, blend.top_k, blend.divergence == "reverse")
        with torch.no_grad():
            states_NE = flat_states(teacher, batch)
            head_VE = teacher.head_weight().to(states_NE.dtype)

        def theirs(part: slice) -> Tensor:
            return capped_logits(states_NE[part], head_VE, teacher.config.softcap)

        def answers(part: slice, log_student_CV: Tensor) -> TermAndSlope:
            return divergence(log_student_CV, (theirs(part)[:, :vocab] / blend.temperature).log_softmax(-1))

        if batch.tokens.is_cuda and not coarse:
            return _distilled(student, batch, blend, fused_chunk_terms(student, batch, blend, vocab, theirs), BYTES_FUSED)
        return _distilled(student, batch, blend, plain_chunk_terms(student, batch, blend, vocab, answers), BYTES_PER_LOGIT)

    return objective


def stored_distillation(blend: DistillationSettings | None = None) -> Objective:
    """Offline: forward KL to the teacher's stored likeliest tokens, all other tokens together being one more outcome.

    That is a true divergence of the coarser distributions: never negative, and 0 only where they agree. The entries must have been
    stored at the blend's temperature: the tail of another one cannot be known.
    """
    blend = blend or DistillationSettings()
    if blend.top_k is not None:
        raise UsageError(f"stored distillation was asked for the {blend.top_k} likeliest tokens; it has those that were stored. Leave "
                         "top_k out")
    if blend.divergence != "forward":
        raise UsageError(f"stored distillation was asked for the divergence {blend.divergence!r}; a teacher that left only its likeliest "
                         "tokens allows forward alone. Run the teacher online for the others")

    def objective(student: Transformer, batch: Batch) -> Loss:
        ids_NK, logprobs_NK, vocab = *_stored(batch), blend.vocab or student.config.vocab
        if ids_NK.shape[1] >= vocab:
            raise UsageError(f"{ids_NK.shape[1]} stored entries a token cover a vocabulary of {vocab}: no other outcome is left. "
                             "Store fewer")

        def answers(part: slice, log_student_CV: Tensor) -> TermAndSlope:
            return top_k_kl(log_student_CV, ids_NK[part], logprobs_NK[part])

        return _distilled(student, batch, blend, plain_chunk_terms(student, batch, blend, vocab, answers), BYTES_PER_LOGIT)

    return objective


def weighted_sum(objectives: Sequence[Objective], shares: Sequence[float]) -> Objective:
    """Objective of several teachers: each token's loss is the weighted sum of its losses by each; the metrics likewise."""
    def objective(student: Transformer, batch: Batch) -> Loss:
        found = [each(student, batch) for each in objectives]
        of = lambda values: sum(share * value for share, value in zip(shares, values, strict=True))  # noqa: E731
        metrics = {name: of([(each.metrics or {})[name] for each in found]) for name in ("kd", "ce")}
        return Loss(of([each.total for each in found]), found[0].weight, of([each.losses for each in found]),
                    {TOKENS: batch.weight.sum(), **metrics})

    return objective


@torch.no_grad()
def teacher_top_k(teacher: Transformer, batch: Batch, k: int, *, temperature: float = 1.0, vocab: int | None = None) -> tuple[Tensor,
                                                                                                                              Tensor]:
    """The streams (teacher_ids, teacher_logprobs), (B, T, K) on the CPU, for `stored_distillation`; column 0 is nobody's prediction."""
    vocab = vocab or teacher.config.vocab
    if not 1 <= k < vocab:
        raise UsageError(f"the teacher's {k} likeliest of {vocab} tokens were asked for; expected 1 to {vocab - 1}")
    states_NE, head_VE, found = flat_states(teacher, batch), teacher.head_weight(), []
    for part in chunks(len(states_NE), len(head_VE)):
        logits_CV = capped_logits(states_NE[part], head_VE.to(states_NE.dtype), teacher.config.softcap)[:, :vocab]
        found.append((logits_CV / temperature).log_softmax(-1).topk(k))
    shape = (*batch.tokens.shape, k)
    ids, logprobs = (torch.cat([getattr(top, name) for top in found]).view(shape).roll(1, 1).cpu() for name in ("indices", "values"))
    return ids.int(), logprobs.float()


# ── the divergences, each with its gradient ───────────────────────────────────────────────────────────────────────────


def forward_kl(log_student: Tensor, log_teacher: Tensor) -> TermAndSlope:
    teacher = log_teacher.exp()
    return (teacher * (log_teacher - log_student)).sum(-1), log_student.exp() - teacher


def reverse_kl(log_student: Tensor, log_teacher: Tensor) -> TermAndSlope:
    student, excess = log_student.exp(), log_student - log_teacher
    kl = (student * excess).sum(-1)
    return kl, student * (excess - kl[..., None])


def jensen_shannon(log_student: Tensor, log_teacher: Tensor, *, beta: float) -> TermAndSlope:
    """β KL(p ‖ m) + (1 − β) KL(q ‖ m) with m = β p + (1 − β) q.

    Written in r = log q − log p and in e⁻ˡʳˡ − 1, so that it and its gradient are exactly 0 where the two agree, and so that no
    exponential overflows: m/q = 1 + β(e⁻ʳ − 1), and m/p = 1 + (1 − β)(eʳ − 1).
    """
    r = log_student - log_teacher
    share = torch.where(r > 0, r.new_full((), beta), 1 - beta)  # of r's own precision
    over_student = share.mul_(r.abs().neg_().expm1_()).log1p_().sub_(r.clamp_max(0))  # log m/q
    student = log_student.exp()
    of_student = -(student * over_student).sum(-1)
    of_teacher = -(log_teacher.exp() * r.add_(over_student)).sum(-1)
    slopes = student.mul_(over_student.add_(of_student[..., None])).mul_(beta - 1)
    return beta * of_teacher + (1 - beta) * of_student, slopes


def among_top_k(divergence: DivergenceFunction, k: int, by_student: bool, log_student_CV: Tensor, log_teacher_CV: Tensor) -> TermAndSlope:
    """The divergence over K + 1 outcomes: the tokens that are likeliest to one of both, and any other.

    The one is who weighs: the student in KL(student ‖ teacher), else the teacher. It is never more than the divergence over all tokens,
    0 where both agree, and with K = V − 1 the same. The likelihood of "any other" is the sum of what it stands for, whose gradient it
    shares out by their shares in it.
    """
    ids_CK = (log_student_CV if by_student else log_teacher_CV).topk(k).indices
    others_CV = log_student_CV.scatter(1, ids_CK, -math.inf)
    rest_C1 = others_CV.logsumexp(-1, keepdim=True)
    rest_of_teacher_C1 = log_teacher_CV.scatter(1, ids_CK, -math.inf).logsumexp(-1, keepdim=True)
    coarse_student, coarse_teacher = (torch.cat([log_CV.gather(1, ids_CK), log_rest_C1], 1) for log_CV, log_rest_C1 in
                                      ((log_student_CV, rest_C1), (log_teacher_CV, rest_of_teacher_C1)))
    term_C, slopes_CO = divergence(coarse_student, coarse_teacher)
    return term_C, ((others_CV - rest_C1).exp_() * slopes_CO[:, -1:]).scatter(1, ids_CK, slopes_CO[:, :-1])


def top_k_kl(log_student_CV: Tensor, ids_CK: Tensor, logprobs_CK: Tensor) -> TermAndSlope:
    """KL(p‖q) over K + 1 outcomes: the stored tokens, and any other. Where rounding made the stored exceed 1, they are all there is."""
    logprobs_CK = logprobs_CK.to(log_student_CV.dtype)
    logprobs_CK = logprobs_CK - logprobs_CK.logsumexp(-1, keepdim=True).clamp_min(0)
    stored_CK = logprobs_CK.exp()
    rest_C1 = (1 - stored_CK.sum(-1, keepdim=True)).clamp_min(0)
    log_inside_CK = log_student_CV.gather(1, ids_CK)
    log_others_CV = log_student_CV.scatter(1, ids_CK, -math.inf)
    log_rest_C1 = log_others_CV.logsumexp(-1, keepdim=True)
    # A stored probability of 0 costs nothing: 0 · log 0 is 0, not NaN.
    gained_CK = torch.where(stored_CK > 0, stored_CK * (logprobs_CK - log_inside_CK), 0)
    kl_C = gained_CK.sum(-1) + (torch.xlogy(rest_C1, rest_C1) - rest_C1 * log_rest_C1).squeeze(-1)
    slopes_CV = (log_others_CV - log_rest_C1).exp() * (log_rest_C1.exp() - rest_C1)
    return kl_C, slopes_CV.scatter(1, ids_CK, log_inside_CK.exp() - stored_CK)


# ── chunk by chunk ────────────────────────────────────────────────────────────────────────────────────────────────────


def _distilled(student: Transformer, batch: Batch, blend: DistillationSettings, rows: ChunkTerms, bytes_per_logit: int) -> Loss:
    sweep = _Sweep(rows, _predicted(batch.weight), (blend.kd_weight, blend.ce_weight), bytes_per_logit, student.config.softcap)
    total, terms_N2 = _Swept.apply(flat_states(student, batch), student.head_weight(), sweep, torch.is_grad_enabled())
    kd, ce = (sweep.weight_N[:, None] * terms_N2).sum(0)
    losses = sweep.blended(terms_N2).view(batch.tokens.shape).roll(1, 1)
    return Loss(total, batch.weight.sum(), losses, {TOKENS: batch.weight.sum(), "kd": kd, "ce": ce})


def plain_chunk_terms(student: Transformer, batch: Batch, blend: DistillationSettings, vocab: int, answers: TeacherTerms) -> ChunkTerms:
    targets_N, weight_N, cap = _predicted(batch.tokens), _predicted(batch.weight), student.config.softcap

    def rows(part: slice, logits_CV: Tensor, gradient: torch.dtype | None) -> tuple[Tensor, Tensor]:
        kd_C, slopes_CV = answers(part, (logits_CV[:, :vocab] / blend.temperature).log_softmax(-1))
        slopes_CV *= blend.kd_weight * blend.temperature  # τ² · 1/τ: the logits were divided by τ
        if vocab < logits_CV.shape[1]:
            slopes_CV = F.pad(slopes_CV, (0, logits_CV.shape[1] - vocab))
        target_C1, total_C1 = targets_N[part, None], logits_CV.logsumexp(-1, keepdim=True)
        if blend.ce_weight:
            slopes_CV.add_((logits_CV - total_C1).exp_(), alpha=blend.ce_weight)
            slopes_CV.scatter_add_(1, target_C1, torch.full_like(total_C1, -blend.ce_weight))
        ce_C = (total_C1 - logits_CV.gather(1, target_C1)).squeeze(1)
        weight_C1 = weight_N[part, None]
        terms_C2 = torch.where(weight_C1 != 0, torch.stack([kd_C * blend.temperature**2, ce_C], -1), 0)
        slopes_CV.mul_(weight_C1).masked_fill_(weight_C1 == 0, 0)
        if cap is not None:
            slopes_CV *= 1 - logits_CV.div_(cap).square_()
        return terms_C2, slopes_CV.to(gradient or slopes_CV.dtype)

    return rows


def fused_chunk_terms(student: Transformer, batch: Batch, blend: DistillationSettings, vocab: int,
                      theirs: Callable[[slice], Tensor]) -> ChunkTerms:
    """`plain_chunk_terms` by the fused kernel. `theirs` gives the teacher's logits for the tokens of a chunk."""
    targets_N, weight_N = _predicted(batch.tokens), _predicted(batch.weight)
    asked = DivergenceSpec(blend.divergence, blend.temperature, blend.kd_weight, blend.ce_weight, blend.beta, vocab, student.config.softcap)
    return lambda part, logits_CV, gradient: fused_divergence(logits_CV, theirs(part), targets_N[part], weight_N[part], asked, gradient)


def _predicted(stream_BT: Tensor) -> Tensor:
    """Stream shifted by one: at each state, the value of the token that it predicts."""
    return stream_BT.roll(-1, 1).reshape(-1)


@dataclass(frozen=True)
class _Sweep:
    """One pass over all tokens."""

    rows: ChunkTerms
    weight_N: Tensor
    shares: tuple[float, float]
    bytes_per_logit: int
    softcap: float | None

    def __call__(self, states_ND: Tensor, head_VD: Tensor, want_states: bool,
                 want_head: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Terms (N, 2), and where wanted the gradients of their weighted sum with respect to states and head."""
        head_VD, wide = head_VD.to(states_ND.dtype), torch.promote_types(states_ND.dtype, torch.float32)
        terms_N2 = states_ND.new_empty(len(states_ND), 2, dtype=wide)
        d_states_ND = torch.empty_like(states_ND, dtype=wide) if want_states else None
        d_head_VD = torch.zeros_like(head_VD, dtype=wide) if want_head else None
        for part in chunks(len(states_ND), len(head_VD), self.bytes_per_logit):
            logits_CV = capped_logits(states_ND[part], head_VD, self.softcap)
            terms_N2[part], grads_CV = self.rows(part, logits_CV, states_ND.dtype if want_states or want_head else None)
            if d_states_ND is not None and grads_CV is not None:
                matmul_into(grads_CV, head_VD, out=d_states_ND[part])
            if d_head_VD is not None and grads_CV is not None:
                matmul_into(grads_CV.T, states_ND[part], out=d_head_VD, add=True)
        return terms_N2, d_states_ND, d_head_VD

    def blended(self, terms_N2: Tensor) -> Tensor:
        return self.shares[0] * terms_N2[:, 0] + self.shares[1] * terms_N2[:, 1]


class _Swept(torch.autograd.Function):
    """(Σ weight · loss, terms): the sum is differentiable in states and head, whose gradients the forward pass has made."""

    @staticmethod
    def forward(ctx: Any, states_ND: Tensor, head_VD: Tensor, sweep: _Sweep, grad_enabled: bool) -> tuple[Tensor, Tensor]:
        terms_N2, d_states_ND, d_head_VD = sweep(states_ND, head_VD, *(need and grad_enabled for need in ctx.needs_input_grad[:2]))
        ctx.dtypes = states_ND.dtype, head_VD.dtype
        ctx.save_for_backward(d_states_ND, d_head_VD)
        ctx.mark_non_differentiable(terms_N2)
        return (sweep.weight_N * sweep.blended(terms_N2)).sum(), terms_N2

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as in softcap_ce: autograd then refuses a second backward through the same graph.
        grads = [d if d is None else d.mul_(grad_total).to(dtype) for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return (*grads, None, None)


def flat_states(model: Transformer, batch: Batch) -> Tensor:
    return model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions, starts=batch.starts).flatten(0, 1)


def capped_logits(states_CD: Tensor, head_VD: Tensor, cap: float | None) -> Tensor:
    """Logits with the soft cap, summed and kept in fp32: a divergence of two close models is far below what bf16 logits can tell apart."""
    logits_CV = states_CD.new_empty(len(states_CD), len(head_VD), dtype=torch.promote_types(states_CD.dtype, torch.float32))
    matmul_into(states_CD, head_VD.T, out=logits_CV)
    return logits_CV if cap is None else softcap(logits_CV, cap)


def shared_vocab(student: Transformer, teacher: Transformer, said: int | None) -> int:
    """How many ids both distributions are over; nothing is guessed where the models' tables differ."""
    sizes = student.config.vocab, teacher.config.vocab
    if said is None and sizes[0] != sizes[1]:
        raise UsageError(f"the student has {sizes[0]} tokens and the teacher {sizes[1]}. If they share a tokenizer and only their tables "
                         "are padded differently, say vocab= its size; if not, distil through text the teacher wrote")
    if said is not None and not 1 < said <= min(sizes):
        raise UsageError(f"vocab is {said}, but the student has {sizes[0]} tokens and the teacher {sizes[1]}; expected the size of the "
                         "tokenizer that both share")
    return said or sizes[0]


def _stored(batch: Batch) -> tuple[Tensor, Tensor]:
    """The teacher's entries where the states that learn from them stand."""
    if batch.teacher_ids is None or batch.teacher_logprobs is None:
        raise UsageError("this batch carries no teacher_ids and teacher_logprobs: the teacher would never reach the student. Add the "
                         "streams of the stored teacher to it, or distil online")
    return batch.teacher_ids.roll(-1, 1).flatten(0, 1).long(), batch.teacher_logprobs.roll(-1, 1).flatten(0, 1)


def chunks(N: int, V: int, bytes_per_logit: int = BYTES_PER_LOGIT) -> Iterator[slice]:
    size = even_chunk(N, V, bytes_per_logit)
    return (slice(start, min(start + size, N)) for start in range(0, N, size))
