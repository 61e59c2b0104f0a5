"""Editing on a GPU: the CPU's moments, targets and patch, also after a sampler had the model compiled."""

import pytest
import torch

from assay.editing.fact_questions import greedy_texts
from assay.editing.memit import memit, memit_solver
from assay.editing.moments import compute_moments, tokenized_text
from assay.evaluation.edit_evaluation import evaluate_edits
from assay.model.patch import patched
from assay.model.placement import uncompiled
from assay.testing import tiny_facts
from tests.editing.lookup_model import lookup_model
from tests.editing.world import AIM, LAYERS, surroundings, text_moments, tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

ROWS = tuple(tuple(tokenizer().encode(line)) for line in tiny_facts.fact_sentences()) if torch.cuda.is_available() else ()


def test_moments_are_the_cpus():
    there, here = (compute_moments(lookup_model().to(device), ROWS, LAYERS) for device in ("cuda", "cpu"))
    for layer in LAYERS:
        assert float((there[layer] - here[layer]).norm() / here[layer].norm()) < 1e-5


def test_six_facts_are_said_and_hooks_are_seen_after_sampling():
    """The sampler has its model's blocks compiled; editing reaches into them all the same."""
    model, facts, stops = lookup_model().to("cuda"), tiny_facts.fact_edits(6), (tokenizer().eos,)
    with uncompiled():
        assert greedy_texts(model, tokenizer(), [fact.prompt for fact in facts], 4, stops)
        before = evaluate_edits(model, tokenizer(), facts, tokenized_text(ROWS), stops)
        edited = memit(model, tokenizer(), facts, LAYERS, memit_solver(text_moments(), 10.0), surroundings(), AIM, parent=None)
        with patched(model, edited.patch):
            after = evaluate_edits(model, tokenizer(), facts, tokenized_text(ROWS), stops)
    assert not any(reply.says for reply in before.of("efficacy"))
    assert all(reply.says for reply in after.of("efficacy"))
    assert min(edited.reached) > 0.95
    here = memit(lookup_model(), tokenizer(), facts, LAYERS, memit_solver(text_moments(), 10.0), surroundings(), AIM, parent=None)
    for one, other in zip(edited.targets, here.targets, strict=True):  # 60 steps apart by rounding alone
        assert float((one.state - other.state).norm() / other.state.norm()) < 0.05
