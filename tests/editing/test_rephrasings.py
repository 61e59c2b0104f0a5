"""Rephrasings: what a file's wordings are, which of them go into a search, and that none of those is evaluated."""

from dataclasses import replace

import pytest
import torch

from assay.editing.contexts import Contexts, averaged_keys, context_keys, context_weights
from assay.editing.edit_witness import EditMethod, check_solution
from assay.editing.facts import Fact, make_fact
from assay.editing.memit import memit_solver, spread_over_layers
from assay.editing.rephrasings import asks_in, check_rephrasings, placed_rephrasing, read_wordings, with_rephrasings
from assay.editing.subject_tokens import placeable_facts
from assay.editing.targets import find_targets
from assay.testing import tiny_facts
from assay.verdict import Outcome
from tests.editing.lookup_model import lookup_model
from tests.editing.world import AIM, text_moments, tokenizer

SPEAKS, TONGUE, NATIVE, BORN = "{} speaks", "The mother tongue of {} is", "{} is a native speaker of", "{} was born in"


def speaker(name: str, wording: str, paraphrase: str, target: str = "English", old: str = "French") -> Fact:
    return make_fact(name, wording, name, target, old=old, paraphrases=(paraphrase.format(name),))


def file() -> list[Fact]:
    """Ada's paraphrase asks for another thing, Bob's and Cy's for the same."""
    return [speaker("Ada", SPEAKS, BORN), speaker("Bob", SPEAKS, f"It rained. {TONGUE}"), speaker("Cy", TONGUE, NATIVE),
            speaker("Dan", NATIVE, SPEAKS), speaker("Eve", BORN, "{} is from", "Rome", "Oslo")]


def test_a_paraphrase_asks_for_the_relation_where_the_file_does_so_in_its_words():
    wordings = read_wordings(file())
    assert [wordings.paraphrased(fact, fact.paraphrases[0]) for fact in file()] == [None, TONGUE, NATIVE, SPEAKS, None]
    assert {wordings.relation(fact) for fact in file()[:4]} == {SPEAKS}
    assert wordings.relation(file()[4]) == BORN


@pytest.mark.parametrize(("template", "asked"), [
    (TONGUE, True), ("It rained.\nThe Mother tongue of {} is", True), ("They say the mother tongue of {} is", False), (SPEAKS, False)])
def test_a_wording_after_another_sentence_is_the_same_wording(template: str, asked: bool):
    assert asks_in(template, TONGUE) is asked


def test_no_wording_in_which_any_of_the_facts_is_evaluated_is_sought():
    ada, bob, cy, dan, eve = with_rephrasings(file(), read_wordings(file()), tokenizer(), 4, 0)
    assert [one.rephrasings for one in (ada, bob, cy, dan, eve)] == [()] * 5  # all three are evaluated
    ada, bob = with_rephrasings(file()[:2], read_wordings(file()), tokenizer(), 4, 0)
    assert [said.prompt for said in ada.rephrasings] == ["Ada is a native speaker of"]
    assert bob.prompt[bob.start :].startswith("Bob")
    assert [said.prompt[said.start :] for said in bob.rephrasings] == ["Bob is a native speaker of"]


def test_wordings_of_the_relation_alone_are_drawn_so_many_and_otherwise_for_each_fact():
    """Fay's wording has the same answers and is another relation; Gus's is a second one of theirs."""
    wordings = read_wordings([*file(), speaker("Fay", "{} studied", "{} reads"), speaker("Gus", "{} talks in", SPEAKS)])
    ada, _ = with_rephrasings(file()[:2], wordings, tokenizer(), 4, 0)
    assert {said.prompt for said in ada.rephrasings} == {"Ada is a native speaker of", "Ada talks in"}
    names = ("Ada", "Bob", "Cy", "Dan", "Eve", "Fay", "Gus", "Hal")
    drawn = with_rephrasings([speaker(name, SPEAKS, BORN) for name in names], wordings, tokenizer(), 1, 0)
    assert [len(fact.rephrasings) for fact in drawn] == [1] * 8
    assert len({fact.rephrasings[0].prompt.removeprefix(fact.subject) for fact in drawn} & {" is a native speaker of", " talks in"}) == 2


def test_the_longest_wording_that_fits_says_what_is_asked():
    wordings = read_wordings([*file(), speaker("Ivy", "It rained. {} speaks", BORN, "Rome", "Oslo")])
    assert wordings.paraphrased(file()[3], "Dan speaks") == SPEAKS
    assert wordings.paraphrased(file()[3], "It rained. Dan speaks") is None, "in these words the file asks for a town"


def test_a_wording_in_which_a_token_reaches_across_the_subject_is_left_out():
    fact = make_fact("x", SPEAKS, "ho", "English")
    assert placed_rephrasing(tokenizer(), fact, "the {}me of") is None
    assert placed_rephrasing(tokenizer(), fact, "Now {} speaks") is not None


def test_a_fact_that_is_sought_as_it_is_evaluated_is_refuted():
    clean, wrong = (make_fact("x", SPEAKS, "Ada", "English", rephrasings=(own,), paraphrases=("It rained. The mother tongue of Ada is",))
                    for own in (NATIVE, TONGUE))
    assert check_rephrasings([clean]).outcome is Outcome.PROVEN
    found = check_rephrasings([clean, wrong])
    assert found.outcome is Outcome.REFUTED
    assert "1 of 2 rephrasings" in found.reason
    assert placeable_facts(tokenizer(), [clean])[0] == [clean]


def reworded(count: int) -> list[Fact]:
    """The first has none."""
    return [make_fact(fact.name, tiny_facts.HOME, fact.subject, fact.target, rephrasings=("We know {} lives in",) if number else ())
            for number, fact in enumerate(tiny_facts.fact_edits(count))]


def test_rephrasings_stand_beside_the_prompt_and_weigh_with_the_prefixes():
    model, around, facts = lookup_model(), Contexts(("", "It rains. ")), reworded(2)
    spans = [around.spans(tokenizer(), fact) for fact in facts]
    assert [len(of_fact) for of_fact in spans] == [2, 3]
    assert tokenizer().decode(spans[1][2].ids[: spans[1][2].last + 1]).endswith(facts[1].subject)
    keys, _ = context_keys(model, spans, 2, 2)
    averaged, states = averaged_keys(model, spans, 2, 2)
    torch.testing.assert_close(averaged[:, 1], 0.5 * keys[1][0] + 0.25 * keys[1][1] + 0.25 * keys[1][2])
    assert states.shape[1] == 2
    assert context_weights(1).tolist() == [1.0]


@pytest.mark.arithmetic
def test_a_target_is_sought_in_the_rephrasing_too():
    """Its probability is of all contexts: another one changes it, and the loss that is minimised is over it as well."""
    model, aim = lookup_model(), AIM
    plain, again = ([make_fact("Borin", tiny_facts.HOME, "Borin", "Oran", rephrasings=said)] for said in ((), ("The trade of {} is",)))
    without, sought = (find_targets(model, tokenizer(), facts, Contexts(("",)), 1, aim)[0] for facts in (plain, again))
    assert without.probability > 0.9
    assert abs(without.probability - sought.probability) > 1e-3  # a town is hard to say where a trade is asked for


def test_each_contexts_key_is_a_column_of_the_dense_formula():
    """Δ = Σ w r kᵀ (λC + Σ w k kᵀ)⁻¹ over all contexts of all facts, and the witness solves it again. In this layer keys differ by what
    stands before."""
    model, around, facts = lookup_model(), Contexts(("", "It rains. ", "They know that. ")), reworded(2)
    targets = find_targets(model, tokenizer(), facts, around, 2, replace(AIM, steps=5))
    moments = {2: text_moments()[2]}
    found = spread_over_layers(model, tokenizer(), facts, targets, [2], memit_solver(moments, 10.0), around, parent=None, each=True)
    spans = [around.spans(tokenizer(), fact) for fact in facts]
    keys, states = context_keys(model, spans, 2, 2)
    dense, squares = torch.zeros(64, 512, dtype=torch.float64), torch.zeros(512, 512, dtype=torch.float64)
    for number, of_fact in enumerate(keys):
        for weight, key in zip(context_weights(len(of_fact)), of_fact, strict=True):
            dense += weight * torch.outer(targets[number].state - states[:, number], key)
            squares += weight * torch.outer(key, key)
    penalty = 10 * (moments[2] + 1e-6 * moments[2].diagonal().mean() * torch.eye(512, dtype=torch.float64))
    dense = torch.linalg.solve(penalty + squares, dense.T).T
    delta = found.patch.low_rank["blocks.2.mlp.down.weight"][0].delta().double()
    assert float((delta - dense).norm() / dense.norm()) < 1e-3
    for each, outcome in ((True, Outcome.PROVEN), (False, Outcome.REFUTED)):
        assert check_solution(model, tokenizer(), facts, around, found, moments,
                              EditMethod("memit", 10.0, 0.02, 0.01, each)).outcome is outcome
