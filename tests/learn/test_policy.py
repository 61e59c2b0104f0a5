"""Policy gradients against their formulas written out sequence by sequence, in value, gradient and measures."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.errors import DataError, UsageError
from assay.learn.loop import accumulated
from assay.learn.objectives import averages, combined
from assay.learn.policy import Surrogate, policy_gradient, sequence_mean, token_logprobs
from assay.model.transformer import Transformer, initialised
from assay.testing.tiny_models import tiny_config
from tests.learn.made_up_rollouts import CAP, Rollout, as_batch, made

T = 0.7
PACKED, ALONE = [[0, 1], [2], [3, 4, 5]], [[n] for n in range(6)]
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "grpo": ({"kl": "k3", "kl_weight": 0.1}, "sequence"),
    "dapo": ({"epsilon_high": 0.28, "kl": "k2", "kl_weight": 0.1, "kl_by_ratio": False}, "token"),
    "dr_grpo": ({"kl": "k1", "kl_weight": 0.1, "entropy_weight": 0.05}, "constant"),
    "gspo": ({"ratio": "sequence", "epsilon": 0.03}, "sequence"),
    "cispo": ({"ratio": "cispo", "kl": "k3", "kl_weight": 0.1, "entropy_weight": torch.tensor(0.02)}, "token"),
}


@pytest.fixture(scope="module", params=["llama", "assay"])
def model(request: pytest.FixtureRequest) -> Transformer:
    """The second has a soft cap; both are loud enough for it, and for a temperature, to matter."""
    model = initialised(tiny_config(request.param), 3)
    with torch.no_grad():
        model.norm.weight.mul_(4)
    return model


def written_out(model: Transformer, rollouts: list[Rollout], asked: Surrogate, how: str) -> Tensor:
    """One sequence at a time, unpadded, with whole logits."""
    sums, tokens = [], 0
    for r in rollouts:
        ids = torch.cat([r.prompt, r.completion])
        logprobs = (model(ids[None])[0, len(r.prompt) - 1:-1] / asked.temperature).log_softmax(-1)
        logp = logprobs[range(len(r.completion)), r.completion]
        ratio = (logp - r.behaviour).exp()
        if asked.ratio == "sequence":
            ratio = (logp - r.behaviour).mean().exp().expand(len(logp))
        low, high = 1 - asked.epsilon, 1 + (asked.epsilon if asked.epsilon_high is None else asked.epsilon_high)
        loss = -torch.stack([min(q * r.advantage, q.clamp(low, high) * r.advantage) for q in ratio])
        if asked.ratio == "cispo":
            loss = -ratio.clamp(max=high).detach() * r.advantage * logp
        d = r.reference - logp
        kl = {"none": 0 * d, "k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[asked.kl]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = loss + asked.kl_weight * kl * (ratio if asked.kl_by_ratio else 1) - asked.entropy_weight * entropy
        sums.append(loss.mean() if how == "sequence" else loss.sum())
        tokens += len(r.completion)
    return sum(sums) / {"sequence": len(rollouts), "token": tokens, "constant": len(rollouts) * CAP}[how]  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [PACKED, ALONE], ids=["packed", "alone"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_formula_s(name: str, rows: list[list[int]], model: Transformer):
    options, how = CASES[name]
    asked = Surrogate(**options, temperature=T)
    rollouts = made(model, T)
    batch = as_batch(rollouts, rows, how)
    found = policy_gradient(asked)(model, batch).total / (batch.divisor or batch.weight.sum())
    due = written_out(model, rollouts, asked, how)
    assert float(found.detach()) == pytest.approx(float(due.detach()), rel=1e-5)
    for one, two in zip(*(torch.autograd.grad(value, list(model.parameters())) for value in (found, due)), strict=True):
        assert (one - two).norm() <= 1e-5 * two.norm()


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_change_nothing(name: str, model: Transformer):
    options, how = CASES[name]
    batch = as_batch(made(model, T), PACKED, how)
    objective = policy_gradient(Surrogate(**options, temperature=T))
    weight = batch.divisor or float(batch.weight.sum())
    gradients = []
    for micro in (1, 3):
        model.zero_grad()
        accumulated(model, objective, batch, micro, weight)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    for one, two in zip(*gradients, strict=True):
        assert (one - two).norm() <= 2e-6 * two.norm()


def test_a_group_without_a_signal_moves_nothing(model: Transformer):
    batch = as_batch(made(model, T), PACKED)
    loss = policy_gradient(Surrogate(temperature=T))(model, replace(batch, advantage=torch.zeros_like(batch.weight)))
    assert all(not g.any() for g in torch.autograd.grad(loss.total, list(model.parameters())))


def test_what_does_not_count_is_not_there(model: Transformer):
    """Rollout 1 with weight 0 and a batch without it are the same step, by any normalisation."""
    rollouts = made(model, T)
    kept = [r for n, r in enumerate(rollouts) if n != 1]
    for how in ("token", "sequence", "constant"):
        with_it = as_batch(rollouts, ALONE, how, [n != 1 for n in range(6)])
        without = as_batch(kept, [[n] for n in range(5)], how)
        one, two = (policy_gradient(Surrogate())(model, b).total / (b.divisor or b.weight.sum()) for b in (with_it, without))
        assert float(one.detach()) == pytest.approx(float(two.detach()), rel=1e-5)


def test_the_log_probabilities_with_and_without_entropy_are_the_same(model: Transformer):
    batch = as_batch(made(model, T), PACKED)
    one, entropy = token_logprobs(model, batch, T, entropy=True)
    two, none = token_logprobs(model, batch, T)
    assert none is None
    assert entropy is not None
    assert torch.allclose(one, two, rtol=0, atol=2e-6)
    assert not one[:, 0].any()


def test_means_stay_within_a_sequence():
    values = torch.tensor([[1.0, 2, 3, 10, 20, 99]])
    counts = torch.tensor([[False, True, True, False, True, False]])
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    assert sequence_mean(values, counts, documents).tolist() == [[2.5, 2.5, 2.5, 20, 20, 0]]
    assert sequence_mean(values, counts, None)[0, 0] == pytest.approx(25 / 3)


def test_measures(model: Transformer):
    """A policy that sampled its own tokens has ratio 1, nothing clipped, and KL 0 to itself; micro-batches add up."""
    batch = as_batch(made(model, T, noise=0.0), PACKED)
    objective = policy_gradient(Surrogate(temperature=T))
    parts, whole = (averages(accumulated(model, objective, batch, micro, 1.0).metrics) for micro in (2, len(batch)))
    assert parts == pytest.approx(whole, rel=1e-5, abs=1e-6)
    found = parts
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert 0 <= found["sampling/sampling_logp_difference/max"] < 1e-5
    assert found["clip_ratio/low_mean"] == found["clip_ratio/high_mean"] == found["clip_ratio/region_mean"] == 0
    assert abs(found["kl"]) < 1e-9
    assert 0 < found["entropy"] < torch.tensor(model.config.vocab).log()


def test_clip_fractions_count_the_side_that_the_advantage_pushes(model: Transformer):
    rollouts = [replace(r, behaviour=r.behaviour - 1.0, advantage=abs(r.advantage)) for r in made(model, T, noise=0.0)]
    found = averages(policy_gradient(Surrogate(temperature=T))(model, as_batch(rollouts, PACKED)).metrics or {})
    assert (found["clip_ratio/high_mean"], found["clip_ratio/low_mean"]) == (1, 0)
    turned = [replace(r, advantage=-r.advantage) for r in rollouts]
    found = averages(policy_gradient(Surrogate(temperature=T))(model, as_batch(turned, PACKED)).metrics or {})
    assert (found["clip_ratio/high_mean"], found["clip_ratio/low_mean"]) == (0, 0)


def test_sums_add_and_maxima_do_not():
    one, two = ({"a": torch.tensor(a), "b/max": torch.tensor(b), "tokens": torch.tensor(2.0)} for a, b in ((1.0, 5.0), (2.0, 3.0)))
    assert averages(combined(one, two)) == {"a": 0.75, "b/max": 5.0}


def test_what_cannot_be_asked():
    with pytest.raises(UsageError, match="kl is 'none'"):
        Surrogate(kl_weight=0.1)
    with pytest.raises(UsageError, match="0 < epsilon < 1"):
        Surrogate(epsilon=0.0)
    with pytest.raises(UsageError, match="one of token, sequence, cispo"):
        Surrogate(ratio="word")  # type: ignore[arg-type]
    model = initialised(tiny_config(), 0)
    batch = replace(as_batch(made(model), PACKED), behaviour=None)
    with pytest.raises(DataError, match="no stream 'behaviour'"):
        policy_gradient(Surrogate())(model, batch)
