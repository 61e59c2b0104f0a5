"""A tiny student comes nearer to its teacher on held-out text, online and from stored answers, than from the same little text alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from assay.data.batch import Batch
from assay.data.held_out_documents import held_out_document_batches
from assay.data.teacher_store import open_teacher, teacher_entries, write_teacher
from assay.evaluation.teacher_agreement import Agreement, measure_agreement
from assay.learn.distillation import DistillationSettings, distillation, stored_distillation, teacher_top_k
from assay.learn.loop import train
from assay.learn.objectives import Objective, next_token
from assay.learn.optim import adamw
from assay.model.transformer import Transformer
from assay.statistics.estimate import paired
from assay.testing.tiny_models import tiny_model
from assay.testing.tiny_training import STORED_TOP_K, TINY_LENGTH, TinyRun, tiny_corpus, tiny_teacher

STEPS = 60


def student() -> Transformer:
    """Half as deep as its teacher."""
    return tiny_model("llama", 0, depth=1, windows=(None,))


def text() -> list[Batch]:
    """Three batches, read again and again."""
    order = TinyRun(rows=8).order()
    return [order.batch(step) for step in range(3)]


def taught(objective: Objective, batches: list[Batch] | None = None) -> Agreement:
    model, read = student(), batches or text()
    for _ in train(model, adamw(model.named_parameters(), 5e-3), (read[step % len(read)] for step in range(STEPS)), objective, micro=4):
        pass
    return held_out(model)


def held_out(model: Transformer) -> Agreement:
    return measure_agreement(model, tiny_teacher(), held_out_document_batches(tiny_corpus(), rows=8, length=TINY_LENGTH))


def fell_by(share: float, found: Agreement) -> bool:
    start = held_out(student())
    return paired(found.kl, start.kl).high < -share * start.kl.mean() and found.top1.mean() > start.top1.mean() + 0.1


@pytest.fixture(scope="module")
def alone() -> Agreement:
    """The same student, text and steps, without a teacher."""
    return taught(next_token)


@pytest.mark.arithmetic
def test_the_teacher_teaches_more_than_the_text(alone: Agreement):
    found = taught(distillation(tiny_teacher()))
    assert fell_by(0.8, found)
    assert paired(found.kl, alone.kl).high < -0.2


@pytest.mark.arithmetic
def test_stored_answers_teach_more_than_the_text(tmp_path: Path, alone: Agreement):
    teacher, batches = tiny_teacher(), text()
    entries = (entry for batch in batches for entry in teacher_entries(batch, *teacher_top_k(teacher, batch, STORED_TOP_K)))
    write_teacher(tmp_path / "answers", entries, tokenizer=tiny_corpus().tokenizer_digest, teacher="toy", vocab=320, k=STORED_TOP_K)
    stored = open_teacher(tmp_path / "answers", tokenizer=tiny_corpus().tokenizer_digest)
    streams = [stored.streams_for(batch) for batch in batches]
    found = taught(stored_distillation(), [replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)
                                           for batch, (ids, logprobs) in zip(batches, streams, strict=True)])
    assert fell_by(0.8, found)
    assert paired(found.kl, alone.kl).high < -0.2


@pytest.mark.arithmetic
@pytest.mark.parametrize("blend", [
    DistillationSettings(temperature=2.0, kd_weight=0.7, ce_weight=0.3),
    pytest.param(DistillationSettings("reverse"), marks=pytest.mark.slow),
    pytest.param(DistillationSettings("jsd", kd_weight=4.0), marks=pytest.mark.slow)], ids=str)
def test_other_blends_come_nearer_too(blend: DistillationSettings):
    assert fell_by(0.6, taught(distillation(tiny_teacher(), blend)))


def test_distilling_from_oneself_does_not_move_a_bit():
    model = tiny_teacher().requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in train(model, adamw(model.named_parameters(), 1e-2, weight_decay=0.0), text(), distillation(model), micro=2):
        assert float(step.loss) == 0
        assert float(step.grad_norm) == 0
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
