"""Agreement is counted by document, over the tokens that count, as a plain loop counts it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.data.batch import Batch
from assay.data.held_out_documents import held_out_document_batches
from assay.errors import DataError
from assay.evaluation.held_out_loss import score_corpus
from assay.evaluation.teacher_agreement import compare_tokens, measure_agreement
from assay.kernels import softcap_ce
from assay.testing.tiny_models import tiny_model
from assay.testing.tiny_training import tiny_corpus


def held_out(length: int = 32, rows: int = 3) -> list[Batch]:
    return list(held_out_document_batches(tiny_corpus(), rows=rows, length=length))


@torch.no_grad()
def by_hand(student, teacher, batch: Batch, row: int, start: int, stop: int) -> np.ndarray:
    """(tokens, kl, top1, student ce, teacher ce) of one document, read alone."""
    tokens, weight = batch.tokens[row, start:stop][None], batch.weight[row, start + 1 : stop]
    q, p = (model(tokens)[0, :-1].log_softmax(-1) for model in (student, teacher))
    paid = [-each.gather(-1, tokens[0, 1:, None])[:, 0] for each in (q, p)]
    values = [torch.ones_like(weight), (p.exp() * (p - q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).float(), *paid]
    return np.array([float((value * (weight != 0)).sum()) for value in values])


def test_every_document_has_the_sums_of_a_plain_loop(monkeypatch):
    monkeypatch.setattr(softcap_ce, "CHUNK_BYTES", 1)
    student, teacher, batches = tiny_model("assay", 1), tiny_model("llama", 2), held_out(rows=5)
    found = measure_agreement(student, teacher, batches)
    due: dict = {}
    for batch in batches:
        for row, ids in enumerate(batch.ids):
            edges = [0, *((batch.documents[row, 1:] != batch.documents[row, :-1]).nonzero()[:, 0] + 1).tolist(), batch.tokens.shape[1]]
            for id, start, stop in zip(ids, edges, edges[1:], strict=False):
                due[id] = due.get(id, 0) + by_hand(student, teacher, batch, row, start, stop)
    assert list(found.ids) == list(due)
    assert len(found.ids) < sum(len(ids) for batch in batches for ids in batch.ids)  # some go on in another row
    sums = np.stack(list(due.values()), 1)
    assert np.array_equal(found.tokens, sums[0])
    for name, total in zip(("kl", "top1", "student_ce", "teacher_ce"), sums[1:], strict=True):
        np.testing.assert_allclose(getattr(found, name), total / sums[0], rtol=1e-4, atol=1e-6, err_msg=name)


def test_estimates_are_over_all_tokens_and_agree_with_the_held_out_score():
    student = tiny_model("llama", 1)
    found = measure_agreement(student, tiny_model("llama", 2), held_out()).estimates()
    assert found["student_ce"].mean == pytest.approx(score_corpus(student, tiny_corpus(), rows=3, length=32).loss, rel=1e-5)
    assert found["kl"].n == len(measured := measure_agreement(student, student, held_out()).ids)
    assert found["kl"].low < found["kl"].mean < found["kl"].high
    assert measured


def test_a_model_agrees_with_itself_entirely():
    student = tiny_model("assay", 1)
    found = measure_agreement(student, student, held_out())
    assert not found.kl.any()
    assert (found.top1 == 1).all()
    assert np.array_equal(found.student_ce, found.teacher_ce)


def test_modes_are_put_back_and_padded_tables_need_a_word():
    student, teacher, batch = tiny_model("llama", 1), tiny_model("llama", 2, vocab=336), held_out()[0]
    student.train()
    teacher.eval()
    compare_tokens(student, teacher, batch, vocab=320)
    assert (student.training, teacher.training) == (True, False)


def test_nothing_compared_is_no_agreement():
    batch = held_out()[0]
    with pytest.raises(DataError, match="nothing was compared"):
        measure_agreement(tiny_model(), tiny_model(), [replace(batch, weight=torch.zeros_like(batch.weight))])
