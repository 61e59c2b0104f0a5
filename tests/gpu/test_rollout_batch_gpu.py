"""Packed completions on CUDA: through captured graphs, in bf16, they teach what rows of one completion each teach in fp32."""

import pytest
import torch

from assay.learn.cuda_graph import GraphedAccumulate, GraphedLogprobs
from assay.learn.loop import accumulated
from assay.learn.policy import Surrogate, policy_gradient, token_logprobs
from assay.model.placement import place_for_training
from assay.model.transformer import initialised
from assay.recipes.rollout_batch import Layout, batch_logprobs
from assay.testing.tiny_models import tiny_config
from tests.recipes.test_rollout_batch import rollout

pytestmark = pytest.mark.gpu


def norm_apart(found, due):
    return (sum((found[name] - due[name]).square().sum() for name in due) / sum(g.square().sum() for g in due.values())).sqrt().item()


def learned(batch, rows, accumulate, compute):
    model = place_for_training(initialised(tiny_config("llama"), 0), "cuda", compute=compute, compile=False)
    loss = accumulate(model, policy_gradient(Surrogate(kl="k3", kl_weight=0.1)), batch, rows, batch.divisor).loss.item()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_gradients_are_those_of_the_rows():
    rows, layout = rollout(), Layout(2, 40)
    due = learned(rows, len(rows), accumulated, torch.float32)
    exact = learned(layout.packed(rows).batch, layout.rows, GraphedAccumulate(), torch.float32)
    assert exact[0] == pytest.approx(due[0], rel=1e-5)
    assert norm_apart(exact[1], due[1]) < 1e-4
    half = learned(layout.packed(rows).batch, layout.rows, GraphedAccumulate(), torch.bfloat16)
    usual = learned(rows, len(rows), accumulated, torch.bfloat16)
    assert half[0] == pytest.approx(due[0], rel=3e-2)
    assert norm_apart(half[1], due[1]) < 1.5 * norm_apart(usual[1], due[1]) + 1e-2


def test_log_probabilities_in_bf16_come_back_row_by_row():
    rows = rollout()
    model = place_for_training(initialised(tiny_config("llama"), 0), "cuda", compile=False)
    due, found = (batch_logprobs(model, rows, 0.7, layout, entropy=False) for layout in (Layout(4), Layout(2, 40)))
    said = rows.weight != 0
    assert (found - due)[said].abs().max() < 0.05
    assert (found - due)[said].abs().mean() < 5e-3


@pytest.mark.parametrize("entropy", [False, True])
def test_a_graph_of_log_probabilities_follows_the_weights_wherever_they_are(entropy):
    rows, layout, score = rollout(), Layout(2, 40), GraphedLogprobs()
    model = place_for_training(initialised(tiny_config("llama"), 0), "cuda", compile=False)

    def both():
        return (batch_logprobs(model, rows, 0.7, layout, entropy=entropy, score=way) for way in (score, token_logprobs))

    before, due = both()
    assert torch.equal(before, due)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)  # where they are
    written, due = both()
    assert torch.equal(written, due)
    assert not torch.equal(written, before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9  # and somewhere else
    moved, due = both()
    assert torch.equal(moved, due)
    assert not torch.equal(moved, written)
