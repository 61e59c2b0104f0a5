"""The decoder equals transformers, and equals itself however the tokens are laid out."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from assay.model.attention import documents_from_lengths
from assay.model.families import config_from_hf, config_to_hf, from_foreign, hf_layout, to_foreign
from assay.model.kv_cache import DecodeView, PrefillView, SlotCache
from assay.model.transformer import Transformer, initialised
from assay.testing.tiny_models import tiny_config

DENSE = ["gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma2", "phi3", "olmo2", "smollm3", "granite", "yarn"]
FOREIGN = [*DENSE, "qwen3_moe", "qwen2_moe", "gpt_oss"]
FAMILIES = [*FOREIGN, "assay", "mixed"]


def lively(family: str) -> Transformer:
    """Random weights larger than an initialisation's and random biases, so that a lost one shows."""
    model = initialised(tiny_config(family), seed=1)
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.1)
    return model


def foreign_twin(model: Transformer) -> torch.nn.Module:
    fields = config_to_hf(model.config, "float32")
    config = AutoConfig.for_model(**fields)
    config._attn_implementation = "eager"
    twin = AutoModelForCausalLM.from_config(config).eval()
    missing, unexpected = twin.load_state_dict(to_foreign(hf_layout(model.config), dict(model.named_parameters())), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    twin.tie_weights()
    return twin


def tokens(rows: int = 3, length: int = 80, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", DENSE)
def test_logits_equal_transformers(family):
    model = lively(family)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), foreign_twin(model)(tokens()).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", DENSE)
def test_gradients_equal_transformers(family):
    model = lively(family)
    twin = foreign_twin(model)
    model(tokens()).float().log_softmax(-1)[..., 7].sum().backward()
    twin(tokens()).logits.float().log_softmax(-1)[..., 7].sum().backward()
    ours = to_foreign(hf_layout(model.config), {name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        error = (gradient - theirs[name]).norm() / theirs[name].norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("family", FOREIGN)
def test_config_survives_the_round_trip_through_transformers(family):
    """What we write, transformers reads; what transformers writes back, we read as the same geometry."""
    config = tiny_config(family)
    written = AutoConfig.for_model(**config_to_hf(config, "float32")).to_dict()
    names = set(to_foreign(hf_layout(config), dict(initialised(config, 0).named_parameters())))
    assert config_from_hf(written, names, "config.json") == config
    assert config_from_hf(config_to_hf(config, "float32"), names, "config.json") == config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_nothing(family, left):
    model, lengths, width = lively(family), [5, 40, 23], 44
    documents = documents_from_lengths(lengths, width, left=left)
    padded = torch.full((3, width), 9)
    padded[documents >= 0] = torch.cat([tokens()[row, :n] for row, n in enumerate(lengths)])
    with torch.no_grad():
        batched = model.logits(model.hidden(padded, documents=documents))
        for row, n in enumerate(lengths):
            torch.testing.assert_close(batched[row][documents[row] >= 0], model(tokens()[row:row + 1, :n])[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_cannot_see_each_other(family):
    model, lengths = lively(family), [30, 7, 43]
    packed = tokens(1, 80)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    with torch.no_grad():
        together = model.logits(model.hidden(packed, documents=documents))[0].split(lengths)
        alone = [model(part)[0] for part in packed.split(lengths, 1)]
    for ours, solo in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, solo, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_decoding_equals_one_pass(family):
    """Prompts of other lengths into slots in another order, then token by token, past the sliding window."""
    model, lengths, more = lively(family), [3, 20, 12], 30
    c, slots = model.config, [2, 0, 3]  # slot 1 stays empty
    documents = documents_from_lengths(lengths, 20)
    prompt = torch.full((3, 20), 9)
    prompt[documents >= 0] = torch.cat([tokens()[row, :n] for row, n in enumerate(lengths)])
    cache = SlotCache(c.depth, 4, 50, c.kv_heads, c.head_dim, dtype=torch.float32)
    with torch.no_grad():
        model.hidden(prompt, documents=documents, cache=PrefillView(cache, cache.places(documents, torch.tensor(slots))))
        steps = []
        for i in range(more):
            nexts, positions = torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, dtype=torch.long)
            positions[slots] = torch.tensor(lengths) + i
            nexts[slots, 0] = torch.stack([tokens()[row, n + i] for row, n in enumerate(lengths)])
            steps.append(model.logits(model.hidden(nexts, cache=DecodeView(cache, positions, 50))))
        for row, n in enumerate(lengths):
            whole = model(tokens()[row:row + 1, :n + more])[0, n:]
            torch.testing.assert_close(torch.cat(steps, 1)[slots[row]], whole, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_foreign_names_round_trip(family):
    model = lively(family)
    layout = hf_layout(model.config)
    back = from_foreign(model.config, layout, to_foreign(layout, dict(model.named_parameters())), "memory")
    assert all(torch.equal(back[name], parameter) for name, parameter in model.named_parameters())


def test_recomputation_gives_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        model = lively("qwen3")
        model.recompute = recompute
        model(tokens()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
