"""Causal tracing finds the layer where the tiny model looks its facts up, and leaves no hook behind."""

import json
from dataclasses import asdict

import pytest
import torch

from assay.editing.causal_tracing import GROUPS, LAST_SUBJECT, IndirectEffects, best_window, causal_trace, token_group
from assay.editing.subject_tokens import SubjectSpan
from assay.errors import DataError, UsageError
from assay.testing import tiny_facts
from tests.editing.lookup_model import DEPTH, LOOKS_UP, lookup_model
from tests.editing.world import tokenizer


def effects() -> IndirectEffects:
    return causal_trace(lookup_model(), tokenizer(), tiny_facts.fact_edits(4), window=1, samples=2, seed=0)


@pytest.mark.arithmetic
def test_the_mlp_that_looks_the_fact_up_carries_it_at_the_subjects_last_token():
    found = effects()
    lost, row = found.clean - found.blurred, found.mlp[LAST_SUBJECT]
    assert best_window(found, DEPTH) == [LOOKS_UP]
    assert row[LOOKS_UP] > 0.9 * lost
    assert all(abs(row[layer]) < 0.25 * lost for layer in range(DEPTH) if layer != LOOKS_UP)
    assert found.blurred < 0.7 < 0.95 < found.clean


def test_the_whole_state_brings_the_answer_back():
    """The last layer's state at the last token is all that the answer comes from."""
    found = effects()
    whole = found.state[GROUPS.index("last token")][-1]
    assert whole == pytest.approx(found.clean - found.blurred, abs=1e-4)


def test_it_has_an_address_and_leaves_the_model_alone():
    model, prompt = lookup_model(), torch.tensor([tokenizer().encode("The home of Borin is")])
    before = model(prompt)
    one, again = (causal_trace(model, tokenizer(), tiny_facts.fact_edits(2), window=2, samples=1, seed=seed) for seed in (5, 5))
    other = causal_trace(model, tokenizer(), tiny_facts.fact_edits(2), window=2, samples=1, seed=6)
    assert json.dumps(asdict(one)) == json.dumps(asdict(again)) != json.dumps(asdict(other))
    assert torch.equal(model(prompt), before)


def test_where_a_token_belongs():
    span = SubjectSpan((1, 2, 3, 4, 5, 6, 7, 8), 1, 3)
    assert [GROUPS[token_group(span, token)] for token in range(1, 8)] == [
        "first subject token", "middle subject tokens", "last subject token", "first token after", "further tokens", "further tokens",
        "last token"]


def test_nothing_known_and_no_room_are_said():
    with pytest.raises(DataError, match="nothing can be traced"):
        causal_trace(lookup_model(), tokenizer(), [], window=1, samples=1, seed=0)
    with pytest.raises(UsageError, match="does not fit below the last of 2"):
        best_window(IndirectEffects([], [[None]] * 3, 2, (), 0, 0, 3.0, 1), 2)


def test_the_picture_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from assay.tracing.plots import draw_causal_trace

    draw_causal_trace(effects(), [0], tmp_path / "causal.png")
    assert (tmp_path / "causal.png").read_bytes().startswith(b"\x89PNG")
