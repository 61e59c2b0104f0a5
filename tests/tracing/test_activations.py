"""A trace shows every site once, with statistics that a naive computation confirms, and leaves the model as it was."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from assay.cli import run as assay
from assay.editing.block_hooks import block
from assay.model.attention import PLAIN_RULE
from assay.model.families import parameter_shapes
from assay.seeds import generator
from assay.testing.tiny_forward import random_model, traced_tokens
from assay.testing.tiny_models import save_model, tiny_model
from assay.tracing.activations import SiteStatistics, centred_moments, moments, streamed_moments, trace_activations
from assay.tracing.forward_modes import batched_forward, cached_forward, plain_forward
from assay.tracing.hooks import ENTROPY, Site, attention_statistics, forward_sites, observe_sites, site_weights

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2", "assay", "mixed")


def drawn(*shape: int, name: str = "x") -> torch.Tensor:
    return torch.randn(shape, generator=generator(0, name, *shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_is_seen_once_in_order_and_the_logits_are_the_model_s_own(family: str):
    model, kept = random_model(family), {}
    plain_forward(model)(traced_tokens(), lambda site, value, start: kept.update({site: value.clone()}))
    in_order = sorted(kept, key=list(forward_sites(model.config)).index)
    assert in_order == list(forward_sites(model.config))
    assert torch.equal(kept[Site(None, "logits")], model(traced_tokens()))


def test_the_sites_are_what_their_names_say():
    model, kept = random_model("qwen3"), {}
    plain_forward(model)(traced_tokens(), lambda site, value, start: kept.update({site: value.clone()}))
    one, at = block(model, 1), lambda name: kept[Site(1, name)]
    assert torch.equal(at("attn norm"), one.attn_norm(kept[Site(0, "residual")]))
    assert torch.equal(torch.cat([at("q"), at("k"), at("v")], -1), one.attn.qkv(at("attn norm")))
    q_norm = one.attn.q_norm(at("q").unflatten(-1, (-1, one.attn.head_dim)))
    assert torch.allclose(at("query").norm(dim=-1), q_norm.norm(dim=-1), rtol=1e-5)  # a rotation keeps lengths
    assert not torch.allclose(at("query")[:, 1:], q_norm[:, 1:], rtol=1e-2)
    assert torch.equal(at("middle"), kept[Site(0, "residual")] + at("attn out"))
    assert torch.equal(at("product"), torch.nn.functional.silu(at("gate")) * at("up"))
    assert torch.equal(at("residual"), at("middle") + at("down"))


def test_statistics_are_those_of_a_naive_computation():
    for number, x in enumerate((drawn(3, 100, 1000) * 3 + 1, drawn(1000) ** 5, drawn(7, 100) + 50, drawn(64).bfloat16(),
                                drawn(2, 9, 40)[..., 10:30])):
        wide = x.double()
        spread = wide - wide.mean()
        kurtosis = (spread**4).mean() / (spread**2).mean() ** 2
        right = [wide.mean(), (spread**2).mean().sqrt(), (wide**2).mean().sqrt(), wide.abs().max(), kurtosis, 0.0]
        for found in (moments(x), centred_moments(x)):
            assert found.tolist() == pytest.approx([float(value) for value in right], rel=1e-4, abs=1e-6), number


def test_what_is_not_finite_is_counted():
    x = drawn(100)
    x[3], x[7] = math.nan, math.inf
    assert streamed_moments(x[None])[-1] == 2
    model = random_model("llama")
    with torch.no_grad():
        block(model, 1).mlp.down.weight[0, 0] = math.nan
    seen = trace_activations(model, traced_tokens())
    assert seen[Site(1, "product")].nans == 0
    assert seen[Site(1, "down")].nans == 80  # one feature of every token
    assert isinstance(seen[Site(1, "down")], SiteStatistics)


@pytest.mark.parametrize("window", [None, 24])
def test_entropy_is_that_of_a_softmax_written_out(window: int | None):
    """More queries than are held at a time, shared keys, and a mask or none."""
    q, k = drawn(2, 4, 150, 16, name="q"), drawn(2, 2, 150, 16, name="k")
    distance = torch.arange(150)[:, None] - torch.arange(150)
    mask = (distance >= 0) & (distance < (window or 150))
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) / 4).masked_fill(~mask, -torch.inf).double()
    chances = scores.softmax(-1)
    entropy = torch.special.entr(chances).sum(-1)
    for found in (attention_statistics(q, k, None if window is None else mask[None, None], window is None, PLAIN_RULE),
                  attention_statistics(q, k, torch.zeros(150, 150).masked_fill(~mask, -torch.inf)[None, None], False, PLAIN_RULE)):
        assert torch.allclose(found[..., ENTROPY].transpose(1, 2).double(), entropy, atol=1e-5)
        assert torch.allclose(found[..., 0].transpose(1, 2).double(), scores.logsumexp(-1), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_other_ways_show_the_same_values_for_the_same_tokens(family: str):
    model, seen = random_model(family), []
    for run in (plain_forward(model), batched_forward(model), cached_forward(model, filled=30)):
        parts: dict[Site, list[torch.Tensor]] = {}
        run(traced_tokens(), lambda site, value, start, parts=parts: parts.setdefault(site, []).append(value.clone()))
        seen.append({site: torch.cat(values, 1) for site, values in parts.items()})
    for other in seen[1:]:
        assert other.keys() == seen[0].keys()
        for site, value in seen[0].items():
            assert torch.allclose(other[site].view_as(value), value, atol=3e-4, rtol=1e-4), site


def test_the_model_is_left_as_it_was_even_where_the_pass_fails():
    model = random_model("llama")
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), observe_sites(model, lambda site, value: 1 // 0):
        model(traced_tokens())
    for module, attributes in before:
        assert module.__dict__ == attributes
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_what_look_returns_takes_the_value_s_place():
    model = random_model("llama")
    wanted = drawn(2, 40, 64)

    def look(site: Site, value: torch.Tensor, start: int) -> torch.Tensor | None:
        if site == Site(None, "logits"):
            assert torch.equal(value, model.logits(model.norm(wanted)))
        return wanted if site == Site(2, "residual") else None

    plain_forward(model)(traced_tokens(), look)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_stands_behind_exactly_the_sites_that_read_it(family: str):
    config = random_model(family).config
    rows = Counter((behind.parameter, row) for site in forward_sites(config) for behind in site_weights(site, config)
                   for row in range(behind.start, behind.stop))
    twice = {"embed.weight"} if config.tied else set()
    assert rows == {(name, row): 2 if name in twice else 1 for name, shape in parameter_shapes(config).items() for row in range(shape[0])}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_beyond_the_context_are_not_traced(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = save_model(tmp_path / "model", tiny_model(family, max_length=48)).folder
    (tmp_path / "ids.json").write_text(str([5] * 60))
    assert assay(["trace", str(folder), "--tokens", str(tmp_path / "ids.json")]) == 2
    assert "60 tokens, and the context of" in capsys.readouterr().err
    assert assay(["trace", str(folder), "--tokens", str(tmp_path / "ids.json"), "--max-length", "48"]) == 0
