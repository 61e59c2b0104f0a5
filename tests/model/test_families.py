"""Geometry is never defaulted, and foreign tensors are taken all or not at all."""

import pytest
import torch

from assay.errors import ArtifactError, UsageError
from assay.model.families import (
    config_from_hf,
    config_to_hf,
    deinterleave_heads,
    from_foreign,
    gguf_layout,
    hf_layout,
    interleave_heads,
    to_foreign,
)
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config


def fields(family: str = "llama", **changes):
    return {**config_to_hf(tiny_config(family), "float32"), **changes}


def without(name: str, family: str = "llama"):
    return {key: value for key, value in fields(family).items() if key not in name.split()}


@pytest.mark.parametrize(("config", "names"), [
    (without("hidden_size"), "hidden_size"), (without("rms_norm_eps"), "rms_norm_eps"), (without("vocab_size"), "vocab_size"),
    (without("rope_theta rope_parameters rope_scaling"), "rope_theta is missing"), (without("max_position_embeddings"), "max_position"),
    (without("layer_norm_epsilon", "gpt2"), "layer_norm_epsilon"), (fields(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    (fields(kv_lora_rank=512), "unknown field 'kv_lora_rank'"), (fields(model_type="gemma9"), "'gemma9' is not supported"),
    (fields(hidden_act="gelu"), "hidden_act"), (fields(num_attention_heads=0), "num_attention_heads"),
    (fields(hidden_size="64"), "hidden_size"),
    (fields(rope_scaling={"rope_type": "yarn", "factor": 2.0}, rope_parameters=None), "original_max_position_embeddings"),
    (fields(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_parameters=None), "dynamic"),
    (fields(auto_map={"a": "b"}), "auto_map"),
    (fields(rope_scaling={"rope_type": "llama3", "factor": 2.0}, rope_parameters=None), "low_freq_factor"),
    (fields("qwen2", layer_types=["sliding_attention", "full_attention"]), "sliding_window"),
    (fields(quantization_config={"bits": 4}), "quantization")])
def test_a_config_that_leaves_geometry_open_is_refused_by_name(config, names):
    with pytest.raises(UsageError, match=names):
        config_from_hf(config, ["lm_head.weight"], "config.json")


def test_rope_fields_that_disagree_are_refused():
    with pytest.raises(ArtifactError, match="disagree"):
        config_from_hf(fields(rope_theta=500000.0), [], "config.json")


def test_harmless_fields_are_let_through():
    extra = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}, "_name_or_path": "x", "pretraining_tp": 1}
    assert config_from_hf(fields(**extra), [], "config.json") == tiny_config("llama")


@pytest.mark.parametrize(("family", "published"), [
    ("smollm3", {"pretraining_tp": 2, "max_window_layers": 28}),
    ("gemma2", {"sliding_window_size": 20, "cache_implementation": "hybrid"}),
    ("gemma3_text", {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}),
    ("phi3", {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
                           "AutoTokenizer": "Xenova/gpt-4o"}, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
    ("gpt_oss", {"experts_per_token": 2, "initial_context_length": 4096}), ("qwen2_moe", {"sliding_window": 0, "max_window_layers": 21})])
def test_configs_open_as_their_families_publish_them(family, published):
    assert config_from_hf(fields(family, **published), [] if tiny_config(family).tied else ["lm_head.weight"], "c") == tiny_config(family)


@pytest.mark.parametrize(("config", "names"), [
    (fields("phi3", auto_map={"AutoModelForCausalLM": "modeling_other.Other"}), "auto_map"),
    (fields("gemma2", sliding_window_size=21), "sliding_window_size"), (without("final_logit_softcapping", "gemma2"), "softcapping"),
    (fields("gemma3_text", attn_logit_softcapping=50.0), "gemma3_text has none"),
    (without("norm_topk_prob", "qwen3_moe"), "norm_topk_prob"),
    (fields("qwen3_moe", use_sliding_window=True), "use_sliding_window"),
    (without("residual_multiplier", "granite"), "residual_multiplier"),
    (fields(model_type="mamba"), "those that are: gpt2, llama, .*gpt_oss")])
def test_what_a_family_leaves_open_is_refused_by_name(config, names):
    with pytest.raises(UsageError, match=names):
        config_from_hf(config, ["lm_head.weight"], "config.json")


def test_a_silent_config_is_settled_by_the_tensors():
    assert config_from_hf(without("tie_word_embeddings"), ["lm_head.weight"], "c").tied is False
    assert config_from_hf(without("tie_word_embeddings"), [], "c").tied is True


def foreign(family: str = "llama"):
    config = tiny_config(family)
    return config, to_foreign(hf_layout(config), {n: p.detach().clone() for n, p in initialised(config, 0).named_parameters()})


def test_missing_unknown_and_misshapen_tensors_are_named():
    config, tensors = foreign()
    layout, name = hf_layout(config), "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ArtifactError, match=r"1 tensor\(s\) missing: " + name):
        from_foreign(config, layout, {n: t for n, t in tensors.items() if n != name}, "here")
    with pytest.raises(ArtifactError, match=r"not part of this architecture: _orig_mod\.x"):
        from_foreign(config, layout, tensors | {"_orig_mod.x": torch.ones(1)}, "here")
    with pytest.raises(ArtifactError, match=r"has shape \[64, 32\]; the config asks for \[32, 64\]"):
        from_foreign(config, layout, tensors | {name: tensors[name].t()}, "here")
    with pytest.raises(ArtifactError, match="not floating point"):
        from_foreign(config, layout, tensors | {name: tensors[name].to(torch.int8)}, "here")


def test_a_tied_head_stored_twice_must_be_the_embedding():
    config, tensors = foreign()
    embedding = tensors["model.embed_tokens.weight"]
    from_foreign(config, hf_layout(config), tensors | {"lm_head.weight": embedding.clone()}, "here")
    with pytest.raises(ArtifactError, match="tied"):
        from_foreign(config, hf_layout(config), tensors | {"lm_head.weight": embedding + 1e-3}, "here")


def test_gpt2_of_the_hub_has_no_prefix_and_old_buffers():
    config, tensors = foreign("gpt2")
    hub = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    assert from_foreign(config, hf_layout(config), hub, "here").keys() == dict(initialised(config, 0).named_parameters()).keys()


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2"])
def test_gguf_names_round_trip(family):
    config = tiny_config(family)
    model = initialised(config, 0)
    tensors = to_foreign(gguf_layout(config), dict(model.named_parameters()))
    back = from_foreign(config, gguf_layout(config), tensors, "here")
    assert all(torch.equal(back[name], parameter) for name, parameter in model.named_parameters())


def test_interleaving_puts_rotary_pairs_side_by_side():
    rows = torch.arange(8)[:, None]  # two heads of four: halves (0 1)(2 3) and (4 5)(6 7)
    assert interleave_heads(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(deinterleave_heads(interleave_heads(rows, 2), 2), rows)
