"""Test-time training on a GPU: what the CPU scores, nothing of the future in it, and each document alone beside others."""

import numpy as np
import pytest
import torch

from assay.guard.ttt_checks import TokenCosts, check_causality, token_costs
from assay.learn.ttt_loop import TttSettings, read_and_adapt
from assay.model.batched_lora import TTT_TARGETS, BatchedAdapters, ttt_sites
from assay.model.lora import fresh
from assay.model.transformer import Transformer
from assay.testing.tiny_models import tiny_model
from assay.verdict import Outcome

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

HOW = TttSettings(chunk=24, context=72, steps=2, lr=1e-2, weight_decay=0.1)


def documents() -> list[list[int]]:
    chance = np.random.default_rng(0)
    return [[256, *chance.integers(0, 40, length).tolist()] for length in (100, 60, 30)]


def learned(model: Transformer, texts: list[list[int]], slots: int) -> TokenCosts:
    patch = fresh(model.config, ttt_sites(model.config, TTT_TARGETS), 8, 2.0, 0, None)
    adapters = BatchedAdapters(patch, slots, model.embed.weight.device)
    with adapters.attached(model):
        return token_costs(read_and_adapt(model, texts, HOW, slots, adapters), len(texts))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-3), (torch.bfloat16, 0.3)])
def test_scores_are_the_cpus_and_those_of_each_document_alone(dtype: torch.dtype, bound: float):
    model = tiny_model().to("cuda", dtype)
    here, there = learned(tiny_model(), documents(), 3), learned(model, documents(), 3)
    for number, (cpu, gpu) in enumerate(zip(here, there, strict=True)):
        assert np.abs(cpu - gpu).max() < bound
        assert np.abs(learned(model, [documents()[number]], 1)[0] - gpu).max() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_past_scores_are_the_same_bits_whatever_comes(dtype: torch.dtype):
    """Also after steps: a backward pass that adds in any order would show here."""
    model = tiny_model().to("cuda", dtype)
    verdict = check_causality(lambda texts: learned(model, list(map(list, texts)), 3), documents(), [36, 49], model.config.vocab)
    assert verdict.outcome is Outcome.PROVEN, verdict
