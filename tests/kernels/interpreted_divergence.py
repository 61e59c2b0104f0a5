"""The divergence kernel in Triton's interpreter, on the CPU. Run by test_interpreted.py.

Every comparison is with the formula in float64, its gradient by autograd. Blocks are shrunk to 128 logits, so that a row of 203
takes two of them and ends inside one.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import UsageError
from assay.kernels import softcap_ce
from assay.kernels.divergence import DivergenceSpec, fused_divergence
from assay.learn import distillation
from assay.learn.distillation import DistillationSettings
from assay.seeds import generator
from assay.testing.tiny_models import tiny_model

C, V, W = 6, 203, 210  # the teacher's table is padded to another size
ASKED = [DivergenceSpec("forward", 1.0, 1.0, 0.0, 0.5, V, None), DivergenceSpec("forward", 3.0, 0.7, 0.3, 0.5, V, 6.0),
         DivergenceSpec("reverse", 0.7, 1.0, 0.0, 0.5, V, None), DivergenceSpec("reverse", 2.0, 0.5, 1.5, 0.5, 190, 6.0),
         DivergenceSpec("jsd", 2.0, 1.0, 0.0, 0.3, V, None), DivergenceSpec("jsd", 1.0, 1.0, 0.2, 0.9, 100, None)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softcap_ce, "MAX_BLOCK", 128)


def problem(spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raw, theirs = (spread * torch.randn(C, width, generator=generator(0, name)) for name, width in (("student", V), ("teacher", W)))
    targets = torch.randint(0, V, (C,), generator=generator(0, "targets"))
    targets[0], targets[1] = V - 1, 0
    weight = torch.rand(C, generator=generator(0, "weight"))
    weight[4] = 0
    return raw, theirs, targets, weight


def formula(raw: Tensor, theirs: Tensor, targets: Tensor, weight: Tensor, asked: DivergenceSpec) -> tuple[Tensor, Tensor]:
    logits = raw if asked.softcap is None else asked.softcap * torch.tanh(raw / asked.softcap)
    q, p = ((each[:, : asked.vocab] / asked.temperature).log_softmax(-1) for each in (logits, theirs))
    kl = lambda one, two: (one.exp() * (one - two)).sum(-1)
    if asked.divergence == "jsd":
        m = torch.logaddexp(p + math.log(asked.beta), q + math.log1p(-asked.beta))
        found = asked.beta * kl(p, m) + (1 - asked.beta) * kl(q, m)
    else:
        found = kl(p, q) if asked.divergence == "forward" else kl(q, p)
    kd, ce = found * asked.temperature**2, -logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return (weight * (asked.kd_weight * kd + asked.ce_weight * ce)).sum(), torch.stack([kd, ce], -1)


def capped(raw: Tensor, asked: DivergenceSpec) -> Tensor:
    return raw if asked.softcap is None else asked.softcap * torch.tanh(raw / asked.softcap)


def apart(found: Tensor, due: Tensor) -> float:
    return float((found.double() - due).abs().max() / due.abs().max())


@pytest.mark.parametrize(("asked", "dtype", "bound"), [
    *((asked, torch.float32, 3e-6) for asked in ASKED), (ASKED[1], torch.bfloat16, 8e-3)], ids=str)
def test_terms_and_gradient_are_those_of_the_formula(asked: DivergenceSpec, dtype: torch.dtype, bound: float):
    raw, theirs, targets, weight = problem()
    terms, grads = fused_divergence(capped(raw, asked), theirs, targets, weight, asked, dtype)
    raw64 = raw.double().requires_grad_()
    total, due = formula(raw64, theirs.double(), targets, weight.double(), asked)
    total.backward()
    counts = weight != 0
    assert grads is not None
    assert grads.dtype == dtype
    assert apart(terms[counts], due[counts].detach()) < 3e-6
    assert apart(grads, raw64.grad) < bound
    assert not terms[4].any()
    assert not grads[4].any()
    assert torch.equal(fused_divergence(capped(raw, asked), theirs, targets, weight, asked, None)[0], terms)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_oneself_is_exactly_nothing(kind: str):
    raw, _, targets, weight = problem()
    terms, grads = fused_divergence(raw, raw.clone(), targets, weight, DivergenceSpec(kind, 2.0, 1.0, 0.0, 0.4, V, None), torch.float32)
    assert grads is not None
    assert float(terms[:, 0].abs().max()) < 1e-6
    assert float(grads.abs().max()) < 1e-7


def test_what_does_not_count_may_hold_anything_and_large_logits_neither_overflow_nor_vanish():
    raw, theirs, targets, weight = problem(spread=300.0)
    raw[4], theirs[4] = math.nan, math.inf
    terms, grads = fused_divergence(raw, theirs, targets, weight, ASKED[0], torch.float32)
    assert grads is not None
    assert torch.isfinite(terms).all()
    assert torch.isfinite(grads).all()
    assert float(terms[:, 0].max()) > 100


def test_the_objective_through_the_kernel_is_the_objective(monkeypatch: pytest.MonkeyPatch):
    """As it runs on CUDA: chunks, the teacher's part of each, targets and weights in their places."""
    student, teacher = tiny_model("assay", 1), tiny_model("llama", 2).requires_grad_(False)
    tokens = torch.randint(0, student.config.vocab, (2, 66), generator=generator(0, "tokens"))
    weight = torch.rand(2, 66, generator=generator(1, "weight"))
    weight[:, :7], weight[:, torch.arange(66) % 5 != 3] = 0, 0  # 24 tokens count: the interpreter takes its time for each
    batch, blend = Batch(tokens, weight), DistillationSettings("jsd", 2.0, ce_weight=0.5, vocab=300)
    monkeypatch.setattr(softcap_ce, "CHUNK_BYTES", 1)  # 128 tokens a chunk
    monkeypatch.setattr(softcap_ce, "MAX_BLOCK", 256)

    def found() -> tuple[float, Tensor, dict[str, float]]:
        student.zero_grad()
        loss = distillation.distillation(teacher, blend)(student, batch)
        loss.total.backward()
        gradient = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        return float(loss.total.detach()), gradient, {name: float(value) for name, value in (loss.metrics or {}).items()}

    plain, used = found(), []

    def plain_rows(student, batch, blend, vocab, answers):
        """What `distillation` would do with a batch on CUDA."""
        used.append(vocab)
        with torch.no_grad():
            states, head = distillation.flat_states(teacher, batch), teacher.head_weight()
        theirs = lambda part: distillation.capped_logits(states[part], head, teacher.config.softcap)
        return distillation.fused_chunk_terms(student, batch, blend, vocab, theirs)

    monkeypatch.setattr(distillation, "plain_chunk_terms", plain_rows)
    fused = found()
    assert used == [300]
    assert fused[0] == pytest.approx(plain[0], rel=1e-5)
    assert fused[2] == pytest.approx(plain[2], rel=1e-5)
    assert float((fused[1] - plain[1]).norm()) < 1e-5 * float(plain[1].norm())


def test_what_does_not_fit_together_is_refused():
    raw, theirs, targets, weight = problem()
    with pytest.raises(UsageError, match="expected float32 rows"):
        fused_divergence(raw.double(), theirs, targets, weight, ASKED[0], None)
    with pytest.raises(UsageError, match="of 211 ids at least"):
        fused_divergence(raw, theirs, targets, weight, replace(ASKED[0], vocab=211), None)
    with pytest.raises(UsageError, match="6 tokens of the student, 5 of the teacher"):
        fused_divergence(raw, theirs[:5], targets, weight, ASKED[0], None)
    assert fused_divergence(raw[:0], theirs[:0], targets[:0], weight[:0], ASKED[0], torch.float32)[0].shape == (0, 2)
