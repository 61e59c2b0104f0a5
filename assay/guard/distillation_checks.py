"""Distillation checks on one real batch before step 1: the teacher knows the text, and the student alone learns from it.

`preflight_distillation` runs all of it. At the end of a run `check_teacher_frozen` is asked once more.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.evaluation.teacher_agreement import Agreement, compare_stored_tokens, compare_tokens
from assay.guard import loss_preflight
from assay.guard.loss_preflight import PARITY_BOUNDS, NaiveLoss, amplified, batch_logits, loss_gradients, sample_rows
from assay.guard.training_guards import check_gradients, parameter_digests
from assay.learn import distillation
from assay.learn.distillation import DistillationSettings
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective, next_token
from assay.model.placement import fp32_uncompiled
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

KNOWS = 0.8  # of ln V: a teacher above this cross-entropy knows next to nothing of the text
AGREED_TOKENS, SAME_AGREEMENT = 24, 1e-3  # tokens that are worked out again; relative, and absolute below 1
_WORSE = 0.5  # nats that a teacher may pay more than its student before the first step
CHANGES = 1e-6, 1e-2  # of loss and of gradient, relative, that other answers make: a student that knows nothing loses as much by any
_SHARE = 1e-3  # of the loss: less than this is lost beside the cross-entropy
_FAINT = 0.02  # of the share that the KL between the models lets expect: another temperature or divergence does not shrink it so


def preflight_distillation(student: Transformer, objective: Objective, batch: Batch, blend: DistillationSettings, *,
                           tokenizers: tuple[str, str],
                           teacher: Transformer | None, accumulate: Accumulate | None = None,
                           reachable: Collection[str] | None = None) -> list[Verdict]:
    """Distillation preflight: every check of this file and of guard/loss_preflight.py. `tokenizers` are the digests of student's and
    teacher's.

    `teacher` is None where its answers are read from the batch. `reachable` are the student's tensors that a gradient can reach
    now, where those are not all that learn. Both models are as before afterwards.
    """
    batch, vocabulary = sample_rows(batch), check_same_vocabulary(*tokenizers)
    if vocabulary.outcome is Outcome.REFUTED:
        return [vocabulary]  # of two vocabularies nothing else can be compared
    trained = reachable or [name for name, parameter in student.named_parameters() if parameter.requires_grad]
    if teacher is None:
        mean = loss_gradients(student, lambda: objective(student, batch).total / batch.weight.sum())
        return [vocabulary, check_stored_answers(student, batch, blend), check_agreement(student, None, batch, blend),
                check_teacher_signal(student, objective, batch),
                check_gradients(mean[1], trained),
                *loss_preflight.preflight_loss(student, objective, batch, accumulate, naive_stored(blend))]
    before = parameter_digests(teacher)
    with amplified(teacher, batch):  # a missing soft cap of the teacher's must show too
        parity_verdicts = loss_preflight.preflight_loss(student, objective, batch, accumulate, naive_distillation(teacher, blend), teacher)
        mean = loss_gradients(student, lambda: objective(student, batch).total / batch.weight.sum())
    return [vocabulary, check_teacher(student, teacher, batch, blend), check_agreement(student, teacher, batch, blend),
            check_teacher_deterministic(teacher, batch),
            check_teacher_signal(student, objective, batch, teacher), check_gradients(mean[1], trained),
            check_teacher_frozen(teacher, before),
            check_self_distillation(student, batch, blend), check_teacher_share(student, teacher, objective, batch, blend),
            *parity_verdicts]


def preflight_teachers(student: Transformer, teachers: Sequence[tuple[Objective, DistillationSettings, Transformer]],
                       shares: Sequence[float], together: Objective, batch: Batch, *, tokenizers: tuple[str, str],
                       accumulate: Accumulate | None = None, reachable: Collection[str] | None = None) -> list[Verdict]:
    """Distillation preflight with several teachers: each as if it were alone; and what is minimised is the weighted sum of what they ask
    for."""
    found = [verdict for objective, blend, teacher in teachers
             for verdict in preflight_distillation(student, objective, batch, blend, tokenizers=tokenizers, teacher=teacher,
                                                   accumulate=accumulate, reachable=reachable)]
    parts = [naive_distillation(teacher, blend) for _, blend, teacher in teachers]

    def naive(model: Transformer, read: Batch) -> Tensor:
        return torch.stack([share * part(model, read) for share, part in zip(shares, parts, strict=True)]).sum()

    shown = sample_rows(batch)
    with fp32_uncompiled(student, *(teacher for *_, teacher in teachers)):
        return [*found, loss_preflight.check_loss(student, together, shown, naive),
                loss_preflight.check_accumulation(student, together, shown, accumulate)]


def check_drawn_tokens(batch: Batch, drawn: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Verdict:
    """Every document of the batch is a prompt with exactly the ids that were drawn for it, and every drawn id counts, and no other. The
    first that were drawn are there, each once; the last may not have fitted."""
    assert batch.documents is not None
    due, seen = {(*prompt, *said): len(said) for prompt, said in drawn}, Counter[tuple[int, ...]]()
    documents, tokens, weight = batch.documents.cpu(), batch.tokens.cpu(), batch.weight.cpu()
    for row in range(len(batch)):
        for number in range(int(documents[row].max()) + 1):
            here = documents[row] == number
            ids, counts = tuple(tokens[row][here].tolist()), (weight[row][here] != 0).tolist()
            if ids not in due or counts != [False] * (len(ids) - due[ids]) + [True] * due[ids]:
                return refuted("own words", f"row {row}, document {number}: {len(ids)} tokens, {sum(counts)} counting, are no prompt with "
                                            "what the student said to it: ids were retokenised, shifted or masked", row=row)
            seen[ids] += 1
    first = Counter((*prompt, *said) for prompt, said in drawn[:seen.total()])
    if seen != first or not seen:
        return refuted("own words", f"{(first - seen).total() or len(drawn)} of {len(drawn)} completions of the student are not in the "
                                    "batch, and others stand there in their place: some are learned twice, or none is")
    return proven("own words", f"{seen.total()} of {len(drawn)} completions of the student stand in the batch, id for id, and each id "
                               "counts", completions=seen.total())


def check_own_words_loss(student: Transformer, objective: Objective, batch: Batch, blend: DistillationSettings,
                         teacher: Transformer) -> Verdict:
    """Check that on the student's own answers the loss is the divergence at exactly the sampled tokens, in value and gradient."""
    found = loss_preflight.preflight_loss(student, objective, batch, None, naive_distillation(teacher, blend), teacher)
    against = [verdict for verdict in found if verdict.outcome is Outcome.REFUTED]
    if against:
        return refuted("own words' loss", f"{against[0].check}: {against[0].reason}: the teacher scores other tokens than those that were "
                                          "drawn", of=against[0].check)
    return proven("own words' loss", f"on the student's own words {found[0].reason}", checks=len(found))


def check_same_vocabulary(student: str, teacher: str) -> Verdict:
    """Digests of both tokenizers: an id must mean the same to both, or the teacher answers about another text."""
    if student != teacher:
        return refuted("vocabulary", f"the student's tokenizer is {student[:12]}, the teacher's {teacher[:12]}: the same ids are another "
                                     "text to the teacher, and its answers would be noise. Let the teacher write text, and fine-tune the "
                                     "student on that", student=student, teacher=teacher)
    return proven("vocabulary", f"student and teacher share the tokenizer {student[:12]}", tokenizer=student)


@torch.no_grad()
def check_agreement(student: Transformer, teacher: Transformer | None, batch: Batch, blend: DistillationSettings) -> Verdict:
    """Check the reported agreement with the teacher (KL, same likeliest token, cross-entropy), recomputed token by token in float64."""
    with fp32_uncompiled(student, *([] if teacher is None else [teacher])):
        found = compare_stored_tokens(student, batch, blend.temperature, blend.vocab or student.config.vocab) if teacher is None else \
            list(compare_tokens(student, teacher, batch, vocab=blend.vocab))[:3]
        tables = [None if model is None else batch_logits(model, batch).double() for model in (student, teacher)]
    places = (batch.weight[:, 1:] != 0).nonzero()[:AGREED_TOKENS].tolist()
    due = torch.tensor([_agreement_at(row, column, tables, batch, blend) for row, column in places], dtype=torch.float64)
    said = torch.tensor([[float(each[row, column + 1]) for each in found] for row, column in places], dtype=torch.float64)
    if not places:
        return unproven("agreement", "no token of the batch counts; give a batch with something to learn from")
    told = ((said - due).abs() / due.abs().clamp(min=1.0))[~due.isnan()]  # what is a close call is not asked
    apart = float("inf") if told.isnan().any() else float(told.max())
    if wrong := _wrong_means():
        return refuted("agreement", f"of three documents whose agreement is known, {wrong}")
    words = (f"agreement with the teacher at {len(places)} tokens, worked out again one by one, differs by {apart:.1e}, "
             f"bound {SAME_AGREEMENT:g}")
    return (proven if apart <= SAME_AGREEMENT else refuted)("agreement", words, apart=apart)


def _wrong_means() -> str:
    """Three documents of 4, 1 and 5 tokens, of which 3, 0 and 1 agree: every figure is a mean over the ten tokens."""
    tokens, alike = np.array([4.0, 1.0, 5.0]), np.array([3.0, 0.0, 1.0])
    found = Agreement(("a", "b", "c"), tokens, alike / 2 / tokens, alike / tokens, alike * 3 / tokens, alike * 5 / tokens).estimates()
    due = {"kl": 0.2, "student_ce": 1.2, "teacher_ce": 2.0, "top1": 0.4}
    return "; ".join(f"{name} is {mean}, told {found[name].mean:.6g}" for name, mean in due.items() if abs(found[name].mean - mean) > 1e-9)


def _agreement_at(row: int, column: int, tables: list[Tensor | None], batch: Batch, blend: DistillationSettings) -> list[float]:
    """(KL, same, cross-entropy) of the token after `column`."""
    logits = tables[0][row, column][: blend.vocab]  # type: ignore[index]
    own, token = logits.log_softmax(-1), int(batch.tokens[row, column + 1])
    if tables[1] is not None:
        teachers = tables[1][row, column][: len(logits)].log_softmax(-1)
        own = own[: len(teachers)]
        same = math.nan if _close_call(own) or _close_call(teachers) else float(int(own.argmax()) == int(teachers.argmax()))
        return [float(sum(teachers.exp() * (teachers - own))), same, -float(own[token])]
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    ids, warm = batch.teacher_ids[row, column + 1].tolist(), (logits / blend.temperature).softmax(-1)
    stored = [math.exp(float(each)) for each in batch.teacher_logprobs[row, column + 1]]
    total = max(1.0, math.fsum(stored))
    pairs = [(each / total, float(warm[id])) for id, each in zip(ids, stored, strict=True)]
    pairs.append((max(0.0, 1 - math.fsum(p for p, _ in pairs)), max(1e-300, 1 - math.fsum(q for _, q in pairs))))
    kl = math.fsum(p * (math.log(p) - math.log(q)) for p, q in pairs if p > 0)
    return [kl, math.nan if _close_call(own) else float(int(logits.argmax()) == ids[0]), -float(own[token])]


def _close_call(logprobs: Tensor) -> bool:
    """Whether two tokens are as likely, but for rounding: which of them is the likeliest says nothing."""
    best = logprobs.topk(2).values
    return float(best[0] - best[1]) < SAME_AGREEMENT


def check_teacher(student: Transformer, teacher: Transformer, batch: Batch, blend: DistillationSettings) -> Verdict:
    """The teacher's own cross-entropy on the text is well below ignorance, and not far above the student's."""
    found = compare_tokens(student, teacher, batch, vocab=blend.vocab)
    paid, students = (float((each * batch.weight).sum() / batch.weight.sum()) for each in (found.teacher_ce, found.student_ce))
    ignorance = math.log(blend.vocab or teacher.config.vocab)
    words = f"loss on this text, in nats a token: the teacher {paid:.3f}, the student {students:.3f}, a uniform guess {ignorance:.3f}"
    if not paid < KNOWS * ignorance:
        return refuted("teacher", f"{words}: it does not read this text as it should. Look at its tokenizer, its weights and the data",
                       teacher_ce=str(paid), student_ce=str(students))
    if not paid < students + _WORSE:
        return refuted("teacher", f"{words}: there is nothing to learn from it here", teacher_ce=paid, student_ce=str(students))
    return proven("teacher", words, teacher_ce=paid, student_ce=students)


def check_stored_answers(student: Transformer, batch: Batch, blend: DistillationSettings) -> Verdict:
    """Check that a stored teacher knows the text, by its own cross-entropy as in `check_teacher`, all tokens that are not among them being
    equally likely; at temperature 1, whatever theirs is."""
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    vocab, K = blend.vocab or student.config.vocab, batch.teacher_ids.shape[-1]
    here = batch.teacher_ids == batch.tokens[..., None]
    other = ((1 - batch.teacher_logprobs.exp().sum(-1)).clamp_min(1e-6) / (vocab - K)).log()  # the log-probability of each
    whole = torch.cat([batch.teacher_logprobs * blend.temperature, other[..., None] * blend.temperature + math.log(vocab - K)], -1)
    said = torch.where(here.any(-1), torch.where(here, batch.teacher_logprobs, 0).sum(-1), other)
    losses = whole.logsumexp(-1) - said * blend.temperature
    paid = float(torch.where(batch.weight != 0, losses * batch.weight, 0).sum() / batch.weight.sum())
    words = f"by its {K} stored answers a token the teacher pays {paid:.3f} nats of this text, one who knows nothing {math.log(vocab):.3f}"
    if not paid < KNOWS * math.log(vocab):
        return refuted("teacher", f"{words}: they were given for another text, or stand at the wrong tokens", teacher_ce=str(paid))
    return proven("teacher", words, teacher_ce=paid)


@torch.no_grad()
def check_teacher_deterministic(teacher: Transformer, batch: Batch) -> Verdict:
    """Check that the teacher is deterministic: asked twice, it answers the same to the last bit. It is in evaluation mode and nothing in it
    is random."""
    if training := [name or "the teacher" for name, module in teacher.named_modules() if module.training]:
        return refuted("answers", f"in training mode: {', '.join(training[:3])}; dropout would blur what the teacher knows. Call eval() "
                                  "on it", modules=len(training))
    one, two = (batch_logits(teacher, batch) for _ in range(2))
    if not torch.equal(one, two):
        return refuted("answers", f"asked twice, the teacher's logits differ by up to {float((one - two).abs().max()):.1e}; something "
                                  "in it is drawn by lot")
    return proven("answers", "asked twice, the teacher says the same to the last bit")


def check_teacher_signal(student: Transformer, objective: Objective, batch: Batch, teacher: Transformer | None = None) -> Verdict:
    """Check that permuting the teacher's answers over the vocabulary changes the student's loss and gradient.

    Without `teacher` the answers are those in the batch.
    """
    ask = lambda read: loss_gradients(student, lambda: objective(student, read).total / batch.weight.sum())  # noqa: E731
    plain = ask(batch)
    if teacher is None:
        changed = ask(_permuted_streams(batch, student.config.vocab))
    else:
        with _permuted_answers(teacher):
            changed = ask(batch)
    loss = abs(changed[0] - plain[0]) / max(abs(plain[0]), 1e-12)
    gradient = _norm({name: g - changed[1][name] for name, g in plain[1].items()}) / max(_norm(plain[1]), 1e-12)
    words = f"permuting the teacher's answers changes the loss from {plain[0]:.5g} to {changed[0]:.5g}, and the gradient by {gradient:.1%}"
    if not (loss > CHANGES[0] and gradient > CHANGES[1]):
        return refuted("signal", f"{words}: the teacher's signal does not reach the student", loss_change=str(loss),
                       gradient_change=str(gradient))
    return proven("signal", words, loss_change=loss, gradient_change=gradient)


def check_teacher_frozen(teacher: Transformer, before: Mapping[str, str]) -> Verdict:
    """The teacher has its old bits, asks for no gradient and got none. `before` is guard.update's `parameter_digests` of it."""
    named = dict(teacher.named_parameters())
    if learning := [name for name, p in named.items() if p.requires_grad or p.grad is not None]:
        return refuted("frozen", f"{len(learning)} of {len(named)} tensors of the teacher may learn or got a gradient, {learning[0]} among "
                                 "them; call requires_grad_(False) on it", tensors=learning)
    now = parameter_digests(teacher)
    if strayed := sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name)):
        return refuted("frozen", f"{len(strayed)} of {len(now)} tensors of the teacher changed, {strayed[0]} among them", tensors=strayed)
    return proven("frozen", f"all {len(now)} tensors of the teacher have their old bits and no gradient", tensors=len(now))


def check_self_distillation(student: Transformer, batch: Batch, blend: DistillationSettings) -> Verdict:
    """Distilling a model from itself teaches nothing: no loss, and no gradient beside that of the text.

    Asked in fp32, whatever the run computes in: a student that lacks half its layers makes so much of a rounding that in bf16 the
    passes with and without gradients, which round in different places, were 0.05 nats apart.
    """
    objective, weight = distillation.distillation(student, replace(blend, ce_weight=0.0, vocab=None)), batch.weight.sum()
    with fp32_uncompiled(student):
        loss, own = loss_gradients(student, lambda: objective(student, batch).total / weight)
        scale, text = loss_gradients(student, lambda: next_token(student, batch).total / weight)
    bound, parts = PARITY_BOUNDS[torch.float32], (abs(loss) / scale, _norm(own) / _norm(text))
    words = f"distilling the student from itself: loss {loss:.1e}, gradient {parts[1]:.1e} of the text's, bound {bound:.0e}"
    if not all(part <= bound for part in parts):
        return refuted("oneself", f"{words}: the two models are not asked about the same thing, or the divergence is none",
                       loss=str(loss), gradient=str(parts[1]))
    return proven("oneself", words, loss=loss, gradient=parts[1])


@torch.no_grad()
def check_teacher_share(student: Transformer, teacher: Transformer, objective: Objective, batch: Batch,
                        blend: DistillationSettings) -> Verdict:
    """The teacher's term is a number, and not lost beside the cross-entropy where student and teacher differ."""
    metrics = objective(student, batch).metrics or {}
    kd, ce = (float(metrics[name]) * share for name, share in (("kd", blend.kd_weight), ("ce", blend.ce_weight)))
    if not (math.isfinite(kd) and math.isfinite(ce)):
        return refuted("share", f"kd_weight · kd is {kd} and ce_weight · ce is {ce}; a blend of what is no number is none", kd=str(kd))
    found = compare_tokens(student, teacher, batch, vocab=blend.vocab)
    apart = float((found.kl * batch.weight).sum() / (found.student_ce * batch.weight).sum())
    share, due = kd / max(kd + ce, 1e-12), blend.kd_weight * apart / (blend.kd_weight * apart + blend.ce_weight)
    words = f"the teacher's term makes up {share:.2%} of the loss (kd {kd:.4g}, ce {ce:.4g}), and the models' KL lets expect {due:.2%}"
    if apart < _SHARE:
        return unproven("share", f"{words}: the student already agrees with its teacher", share=share, due=due)
    if due < _SHARE:
        return refuted("share", f"{words}: kd_weight {blend.kd_weight:g} drowns beside ce_weight {blend.ce_weight:g}", share=share, due=due)
    if share < _FAINT * due:
        return refuted("share", f"{words}: look for a mean that was taken over the vocabulary", share=share, due=due)
    return proven("share", words, share=share, due=due)


# ── the objectives written out, sharing with them the models' `hidden` and `logits` alone ─────────────────────────────


def naive_distillation(teacher: Transformer, blend: DistillationSettings) -> NaiveLoss:
    def naive(student: Transformer, batch: Batch) -> Tensor:
        ours = batch_logits(student, batch)[:, :-1]
        with torch.no_grad():
            theirs = batch_logits(teacher, batch)[:, :-1]
        q, p = (each[..., : blend.vocab].div(blend.temperature).log_softmax(-1) for each in (ours, theirs))
        if blend.top_k is not None and blend.top_k < q.shape[-1]:
            q, p = _top_and_rest(q, p, (q if blend.divergence == "reverse" else p).detach(), blend.top_k)
        kl = lambda one, two: (one.exp() * (one - two)).sum(-1)  # noqa: E731
        if blend.divergence == "jsd":
            m = torch.logaddexp(p + math.log(blend.beta), q + math.log1p(-blend.beta))
            kd = blend.beta * kl(p, m) + (1 - blend.beta) * kl(q, m)
        else:
            kd = kl(p, q) if blend.divergence == "forward" else kl(q, p)
        return _blended(kd, ours, batch, blend)

    return naive


def _top_and_rest(q: Tensor, p: Tensor, weighs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens that are `weighs`' likeliest, and of all the others together, for both models."""
    ids = weighs.topk(k, -1).indices
    inside = torch.zeros_like(q, dtype=torch.bool).scatter(-1, ids, True)
    one, other = (torch.cat([each.gather(-1, ids), each.masked_fill(inside, -math.inf).logsumexp(-1, keepdim=True)], -1) for each in (q, p))
    return one, other


def naive_stored(blend: DistillationSettings) -> NaiveLoss:
    def naive(student: Transformer, batch: Batch) -> Tensor:
        assert batch.teacher_ids is not None
        assert batch.teacher_logprobs is not None
        ours = batch_logits(student, batch)[:, :-1]
        q = ours[..., : blend.vocab].div(blend.temperature).softmax(-1)
        p, kept = batch.teacher_logprobs[:, 1:].exp(), q.gather(-1, batch.teacher_ids[:, 1:].long())
        p = p / p.sum(-1, keepdim=True).clamp_min(1)
        p, kept = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1).clamp_min(0) for each in (p, kept))
        return _blended((torch.xlogy(p, p) - torch.xlogy(p, kept)).sum(-1), ours, batch, blend)

    return naive


def _blended(kd: Tensor, logits_BTV: Tensor, batch: Batch, blend: DistillationSettings) -> Tensor:
    ce = -logits_BTV.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    losses = blend.kd_weight * blend.temperature**2 * kd + blend.ce_weight * ce
    counts = batch.weight[:, 1:]
    return torch.where(counts != 0, losses * counts, 0).sum() / batch.weight.sum()


@contextlib.contextmanager
def _permuted_answers(teacher: Transformer) -> Iterator[None]:
    """The rows of its head in another order; its embedding, which may be the same matrix, as it was."""
    whole = teacher.head_weight
    order = torch.randperm(teacher.config.vocab, generator=generator(0, "permuted")).to(whole().device)
    vars(teacher)["head_weight"] = lambda: whole()[order]
    try:
        yield
    finally:
        del vars(teacher)["head_weight"]


def _permuted_streams(batch: Batch, vocab: int) -> Batch:
    if batch.teacher_ids is None:
        return batch
    order = torch.randperm(vocab, generator=generator(0, "permuted")).to(batch.teacher_ids)
    return replace(batch, teacher_ids=order[batch.teacher_ids.long()])


def _norm(found: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in found.values()))
