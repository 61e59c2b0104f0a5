"""The fingerprint of behaviour: unrelated models are far apart, however little they have learned."""

from dataclasses import replace

import pytest
import torch

from assay.guard.behaviour_checks import SAME_WEIGHTS
from assay.model.probe_logits import ProbeLogits, compute_probe_logits, probe_distance, share_of_change
from assay.model.transformer import Rope, Transformer, initialised
from assay.testing.tiny_models import tiny_config, tiny_model


def answers(seed: int = 0, **geometry: object) -> ProbeLogits:
    config = tiny_config("llama")
    model = Transformer(replace(config, **geometry))  # type: ignore[arg-type]
    model.load_state_dict(initialised(config, seed).state_dict())
    return compute_probe_logits(model)


def test_two_fresh_models_are_unrelated():
    assert probe_distance(answers(0), answers(0)) == 0
    assert 1.2 < probe_distance(answers(0), answers(1)) < 1.6


@pytest.mark.parametrize("rope", [Rope(500000.0), Rope(10000.0, "linear", 4.0)])
def test_a_wrong_rotary_base_shows_even_before_anything_was_learned(rope: Rope):
    assert probe_distance(answers(rope=rope), answers()) > 5 * SAME_WEIGHTS


def test_what_is_not_finite_is_infinitely_far():
    good = answers()
    bad = good._replace(logits=good.logits.clone().index_fill_(1, good.logits.new_tensor([3]).long(), float("nan")))
    assert probe_distance(bad, good) == probe_distance(good, bad) == float("inf")


def test_share_counts_how_often_a_change_was_made():
    base, other = answers(0), answers(1)
    change = [b + k * (o - b) for k in (0, 0.5, 2) for b, o in [(base.logits, other.logits)]]
    normalisers = [base.logsumexp + k * (other.logsumexp - base.logsumexp) for k in (0, 0.5, 2)]
    shares = [share_of_change(ProbeLogits(*pair), base, other) for pair in zip(change, normalisers, strict=True)]
    assert shares == pytest.approx([0, 0.5, 2], abs=1e-4)


def test_a_compiled_model_is_not_compiled_for_its_probe():
    """A save would wait for it, and what is compared later is computed uncompiled in another process."""
    model, compiled = tiny_model("llama").eval(), list[object]()
    due = compute_probe_logits(model)
    for block in model.blocks:
        block.compile(backend=lambda graph, inputs: (compiled.append(graph), graph.forward)[1])
    found = compute_probe_logits(model)
    assert not compiled
    assert torch.equal(found.logits, due.logits)
    with torch.no_grad():
        model.hidden(torch.zeros(1, 8, dtype=torch.long))
    assert compiled, "it is compiled for whoever else asks"
