"""One law of truncation and of draws: tested against brute force, against frequencies, and as what the trainer scores."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from assay.errors import UsageError
from assay.generate import policy_logprobs
from assay.generate.generation_request import Sampling
from assay.generate.policy_logprobs import completion_logprobs, sampled_distribution, sampled_logprobs
from assay.kernels.draw_tokens import GOLDEN, SamplingRule, draw_tokens, uniforms
from assay.model.transformer import initialised
from assay.seeds import derive
from assay.testing.tiny_models import tiny_config


def rule(sampling: Sampling, rows: int) -> SamplingRule:
    return SamplingRule(torch.full((rows,), sampling.temperature), torch.full((rows,), sampling.top_k), torch.full((rows,), sampling.top_p),
                torch.full((rows,), sampling.min_p))


def by_hand(logits: list[float], s: Sampling) -> list[float]:
    """The law, read out: token i stays if what lies strictly above it is neither too many nor too heavy, and it is likely enough."""
    scaled = torch.tensor(logits, dtype=torch.float64) / s.temperature
    mass = (scaled - scaled.max()).exp()
    left = [not s.top_k or int((scaled > x).sum()) < s.top_k for x in scaled]
    whole = sum(m for m, stays in zip(mass, left, strict=True) if stays)
    kept = [stays and float(mass[scaled > x].sum()) < s.top_p * float(whole) and float(m) >= s.min_p
            for x, m, stays in zip(scaled, mass, left, strict=True)]
    total = sum(m for m, stays in zip(mass, kept, strict=True) if stays)
    return [float(m / total) if stays else 0.0 for m, stays in zip(mass, kept, strict=True)]


SAMPLINGS = [Sampling(), Sampling(temperature=0.6), Sampling(top_k=3), Sampling(top_p=0.7), Sampling(min_p=0.2),
             Sampling(temperature=1.7, top_k=5, top_p=0.8, min_p=0.05), Sampling(top_k=2, top_p=0.5), Sampling(top_k=99)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_truncation_is_the_law(sampling):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 9, generator=g) * 2
    logits[20:] = logits[20:].round()  # ties
    found = sampled_distribution(logits, sampling).exp()
    torch.testing.assert_close(found, torch.tensor([by_hand(row, sampling) for row in logits.tolist()]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_have_the_reported_distribution(sampling):
    """Chi-square at 1e-4 over 20,000 counters of one key and over 20,000 keys."""
    logits, rows = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, 0.5]), 20000
    due = sampled_distribution(logits[None], sampling)[0]
    keys = torch.tensor([derive(3, "test", row) for row in range(rows)])
    for key, counter in ((keys[:1].expand(rows), torch.arange(rows)), (keys, torch.full((rows,), 7))):
        ids, logprobs = draw_tokens(logits.expand(rows, 6).contiguous(), rule(sampling, rows), key, counter)
        assert torch.equal(logprobs, due[ids])
        counts, kept = torch.bincount(ids, minlength=6), due.exp() > 0
        assert counts[~kept].sum() == 0
        if kept.sum() > 1:
            share = due.exp().double()[kept]
            assert chisquare(counts[kept], rows * share / share.sum()).pvalue > 1e-4


def test_uniforms_are_splitmix64s():
    """Steele, Lea and Flood's generator from state 1234567: the first outputs, as published with its reference code."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    found = uniforms(torch.full((5,), 1234567), torch.arange(5))
    assert found.tolist() == [(output >> 11) * 2.0**-53 for output in outputs]


def test_the_smallest_draw_takes_the_first_token_that_was_kept():
    """u is 0 where the generator's state is."""
    key, counter = torch.tensor([-GOLDEN]), torch.tensor([0])
    assert uniforms(key, counter).tolist() == [0.0]
    ids, _ = draw_tokens(torch.tensor([[-9.0, 1.0, 1.0]]), rule(Sampling(top_k=2), 1), key, counter)
    assert ids.tolist() == [1]


def test_greedy_is_one_outcome():
    logits = torch.tensor([[0.0, 2.0, 2.0]])
    found = sampled_distribution(logits, Sampling(temperature=0))
    assert found.exp().tolist() == [[0.0, 1.0, 0.0]]


def test_a_penalty_pushes_down_what_was_said():
    logits, seen = torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[True, True, False, False]])
    found = sampled_distribution(logits, Sampling(repetition_penalty=2.0), seen)
    torch.testing.assert_close(found, torch.tensor([[1.0, -4.0, 2.0, -2.0]]).log_softmax(-1))


def test_scored_by_hand(monkeypatch):
    """Prompt and completion through a plain forward pass, one position at a time, the penalty's memory kept by hand."""
    monkeypatch.setattr(policy_logprobs, "_ROWS", 3)
    model = initialised(tiny_config("llama"), 0)
    with torch.no_grad():
        model.embed.weight.mul_(5)  # logits that a penalty moves
    sampling = Sampling(temperature=0.8, repetition_penalty=1.5)
    sequences = [((5, 6, 7), (8, 5, 9, 8, 9)), ((1,), (2,)), (tuple(range(30)), (31, 30)), ((4, 4), ())]
    for (prompt, completion), found in zip(sequences, completion_logprobs(model, sequences, sampling), strict=True):
        for index, token in enumerate(completion):
            before = [*prompt, *completion[:index]]
            with torch.no_grad():
                logits = model(torch.tensor([before]))[0, -1]
            said = torch.tensor(sorted(set(before)))
            logits[said] = torch.where(logits[said] > 0, logits[said] / 1.5, logits[said] * 1.5)
            due = sampled_distribution(logits[None], Sampling(temperature=0.8))[0, token]
            assert float(found[index]) == pytest.approx(float(due), abs=1e-5)
        assert len(found) == len(completion)


def test_a_token_that_was_cut_off_has_no_probability():
    model = initialised(tiny_config("llama"), 0)
    greedy = int(model(torch.tensor([[1, 2, 3]]))[0, -1].argmin())
    assert completion_logprobs(model, [((1, 2, 3), (greedy,))], Sampling(top_k=5))[0].tolist() == [float("-inf")]


def test_scores_have_gradients_with_and_without_truncation():
    model = initialised(tiny_config("llama"), 0)
    targets = torch.tensor([3, 4, 5])
    for sampling in (Sampling(temperature=0.7), Sampling(temperature=0.7, top_k=310)):
        states = model.hidden(torch.tensor([[1, 2, 3]]))[0]
        model.zero_grad()
        sampled_logprobs(model, states, targets, sampling).sum().backward()
        assert float(model.blocks[0].attn.qkv.weight.grad.norm()) > 0


@pytest.mark.parametrize("wrong", [{"max_new": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1},
                                   {"min_p": 1.5}, {"repetition_penalty": 0.0}])
def test_no_distribution_no_sampling(wrong):
    with pytest.raises(UsageError, match="expected"):
        Sampling(**wrong)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_text_beyond_the_context_gets_no_number(family):
    """Rotary positions go on for ever, so that it would; a table of them ends."""
    model = initialised(replace(tiny_config(family), max_length=32), 0)
    assert completion_logprobs(model, [((1,) * 20, (2,) * 12)], Sampling())[0].shape == (12,)
    with pytest.raises(UsageError, match="has 33 tokens, prompt and answer together, and the model's context is 32"):
        completion_logprobs(model, [((1,), (2,)), ((1,) * 20, (2,) * 13)], Sampling())
