"""Preference objectives: the formulas, with gradients, whatever the packing. tests/recipes/test_trl_equivalence.py has TRL's own losses."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.preferences import PackedPairs, PreferencePair, pair_rows
from assay.errors import DataError, UsageError
from assay.guard.loss_preflight import loss_gradients
from assay.guard.preference_checks import naive_preference
from assay.learn.loop import accumulated
from assay.learn.objectives import averages
from assay.learn.policy import token_logprobs
from assay.learn.preference import PreferenceSettings, preference
from assay.testing.tiny_models import tiny_model

ALL = [PreferenceSettings(), PreferenceSettings(label_smoothing=0.1), PreferenceSettings("sigmoid_norm", 2.0), PreferenceSettings("ipo"),
       PreferenceSettings("hinge", 0.05), PreferenceSettings("robust", 0.1, 0.2), PreferenceSettings("simpo", 2.0, 0.1, 0.5),
       PreferenceSettings("orpo", 0.3)]


def example(name: str, tokens: list[int], prompt: int) -> TrainingExample:
    weight = [0.0] * prompt + [1.0] * (len(tokens) - prompt)
    return TrainingExample(name, np.array(tokens), np.array(weight), (), prompt, "?")


def tiny_pairs(count: int = 5, seed: int = 0) -> list[PreferencePair]:
    """Pairs of ragged lengths."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt = draw.integers(3, 90, 2 + number % 3).tolist()
        sides = [example(f"f:{number}:{number}#{side}", prompt + draw.integers(3, 90, 2 + int(draw.integers(5))).tolist(), len(prompt))
                 for side in ("chosen", "rejected")]
        made.append(PreferencePair(f"f:{number}:{number}", *sides))
    return made


def with_reference(batch: Batch, seed: int = 7) -> Batch:
    """Batch with the reference of another model: a policy that has moved."""
    with torch.no_grad():
        return replace(batch, reference=token_logprobs(tiny_model("llama", seed), batch)[0])


def packed(length: int = 40, rows: int | None = None, seed: int = 0) -> Batch:
    order = PackedPairs(tiny_pairs(), seed, 1, length)
    return with_reference(PackedPairs(tiny_pairs(), seed, rows or order.windows, length).batch(0))


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: f"{settings.loss}-{settings.label_smoothing}")
def test_the_objective_is_its_formula_written_out_in_value_and_gradient(settings: PreferenceSettings):
    model, batch = tiny_model("llama").requires_grad_(True), packed()
    ours = loss_gradients(model, lambda: preference(settings)(model, batch).total / batch.weight.sum())
    due = loss_gradients(model, lambda: naive_preference(settings)(model, batch))
    assert ours[0] == pytest.approx(due[0], rel=1e-5)
    for name, gradient in due[1].items():
        assert (ours[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("settings", [ALL[0], ALL[3], ALL[7]], ids=lambda settings: settings.loss)
def test_packing_and_micro_batches_change_nothing(settings: PreferenceSettings):
    model = tiny_model("llama").requires_grad_(True)

    def step(batch: Batch, micro: int) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
        model.zero_grad()
        found = accumulated(model, preference(settings), batch, micro, batch.divisor or 0.0)
        return float(found.loss), {name: p.grad.clone() for name, p in model.named_parameters()}, averages(found.metrics)

    alone = with_reference(pair_rows([[pair] for pair in tiny_pairs()], 24))
    due = step(alone, 5)
    for batch, micro in ((packed(40), 1), (packed(200), 1), (alone, 2)):
        loss, gradients, metrics = step(batch, micro)
        assert batch.divisor == 5
        assert loss == pytest.approx(due[0], rel=1e-5)
        assert metrics == pytest.approx(due[2], rel=1e-4)
        assert all((gradients[name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-8 for name, gradient in due[1].items())


@pytest.mark.parametrize("settings", ALL[:6], ids=lambda settings: f"{settings.loss}-{settings.label_smoothing}")
def test_a_policy_that_is_its_reference_has_the_loss_that_the_settings_name(settings: PreferenceSettings):
    model, pairs = tiny_model("llama"), tiny_pairs()
    batch = with_reference(pair_rows([pairs], 120), seed=0)
    with torch.no_grad():
        found = preference(settings)(model, batch)
    assert settings.at_reference is not None
    assert float(found.total) / 5 == pytest.approx(settings.at_reference, rel=1e-6)
    if settings.loss in ("sigmoid", "robust"):
        assert float(found.total) / 5 == pytest.approx(math.log(2), abs=1e-6)


def test_pairs_that_hold_nothing_count_for_nothing():
    model, batch = tiny_model("llama"), with_reference(pair_rows([tiny_pairs()], 120))
    weight = batch.weight.clone()
    weight[batch.documents == 3] = 0  # the rejected side of the second pair
    object.__setattr__(batch, "weight", weight)
    for settings in ALL:
        found = preference(settings)(model, batch)
        assert float(found.weight) == 4
        assert torch.isfinite(found.total)


def test_a_batch_without_pairs_or_a_reference_is_refused():
    model, batch = tiny_model("llama"), pair_rows([tiny_pairs()], 120)
    with pytest.raises(DataError, match="needs pairs"):
        preference(PreferenceSettings())(model, batch)
    preference(PreferenceSettings("simpo"))(model, batch)


@pytest.mark.parametrize(("asked", "words"), [
    ({"loss": "dpo"}, "expected one of"), ({"beta": 0.0}, "beta above 0"), ({"label_smoothing": 0.5}, "below 0.5"),
    ({"loss": "ipo", "label_smoothing": 0.1}, "which has none")])
def test_settings_that_make_no_sense_are_refused(asked: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        PreferenceSettings(**asked)
