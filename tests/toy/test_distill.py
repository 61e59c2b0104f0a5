"""A tiny student comes nearer to its teacher on held-out text, online and from stored answers, than from the same little text alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from assay.data.batch import Batch
from assay.data.held_out import held_out_batches
from assay.data.teacher import entries_of, open_teacher, write_teacher
from assay.learn.distill import Blend, distillation, stored_distillation, top_k
from assay.learn.loop import train
from assay.learn.objectives import Objective, next_token
from assay.learn.optim import adamw
from assay.measure.agreement import Agreement, agreement
from assay.measure.estimate import paired
from assay.model.transformer import Transformer
from assay.zoo.lesson import K, a_teacher
from assay.zoo.practice import LENGTH, Practice, corpus
from assay.zoo.stage import tiny

STEPS = 60


def student() -> Transformer:
    """Half as deep as its teacher."""
    return tiny("llama", 0, depth=1, windows=(None,))


def text() -> list[Batch]:
    """Three batches, read again and again."""
    order = Practice(rows=8).order()
    return [order.batch(step) for step in range(3)]


def taught(objective: Objective, batches: list[Batch] | None = None) -> Agreement:
    model, read = student(), batches or text()
    for _ in train(model, adamw(model.named_parameters(), 5e-3), (read[step % len(read)] for step in range(STEPS)), objective, micro=4):
        pass
    return held_out(model)


def held_out(model: Transformer) -> Agreement:
    return agreement(model, a_teacher(), held_out_batches(corpus(), rows=8, length=LENGTH))


def fell_by(share: float, found: Agreement) -> bool:
    start = held_out(student())
    return paired(found.kl, start.kl).high < -share * start.kl.mean() and found.top1.mean() > start.top1.mean() + 0.2


@pytest.fixture(scope="module")
def alone() -> Agreement:
    """The same student, text and steps, without a teacher."""
    return taught(next_token)


def test_the_teacher_teaches_more_than_the_text(alone: Agreement):
    found = taught(distillation(a_teacher()))
    assert fell_by(0.8, found)
    assert paired(found.kl, alone.kl).high < -0.2


def test_stored_answers_teach_more_than_the_text(tmp_path: Path, alone: Agreement):
    teacher, batches = a_teacher(), text()
    entries = (entry for batch in batches for entry in entries_of(batch, *top_k(teacher, batch, K)))
    write_teacher(tmp_path / "answers", entries, tokenizer=corpus().tokenizer_digest, teacher="toy", vocab=320, k=K)
    stored = open_teacher(tmp_path / "answers", tokenizer=corpus().tokenizer_digest)
    streams = [stored.streams_for(batch) for batch in batches]
    found = taught(stored_distillation(), [replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)
                                           for batch, (ids, logprobs) in zip(batches, streams, strict=True)])
    assert fell_by(0.8, found)
    assert paired(found.kl, alone.kl).high < -0.2


@pytest.mark.parametrize("blend", [Blend(temperature=2.0, kd_weight=0.7, ce_weight=0.3), Blend("reverse"), Blend("jsd", kd_weight=4.0)],
                         ids=str)
def test_other_blends_come_nearer_too(blend: Blend):
    assert fell_by(0.4, taught(distillation(a_teacher(), blend)))


def test_distilling_from_oneself_does_not_move_a_bit():
    model = a_teacher().requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in train(model, adamw(model.named_parameters(), 1e-2, weight_decay=0.0), text(), distillation(model), micro=2):
        assert float(step.loss) == 0
        assert float(step.grad_norm) == 0
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
