"""Editing on a GPU: the CPU's moments, targets and patch, also after a sampler had the model compiled."""

import pytest
import torch

from assay.edit.memit import by_moments, memit
from assay.edit.moments import as_reading, computed
from assay.measure.edits import examine
from assay.measure.questions import generated
from assay.model.patch import patched
from assay.model.placement import uncompiled
from assay.zoo import lore
from tests.edit.world import AIM, LAYERS, surroundings, text_moments, tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

ROWS = tuple(tuple(tokenizer().encode(line)) for line in lore.sentences()) if torch.cuda.is_available() else ()


def test_moments_are_the_cpus():
    there, here = (computed(lore.lore_model().to(device), ROWS, LAYERS) for device in ("cuda", "cpu"))
    for layer in LAYERS:
        assert float((there[layer] - here[layer]).norm() / here[layer].norm()) < 1e-5


def test_six_facts_are_said_and_hooks_are_seen_after_sampling():
    """The sampler has its model's blocks compiled; editing reaches into them all the same."""
    model, facts, stops = lore.lore_model().to("cuda"), lore.edits(6), (tokenizer().eos,)
    with uncompiled():
        assert generated(model, tokenizer(), [fact.prompt for fact in facts], 4, stops)
        before = examine(model, tokenizer(), facts, as_reading(ROWS), stops)
        edited = memit(model, tokenizer(), facts, LAYERS, by_moments(text_moments(), 10.0), surroundings(), AIM, parent=None)
        with patched(model, edited.patch):
            after = examine(model, tokenizer(), facts, as_reading(ROWS), stops)
    assert not any(reply.says for reply in before.of("efficacy"))
    assert all(reply.says for reply in after.of("efficacy"))
    assert min(edited.reached) > 0.95
    here = memit(lore.lore_model(), tokenizer(), facts, LAYERS, by_moments(text_moments(), 10.0), surroundings(), AIM, parent=None)
    for one, other in zip(edited.targets, here.targets, strict=True):  # 60 steps apart by rounding alone
        assert float((one.state - other.state).norm() / other.state.norm()) < 0.05
