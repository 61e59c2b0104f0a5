"""Edit witness: a sound edit comes out again, and each part that was computed otherwise is refuted."""

import functools
from dataclasses import replace

import pytest
import torch

from assay.editing import edit_witness
from assay.editing.contexts import Contexts
from assay.editing.edit_witness import EditMethod, check_contexts, check_moments, check_search, check_solution
from assay.editing.memit import EditResult, alphaedit_solver, memit, memit_solver
from assay.editing.moments import TokenizedText, compute_moments, tokenized_text
from assay.model.transformer import initialised
from assay.testing import tiny_facts
from assay.verdict import Outcome
from tests.editing.lookup_model import lookup_model
from tests.editing.world import AIM, LAYERS, surroundings, text_moments, tokenizer

MEMIT, ALPHAEDIT = EditMethod("memit", 10.0, 0.02, 1e-2), EditMethod("alphaedit", 10.0, 0.1, 1e-2)
SHORT = replace(AIM, steps=20)


def moments() -> dict[int, torch.Tensor]:
    return {layer: text_moments()[layer] for layer in LAYERS}


@functools.cache
def edited(how: EditMethod = MEMIT) -> EditResult:
    solve = memit_solver(moments(), how.weight) if how is MEMIT else alphaedit_solver(moments(), how.null_share, how.ridge)
    return memit(lookup_model(), tokenizer(), tiny_facts.fact_edits(2), LAYERS, solve, surroundings(), SHORT, parent="base")


@functools.cache
def reading() -> TokenizedText:
    ids = tokenizer().encode("".join(tiny_facts.fact_sentences()))
    return tokenized_text(tuple(tuple(ids[start : start + 37]) for start in range(0, 300, 37)))


def solution(found: EditResult, how: EditMethod = MEMIT, contexts: Contexts | None = None):
    around = contexts or surroundings()
    return check_solution(lookup_model(), tokenizer(), tiny_facts.fact_edits(2), around, found, moments(), how)


def search(found: EditResult, **other):
    return check_search(lookup_model(), tokenizer(), tiny_facts.fact_edits(2), surroundings(), found.targets, LAYERS[-1],
                        replace(SHORT, **other))


def test_a_sound_edit_comes_out_again():
    model = lookup_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = [check_contexts(model, tokenizer(), surroundings(), 3), search(edited()), solution(edited()),
             solution(edited(ALPHAEDIT), ALPHAEDIT),
             check_moments(model, reading(), compute_moments(model, reading().rows, LAYERS), compute_moments)]
    assert [verdict.outcome for verdict in found] == [Outcome.PROVEN] * 5, "\n".join(map(str, found))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_of_a_long_text_the_first_rows_are_summed_again(monkeypatch):
    monkeypatch.setattr(edit_witness, "TOKENS_AGAIN", 80)
    model = lookup_model()
    due = compute_moments(model, reading().rows, LAYERS)
    assert "the first 74" in check_moments(model, reading(), due, compute_moments).reason
    wrong = check_moments(model, reading(), due, lambda *given: {layer: 1.01 * moment for layer, moment in compute_moments(*given).items()})
    assert wrong.outcome is Outcome.REFUTED


@pytest.mark.parametrize("wrong", [
    lambda found: replace(found, patch=replace(found.patch, low_rank={
        name: tuple(replace(part, scale=0.9) for part in parts) for name, parts in found.patch.low_rank.items()})),
    lambda found: replace(found, targets=found.targets[::-1])])
def test_another_update_costs_more_than_the_least(wrong):
    assert solution(wrong(edited())).outcome is Outcome.REFUTED


def test_another_penalty_or_other_contexts_are_seen():
    assert solution(edited(), replace(MEMIT, weight=1e6)).outcome is Outcome.REFUTED
    assert solution(edited(), contexts=Contexts(("",))).outcome is Outcome.REFUTED


@pytest.mark.parametrize(("other", "words"), [({"kl": 1.0}, "loss"), ({"decay": 50.0}, "loss"), ({"clamp": 0.01}, "allowed"),
                                              ({"steps": 99, "enough": 0.0}, "given up")])
def test_a_search_with_other_settings_is_seen(other, words):
    found = search(edited(), **other)
    assert found.outcome is Outcome.REFUTED
    assert words in found.reason


def test_prefixes_that_the_model_would_not_say_are_refuted():
    odd = Contexts(("", *(f"{text}. " for text in ("The~}|{&%$#@", "Thereforezqxjvkw", "Because]>?[<!="))))
    found = check_contexts(initialised(tiny_facts.facts_config(), 0), tokenizer(), odd, 3)
    assert found.outcome is Outcome.REFUTED, found.reason
    assert check_contexts(lookup_model(), tokenizer(), surroundings(), 4).outcome is Outcome.REFUTED


def test_of_many_facts_the_keys_of_a_few_are_computed_again(monkeypatch):
    monkeypatch.setattr(edit_witness, "MOST_PASSES", 1)
    assert "the keys of 2 facts in 2 layers" in solution(edited()).reason
    assert solution(edited()).outcome is Outcome.PROVEN
    wrong = replace(edited(), keys={layer: 1.01 * keys for layer, keys in edited().keys.items()})
    assert solution(wrong).outcome is Outcome.REFUTED
