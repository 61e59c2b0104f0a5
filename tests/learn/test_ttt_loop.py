"""Test-time training: many documents at once are each alone, each chunk is scored before it teaches, and nothing stays behind."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.errors import GuardStop, UsageError
from assay.guard.ttt_checks import TokenCosts, token_costs
from assay.learn.ttt_loop import AdapterUpdated, ChunkScored, DocumentBegun, SlotAdam, TttSettings, read_and_adapt
from assay.model.batched_lora import TTT_TARGETS, BatchedAdapters, BatchedLora, ttt_sites
from assay.model.lora import attach, detach, fresh
from assay.model.transformer import Transformer
from assay.testing.tiny_models import tiny_model

HOW = TttSettings(chunk=12, context=30, steps=2, lr=1e-2, weight_decay=0.1)
LENGTHS = (50, 13, 31, 12, 3)


def some_documents() -> list[list[int]]:
    chance = np.random.default_rng(0)
    return [[256, *chance.integers(0, 40, length).tolist()] for length in LENGTHS]


def new_patch(model: Transformer, targets: tuple[str, ...] = TTT_TARGETS):
    return fresh(model.config, ttt_sites(model.config, targets), 4, 2.0, 0, None)


def learned(model: Transformer, documents: list[list[int]], how: TttSettings = HOW, slots: int = 5) -> TokenCosts:
    adapters = BatchedAdapters(new_patch(model), slots, shared=how.carry_over)
    with adapters.attached(model):
        return token_costs(read_and_adapt(model, documents, how, slots, adapters), len(documents))


@pytest.mark.parametrize("family", ["llama", "llama3", "gpt2", "qwen3", "assay", "mixed"])
def test_side_by_side_is_one_at_a_time(family: str):
    model, documents = tiny_model(family), some_documents()
    alone = [learned(model, [document], slots=1)[0] for document in documents]
    for slots in (5, 2):
        for one, other in zip(alone, learned(model, documents, slots=slots), strict=True):
            assert np.abs(one - other).max() < 1e-5


def test_one_document_is_what_plain_lora_and_torchs_adamw_make_of_it():
    """Head left out: LoraLinear knows no head of a tied model."""
    model, (tokens, *_), how = tiny_model(), some_documents(), HOW
    patch, expected = new_patch(model, TTT_TARGETS[:-1]), []
    optimizer = torch.optim.AdamW(attach(model, patch), lr=how.lr, betas=how.betas, weight_decay=how.weight_decay, eps=how.eps)
    for start in range(1, len(tokens), how.chunk):
        stop = min(start + how.chunk, len(tokens))
        seen = torch.tensor([tokens[max(0, stop - how.context) : stop]])
        for step in range(how.steps + 1):
            logits = model(seen[:, :-1])[0, start - stop :]
            loss = torch.nn.functional.cross_entropy(logits, seen[0, start - stop :], reduction="none")
            if step == 0:
                expected.append(loss.detach().numpy())
            if step < how.steps:
                optimizer.zero_grad()
                loss.mean().backward()
                optimizer.step()
    detach(model, None)
    adapters = BatchedAdapters(patch, 1)
    with adapters.attached(model):
        found = token_costs(read_and_adapt(model, [tokens], how, 1, adapters), 1)[0]
    assert np.abs(found - np.concatenate(expected)).max() < 1e-4


def test_one_adapter_for_all_is_plain_lora_that_learns_from_every_round_once_it_is_scored():
    """Two documents side by side: a round is the next chunk of each, and a step is taken on the mean over its tokens."""
    model, documents, how = tiny_model(), some_documents(), replace(HOW, carry_over=True)
    patch, waiting = new_patch(model), [(number, 1) for number in range(len(documents))]
    expected: dict[int, list[np.ndarray]] = {number: [] for number in range(len(documents))}
    optimizer = torch.optim.AdamW(attach(model, new_patch(model, TTT_TARGETS[:-1])), lr=how.lr, betas=how.betas,
                                  weight_decay=how.weight_decay, eps=how.eps)
    while waiting:
        current, waiting = waiting[:2], waiting[2:]
        stops = [min(start + how.chunk, len(documents[number])) for number, start in current]
        for step in range(how.steps + 1):
            costs = []
            for (number, start), stop in zip(current, stops, strict=True):
                seen = torch.tensor([documents[number][max(0, stop - how.context) : stop]])
                costs.append(torch.nn.functional.cross_entropy(model(seen[:, :-1])[0, start - stop :], seen[0, start - stop :],
                                                               reduction="none"))
                if step == 0:
                    expected[number].append(costs[-1].detach().numpy())
            optimizer.zero_grad()
            torch.cat(costs).mean().backward()
            if step < how.steps:
                optimizer.step()
        unread = [(number, stop) if stop < len(documents[number]) else None for (number, _), stop in zip(current, stops, strict=True)]
        waiting = [place for place in unread if place is not None] + waiting
    detach(model, None)
    adapters = BatchedAdapters(replace(patch, low_rank={name: parts for name, parts in patch.low_rank.items() if name != "embed.weight"}),
                               2, shared=True)
    with adapters.attached(model):
        found = token_costs(read_and_adapt(model, documents, how, 2, adapters), len(documents))
    for number, costs in expected.items():
        assert np.abs(found[number] - np.concatenate(costs)).max() < 1e-4
    apart = [learned(model, [document], slots=1)[0] for document in documents]
    assert any(np.abs(one - other).max() > 1e-2 for one, other in zip(found[1:], apart[1:], strict=True)), "something was carried over"


def test_what_is_carried_over_is_what_the_documents_before_left_and_the_very_last_chunk_teaches_nobody():
    model, how = tiny_model(), replace(HOW, carry_over=True, steps=1)
    adapters, seen = BatchedAdapters(new_patch(model), 1, shared=True), []
    with adapters.attached(model):
        for event in read_and_adapt(model, [some_documents()[1], some_documents()[4]], how, 1, adapters):
            seen.append((type(event[0]), event[0].document, getattr(event[0], "chunk", None), getattr(event[0], "steps", None)))
            if isinstance(event[0], DocumentBegun):
                assert (event[0].left > 0) == (event[0].document > 0)
    assert seen == [(DocumentBegun, 0, None, None), (ChunkScored, 0, 0, 0), (AdapterUpdated, 0, 0, 1), (ChunkScored, 0, 1, 1),
                    (AdapterUpdated, 0, 1, 2), (DocumentBegun, 1, None, None), (ChunkScored, 1, 0, 2)]


def test_until_the_first_step_it_is_the_model_alone_bit_for_bit_and_then_it_is_not():
    model, documents = tiny_model(), some_documents()
    alone = token_costs(read_and_adapt(model, documents, HOW, 5), 5)
    for without, with_ in zip(alone, learned(model, documents), strict=True):
        assert np.array_equal(without[: HOW.chunk], with_[: HOW.chunk])
        assert len(without) <= HOW.chunk or not np.array_equal(without, with_)
    assert [len(found) for found in alone] == list(LENGTHS)


def test_a_score_is_given_before_the_step_and_no_step_follows_the_last_chunk():
    model, adapters = tiny_model(), BatchedAdapters(new_patch(tiny_model()), 1)
    seen, states = [], []
    with adapters.attached(model):
        for event in read_and_adapt(model, [some_documents()[2]], HOW, 1, adapters):
            seen.append((type(event[0]), getattr(event[0], "chunk", None), getattr(event[0], "steps", None)))
            states.append(adapters.state_BN.detach().clone())
    assert seen == [(DocumentBegun, None, None), (ChunkScored, 0, 0), (AdapterUpdated, 0, 2), (ChunkScored, 1, 2), (AdapterUpdated, 1, 4),
                    (ChunkScored, 2, 4)]
    same = [torch.equal(one, other) for one, other in itertools.pairwise(states)]
    assert same == [True, False, True, False, True]  # only between a score and the update that follows it


def test_reset_forgets_everything_and_a_warm_start_keeps_the_right_factors_alone():
    model, documents = tiny_model(), some_documents()[:1] * 2
    twice = learned(model, documents, slots=1)
    assert np.array_equal(twice[0], twice[1])
    warm, begun = replace(HOW, warm=True), list[tuple[DocumentBegun, torch.Tensor]]()
    adapters = BatchedAdapters(new_patch(model), 1)
    with adapters.attached(model):
        left_behind = adapters.state_BN.detach().clone()
        for event in read_and_adapt(model, documents, warm, 1, adapters):
            if isinstance(event[0], DocumentBegun):
                kept = torch.where(adapters.right_N, left_behind[0], 0.0)
                assert torch.equal(adapters.state_BN[0], kept)
                begun.append((event[0], kept))
            left_behind = adapters.state_BN.detach().clone()
    (first, _), (second, _) = begun
    assert (first.left, second.left) == (0, 0)
    assert first.right == pytest.approx(1)
    assert second.right != pytest.approx(1, abs=1e-3)


def test_a_slot_that_does_not_learn_keeps_its_factors_moments_and_count_bit_for_bit():
    adapters = BatchedAdapters(new_patch(tiny_model()), 2)
    adam = SlotAdam(adapters, HOW)
    gradient = torch.ones_like(adapters.state_BN, requires_grad=False)
    adam.step(gradient, [True, True])
    before = [tensor[1].clone() for tensor in (adapters.state_BN, adam.first_BN, adam.second_BN)]
    gradient[1] = torch.inf  # nobody's business while the slot is idle
    adam.step(gradient, [True, False])
    after = [tensor[1] for tensor in (adapters.state_BN, adam.first_BN, adam.second_BN)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert adam.steps_B.tolist() == [2, 1]
    with pytest.raises(GuardStop, match="slot 1 is inf after 1 steps; nothing was updated"):
        adam.step(gradient, [True, True])


def test_a_score_that_is_no_number_stops_the_reading_and_the_model_is_put_back():
    model = tiny_model()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(GuardStop, match="document 0, chunk 1: token 13 costs"):
        learned(model, some_documents()[:1], replace(HOW, lr=1e30, steps=1), slots=1)
    assert not any(isinstance(module, BatchedLora) for module in model.modules())
    assert model.head is None
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_cannot_be_read_as_asked_is_refused():
    model, documents = tiny_model(), some_documents()
    for wrong in ({"context": 12}, {"context": 257}, {"steps": 0}, {"lr": -1.0}, {"betas": (1.0, 0.0)}):
        with pytest.raises(UsageError, match="expected"):
            list(read_and_adapt(model, documents, replace(HOW, **wrong), 1))
    with pytest.raises(UsageError, match="document 1 has 1 tokens"):
        list(read_and_adapt(model, [documents[0], [256]], HOW, 1))


def test_factors_rounded_all_at_once_are_those_rounded_one_by_one():
    """A model that computes in another dtype than its factors are kept in: the same scores and the same gradient, bit for bit."""
    model, tokens = tiny_model().double(), torch.tensor(some_documents()[0][:30])[None].repeat(2, 1)

    def passed(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        adapters = BatchedAdapters(new_patch(model), 2)
        with torch.no_grad():
            adapters.state_BN.add_(torch.linspace(-0.1, 0.1, adapters.state_BN.numel()).view_as(adapters.state_BN))
        with adapters.attached(model):
            adapters.bind(dtype)
            loss = model(tokens).square().mean()
        return loss.detach(), torch.autograd.grad(loss, adapters.state_BN)[0]

    (loss, gradient), (other_loss, other_gradient) = passed(torch.float64), passed(torch.float32)
    assert gradient.dtype is torch.float32
    assert gradient.abs().sum() > 0
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient, other_gradient)
