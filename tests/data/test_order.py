"""Batches are a pure function of (seed, step): exactly once an epoch, never held out, never silently exhausted."""

import numpy as np
import pytest
import torch

from assay.data.data_ledger import check_data_ledger, ids_digest
from assay.data.order import Order, corpus_batches, permuted_places
from assay.data.token_corpus import Corpus
from assay.errors import DataError, UsageError
from assay.verdict import Outcome


def order(corpus: Corpus, **given: int) -> Order:
    return Order(corpus, **{"seed": 7, "rows": 4, "length": 33, **given})


def epoch_of_ids(plan: Order, epoch: int) -> list[int]:
    """The windows of one epoch in the order they are read, by one row a step."""
    return [int(plan.consumed(step)[0]) for step in range(epoch * plan.windows, (epoch + 1) * plan.windows)]


def test_in_an_epoch_every_token_is_predicted_exactly_once(corpus: Corpus) -> None:
    plan = order(corpus, rows=1)
    predicted = np.zeros(corpus.train.tokens, np.int64)
    stream = np.concatenate(corpus.train.shards)
    for step in range(plan.windows):
        batch, start = plan.batch(step), int(plan.consumed(step)[0]) * 32
        kept = np.flatnonzero(batch.weight[0].numpy())
        predicted[start + kept] += 1
        assert (batch.tokens[0, kept].numpy() == stream[start + kept]).all()
    begins = np.zeros(corpus.train.tokens, np.int64)
    begins[corpus.train.index["offset"].astype(np.int64)] = 1
    assert (predicted == 1 - begins).all()


def test_documents_and_positions_keep_packed_documents_apart(corpus: Corpus) -> None:
    offsets = corpus.train.index["offset"].astype(np.int64)
    crossed = 0
    for step in range(10):
        plan = order(corpus, length=200)
        batch = plan.batch(step)
        assert batch.documents is not None
        assert batch.positions is not None
        for row, window in enumerate(plan.consumed(step)):
            places = window * 199 + np.arange(200)
            inside = places < corpus.train.tokens
            documents = np.searchsorted(offsets, places, side="right") - 1
            begin = np.maximum(offsets[documents], places[0])  # a row begins anew
            assert (batch.documents[row].numpy() == np.where(inside, documents, -1)).all()
            assert (batch.positions[row].numpy() == np.where(inside, places - begin, 0)).all()
            crossed += len(set(documents[inside])) > 1
    assert crossed > 5


def test_the_end_of_the_stream_is_padding_without_weight(corpus: Corpus) -> None:
    plan = order(corpus, rows=1, length=1000)
    (last,) = (plan.batch(step) for step in range(plan.windows) if plan.consumed(step)[0] == plan.windows - 1)
    assert last.documents is not None
    padding = last.documents[0] == -1
    assert 0 < padding.sum() == plan.windows * 999 + 1 - corpus.train.tokens
    assert last.weight[0][padding].sum() == 0
    assert (last.tokens[0][padding] == corpus.boundary).all()


def test_a_batch_needs_its_step_alone(corpus: Corpus) -> None:
    """Resume: the batch of step 17 is the same after 17 batches and after none, and seeds differ."""
    uninterrupted = list(corpus_batches(corpus, seed=7, rows=4, length=33, stop=20))
    resumed = list(corpus_batches(corpus, seed=7, rows=4, length=33, start=17, stop=20))
    for left, right in zip(uninterrupted[17:], resumed, strict=True):
        assert left.ids == right.ids
        for name, stream in left.streams().items():
            assert torch.equal(stream, right.streams()[name])
    assert Order(corpus, 8, 4, 33).batch(17).ids != resumed[0].ids


def test_batches_are_the_same_on_every_machine() -> None:
    """Golden numbers: a change of numpy, of Python or of this code must not reorder a run that is resumed."""
    assert permuted_places(np.arange(10), 10, 12345).tolist() == [3, 6, 4, 0, 9, 7, 5, 1, 8, 2]
    assert permuted_places(np.array([0, 1, 999_999_999]), 1_000_000_000, 12345).tolist() == [934290192, 296477335, 767133437]


@pytest.mark.parametrize("size", [*range(1, 40), 100, 4096, 10007])
def test_shuffling_is_a_permutation(size: int) -> None:
    for key in (0, 1):
        assert sorted(permuted_places(np.arange(size), size, key).tolist()) == list(range(size))


def test_shuffling_is_fair() -> None:
    """Each of 10 windows comes first, and follows another, about as often: chi-square, 9 degrees, p < 1e-6 above 45."""
    first = np.array([permuted_places(np.arange(2), 10, key) for key in range(5000)])
    for counts in (np.bincount(first[:, 0], minlength=10), np.bincount(first[:, 1], minlength=10)):
        assert ((counts - 500) ** 2 / 500).sum() < 45
    large = permuted_places(np.arange(20000), 20000, 3)
    assert abs(np.corrcoef(large, np.arange(20000))[0, 1]) < 0.03
    assert abs(np.corrcoef(large[1:], large[:-1])[0, 1]) < 0.03


# ---------------------------------------------------------------- S3: exhaustion

def test_exhaustion_raises_and_says_what_to_do(corpus: Corpus) -> None:
    plan = order(corpus)
    batches = corpus_batches(corpus, seed=7, rows=4, length=33)
    for _ in range(plan.steps):
        next(batches)
    said = rf"step {plan.steps} needs .* training tokens.*--num-train-epochs is 1.*after {plan.steps:,} steps.*--num-train-epochs 2"
    with pytest.raises(DataError, match=said):
        next(batches)


def test_too_many_steps_are_refused_before_the_first(corpus: Corpus) -> None:
    plan = order(corpus)
    corpus_batches(corpus, seed=7, rows=4, length=33, stop=plan.steps)
    with pytest.raises(DataError, match="--num-train-epochs 3"):
        corpus_batches(corpus, seed=7, rows=4, length=33, epochs=2, stop=2 * plan.steps + plan.windows // 8)
    with pytest.raises(UsageError, match="length from 2"):
        order(corpus, length=1)


# ---------------------------------------------------------------- wraps: D18, held-out text

def test_epochs_wrap_on_purpose_and_reshuffled(corpus: Corpus) -> None:
    plan = order(corpus, rows=1, epochs=3)
    epochs = [epoch_of_ids(plan, epoch) for epoch in range(3)]
    assert all(sorted(ids) == list(range(plan.windows)) for ids in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert [plan.epoch_of(step) for step in (0, plan.windows - 1, plan.windows, 2 * plan.windows)] == [0, 0, 1, 2]


def test_a_step_may_cross_into_the_next_epoch(corpus: Corpus) -> None:
    plan = order(corpus, rows=7, epochs=2)
    step = plan.windows // 7
    assert plan.windows % 7 != 0
    single = order(corpus, rows=1, epochs=2)
    expected = [int(single.consumed(row)[0]) for row in range(step * 7, step * 7 + 7)]
    assert plan.consumed(step).tolist() == expected


def test_no_wrap_touches_held_out_documents(corpus: Corpus) -> None:
    """They are in other files: no document number of any batch names one, after any number of wraps."""
    held = {int(i) for i in corpus.held_out.index["id"]}
    seen: set[int] = set()
    for batch in corpus_batches(corpus, seed=1, rows=16, length=200, epochs=5, stop=order(corpus, rows=16, length=200, epochs=5).steps):
        assert batch.documents is not None
        numbers = batch.documents.unique()
        seen |= {int(i) for i in corpus.train.index["id"][numbers[numbers >= 0].numpy()]}
    assert not seen & held
    assert len(seen) == corpus.train.documents


# ---------------------------------------------------------------- D16, D17: ranks

def test_ranks_read_different_windows_and_together_what_one_would(corpus: Corpus) -> None:
    alone = order(corpus, rows=8)
    ranks = [order(corpus, rows=2, rank=rank, world=4) for rank in range(4)]
    for step in (0, 3, alone.steps - 1):
        parts = [rank.consumed(step).tolist() for rank in ranks]
        assert [window for part in parts for window in part] == alone.consumed(step).tolist()
    assert ranks[0].steps == alone.steps


# ---------------------------------------------------------------- the data ledger; C15-C17: resume

def written_by(plan: Order, steps: list[int]) -> dict[int, str]:
    """Records of a run that believes to be at step 0, 1, … but reads the batches of `steps`."""
    return {step: ids_digest(plan.batch(read).ids) for step, read in enumerate(steps)}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 1.0])
def test_the_ledger_knows_how_often_each_example_was_consumed(corpus: Corpus, share: float) -> None:
    plan = order(corpus, epochs=2)
    steps = round(share * plan.steps)
    verdict, times = check_data_ledger(written_by(plan, list(range(steps))), plan, steps)
    counts = dict.fromkeys(range(plan.windows), 0)
    for step in range(steps):
        for (window,) in plan.batch(step).ids:
            counts[window] += 1
    assert verdict.outcome is Outcome.PROVEN
    assert times == {n: list(counts.values()).count(n) for n in (0, 1, 2) if n in counts.values()}
    assert sum(times.values()) == plan.parts == plan.windows


@pytest.mark.parametrize("fault", ["position lost", "first epoch again", "rows lost", "rows repeated"])
def test_a_resume_that_loses_or_repeats_examples_is_refuted_at_its_first_step(corpus: Corpus, fault: str) -> None:
    """C15: the position is not kept. C16: the resumed order is epoch 0's. C17: a few rows are lost or come twice."""
    plan = order(corpus, epochs=2)
    half = plan.steps // 2 + 3
    steps = list(range(plan.steps))
    read = {"position lost": steps[:half] + steps[: plan.steps - half],
            "first epoch again": steps[:half] + [step - plan.steps // 2 for step in steps[half:]],
            "rows lost": steps[:half] + steps[half + 1 :],
            "rows repeated": steps[:half] + steps[half - 1 : -1]}[fault]
    verdict, times = check_data_ledger(written_by(plan, read), plan, len(read))
    assert (verdict.outcome, verdict.evidence["step"], times) == (Outcome.REFUTED, half, {})


def test_a_step_that_wrote_nothing_down_is_not_taken_on_trust(corpus: Corpus) -> None:
    plan = order(corpus)
    written = written_by(plan, list(range(6)))
    del written[4]
    assert "step 4 wrote nothing down" in check_data_ledger(written, plan, 6)[0].reason
    assert check_data_ledger(written, plan, 4)[0].outcome is Outcome.PROVEN


def test_a_plan_names_what_its_batches_name(corpus: Corpus) -> None:
    plan = order(corpus, epochs=2, rank=1, world=2)
    assert all(plan.ids(step) == plan.batch(step).ids for step in (0, 5, plan.steps - 1))
