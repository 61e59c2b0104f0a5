"""Edits as patches: the model is bit-identical until one is applied, the solve is the dense formula, and the facts are then said."""

import functools

import pytest
import torch
from torch import Tensor

from assay.editing import memit as memit_module
from assay.editing.block_hooks import down_projection, hooked
from assay.editing.fact_questions import FactReply, ask_questions, fact_questions
from assay.editing.facts import Fact, make_fact
from assay.editing.memit import EditResult, alphaedit_solver, memit, memit_solver, rome
from assay.errors import ArtifactError, UsageError
from assay.model.patch import Patch, patched, patched_tensors
from assay.store.digests import weights_digest
from assay.testing import tiny_facts
from tests.editing.lookup_model import lookup_model
from tests.editing.world import AIM, LAYERS, surroundings, text_moments, tokenizer

WEIGHT = 10.0


@functools.cache
def six() -> EditResult:
    solve = memit_solver(text_moments(), WEIGHT)
    return memit(lookup_model(), tokenizer(), tiny_facts.fact_edits(6), LAYERS, solve, surroundings(), AIM, parent="base")


def replies(patch: Patch | None, count: int = 6) -> list[FactReply]:
    model, eos = lookup_model(), tokenizer().eos
    with patched(model, patch or Patch(None)):
        return ask_questions(model, tokenizer(), fact_questions(tiny_facts.fact_edits(count)), (eos,))


def said(found: list[FactReply], kind: str) -> list[bool | None]:
    return [reply.says for reply in found if reply.question.kind == kind]


def bare_keys(count: int, layer: int) -> Tensor:
    """The keys averaged over contexts, one plain forward pass each."""
    model, columns = lookup_model(), []
    for fact in tiny_facts.fact_edits(count):
        seen: list[Tensor] = []
        for span in surroundings().spans(tokenizer(), fact):
            with hooked([down_projection(model, layer).register_forward_pre_hook(
                    lambda _, inputs, at=span.last: seen.append(inputs[0][0, at].double()))]), torch.no_grad():  # noqa: B023
                model.hidden(torch.tensor([span.ids]))
        columns.append(0.5 * seen[0] + 0.5 * torch.stack(seen[1:]).mean(0))
    return torch.stack(columns, 1)


@pytest.mark.arithmetic
def test_six_facts_are_said_in_other_words_too_and_the_neighbours_stay():
    before, after = replies(None), replies(six().patch)
    assert said(before, "efficacy") == said(before, "paraphrase") == [False] * 6
    assert said(after, "efficacy") == said(after, "paraphrase") == [True] * 6
    assert said(after, "neighbourhood") == said(before, "neighbourhood") == [True] * 24


def test_the_model_is_bit_identical_until_the_patch_is_applied():
    model = lookup_model()
    before = weights_digest(dict(model.named_parameters()))
    edited = memit(model, tokenizer(), tiny_facts.fact_edits(2), LAYERS, memit_solver(text_moments(), WEIGHT), surroundings(), AIM,
                   parent="base")
    assert weights_digest(dict(model.named_parameters())) == before
    assert edited.patch.names() == {"blocks.0.mlp.down.weight", "blocks.1.mlp.down.weight"}
    assert all(part.left.shape[1] == 2 for parts in edited.patch.low_rank.values() for part in parts)
    with pytest.raises(ArtifactError, match="for another base"):
        patched_tensors(dict(model.named_parameters()), edited.patch, "another")


def test_the_first_layers_change_is_the_dense_formula():
    """Δ = R Kᵀ (λC + K Kᵀ)⁻¹ with R half of the way, from keys that a plain forward pass gives."""
    keys, edited = bare_keys(6, 0), six()
    states = torch.stack([target.state for target in edited.targets], 1)
    missing = torch.stack([target.delta for target in edited.targets], 1)
    moment = text_moments()[0]
    penalty = WEIGHT * (moment + 1e-6 * moment.diagonal().mean() * torch.eye(len(moment)))
    dense = missing / 2 @ keys.T @ torch.linalg.inv(penalty + keys @ keys.T)
    found = edited.patch.low_rank["blocks.0.mlp.down.weight"][0].delta().double()
    assert states.shape[1] == 6
    assert float((found - dense).norm() / dense.norm()) < 1e-5
    assert float((edited.keys[0] - keys).norm() / keys.norm()) < 1e-6


@pytest.mark.arithmetic
def test_the_states_arrive():
    assert min(six().reached) > 0.99
    timid = memit(lookup_model(), tokenizer(), tiny_facts.fact_edits(2), [0], memit_solver(text_moments(), 1e12), surroundings(),
                  AIM, parent=None)
    assert max(timid.reached) < 0.1


@pytest.mark.arithmetic
def test_editing_twice_is_editing_jointly(monkeypatch: pytest.MonkeyPatch):
    """For the same targets: both in one solve, or the second after the first with the first's keys kept, within a thousandth."""
    model, (one, two), name = lookup_model(), tiny_facts.fact_edits(2), "blocks.0.mlp.down.weight"
    aims = dict(zip(("Borin", "Ulla"), six().targets, strict=False))
    monkeypatch.setattr(memit_module, "find_targets", lambda _, __, facts, *___: [aims[fact.name] for fact in facts])

    def change(facts: list[Fact], patch: Patch, earlier: dict[int, Tensor]) -> EditResult:
        with patched(model, patch):
            return memit(model, tokenizer(), facts, [0], memit_solver(text_moments(), WEIGHT, earlier), surroundings(), AIM, parent=None)

    joint, first = change([one, two], Patch(None), {}), change([one], Patch(None), {})
    whole = joint.patch.low_rank[name][0].delta()

    def apart(second: EditResult) -> float:
        twice = first.patch.low_rank[name][0].delta() + second.patch.low_rank[name][0].delta()
        return float((twice - whole).norm() / whole.norm())

    kept, forgotten = apart(change([two], first.patch, first.keys)), apart(change([two], first.patch, {}))
    assert kept < 1e-3
    assert kept < 0.5 * forgotten  # without them the second disturbs the first


@pytest.mark.arithmetic
def test_rome_maps_the_averaged_key_to_its_value():
    edited = rome(lookup_model(), tokenizer(), tiny_facts.fact_edits(1), [0], text_moments(), surroundings(), AIM, parent=None)
    delta = edited.patch.low_rank["blocks.0.mlp.down.weight"][0].delta().double()
    due = edited.targets[0].delta
    assert float((delta @ bare_keys(1, 0)[:, 0] - due).norm() / due.norm()) < 1e-5
    assert said(replies(edited.patch, 1), "efficacy") == [True]


@pytest.mark.arithmetic
def test_alphaedit_says_the_facts_and_moves_no_text():
    edited = memit(lookup_model(), tokenizer(), tiny_facts.fact_edits(3), LAYERS, alphaedit_solver(text_moments(), 0.02, 0.01),
                   surroundings(), AIM,
                   parent=None)
    assert said(replies(edited.patch, 3), "efficacy") == [True] * 3
    strongest = torch.linalg.eigh(text_moments()[0]).eigenvectors[:, -3:].float()
    delta = edited.patch.low_rank["blocks.0.mlp.down.weight"][0].delta()
    assert float((delta @ strongest).norm() / delta.norm()) < 1e-5


@pytest.mark.parametrize(("layers", "words"), [([], "name at least one"), ([0, 4], "0 to 3"), ([2, 3], "layer 3 is the last")])
def test_layers_that_cannot_be_edited_are_refused(layers: list[int], words: str):
    with pytest.raises(UsageError, match=words):
        memit(lookup_model(), tokenizer(), tiny_facts.fact_edits(1), layers, memit_solver({}, 1), surroundings(), AIM,
              parent=None)


def test_rome_edits_one_layer():
    fact = make_fact("x", tiny_facts.HOME, "Borin", "Oran")
    with pytest.raises(UsageError, match="ROME edits one layer, and 2 are named"):
        rome(lookup_model(), tokenizer(), [fact], [0, 1], {}, surroundings(), AIM, parent=None)
