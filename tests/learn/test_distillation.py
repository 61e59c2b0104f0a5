"""Objectives of distillation against their formulas written out; the toy run that must come nearer to its teacher."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import DataError, UsageError
from assay.kernels import softcap_ce
from assay.learn.distillation import (
    DistillationSettings,
    distillation,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    stored_distillation,
    teacher_top_k,
    top_k_kl,
    weighted_sum,
)
from assay.learn.objectives import next_token
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.testing.tiny_models import tiny_model

VOCAB = 40


def model(seed: int, family: str = "assay", *, loud: float = 4.0, **geometry) -> Transformer:
    """Model in float64, with logits large enough to matter to a soft cap of 2."""
    made = tiny_model(family, seed, vocab=VOCAB, **({"softcap": 2.0} if family == "assay" else {}), **geometry).double()
    with torch.no_grad():
        made.norm.weight.mul_(loud)
    return made


def batch(rows: int = 3, length: int = 12) -> Batch:
    """Two documents a row and padding at the end; weights that differ from token to token."""
    tokens = torch.randint(0, VOCAB, (rows, length), generator=generator(0, "tokens"))
    documents = (torch.arange(length) >= 5).int().repeat(rows, 1)
    documents[:, -2:] = -1
    weight = torch.rand(rows, length, generator=generator(0, "weight"))
    weight[:, [0, 5, -2, -1]] = 0
    return Batch(tokens, weight, documents)


def probabilities(of: Transformer, b: Batch, temperature: float) -> Tensor:
    return (of.logits(of.hidden(b.tokens, documents=b.documents)[:, :-1]) / temperature).softmax(-1)


def written_out(student: Transformer, teacher: Transformer, b: Batch, blend: DistillationSettings) -> Tensor:
    p, q = probabilities(teacher, b, blend.temperature).detach(), probabilities(student, b, blend.temperature)
    if blend.top_k is not None:
        order = (q if blend.divergence == "reverse" else p).argsort(-1, descending=True)
        p, q = (torch.cat([each[..., : blend.top_k], each[..., blend.top_k :].sum(-1, keepdim=True)], -1)
                for each in (p.gather(-1, order), q.gather(-1, order)))
    m = blend.beta * p + (1 - blend.beta) * q
    kl = lambda one, two: (one * (one / two).log()).sum(-1)
    kd = {"forward": lambda: kl(p, q), "reverse": lambda: kl(q, p),
          "jsd": lambda: blend.beta * kl(p, m) + (1 - blend.beta) * kl(q, m)}[blend.divergence]()
    ce = -probabilities(student, b, 1.0).gather(-1, b.tokens[:, 1:, None]).squeeze(-1).log()
    losses = blend.kd_weight * blend.temperature**2 * kd + blend.ce_weight * ce
    return (losses * b.weight[:, 1:]).sum()


def gradients(of: Transformer, total: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, list(of.parameters())))


def assert_same_gradients(found: list[Tensor], due: list[Tensor], rtol: float = 1e-7) -> None:
    """Rotation rounds to fp32 inside an otherwise float64 model, on the way back too."""
    for one, two in zip(found, due, strict=True):
        assert float((one - two).norm()) <= rtol * float(two.norm()) + 1e-14


BLENDS = [DistillationSettings(), DistillationSettings(temperature=3.0), DistillationSettings("reverse", 0.7),
          DistillationSettings("jsd", 2.0, beta=0.3), DistillationSettings("jsd", beta=0.9),
          DistillationSettings(kd_weight=0.25, ce_weight=0.75, temperature=4.0),
          DistillationSettings("reverse", kd_weight=2.0, ce_weight=0.1)]


TOP_K = [DistillationSettings("reverse", 0.7, top_k=5), DistillationSettings("forward", 2.0, top_k=1),
         DistillationSettings("jsd", 2.0, beta=0.3, ce_weight=0.4, top_k=17)]


@pytest.mark.parametrize("blend", [*BLENDS, *TOP_K], ids=str)
@pytest.mark.parametrize("family", ["assay", "llama"])
def test_value_and_gradient_are_those_of_the_formula(blend: DistillationSettings, family: str, monkeypatch):
    monkeypatch.setattr(softcap_ce, "CHUNK_BYTES", 1)  # 128 tokens a chunk: the last of these is short
    student, teacher, b = model(1, family), model(2, "assay", depth=1, windows=(None,), width=32), batch(rows=25)
    loss, due = distillation(teacher, blend)(student, b), written_out(student, teacher, b, blend)
    assert float(loss.total) == pytest.approx(float(due), rel=1e-12)
    assert_same_gradients(gradients(student, loss.total), gradients(student, due))
    assert float((loss.losses * b.weight).sum()) == pytest.approx(float(due), rel=1e-12)
    assert not loss.losses.requires_grad
    assert not loss.losses[:, 0].any()
    assert float(loss.weight) == float(b.weight.sum())


def test_metrics_are_the_sums_of_both_terms():
    student, teacher, b = model(1), model(2), batch()
    loss = distillation(teacher, DistillationSettings(kd_weight=0.3, ce_weight=0.6, temperature=2.0))(student, b)
    assert loss.metrics is not None
    assert float(loss.total) == pytest.approx(0.3 * float(loss.metrics["kd"]) + 0.6 * float(loss.metrics["ce"]), rel=1e-12)
    assert float(loss.metrics["ce"]) == pytest.approx(float(next_token(student, b).total), rel=1e-6)


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl, partial(jensen_shannon, beta=0.3)])
def test_a_divergence_has_the_gradient_of_finite_differences(divergence):
    logits = torch.randn(6, 9, generator=generator(0, "student")).double().requires_grad_()
    other = (3 * torch.randn(6, 9, generator=generator(0, "teacher")).double()).log_softmax(-1)
    values, slopes = divergence(logits.log_softmax(-1), other)
    assert (values > 0).all()
    for column in range(9):
        nudge = torch.zeros(9).double()
        nudge[column] = 1e-6
        up, down = (divergence((logits + sign * nudge).log_softmax(-1), other)[0] for sign in (1, -1))
        torch.testing.assert_close((up - down) / 2e-6, slopes[:, column], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl, partial(jensen_shannon, beta=0.3), partial(jensen_shannon, beta=0.999)])
def test_certainty_and_its_opposite_stay_finite(divergence):
    """Logits 500 apart: probabilities underflow, and nothing may become NaN."""
    sure, unsure = torch.tensor([[500.0, 0, 0]]).log_softmax(-1), torch.tensor([[0.0, 500, 0]]).log_softmax(-1)
    for one, two in ((sure, unsure), (unsure, sure), (sure, sure)):
        values, slopes = divergence(one, two)
        assert torch.isfinite(values).all()
        assert torch.isfinite(slopes).all()


def test_the_ends_of_jensen_shannon_are_the_two_kl_divergences():
    one, two = (torch.randn(5, 7, generator=generator(0, name)).double().log_softmax(-1) for name in "ab")
    small = 1e-7
    torch.testing.assert_close(jensen_shannon(one, two, beta=small)[0] / small, forward_kl(one, two)[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(jensen_shannon(one, two, beta=1 - small)[0] / small, reverse_kl(one, two)[0], rtol=1e-5, atol=0)


def test_at_high_temperature_the_gradient_matches_logits():
    """Hinton's limit: τ² · dKL/dz → (z − z′) / V, each about its mean; without τ² it would vanish."""
    student, teacher, b = model(1, "llama", loud=1.0), model(2, "llama", loud=1.0), batch(rows=1)
    z = student.logits(student.hidden(b.tokens, documents=b.documents))
    other = teacher.logits(teacher.hidden(b.tokens, documents=b.documents)).detach()
    apart = (z - z.mean(-1, keepdim=True)) - (other - other.mean(-1, keepdim=True))
    due = gradients(student, (b.weight[:, 1:, None] * apart[:, :-1].square() / (2 * VOCAB)).sum())
    for divergence in ("forward", "reverse"):
        loss = distillation(teacher, DistillationSettings(divergence, 1e4))(student, b)
        assert_same_gradients(gradients(student, loss.total), due, rtol=2e-3)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_distilling_from_oneself_has_exactly_no_loss_and_no_gradient(divergence: str, temperature: float):
    student, b = tiny_model("assay"), batch()
    loss = distillation(student, DistillationSettings(divergence, temperature, beta=0.3))(student, b)  # type: ignore[arg-type]
    loss.total.backward()
    assert float(loss.total) == 0
    assert all(p.grad is not None and not p.grad.any() for p in student.parameters())


def test_the_teacher_gets_no_gradient_and_padding_has_no_say():
    student, teacher, b = model(1), model(2), batch()
    other = replace(b, tokens=torch.where(b.documents == -1, (b.tokens + 1) % VOCAB, b.tokens))
    one, two = (distillation(teacher, DistillationSettings(ce_weight=0.5))(student, x).total for x in (b, other))
    assert torch.equal(one, two)
    two.backward()
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("make", [lambda: distillation(model(2), DistillationSettings("jsd", 2.0, ce_weight=0.3)),
                                  lambda: stored_distillation(DistillationSettings())])
def test_micro_batches_add_up(make):
    student, b, objective = model(1), with_answers(batch(rows=4), model(2), 7), make()
    whole = gradients(student, objective(student, b).total)
    parts = [gradients(student, objective(student, part).total) for part in b.split(1)]
    assert_same_gradients([sum(each) for each in zip(*parts, strict=True)], whole, rtol=1e-12)


# ---------------------------------------------------------------- vocabularies of different size


def test_padded_tables_are_compared_over_the_tokenizers_ids_alone():
    student, teacher, b = model(1), model(2), batch()
    padded = model(2)
    padded.embed.weight = torch.nn.Parameter(torch.cat([teacher.embed.weight, torch.full((8, 64), 3.0).double()]))
    padded.config = replace(padded.config, vocab=VOCAB + 8)
    due = distillation(teacher)(student, b).total
    found = distillation(padded, DistillationSettings(vocab=VOCAB))(student, b).total
    assert float(found) == pytest.approx(float(due), rel=1e-12)
    with pytest.raises(UsageError, match="say vocab= its size"):
        distillation(padded)(student, b)
    with pytest.raises(UsageError, match="expected the size of the tokenizer"):
        distillation(padded, DistillationSettings(vocab=VOCAB + 8))(student, b)
    twin = distillation(student, DistillationSettings(vocab=VOCAB, ce_weight=1.0))(padded, b)
    fewer = written_out_in_part(padded, student, b)
    assert float(twin.total) == pytest.approx(float(fewer), rel=1e-12)
    assert_same_gradients(gradients(padded, twin.total), gradients(padded, fewer))


def written_out_in_part(student: Transformer, teacher: Transformer, b: Batch) -> Tensor:
    logits = [of.logits(of.hidden(b.tokens, documents=b.documents))[:, :-1] for of in (student, teacher)]
    q, p = (each[..., :VOCAB].log_softmax(-1) for each in logits)
    kd = (p.exp() * (p - q)).sum(-1)
    ce = -logits[0].log_softmax(-1).gather(-1, b.tokens[:, 1:, None]).squeeze(-1)
    return ((kd + ce) * b.weight[:, 1:]).sum()


# ---------------------------------------------------------------- stored answers


def with_answers(b: Batch, teacher: Transformer, k: int, temperature: float = 1.0) -> Batch:
    ids, logprobs = teacher_top_k(teacher, b, k, temperature=temperature)
    return replace(b, teacher_ids=ids, teacher_logprobs=logprobs)


def coarse_written_out(student: Transformer, b: Batch, temperature: float) -> Tensor:
    q = probabilities(student, b, temperature)
    ids, p = b.teacher_ids[:, 1:].long(), b.teacher_logprobs[:, 1:].double().exp()
    kept = q.gather(-1, ids)
    p, kept = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (p, kept))
    return (temperature**2 * (p * (p / kept).log()).sum(-1) * b.weight[:, 1:]).sum()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_stored_answers_have_the_value_and_gradient_of_the_coarse_formula(temperature: float, monkeypatch):
    monkeypatch.setattr(softcap_ce, "CHUNK_BYTES", 1)
    student, b = model(1), with_answers(batch(rows=25), model(2), 5, temperature)
    loss, due = stored_distillation(DistillationSettings(temperature=temperature))(student, b), coarse_written_out(student, b, temperature)
    assert float(loss.total) == pytest.approx(float(due), rel=1e-9)
    assert_same_gradients(gradients(student, loss.total), gradients(student, due))


def test_all_tokens_but_one_stored_is_as_good_as_the_teacher_itself():
    student, teacher, b = model(1), model(2), batch()
    online, offline = distillation(teacher)(student, b), stored_distillation()(student, with_answers(b, teacher, VOCAB - 1))
    assert float(offline.total) == pytest.approx(float(online.total), rel=1e-5)
    assert_same_gradients(gradients(student, offline.total), gradients(student, online.total), rtol=1e-4)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_the_likeliest_and_the_rest_are_a_lower_bound_and_at_the_vocabulary_the_whole(divergence: Any):
    student, teacher, b = model(1), model(2), batch()
    found = {k: distillation(teacher, DistillationSettings(divergence, top_k=k))(student, b)
             for k in (1, 4, 16, VOCAB - 1, VOCAB, VOCAB + 5, None)}
    totals = [float(found[k].total) for k in (1, 4, 16, VOCAB - 1)]
    assert totals == sorted(set(totals))
    assert totals[-1] == pytest.approx(float(found[None].total), rel=1e-9)
    assert_same_gradients(gradients(student, found[VOCAB - 1].total), gradients(student, found[None].total))
    assert float(found[VOCAB].total) == float(found[VOCAB + 5].total) == float(found[None].total)
    alone = distillation(student, DistillationSettings(divergence, top_k=4))(student, b)
    assert float(alone.total) == 0
    assert not any(gradient.any() for gradient in gradients(student, alone.total))
    with pytest.raises(UsageError, match="top_k is 0"):
        DistillationSettings(top_k=0)
    with pytest.raises(UsageError, match="it has those that were stored"):
        stored_distillation(DistillationSettings(top_k=4))


def test_fewer_outcomes_never_show_more_divergence():
    student, teacher, b = model(1), model(2), batch()
    totals = [float(stored_distillation()(student, with_answers(b, teacher, k)).total) for k in (1, 4, 16, VOCAB - 1)]
    assert totals == sorted(totals)
    assert totals[0] > 0


def test_what_is_stored_of_oneself_teaches_nothing():
    student = model(1)
    b = with_answers(batch(), student, 6)
    loss, scale = stored_distillation()(student, b), next_token(student, b).total
    assert abs(float(loss.total)) < 1e-6 * float(scale)
    assert sum(float(g.norm()) for g in gradients(student, loss.total)) < 1e-5 * sum(float(g.norm()) for g in gradients(student, scale))


def test_rounded_entries_that_exceed_one_and_impossible_ones_stay_finite():
    logits = torch.randn(3, 6, generator=generator(0, "coarse"))
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]])
    logprobs = torch.tensor([[-0.69, -0.69], [0.0, -math.inf], [-math.inf, -math.inf]])
    values, slopes = top_k_kl(logits.log_softmax(-1), ids, logprobs)
    q = logits.softmax(-1)
    due = [-math.log(2) - 0.5 * float(q[0, :2].log().sum()), -float(q[1, 2].log()), -float((1 - q[2, 4:].sum()).log())]
    torch.testing.assert_close(values, torch.tensor(due))
    assert torch.isfinite(slopes).all()
    torch.testing.assert_close(slopes.sum(-1), torch.zeros(3), rtol=0, atol=1e-6)


def test_top_k_stands_where_the_token_it_predicts_stands():
    teacher, b = model(2), batch()
    ids, logprobs = teacher_top_k(teacher, b, 3)
    due = probabilities(teacher, b, 1.0).log().topk(3)
    assert torch.equal(ids[:, 1:].long(), due.indices)
    torch.testing.assert_close(logprobs[:, 1:].double(), due.values, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("wrong", "words"), [
    ({"divergence": "backward"}, "expected forward, reverse or jsd"), ({"temperature": 0.0}, "expected a positive number"),
    ({"temperature": math.nan}, "expected a positive number"), ({"kd_weight": 0.0}, "train with next_token"),
    ({"ce_weight": -1.0}, "ce_weight not below 0"), ({"beta": 1.0}, "ask for forward or reverse")])
def test_a_blend_that_means_nothing_is_refused(wrong, words: str):
    with pytest.raises(UsageError, match=words):
        DistillationSettings(**wrong)


def test_stored_distillation_refuses_what_it_cannot_know():
    student, b = model(1), batch()
    with pytest.raises(UsageError, match="the teacher would never reach the student"):
        stored_distillation()(student, b)
    with pytest.raises(UsageError, match="allows forward alone"):
        stored_distillation(DistillationSettings("reverse"))
    with pytest.raises(UsageError, match="no other outcome is left"):
        stored_distillation(DistillationSettings(vocab=4))(student, with_answers(b, model(2), 4))
    with pytest.raises(UsageError, match="expected 1 to 39"):
        teacher_top_k(model(2), b, VOCAB)
    with pytest.raises(DataError, match="entries"):
        replace(b, teacher_ids=torch.zeros(3, 12, dtype=torch.int32))




def test_several_teachers_by_forward_kl_pull_towards_their_mixture():
    student, b, shares = model(1), batch(), (0.7, 0.3)
    teachers = [model(2), model(3)]
    loss = weighted_sum([distillation(teacher) for teacher in teachers], shares)(student, b)
    q = probabilities(student, b, 1.0)
    mixture = sum(share * probabilities(teacher, b, 1.0).detach() for share, teacher in zip(shares, teachers, strict=True))
    due = (b.weight[:, 1:, None] * mixture * (mixture.log() - q.log())).sum()
    assert_same_gradients(gradients(student, loss.total), gradients(student, due), rtol=1e-5)
    assert float(loss.metrics["kd"]) == pytest.approx(float(loss.total.detach()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("divergence", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.5), ("jsd", 0.1)])
def test_the_divergences_are_those_of_trls_gkd(divergence: str, beta: float):
    """Over the tokens that count, in value and in gradient; at temperature 1, where TRL's loss and ours have the same scale."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher, b = model(1), model(2), batch()
    blend = DistillationSettings(divergence, beta=beta if divergence == "jsd" else 0.5)  # type: ignore[arg-type]
    weight = (b.weight != 0).float()
    b = replace(b, weight=weight)
    ours, theirs = (of(b.tokens, documents=b.documents, positions=b.positions) for of in (student.hidden, teacher.hidden))
    labels = torch.where(weight[:, 1:] != 0, b.tokens[:, 1:], -100)
    due = gkd.GKDTrainer.generalized_jsd_loss(student.logits(ours)[:, :-1], teacher.logits(theirs)[:, :-1].detach(), labels, beta=beta)
    loss = distillation(teacher, blend)(student, b).total / weight.sum()
    assert float(loss.detach()) == pytest.approx(float(due.detach()), rel=1e-5)
    assert_same_gradients(gradients(student, loss), gradients(student, due), rtol=1e-5)
