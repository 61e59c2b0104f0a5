"""Tuned edits: the facts are said, the model is bit-identical until the patch is applied, and what is held stays."""

import functools
from dataclasses import replace

import pytest
import torch

from assay.editing.contexts import Contexts
from assay.editing.edit_witness import check_tuned
from assay.editing.fact_questions import ask_questions, fact_questions
from assay.editing.memit import EditResult
from assay.editing.tuned_edit import AskedRow, HeldTexts, TuneOptions, bystander_prompts, drawn, row_surprises, tune_edit
from assay.errors import DataError
from assay.model.patch import Patch, patched
from assay.store.digests import weights_digest
from assay.testing import tiny_facts
from assay.verdict import Outcome
from tests.editing.lookup_model import lookup_model
from tests.editing.world import LAYERS, tokenizer

AROUND = Contexts(("", "It rains. "))
NEAR = [tiny_facts.HOME.format(name) for name in tiny_facts.PEOPLE[-4:]]


@functools.cache
def tuned(hold: float = 1.0) -> EditResult:
    text = [tokenizer().encode(line) for line in tiny_facts.fact_sentences()[-8:]]
    aim = TuneOptions(steps=25, lr=0.01, hold=hold, rows=8, text_rows=4, bystanders=4)
    return tune_edit(lookup_model(), tokenizer(), tiny_facts.fact_edits(3), LAYERS, AROUND, text, NEAR, aim, seed=0, parent="base")


def moved(found: EditResult) -> float:
    """How far the bystanders' answers are from what they were (nats)."""
    model = lookup_model()
    held = HeldTexts(model, [tokenizer().encode(prompt) for prompt in NEAR])
    with patched(model, found.patch), torch.no_grad():
        return float(held.divergence(model, range(len(NEAR))))


@pytest.mark.arithmetic
def test_the_facts_are_said_and_what_is_held_stays():
    model = lookup_model()
    with patched(model, Patch(None, replaced=tuned().patch.replaced)):
        replies = ask_questions(model, tokenizer(), fact_questions(tiny_facts.fact_edits(3)), (tokenizer().eos,))
    assert [reply.says for reply in replies if reply.question.kind == "efficacy"] == [True] * 3
    assert [reply.rank for reply in replies if reply.question.kind == "efficacy"] == [1] * 3
    assert min(tuned().reached) > 0.5
    assert moved(tuned()) < 0.5 * moved(tuned(0.0))


def test_the_model_is_bit_identical_afterwards_and_the_same_seed_gives_the_same_patch():
    model = lookup_model()
    before, asked = weights_digest(dict(model.named_parameters())), [p.requires_grad for p in model.parameters()]
    aim = TuneOptions(steps=2, rows=4)
    one, two = (tune_edit(model, tokenizer(), tiny_facts.fact_edits(2), LAYERS, AROUND, [], NEAR, aim, seed=0, parent=None) for _ in "ab")
    assert weights_digest(dict(model.named_parameters())) == before
    assert [p.requires_grad for p in model.parameters()] == asked
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, two.patch.replaced[name]) for name, tensor in one.patch.replaced.items())
    assert not torch.equal(one.patch.replaced["blocks.0.mlp.down.weight"], model.get_parameter("blocks.0.mlp.down.weight"))


def test_a_rows_surprise_is_the_mean_of_its_answers_tokens_whoever_stands_beside_it():
    model, ids = lookup_model(), tuple(tokenizer().encode("The home of Borin is"))
    long, short = AskedRow(0, ids, tuple(tokenizer().encode(" in Lund now"))), AskedRow(1, ids[:3], (5,))
    assert len(long.answer) > 2
    due = []
    for row in (long, short):
        said = model(torch.tensor([[*row.ids, *row.answer]]))[0].detach().log_softmax(-1)
        due.append(-sum(float(said[len(row.ids) - 1 + k, token]) for k, token in enumerate(row.answer)) / len(row.answer))
    assert row_surprises(model, [long, short]).tolist() == pytest.approx(due, rel=1e-4)


def test_a_tuning_that_runs_away_is_refused_and_the_model_has_its_old_bits():
    model = lookup_model()
    before = weights_digest(dict(model.named_parameters()))
    with pytest.raises(DataError, match="step 1 of the tuning met a loss of nan; lower --tune-lr"):
        tune_edit(model, tokenizer(), tiny_facts.fact_edits(1), LAYERS, AROUND, [], NEAR, TuneOptions(steps=3, lr=float("inf")), seed=0,
                  parent=None)
    assert weights_digest(dict(model.named_parameters())) == before


def test_a_probability_that_was_not_reached_is_refuted():
    facts, found = tiny_facts.fact_edits(3), tuned()
    assert check_tuned(lookup_model(), tokenizer(), facts, AROUND, found).outcome is Outcome.PROVEN
    wrong = replace(found, targets=[replace(target, probability=target.probability - 0.02) for target in found.targets])
    assert check_tuned(lookup_model(), tokenizer(), facts, AROUND, wrong).outcome is Outcome.REFUTED


def test_every_row_is_read_as_often_as_every_other():
    read = [i for step in range(10) for i in drawn(5, 3, 0, "facts", step)]
    assert sorted(read) == sorted([*range(5)] * 6)
    assert drawn(2, 9, 0, "facts", 1) in ([0, 1], [1, 0])


def test_bystanders_are_neither_edited_nor_asked_about():
    facts = tiny_facts.fact_edits(2)
    file = [*tiny_facts.fact_edits(12)]
    found = bystander_prompts(facts, file, 100, 0)
    assert {prompt.removeprefix("The home of ").removesuffix(" is") for prompt in found} == set(tiny_facts.PEOPLE[2:8])
    assert len(bystander_prompts(facts, file, 3, 0)) == 3
