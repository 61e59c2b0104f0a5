"""Rows of examples: each once an epoch, apart from one another, the same for the same (seed, step); held-out ones never among them."""

import random

import numpy as np
import pytest
import torch

from assay.data.chat import TrainingExample
from assay.data.data_ledger import check_data_ledger, ids_digest
from assay.data.packing import PackedExamples, fill_rows, hold_out
from assay.errors import DataError, UsageError
from assay.guard.example_audit import check_batch, check_packing
from assay.learn.objectives import next_token
from assay.testing.tiny_models import tiny_model
from assay.verdict import Outcome


def made(count: int, longest: int = 40, seed: int = 0) -> list[TrainingExample]:
    chance = random.Random(seed)
    examples = []
    for number in range(count):
        length, prompt = chance.randint(4, longest), chance.randint(1, 3)
        weight = [0.0] * prompt + [1.0] * (length - prompt)
        tokens = [chance.randrange(256) for _ in range(length)]
        examples.append(TrainingExample(f"made:{number + 1}:{number:x}", np.array(tokens), np.array(weight), ("",), prompt))
    return examples


EXAMPLES = made(200)


def test_each_example_stands_once_in_an_epoch_and_whole_in_its_row():
    packed = PackedExamples(EXAMPLES, 0, 1, 64, epochs=3)
    for epoch in range(3):
        assert sorted(packed.epoch_ids(epoch)) == sorted(example.id for example in EXAMPLES)
    by_id = {example.id: example for example in EXAMPLES}
    for step in range(packed.steps):
        assert str(check_batch(packed.batch(step), by_id)).startswith("PROVEN")
    written = {step: ids_digest(packed.batch(step).ids) for step in range(packed.steps)}
    verdict, times = check_data_ledger(written, packed, packed.steps)
    assert (str(verdict).split()[0], times) == ("PROVEN", {3: len(EXAMPLES)})


def test_epochs_have_orders_of_their_own_and_seeds_too():
    packed = PackedExamples(EXAMPLES, 0, 1, 64, epochs=2)
    assert packed.epoch_ids(0) != packed.epoch_ids(1) != PackedExamples(EXAMPLES, 1, 1, 64, epochs=2).epoch_ids(1)
    assert check_packing(packed).outcome is Outcome.PROVEN
    assert {frozenset(row) for row in packed.plans[0]} != {frozenset(row) for row in packed.plans[1]}  # and neighbours


def test_a_plan_that_loses_repeats_or_forgets_to_shuffle_is_refuted():
    good = PackedExamples(EXAMPLES, 0, 1, 64, epochs=2).plans
    for plans, words in (([good[0], good[0]], "not shuffled anew"), ([good[0], good[1][:-1]], "epoch 1 reads"),
                         ([[*good[0][:-1], good[0][0]], good[1]], "epoch 0 reads")):
        packed = PackedExamples(EXAMPLES, 0, 1, 64, epochs=2)
        packed.__dict__["plans"] = plans
        verdict = check_packing(packed)
        assert verdict.outcome is Outcome.REFUTED
        assert words in verdict.reason


def test_a_batch_depends_on_seed_and_step_alone():
    one, other = (PackedExamples(EXAMPLES, 5, 3, 64, epochs=2) for _ in range(2))
    for step in reversed(range(other.steps)):
        other.batch(step)
    for step in (0, 7, one.steps - 1):
        assert torch.equal(one.batch(step).tokens, other.batch(step).tokens)
        assert one.batch(step).ids == other.batch(step).ids
        assert [id for row in one.batch(step).ids for id in row] == one.consumed(step).tolist()
        assert one.batch(step).ids == one.ids(step)


def test_ranks_share_no_row_and_together_read_what_one_would():
    alone = PackedExamples(EXAMPLES, 0, 4, 64)
    ranks = [PackedExamples(EXAMPLES, 0, 2, 64, rank=rank, world=2) for rank in (0, 1)]
    assert alone.steps == ranks[0].steps
    for step in range(alone.steps):
        assert alone.consumed(step).tolist() == [id for rank in ranks for id in rank.consumed(step)]


def test_little_is_padding_and_without_packing_a_row_is_an_example():
    packed = PackedExamples(EXAMPLES, 0, 1, 256)
    assert packed.windows == -(-int(packed.lengths.sum()) // 256)  # no packing has fewer rows
    assert packed.padding == pytest.approx(1 - packed.lengths.sum() / (256 * packed.windows))
    single = PackedExamples(EXAMPLES, 0, 2, 64, packing=False)
    assert single.windows == len(EXAMPLES)
    batch = single.batch(0)
    assert all(len(ids) == 1 for ids in batch.ids)
    assert batch.documents is not None
    assert set(batch.documents.unique().tolist()) == {0, -1}


def test_a_row_is_filled_exactly_where_two_examples_together_can():
    lengths = np.array([2, 4, 5, 6, 7])
    rows = fill_rows(np.arange(5), lengths, 16)
    assert [lengths[row].tolist() for row in rows] == [[7, 5, 4], [6, 2]]  # the longest that fits would be 6, and leave 1


def test_the_data_ends_with_a_sentence():
    packed = PackedExamples(EXAMPLES, 0, 7, 64, epochs=2)
    assert packed.steps == int(packed.ends[-1]) // 7
    packed.batch(packed.steps - 1)
    with pytest.raises(DataError, match=rf"the data ends after {packed.steps} steps. Give more examples, fewer steps, or "
                       r"--num-train-epochs 3"):
        packed.batch(packed.steps)
    assert packed.epoch_of(0) == 0
    assert packed.epoch_of(packed.steps - 1) == 1


@pytest.mark.parametrize(("examples", "options", "words"), [
    ([], {}, "no examples to train on"),
    (EXAMPLES, {"length": 16}, "do not fit into rows of 16"),
])
def test_what_cannot_be_packed_is_refused(examples: list[TrainingExample], options: dict[str, int], words: str):
    with pytest.raises(DataError, match=words):
        PackedExamples(examples, 0, 1, **{"length": 64, **options})


def test_packed_rows_teach_what_single_rows_teach():
    model, few = tiny_model(), EXAMPLES[:12]
    together, apart = PackedExamples(few, 0, 1, 128), PackedExamples(few, 0, 1, 64, packing=False)
    totals = []
    for packed in (together, apart):
        model.zero_grad()
        losses = [next_token(model, packed.batch(step)) for step in range(packed.steps)]
        sum(loss.total for loss in losses).backward()  # type: ignore[union-attr]
        totals.append((sum(float(loss.total.detach()) for loss in losses), sum(float(loss.weight) for loss in losses),
                       model.get_parameter("embed.weight").grad.clone()))  # type: ignore[union-attr]
    assert together.windows < apart.windows
    assert totals[0][1] == totals[1][1] == sum(float(example.weight.sum()) for example in few)
    assert totals[0][0] == pytest.approx(totals[1][0], rel=1e-6)
    assert torch.allclose(totals[0][2], totals[1][2], rtol=1e-4, atol=1e-5)


def test_who_is_held_out_depends_on_what_is_said_alone():
    train, held = hold_out(EXAMPLES, 0.1, 3)
    assert len(held) == 20
    assert not {e.id for e in train} & {e.id for e in held}
    turned = list(reversed(EXAMPLES))
    assert {e.id for e in hold_out(turned, 0.1, 3)[1]} == {e.id for e in held}
    assert {e.id for e in hold_out(EXAMPLES, 20, 3)[1]} == {e.id for e in held}
    assert {e.id for e in hold_out(EXAMPLES, 0.1, 4)[1]} != {e.id for e in held}
    renamed = [TrainingExample("other:9:" + e.content, e.tokens, e.weight, e.intended, e.prompt) for e in EXAMPLES]
    assert {e.content for e in hold_out(renamed, 20, 3)[1]} == {e.content for e in held}


def test_no_copy_of_a_held_out_conversation_stays_in_train():
    doubled = [*EXAMPLES, *(TrainingExample(f"copy:{i}:{e.content}", e.tokens, e.weight, e.intended, e.prompt) for i,
                            e in enumerate(EXAMPLES))]
    train, held = hold_out(doubled, 20, 3)
    assert (len(train), len(held)) == (360, 40)
    assert not {e.content for e in train} & {e.content for e in held}
    for wrong in (200, 1.0, -1, -0.5):
        with pytest.raises(UsageError, match="cannot be held out of 200 different conversations"):
            hold_out(EXAMPLES, wrong, 0)
    assert hold_out(EXAMPLES, 0, 0) == (EXAMPLES, [])
