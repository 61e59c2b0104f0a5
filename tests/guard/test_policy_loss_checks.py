"""The algebra's checks: silent on every objective that there is, whatever the batch; what they catch is in the zoo."""

from dataclasses import replace

import pytest
import torch

from assay.guard.policy_loss_checks import check_advantages, check_counted, check_directions, check_policy_loss
from assay.learn.advantage import estimated_advantages
from assay.learn.policy import Surrogate, policy_gradient
from assay.model.transformer import Transformer, initialised
from assay.testing.tiny_models import tiny_config
from assay.verdict import Outcome
from tests.learn.made_up_rollouts import CAP, as_batch, made

PACKED, ALONE = [[0, 1], [2], [3, 4], [5]], [[n] for n in range(6)]
ASKED = [Surrogate(kl="k3", kl_weight=0.04, temperature=0.7), Surrogate(ratio="sequence", epsilon=0.02, epsilon_high=0.04),
         Surrogate(ratio="cispo", epsilon_high=4.0, kl="k2", kl_weight=0.01, kl_by_ratio=False), Surrogate(kl="k1", kl_weight=0.1),
         Surrogate(entropy_weight=0.01, measure_entropy=False)]


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked.ratio}-{asked.kl}")
def test_what_was_asked_for_is_what_runs(asked: Surrogate, how: str):
    model = initialised(tiny_config("assay"), 1)
    batch = as_batch(made(model), ALONE if how == "constant" else PACKED, how, [True, True, False, True, True, True])
    before = [p.clone() for p in model.parameters()]
    assert check_policy_loss(model, policy_gradient(asked), batch, asked, how, CAP).outcome is Outcome.PROVEN  # type: ignore[arg-type]
    quiet = replace(asked, entropy_weight=0.0)
    assert check_directions(model, policy_gradient(quiet), batch, quiet).outcome is Outcome.PROVEN
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("other", [{"epsilon": 0.1}, {"epsilon_high": 0.5}, {"kl": "k2"}, {"kl_weight": 0.08}, {"temperature": 1.0},
                                   {"ratio": "sequence"}, {"kl_by_ratio": False}, {"entropy_weight": 0.05}])
def test_anything_else_is_refuted(other: dict):
    model = initialised(tiny_config(), 1)
    with torch.no_grad():
        model.norm.weight.mul_(3)
    batch = as_batch(made(model), PACKED, "token")
    assert check_policy_loss(model, policy_gradient(replace(ASKED[0], **other)), batch, ASKED[0], "token", CAP).outcome is Outcome.REFUTED


def with_one_loud_channel() -> Transformer:
    """Model with one loud channel, as trained models have: what all logits share is a hundred times what tells them apart, and gradients
    are sums that cancel."""
    model = initialised(replace(tiny_config(), depth=8, windows=(None,) * 8), 4)
    with torch.no_grad():
        model.embed.weight[:, 3] += 4.0
    return model


def test_rounding_of_a_deep_model_with_a_loud_channel_is_no_fault_and_a_fault_there_is_one():
    model = with_one_loud_channel()
    batch, asked = as_batch(made(model), ALONE), Surrogate(kl="k3", kl_weight=0.04)
    sound = check_policy_loss(model, policy_gradient(asked), batch, asked, "token", CAP)
    assert sound.evidence["gradient_error"] > 1e-4, "else rounding is no matter here"
    assert sound.outcome is Outcome.PROVEN, sound.reason
    for other in ({"epsilon": 0.1}, {"kl": "k2"}, {"kl_weight": 0.05}, {"temperature": 1.01}):
        wrong = policy_gradient(replace(asked, **other))
        assert check_policy_loss(model, wrong, batch, asked, "token", CAP).outcome is Outcome.REFUTED, other


@pytest.mark.parametrize(("made_for", "asked_for"), [
    ("sequence", "token"), ("token", "sequence"), ("token", "constant"), ("constant", "token")])
def test_another_normalisation_is_refuted(made_for: str, asked_for: str):
    model = initialised(tiny_config(), 1)
    batch = as_batch(made(model), ALONE, made_for)
    found = check_policy_loss(model, policy_gradient(ASKED[0]), batch, ASKED[0], asked_for, CAP)  # type: ignore[arg-type]
    assert found.outcome is Outcome.REFUTED


def test_turned_advantages_go_the_wrong_way():
    model = initialised(tiny_config(), 1)
    batch = as_batch(made(model), PACKED)
    turned = lambda model, batch: policy_gradient(ASKED[0])(model, replace(batch, advantage=-batch.advantage))
    assert "what had an advantage does not become likelier" in check_directions(model, turned, batch, ASKED[0]).reason


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp"])
def test_advantages(scale: str, estimator: str):
    rewards = [[1.0, 0.0, None, 0.3], [0.5] * 4, [None, None, 2.0, None], [-1.0, 4.0, 0.0, 0.0]]
    found = estimated_advantages(rewards, estimator, scale)  # type: ignore[arg-type]
    assert check_advantages(rewards, found, scale, estimator).outcome is Outcome.PROVEN
    assert check_advantages(rewards, replace(found, values_PG=found.values_PG * 1.01), scale, estimator).outcome is Outcome.REFUTED


def test_what_counts():
    ended = ["stop", "length", "stop"]
    assert check_counted([True, True, False], [True, True, False], ended, mask_truncated=False).outcome is Outcome.PROVEN
    assert check_counted([True, False, False], [True, True, False], ended, mask_truncated=True).outcome is Outcome.PROVEN
    assert "1 are left out that should count, and 0" in check_counted([False] * 3, [True, True, False], ended, mask_truncated=True).reason
    assert "0 are left out that should count, and 1" in check_counted([True] * 3, [True, True, True], ended, mask_truncated=True).reason


def test_nothing_is_said_of_a_batch_without_weight():
    model = initialised(tiny_config(), 1)
    batch = as_batch(made(model), PACKED)
    empty = replace(batch, weight=torch.zeros_like(batch.weight))
    assert check_policy_loss(model, policy_gradient(ASKED[0]), empty, ASKED[0], "token", CAP).outcome is Outcome.UNPROVEN
    assert check_directions(model, policy_gradient(ASKED[0]), empty, ASKED[0]).outcome is Outcome.UNPROVEN
