"""Update accounting: each thing that can be missing is found, and nothing else."""

import copy

import pytest
import torch

from assay.guard.training_guards import (
    UpdateAccount,
    check_gradients,
    check_optimizer,
    check_replicas,
    check_steps,
    check_weights,
    parameter_digests,
)
from assay.learn.optim import adamw, muon
from assay.testing.tiny_models import nudge, tiny_model
from assay.verdict import Outcome


def names(model) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def test_an_optimizer_of_the_models_own_tensors_is_proven():
    model = tiny_model()
    muons = muon(model.named_parameters(), lr_matrix=0.02, lr_embed=0.01, lr_scalar=0.01)
    assert check_optimizer(model, adamw(model.named_parameters(), 1e-3), names(model)).outcome is Outcome.PROVEN
    assert check_optimizer(model, muons, names(model)).outcome is Outcome.PROVEN


def test_the_frozen_part_of_a_plan_is_not_asked_for():
    model = tiny_model()
    model.embed.weight.requires_grad_(False)
    trained = [name for name in names(model) if name != "embed.weight"]
    assert check_optimizer(model, adamw(model.named_parameters(), 1e-3), trained).outcome is Outcome.PROVEN
    found = check_optimizer(model, adamw(model.named_parameters(), 1e-3), names(model))
    assert found.outcome is Outcome.REFUTED
    assert "frozen or not in the model: embed.weight" in found.reason


def held(model, parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["params"] = list(parameters)
    return optimizer


@pytest.mark.parametrize(("kind", "words"), [
    ("copies", "14 trainable tensor(s) are not in the optimizer: embed.weight, blocks.0.attn_norm.weight"),
    ("one missing", "1 trainable tensor(s) are not in the optimizer: norm.weight"),
    ("one more", "the optimizer holds 1 tensor(s) that are frozen or not the model's"),
    ("one twice", "a tensor is in the optimizer twice"),
    ("none", "14 trainable tensor(s) are not in the optimizer"),
])
def test_what_is_wrong_with_an_optimizer_is_named(kind: str, words: str):
    model = tiny_model()
    own = list(model.parameters())
    given = {"copies": list(copy.deepcopy(model).parameters()), "one missing": own[:-1], "one more": [*own, torch.zeros(1)],
             "one twice": [*own, own[0]], "none": []}[kind]
    found = check_optimizer(model, held(model, given), names(model))
    assert found.outcome is Outcome.REFUTED
    assert words in found.reason


def test_a_name_that_the_model_does_not_have_is_refuted():
    model = tiny_model()
    found = check_optimizer(model, adamw(model.named_parameters(), 1e-3), [*names(model), "blocks.9.mlp.up.weight"])
    assert found.outcome is Outcome.REFUTED
    assert "blocks.9.mlp.up.weight" in found.reason


def test_gradients_missing_zero_and_not_finite_are_told_apart():
    model = tiny_model()
    good = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    assert check_gradients(good, names(model)).outcome is Outcome.PROVEN
    without = {name: gradient for name, gradient in good.items() if name != "norm.weight"}
    for bad in (without, good | {"norm.weight": torch.zeros(64)}):
        found = check_gradients(bad, names(model))
        assert (found.outcome, found.evidence["tensors"]) == (Outcome.REFUTED, ["norm.weight"])
    found = check_gradients(good | {"norm.weight": torch.full((64,), float("inf"))}, names(model))
    assert found.outcome is Outcome.REFUTED
    assert "not finite: norm.weight" in found.reason


def test_an_account_of_a_model_that_learned_is_proven_and_of_one_that_did_not_refuted():
    model = tiny_model()
    account = UpdateAccount(model)
    found = account.check_moved()
    assert found.outcome is Outcome.REFUTED
    assert "14 of 14 trainable tensors did not move" in found.reason
    nudge(model, 1e-4)
    assert account.check_moved().outcome is Outcome.PROVEN


def test_a_tensor_that_stops_moving_later_is_found_after_a_new_beginning():
    model = tiny_model()
    account = UpdateAccount(nudge(model, 1e-4, seed=1))
    nudge(model, 1e-4, seed=2)
    account.begin()
    stuck = model.blocks[1].mlp.down.weight.detach().clone()
    nudge(model, 1e-4, seed=3)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight.copy_(stuck)
    found = account.check_moved()
    assert (found.outcome, found.evidence["tensors"]) == (Outcome.REFUTED, ["blocks.1.mlp.down.weight"])


@pytest.mark.parametrize(("moved", "outcome"), [(0.45, Outcome.REFUTED), (0.55, Outcome.PROVEN)])
def test_a_matrix_of_which_rounding_swallows_most_is_found_but_an_embedding_may_rest(moved: float, outcome: Outcome):
    model = tiny_model()
    account = UpdateAccount(model)
    nudge(model, 1e-4)
    for name in ("blocks.0.attn.qkv.weight", "embed.weight"):
        weight = model.get_parameter(name)
        share = moved if "qkv" in name else 0.01
        with torch.no_grad():
            resting = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) > share
            weight.copy_(torch.where(resting, tiny_model().get_parameter(name), weight))
    found = account.check_moved()
    assert found.outcome is outcome, found.reason
    assert outcome is Outcome.PROVEN or "blocks.0.attn.qkv.weight moved (1 tensors below 50%)" in found.reason


def test_a_frozen_tensor_is_held_to_its_bits():
    model = tiny_model()
    model.embed.weight.requires_grad_(False)
    account = UpdateAccount(model)
    nudge(model, 1e-4)
    assert account.check_frozen().outcome is Outcome.PROVEN
    with torch.no_grad():
        model.embed.weight.view(-1).view(torch.int32)[17] ^= 1
    found = account.check_frozen()
    assert (found.outcome, found.evidence["tensors"]) == (Outcome.REFUTED, ["embed.weight"])


def test_steps_are_counted_by_the_optimizer_itself():
    model = tiny_model()
    optimizer = adamw(model.named_parameters(), 1e-3)
    assert check_steps(optimizer, 0).outcome is Outcome.PROVEN
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert check_steps(optimizer, 1).outcome is Outcome.PROVEN
    assert "took 2 steps, the optimizer applied 1" in check_steps(optimizer, 2).reason
    model.norm.weight.grad = None
    optimizer.step()
    assert "took 2 steps, the optimizer applied 1, 2" in check_steps(optimizer, 2).reason


def test_an_optimizer_that_does_not_count_proves_nothing():
    assert check_steps(torch.optim.SGD(tiny_model().parameters(), lr=0.1), 3).outcome is Outcome.UNPROVEN


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_weight_that_is_not_finite_is_found(bad: float):
    model = tiny_model()
    assert check_weights(model).outcome is Outcome.PROVEN
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[3, 5] = bad
    found = check_weights(model)
    assert (found.outcome, found.evidence["tensors"]) == (Outcome.REFUTED, ["blocks.0.mlp.up.weight"])


def test_replicas_are_compared_bit_for_bit_and_by_name():
    one, other = tiny_model(), tiny_model()
    same = [parameter_digests(model) for model in (one, other, one)]
    assert check_replicas(same).outcome is Outcome.PROVEN
    with torch.no_grad():
        other.norm.weight[0] += 1e-7
    found = check_replicas([parameter_digests(model) for model in (one, one, other)])
    assert (found.outcome, found.evidence) == (Outcome.REFUTED, {"rank": 2, "tensors": ["norm.weight"]})
    assert check_replicas([same[0], {"embed.weight": same[0]["embed.weight"]}]).outcome is Outcome.REFUTED
    assert check_replicas(same[:1]).outcome is Outcome.UNPROVEN
