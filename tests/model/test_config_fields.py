"""Every field of every family's config.json, changed and left out: the model computes what transformers computes, or it is refused.

HARMLESS fields are declared to change nothing, and are not tried here.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from assay.errors import ArtifactError, UsageError
from assay.model.families import HARMLESS, config_from_hf, config_to_hf, from_foreign, hf_layout
from assay.model.transformer import Transformer
from assay.testing.tiny_models import tiny_config

Fields = dict[str, Any]
FAMILIES = ("gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma2", "phi3", "olmo2", "smollm3", "granite",
            "qwen3_moe", "qwen2_moe", "gpt_oss")
TOKENS = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(3))
WINDOW = 8  # of TOKENS' columns: one that is lost, or is there unasked, shows
SIZES = {"vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "max_position_embeddings", "n_positions",
         "intermediate_size", "n_inner", "n_head", "num_attention_heads"}  # tensors have them: another value fits no file
OTHERS = {"attention_bias": (True, False), "sliding_window": (WINDOW,), "partial_rotary_factor": (0.5,), "head_dim": (16,),
           "layer_types": (["sliding_attention"] * 2, ["full_attention"] * 2, ["full_attention", "sliding_attention"]),
           "no_rope_layers": ([0, 0], [0, 1]), "mlp_only_layers": ([1],), "hidden_act": ("gelu",), "hidden_activation": ("gelu",),
           "activation_function": ("relu",), "original_max_position_embeddings": (16,), "attn_logit_softcapping": (2.0,),
           "final_logit_softcapping": (3.0,), "clip_qkv": (0.1,), "is_causal": (False,), "attention_chunk_size": (4,),
           "logit_scale": (0.5,), "mlp_bias": (True,), "qkv_bias": (True, False), "sliding_window_pattern": (1, 2),
           "rope_local_base_freq": (55.0,), "use_bidirectional_attention": (True,), "swiglu_alpha": (1.0,), "norm_topk_prob": (True, False)}
ROPE = {"rope_theta": 77.0, "factor": 2.0, "beta_fast": 8, "beta_slow": 2, "mscale": 0.5, "mscale_all_dim": 0.7, "attention_factor": 0.5,
        "truncate": False, "low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.5, "short_factor": [2.0] * 3, "long_factor": [2.0] * 3, "rope_type": "linear", "type": "dynamic"}


def full_config(family: str) -> Fields:
    """All fields that transformers' class has, with their values in a tiny model."""
    return json.loads(json.dumps(AutoConfig.for_model(**config_to_hf(tiny_config(family), "float32")).to_dict()))


@pytest.fixture(scope="module")
def all_names() -> set[str]:
    return {name for family in FAMILIES for name in full_config(family)} | OTHERS.keys()


def other_values(name: str, value: Any) -> tuple[Any, ...]:
    if name in OTHERS:
        return tuple(other for other in OTHERS[name] if other != value)
    if isinstance(value, bool) or value is None:
        return (not value,)
    return (value * 2,) if isinstance(value, int) else (value / 2 + 0.25,) if isinstance(value, float) else ()


def changed_configs(family: str, names: set[str]) -> Iterator[tuple[str, Fields]]:
    """One field other than it was, or absent; windows in every way that Qwen says them; the rope's own fields."""
    fields = full_config(family)
    tried = sorted(names - HARMLESS - SIZES - {"rope_parameters", "rope_scaling", "quantization_config"})
    for name in tried:
        if name in fields:
            yield f"no {name}", {key: value for key, value in fields.items() if key != name}
        for value in other_values(name, fields.get(name)):
            yield f"{name} = {value}", fields | {name: value}
    silent = {key: value for key, value in fields.items() if key not in ("layer_types", "max_window_layers", "sliding_window")}
    for said in ({}, {"max_window_layers": 1}, {"sliding_window": WINDOW}, {"sliding_window": WINDOW, "max_window_layers": 1}):
        yield f"use_sliding_window with {said}", silent | {"use_sliding_window": True} | said
    older = {key: value for key, value in config_to_hf(tiny_config(family), "float32").items() if key != "rope_parameters"}
    yield "no rope_scaling", older | {"rope_scaling": None}
    for name, value in ROPE.items():
        scaling = older.get("rope_scaling") or {"rope_type": "linear", "factor": 4.0}
        yield f"rope_scaling.{name} = {value}", older | {"rope_scaling": scaling | {name: value}}
        if name in scaling:
            yield f"rope_scaling without {name}", older | {"rope_scaling": {key: each for key, each in scaling.items() if key != name}}


def accepted(fields: Fields, names: Any) -> bool:
    try:
        config_from_hf(fields, names, "config.json")
    except (UsageError, ArtifactError):
        return False
    return True


def their_model(fields: Fields) -> torch.nn.Module:
    config = AutoConfig.for_model(**json.loads(json.dumps(fields)))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def file_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors as save_pretrained writes them: a tied head once, Qwen's experts apart."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    found = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name in [name for name in found if name.endswith("mlp.experts.gate_up_proj") and model.config.model_type != "gpt_oss"]:
        stem = name.removesuffix(".gate_up_proj")
        both, down = found.pop(name), found.pop(f"{stem}.down_proj")
        for expert, (gate_up, out) in enumerate(zip(both, down, strict=True)):
            gate, up = gate_up.chunk(2)
            found |= {f"{stem}.{expert}.{leaf}.weight": part for leaf, part in (("gate_proj", gate), ("up_proj", up), ("down_proj", out))}
    return found


def our_logits(fields: Fields, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """None where the tensors do not fit what we make of the config: then the folder is refused."""
    config = config_from_hf(fields, tensors, "config.json")
    try:
        read = from_foreign(config, hf_layout(config), tensors, "folder")
    except ArtifactError:
        return None
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(read, assign=True)
    with torch.no_grad():
        return model.eval()(TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_field_is_computed_as_transformers_does_or_refused(family: str, all_names: set[str]):
    lm_head = () if tiny_config(family).tied else ("lm_head.weight",)
    compared, apart = 0, dict[str, Any]()
    for label, fields in changed_configs(family, all_names):
        if not accepted(fields, lm_head):
            continue
        try:
            theirs = their_model(fields)
            with torch.no_grad():
                due = theirs(TOKENS).logits
        except Exception as error:  # whatever transformers raises: it computes nothing, so neither may we
            apart[label] = f"transformers refuses: {error!r}"
            continue
        if (ours := our_logits(fields, file_tensors(theirs))) is not None:
            compared += 1
            error = float((ours - due).norm() / due.norm())
            apart |= {label: error} if not error < 1e-4 else {}
    assert not apart, "\n".join(f"{label}: {what}" for label, what in apart.items())
    assert compared >= 5, "most was refused: the comparison says nothing"
