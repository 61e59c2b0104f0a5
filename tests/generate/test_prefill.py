"""Prompts reach their slots, whether each has a row or all are packed into one; padding reaches nobody."""

import pytest
import torch

from assay.generate.prefill import LEAST, Prefill, PrefillBatch, packed_prefill, padded_prefill
from assay.generate.sampler_weights import SamplerWeights
from assay.model.kv_cache import SlotCache
from assay.testing.tiny_models import nudge, tiny_model

PROMPTS = [(5, 6, 7), tuple(range(20, 61)), (9,), (1, 2, 3, 4)]
SLOTS = [4, 0, 2, 5]  # 1 and 3 stay empty


def filled(family: str, make) -> tuple[SlotCache, PrefillBatch]:
    model = nudge(tiny_model(family), 0.2)
    c = model.config
    cache = SlotCache(c.depth, 6, 64, c.kv_heads, c.head_dim, dtype=torch.float32)
    given = make(PROMPTS, SLOTS, cache)
    with torch.no_grad():
        Prefill(SamplerWeights(model, None), cache, graphed=False).run(given)
    return cache, given


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_packed_prompts_are_stored_as_rows_are(family):
    (one, _), (two, given) = filled(family, padded_prefill), filled(family, packed_prefill)
    assert given.tokens_BT.shape == (1, LEAST)
    for slot, prompt in zip(SLOTS, PROMPTS, strict=True):
        stored = one.all[:, slot, : len(prompt)]
        assert stored.flatten(2).norm(dim=-1).min() > 0
        torch.testing.assert_close(two.all[:, slot, : len(prompt)], stored, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [padded_prefill, packed_prefill])
def test_nothing_is_stored_beside_the_prompts(make):
    cache, _ = filled("llama", make)
    used = torch.zeros(cache.slots, cache.length, dtype=torch.bool)
    for slot, prompt in zip(SLOTS, PROMPTS, strict=True):
        used[slot, : len(prompt)] = True
    assert not cache.all[:, : cache.slots][:, ~used].any()


def test_a_width_is_a_shape():
    """However many prompts there are: a captured graph takes one shape of each input."""
    cache = SlotCache(1, 6, 2000, 1, 4, dtype=torch.float32)
    shapes = {tuple(tuple(part.shape) for part in packed_prefill(prompts, SLOTS[: len(prompts)], cache))
              for prompts in (PROMPTS, PROMPTS[:1], [(1,) * LEAST])}
    assert shapes == {((1, LEAST), (1, LEAST), (1, LEAST), (8,))}
    assert packed_prefill([(1,) * (LEAST + 1)], [0], cache).tokens_BT.shape == (1, 2 * LEAST)


def test_starts_bound_each_prompt():
    cache = SlotCache(1, 6, 64, 1, 4, dtype=torch.float32)
    assert packed_prefill(PROMPTS, SLOTS, cache).starts.tolist() == [0, 3, 44, 45, 49, 49, 49, 49]


@pytest.mark.parametrize(("kv_heads", "head_dim", "dtype"), [(3, 64, torch.bfloat16), (1, 3, torch.bfloat16), (1, 6, torch.float32)])
def test_slots_are_copied_as_they_were_before_any_is_written(kv_heads, head_dim, dtype):
    """Rows of 384, 6 and 24 bytes: the first is copied in wider elements, and a NaN's bits too."""
    cache = SlotCache(2, 4, 5, kv_heads, head_dim, dtype=dtype)
    cache.all.copy_(torch.randn(cache.all.shape, generator=torch.Generator().manual_seed(0)))
    cache.all[0, 1, 0] = torch.nan
    before = cache.all.clone()
    cache.copy(torch.tensor([1, 0]), torch.tensor([0, 3]), 3)
    due = before.clone()
    due[:, 0, :3], due[:, 3, :3] = before[:, 1, :3], before[:, 0, :3]
    assert torch.equal(cache.all.view(torch.uint8), due.view(torch.uint8))
