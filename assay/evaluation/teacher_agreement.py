"""Agreement of a student with its teacher on held-out text, by document: KL, likeliest token, both cross-entropies."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import Batch
from assay.data.teacher_store import Id, example_spans
from assay.errors import DataError
from assay.learn.distillation import capped_logits, chunks, flat_states, shared_vocab, top_k_kl
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.statistics.estimate import Estimate, clustered, cost_ratio


class TokenAgreement(NamedTuple):
    """Token by token (B, T), aligned with the batch's tokens; at temperature 1."""

    kl: Tensor  # KL(teacher ‖ student), nats
    top1: Tensor  # 1 where both hold the same token likeliest
    student_ce: Tensor
    teacher_ce: Tensor


@dataclass(frozen=True)
class Agreement:
    """Means over the tokens of each document, aligned; the estimates are over all tokens, and their unit is the document."""

    ids: tuple[Id, ...]
    tokens: NDArray[np.float64]  # that counted
    kl: NDArray[np.float64]
    top1: NDArray[np.float64]
    student_ce: NDArray[np.float64]
    teacher_ce: NDArray[np.float64] | None = None  # not known of stored answers, which may leave the text's own token out

    def estimates(self) -> dict[str, Estimate]:
        means = {"kl": self.kl, "student_ce": self.student_ce, "teacher_ce": self.teacher_ce}
        known = {name: cost_ratio(values * self.tokens, self.tokens) for name, values in means.items() if values is not None}
        counts = self.tokens.astype(np.int64)
        alike, document = np.rint(self.top1 * counts).astype(np.int64), np.repeat(np.arange(len(counts)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # a token's place in its document
        return known | {"top1": clustered(within < alike[document], document.tolist())}  # no agreement at all is still not exactly 0


def measure_agreement(student: Transformer, teacher: Transformer, batches: Iterable[Batch], *, vocab: int | None = None) -> Agreement:
    """Agreement of student and teacher over every token with weight. A document that goes on in another row or batch is one document still,
    by its id."""
    return _by_document(student, batches, lambda batch: compare_tokens(student, teacher, batch, vocab=vocab))


def weighted_agreement(found: Sequence[Agreement], shares: Sequence[float]) -> Agreement:
    """Weighted agreement with several teachers, on the same documents."""
    assert all(each.ids == found[0].ids and each.teacher_ce is not None for each in found), "all read the same batches"
    of = lambda name: np.tensordot(shares, np.stack([getattr(each, name) for each in found]), 1)  # noqa: E731
    return Agreement(found[0].ids, found[0].tokens, *(of(name) for name in ("kl", "top1", "student_ce", "teacher_ce")))


def measure_stored_agreement(student: Transformer, batches: Iterable[Batch], *, temperature: float, vocab: int | None = None) -> Agreement:
    """Agreement with the stored answers that the batches carry. KL is over their K + 1 outcomes and at the temperature they were stored
    at."""
    return _by_document(student, batches, lambda batch: compare_stored_tokens(student, batch, temperature, vocab or student.config.vocab))


def _by_document(student: Transformer, batches: Iterable[Batch], compared: Callable[[Batch], Sequence[Tensor]]) -> Agreement:
    device, sums = student.embed.weight.device, dict[Id, NDArray[np.float64]]()
    for batch in batches:
        with uncompiled():
            found = compared(batch.to(device))
        counts = (batch.weight != 0).cpu().numpy()
        values = np.stack([counts, *(np.where(counts, stream.double().cpu().numpy(), 0) for stream in found)])
        for id, row, start, stop in example_spans(batch):
            sums[id] = sums.get(id, np.zeros(len(values))) + values[:, row, start:stop].sum(-1)
    kept = {id: sum for id, sum in sums.items() if sum[0]}
    if not kept:
        raise DataError("no held-out token counts, so nothing was compared; look at the batches and their weights")
    tokens, *totals = np.stack(list(kept.values()), 1)
    return Agreement(tuple(kept), tokens, *(total / tokens for total in totals))


@torch.no_grad()
def compare_tokens(student: Transformer, teacher: Transformer, batch: Batch, *, vocab: int | None = None) -> TokenAgreement:
    """A chunk of logits at a time, as the objectives do. Where the models' tables differ in size, `vocab` is as in Blend."""
    models, modes = (student, teacher), (student.training, teacher.training)
    vocab = shared_vocab(student, teacher, vocab)
    states = [flat_states(model.eval(), batch) for model in models]
    for model, mode in zip(models, modes, strict=True):
        model.train(mode)
    heads = [model.head_weight().to(state.dtype) for model, state in zip(models, states, strict=True)]
    targets_N, found = batch.tokens.roll(-1, 1).reshape(-1), []
    for part in chunks(len(targets_N), max(map(len, heads))):
        log_student, log_teacher = (capped_logits(state[part], head, model.config.softcap)[:, :vocab].log_softmax(-1)
                                    for model, state, head in zip(models, states, heads, strict=True))
        kl = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
        same = (log_student.argmax(-1) == log_teacher.argmax(-1)).to(kl.dtype)
        paid = (-logs.gather(1, targets_N[part, None]).squeeze(1) for logs in (log_student, log_teacher))
        found.append(torch.stack([kl, same, *paid]))
    return TokenAgreement(*(row.view(batch.tokens.shape).roll(1, 1) for row in torch.cat(found, 1)))


@torch.no_grad()
def compare_stored_tokens(student: Transformer, batch: Batch, temperature: float, vocab: int) -> list[Tensor]:
    """KL, top-1 and the student's cross-entropy, as in Comparison."""
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    mode = student.training
    states_ND, head_VD = flat_states(student.eval(), batch), student.head_weight()
    student.train(mode)
    ids_NK, logprobs_NK = batch.teacher_ids.roll(-1, 1).flatten(0, 1).long(), batch.teacher_logprobs.roll(-1, 1).flatten(0, 1)
    targets_N, found = batch.tokens.roll(-1, 1).reshape(-1), []
    for part in chunks(len(targets_N), len(head_VD)):
        logits_CV = capped_logits(states_ND[part], head_VD.to(states_ND.dtype), student.config.softcap)[:, :vocab]
        kl, _ = top_k_kl((logits_CV / temperature).log_softmax(-1), ids_NK[part], logprobs_NK[part])
        same = (logits_CV.argmax(-1) == ids_NK[part, 0]).to(kl.dtype)
        paid = logits_CV.logsumexp(-1) - logits_CV.gather(1, targets_N[part, None]).squeeze(1)
        found.append(torch.stack([kl, same, paid]))
    return [row.view(batch.tokens.shape).roll(1, 1) for row in torch.cat(found, 1)]
