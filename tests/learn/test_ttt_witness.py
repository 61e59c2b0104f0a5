"""TTT witness: a sound reading comes out again, and one with other settings, factors or sites does not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.guard.ttt_checks import token_costs
from assay.learn.ttt_loop import TttSettings, read_and_adapt
from assay.learn.ttt_witness import check_reading, check_sites
from assay.model.batched_lora import BatchedAdapters, ttt_sites
from assay.model.lora import fresh
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config, tiny_model
from assay.verdict import Outcome
from tests.live_bytes import LiveBytes

HOW = TttSettings(8, 20, 2, 1e-2, weight_decay=0.1)
TARGETS = ("q", "v", "o", "mlp", "head")


def random_tokens(length):
    return tuple(torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(length)).tolist())


@pytest.fixture(scope="module")
def read():
    model = tiny_model("llama").eval()
    patch = fresh(model.config, ttt_sites(model.config, TARGETS), 2, 1.0, 0, "")
    tokens = [random_tokens(length) for length in (30, 41)]
    adapters = BatchedAdapters(patch, 2)
    with adapters.attached(model):
        learned = token_costs(read_and_adapt(model, tokens, HOW, 2, adapters), 2)
    return model, patch, tokens[1:], (token_costs(read_and_adapt(model, tokens, HOW, 2), 2)[1:], learned[1:])


def test_a_sound_reading_comes_out_again(read):
    model, patch, tokens, costs = read
    found = [check_reading(model, tokens, costs, patch, HOW), check_sites(patch, model.config, TARGETS)]
    assert [verdict.outcome for verdict in found] == [Outcome.PROVEN] * 2, found


@pytest.mark.parametrize("other", [{"lr": 2e-2}, {"steps": 1}, {"betas": (0.5, 0.95)}, {"weight_decay": 5.0}, {"chunk": 10},
                                   {"context": 12}])
def test_another_way_to_read_is_seen(read, other):
    model, patch, tokens, costs = read
    assert check_reading(model, tokens, costs, patch, replace(HOW, **other)).outcome is Outcome.REFUTED


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_documents_of_one_adapter_come_out_again_and_only_as_many_side_by_side_as_there_were(slots):
    """The first document ends after one chunk, so that the last one begins beside the second's second chunk."""
    how = replace(HOW, carry_over=True)
    model = tiny_model("llama").eval()
    patch = fresh(model.config, ttt_sites(model.config, TARGETS), 2, 1.0, 0, "")
    documents = [random_tokens(length) for length in (7, 30, 41)]
    adapters, without = BatchedAdapters(patch, slots, shared=True), token_costs(read_and_adapt(model, documents, how, slots), 3)
    with adapters.attached(model):
        costs = without, token_costs(read_and_adapt(model, documents, how, slots, adapters), 3)
    assert check_reading(model, documents, costs, patch, how, slots=slots).outcome is Outcome.PROVEN
    assert check_reading(model, documents, costs, patch, how, slots=slots + 1 if slots < 3 else 1).outcome is Outcome.REFUTED
    assert check_reading(model, documents, costs, patch, replace(how, steps=1), slots=slots).outcome is Outcome.REFUTED


def test_in_half_precision_one_token_may_be_rounded_off_and_all_of_them_may_not():
    model = tiny_model("llama").bfloat16().eval()
    patch, tokens = fresh(model.config, ttt_sites(model.config, TARGETS), 2, 1.0, 0, ""), [random_tokens(41)]
    adapters, without = BatchedAdapters(patch, 1), token_costs(read_and_adapt(model, tokens, HOW, 1), 1)
    with adapters.attached(model):
        learned = token_costs(read_and_adapt(model, tokens, HOW, 1, adapters), 1)
    off = np.zeros_like(learned[0])
    for places, share, outcome in (([3], 0.1, Outcome.PROVEN), ([3], 0.3, Outcome.REFUTED), (slice(None), 0.06, Outcome.REFUTED)):
        off[:], off[places] = 0, share * learned[0].mean()
        assert check_reading(model, tokens, (without, [learned[0] + off]), patch, HOW).outcome is outcome, (places, share)


def test_other_costs_and_lost_sites_are_refuted(read):
    model, patch, tokens, (without, learned) = read
    assert check_reading(model, tokens, (without, [np.roll(learned[0], 1)]), patch, HOW).outcome is Outcome.REFUTED
    assert check_reading(model, tokens, (learned, learned), patch, HOW).outcome is Outcome.REFUTED
    fewer = replace(patch, low_rank={name: parts for name, parts in patch.low_rank.items() if "blocks.1" not in name})
    assert check_sites(fewer, model.config, TARGETS).outcome is Outcome.REFUTED


@pytest.mark.parametrize(("weights", "compute"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                              (torch.bfloat16, torch.bfloat16)])
def test_reading_again_holds_one_copy_of_the_weights(weights, compute):
    """In the dtype computed in, and beside it what a layer takes."""
    config = replace(tiny_config("llama"), width=128, hidden=512, depth=12, windows=(None,) * 12)
    model = initialised(config, 0).to(weights).eval()
    model.compute_dtype = compute
    patch = fresh(config, ttt_sites(config, TARGETS), 1, 1.0, 0, "")
    costs = np.zeros(12, np.float32)
    with LiveBytes() as made:
        check_reading(model, [tuple(range(3, 16))], ([costs], [costs]), patch, TttSettings(4, 8, 2, 1e-2))
    one_copy = sum(parameter.numel() for parameter in model.parameters()) * compute.itemsize
    assert one_copy < made.peak < 1.5 * one_copy
    assert not model.gradients()
