"""Model families: Hugging Face config.json and tensor names, and llama.cpp's GGUF, to and from our own layout.

No other file knows foreign names and layouts. Geometry is never defaulted: a field is read from the config, or follows from others
by the family's own definition, or is settled by the tensors themselves (is there an lm_head?); a field that is missing or unknown
is an error that names it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
from torch import Tensor

from assay.config import nearest
from assay.errors import ArtifactError, UsageError
from assay.model.transformer import Experts, ModelConfig, Rope, Transformer

# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class Family:
    name: str  # Hugging Face's model_type
    architecture: str  # Hugging Face's class
    gguf: str | None  # llama.cpp's architecture
    gguf_interleaves_heads: bool  # llama.cpp stores q and k rows in its own rotary order for this one
    adaptable: tuple[str, ...]  # leaf names of the linear layers, as PEFT knows them
    code_in_folder: bool = False  # published with code beside it that transformers has had for long; it is never run


class ForeignTensor(NamedTuple):
    """One foreign tensor: some rows of one of ours, perhaps transposed."""

    name: str
    rows: int | None  # None: the whole tensor
    transposed: bool = False
    heads: int | None = None  # for q and k: how many heads its rows hold
    experts: int | None = None  # one tensor of all experts, each with so many `rows` of its own
    alternating: bool = False  # rows of gate and up in turns
    suffixes: tuple[str, str] = (".weight", ".bias")
    offset: float = 0.0  # what the foreign one is larger by


LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", "gpt2", False, ("c_attn", "c_proj", "c_fc")),
        Family("llama", "LlamaForCausalLM", "llama", True, LLAMA_LAYERS),
        Family("mistral", "MistralForCausalLM", "llama", True, LLAMA_LAYERS),
        Family("qwen2", "Qwen2ForCausalLM", "qwen2", False, LLAMA_LAYERS),
        Family("qwen3", "Qwen3ForCausalLM", "qwen3", False, LLAMA_LAYERS),
        Family("gemma3_text", "Gemma3ForCausalLM", "gemma3", False, LLAMA_LAYERS),
        Family("gemma2", "Gemma2ForCausalLM", "gemma2", False, LLAMA_LAYERS),
        Family("phi3", "Phi3ForCausalLM", "phi3", False, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), code_in_folder=True),
        Family("olmo2", "Olmo2ForCausalLM", "olmo2", False, LLAMA_LAYERS),
        Family("smollm3", "SmolLM3ForCausalLM", "smollm3", True, LLAMA_LAYERS),
        Family("granite", "GraniteForCausalLM", "granite", True, LLAMA_LAYERS),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3moe", False, LLAMA_LAYERS),
        Family("qwen2_moe", "Qwen2MoeForCausalLM", None, False, (*LLAMA_LAYERS[:4], "gate_up_proj", "down_proj")),
        Family("gpt_oss", "GptOssForCausalLM", None, False, (*LLAMA_LAYERS[:4], "gate_up_proj", "down_proj")),
        # Ours: what no foreign architecture can express (soft cap, relu², …). Only Assay loads it.
        Family("assay", "AssayForCausalLM", None, False, LLAMA_LAYERS),
    )
}

SWITCHED_WINDOWS = ("qwen2", "qwen3", "smollm3")  # where a sliding window counts only if use_sliding_window says so
WINDOWED = ("mistral", "phi3", *SWITCHED_WINDOWS)  # those whose windows are read by `_read_windows`; gemma's and gpt-oss' follow a pattern
_LARGEST, _DEEPEST = 1 << 24, 1 << 10  # no size and no number of layers is larger: a hostile config must not fill the memory
# Fields of config.json that say nothing about what the model computes at inference.
HARMLESS = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "summary_type", "summary_use_proj",
    "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "summary_hidden_size", "task_specific_params",
    "id2label", "label2id", "problem_type", "output_hidden_states", "output_attentions", "return_dict", "is_encoder_decoder",
    "chunk_size_feed_forward", "name_or_path", "n_ctx", "gradient_checkpointing", "is_llama_config", "finetuning_task",
    "transformers.js_config", "unsloth_version", "unsloth_fixed", "unsloth_training_date", "reorder_and_upcast_attn",
    "cache_implementation", "output_router_logits", "experts_per_token", "initial_context_length", "default_theta",
}
# Fields that change the computation in a way we do not implement: only the value that changes nothing is accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None), "rope_interleaved": (False,), "partial_rotary_factor": (1, None),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    "is_decoder": (False, True), "tie_encoder_decoder": (False,), "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,), "quantization_config": (None,), "use_mrope": (False,), "use_bidirectional_attention": (False, None),
    "full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,),
}

# ---------------------------------------------------------------- config.json


def config_from_hf(fields: Mapping[str, Any], tensor_names: Collection[str], where: str) -> ModelConfig:
    """`tensor_names` settle what a config may leave open: whether the head is tied, whether there are biases."""
    family = family_named(fields.get("model_type"), where)
    if "auto_map" in fields and not _known_code(family, fields["auto_map"]):
        raise UsageError(f"{where}: auto_map asks to run code from the folder, which Assay never does; use a supported architecture")
    reader = ConfigFields(fields, where)
    if family.name == "assay":
        return _read_assay(reader)
    config = _read_gpt2(reader, tensor_names) if family.name == "gpt2" else _read_llama(family.name, reader, tensor_names)
    reader.finish()
    return config


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    family = FAMILIES[config.family]
    common = {"model_type": family.name, "architectures": [family.architecture], "dtype": dtype, "torch_dtype": dtype,
              "vocab_size": config.vocab, "tie_word_embeddings": config.tied, "use_cache": True}
    if family.name == "assay":
        return common | {"geometry": dataclasses.asdict(config)}
    for what in unexportable_features(config):
        raise UsageError(f"the {config.family} architecture of transformers has no {what}; make it of the family 'assay', which has")
    return common | (_write_gpt2(config) if family.name == "gpt2" else _write_llama(config))


def unexportable_features(config: ModelConfig) -> list[str]:
    """Features of this model that no foreign architecture computes, in words."""
    own = {"soft cap": config.softcap is not None and config.family != "gemma2", "squared relu": config.activation == "relu2",
           "mixing of the first layer's values": config.value_residual, "gates on attention's output": config.attention_gate}
    return [what for what, found in own.items() if found]


def family_named(name: Any, where: str) -> Family:
    if name is None:
        raise UsageError(f"{where}: no model_type; expected one of: {', '.join(FAMILIES)}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UsageError(f"{where}: architecture {name!r} is not supported; those that are: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _known_code(family: Family, auto_map: Any) -> bool:
    """Whether the code in the folder is the family's own, which transformers has and we compute without it."""
    known = {family.architecture, family.architecture.replace("ForCausalLM", "Config")}
    return family.code_in_folder and isinstance(auto_map, dict) and all(
        key == "AutoTokenizer" or str(value).rpartition(".")[2] in known for key, value in auto_map.items())


def scaled_context(config: ModelConfig, scaling: str) -> ModelConfig:
    """Config of the model with a longer context by a stated scaling of its rotary positions: linear:F, yarn:F, or long, which takes the
    long factors that a LongRoPE model has."""
    kind, _, factor = scaling.partition(":")
    rope = config.rope
    if rope is None:
        raise UsageError(f"--rope-scaling {scaling}: {config.family} learns its positions, and there is nothing to scale")
    if kind == "long":
        if rope.kind != "longrope" or factor:
            raise UsageError(f"--rope-scaling {scaling}: only a LongRoPE model has long factors; give linear:F or yarn:F")
        assert rope.longest is not None
        return dataclasses.replace(config, rope=dataclasses.replace(rope, short_factor=rope.long_factor), max_length=rope.longest)
    if kind not in ("linear", "yarn") or not _above_one(factor):
        raise UsageError(f"--rope-scaling {scaling!r}: expected linear:F or yarn:F with a factor above 1, or long")
    if rope.kind != "default":
        raise UsageError(f"--rope-scaling {scaling}: the model's positions are of kind {rope.kind!r} already; "
                         "change its config.json on purpose")
    if config.family == "phi3":
        raise UsageError(f"--rope-scaling {scaling}: a phi3 takes no other scaling than its own, LongRoPE, and its config names no factors "
                         "of it")
    times, original = float(factor), config.max_length
    if original * times > _LARGEST:
        raise UsageError(f"--rope-scaling {scaling}: {original:,} tokens times {times:g} is more than the {_LARGEST:,} that a config may "
                         "name; give a smaller factor")
    longer = Rope(rope.base, "linear", times) if kind == "linear" else Rope(
        rope.base, "yarn", times, original_length=original, beta_fast=32.0, beta_slow=1.0, attention_factor=_attention_growth(times),
        truncate=True)
    return dataclasses.replace(config, rope=longer, max_length=int(original * times))


def _above_one(text: str) -> bool:
    try:
        return 1 < float(text) < math.inf
    except ValueError:
        return False


ROPE_KINDS = {int: "a whole number", float: "a number with a point", (int, float): "a number", bool: "true or false", str: "text",
         list: "a list", dict: "an object"}


class ConfigFields:
    """Reader of config.json, field by field, which remembers the fields, so that `finish` can name what nobody asked for."""

    def __init__(self, fields: Mapping[str, Any], where: str):
        self.fields, self.where, self.read = fields, where, set[str]()

    def need(self, name: str, kind: type | tuple[type, ...] = int, most: float = math.inf) -> Any:
        if self.fields.get(name) is None:
            raise UsageError(f"{self.where}: {name} is missing; geometry is never guessed, add it to the config")
        return self.maybe(name, kind, most)

    def maybe(self, name: str, kind: type | tuple[type, ...] = int, most: float = math.inf) -> Any:
        """The value, or None where the family defines what absence means."""
        self.read.add(name)
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{self.where}: {name} is {value!r}; expected {ROPE_KINDS[kind]}")
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise UsageError(f"{self.where}: {name} is {value!r}; expected a positive number")
        most = min(most, _LARGEST) if kind is int else most
        if isinstance(value, int | float) and value > most:
            raise ArtifactError(f"{self.where}: {name} is {value!r}, and no model's is above {most}: damaged, or made to fill the memory")
        return value

    def finish(self) -> None:
        for name, value in self.fields.items():
            if name in self.read or name in HARMLESS or name.startswith("_"):
                continue
            if name not in _NEUTRAL:
                raise UsageError(f"{self.where}: unknown field {name!r} = {value!r}; it may change what the model computes, "
                                 "so the model is not loaded without it being understood")
            if value not in _NEUTRAL[name]:
                raise UsageError(f"{self.where}: {name} = {value!r} is not supported; expected {_NEUTRAL[name][0]!r}")


def _read_llama(family: str, fields: ConfigFields, tensor_names: Collection[str]) -> ModelConfig:
    """Config fields that all families with rotary positions have; what one of them has beyond that is in FEATURES."""
    width, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    depth, kv_heads = fields.need("num_hidden_layers", most=_DEEPEST), fields.maybe("num_key_value_heads") or heads
    if "num_key_value_heads" not in fields.fields and family not in ("llama", "olmo2", "granite", "phi3"):  # there it is as many as heads
        fields.need("num_key_value_heads")
    if heads % kv_heads:
        raise UsageError(f"{fields.where}: {heads} heads cannot share {kv_heads} key/value heads evenly")
    # An absent flag means no bias; a bias tensor in the file would then be refused as unknown.
    bias, mlp_bias = bool(fields.maybe("attention_bias", bool)), bool(fields.maybe("mlp_bias", bool))
    if mlp_bias and family not in ("llama", "granite", "smollm3"):
        raise UsageError(f"{fields.where}: mlp_bias is not part of {family}")
    if bias and family == "phi3":
        raise UsageError(f"{fields.where}: attention_bias is not part of phi3")
    head_dim = _head_dim(fields, width, heads)
    common: dict[str, Any] = {
        "family": family, "vocab": fields.need("vocab_size"), "width": width, "depth": depth, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "hidden": fields.need("intermediate_size"), "max_length": fields.need("max_position_embeddings"),
        "norm": "rms", "norm_eps": fields.need("rms_norm_eps", float), "gated": True, "qkv_bias": bias, "out_bias": bias,
        "mlp_bias": mlp_bias, "qk_norm": False, "tied": _read_tied(fields, tensor_names), "softcap": None, "value_residual": False,
        "attention_gate": False}
    if family not in ("gemma2", "gemma3_text"):
        common["activation"] = _activation(fields, "hidden_act", {"silu": "silu"})
    if family != "gemma3_text":
        common["rope"] = _read_rope(fields)
    features = FEATURES[family](fields, common) if family in FEATURES else {}
    if "windows" not in features:
        features["windows"] = _read_windows(family, fields, depth)
    return ModelConfig(**(common | features))


def _qwen2_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False}  # biases on q, k, v and nowhere else, by definition of its class


def _gemma_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    fields.read.add("hidden_act")  # an older name, which nobody reads where the newer one stands
    if fields.maybe("sliding_window_size") not in (None, fields.fields.get("sliding_window")):
        raise UsageError(f"{fields.where}: sliding_window and sliding_window_size differ; keep the one that is meant")
    scalar = float(fields.need("query_pre_attn_scalar", (int, float)))
    return {
        "activation": _activation(fields, "hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}), "post_norms": True,
        "norm_plus_one": True, "embedding_scale": math.sqrt(common["width"]),
        "attention_scale": None if scalar == common["head_dim"] else scalar**-0.5,
        "softcap": fields.maybe("final_logit_softcapping", (int, float)),
        "attention_softcap": fields.maybe("attn_logit_softcapping", (int, float))}


def _gemma2_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if name not in fields.fields:  # null says that there is none; silence says nothing
            raise UsageError(f"{fields.where}: {name} is missing; geometry is never guessed, add it to the config")
    return _gemma_features(fields, common) | {"windows": _patterned_windows(fields, common["depth"], every=2)}


def _gemma3_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    every = fields.maybe("sliding_window_pattern") or fields.maybe("_sliding_window_pattern") or 6
    rope, local = _read_gemma3_ropes(fields)
    found = _gemma_features(fields, common) | {"qk_norm": True, "rope": rope, "local_rope": local,
                                               "windows": _patterned_windows(fields, common["depth"], every)}
    if found["attention_softcap"] is not None:  # transformers reads the field and does nothing by it
        raise UsageError(f"{fields.where}: attn_logit_softcapping is {found['attention_softcap']}; gemma3_text has none")
    if found["softcap"] is not None:
        raise UsageError(f"{fields.where}: final_logit_softcapping is {found['softcap']}; gemma3_text has none")
    return found


def _phi3_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    rope: Rope = common["rope"]
    shares = {share for share in (fields.maybe("partial_rotary_factor", (int, float)), *_nested(fields, "partial_rotary_factor")) if share}
    if len(shares) > 1 or rope.kind not in ("default", "longrope"):
        raise UsageError(f"{fields.where}: partial_rotary_factor is {sorted(shares)} and the rope's type {rope.kind!r}; expected one share "
                         "of a head, and default or longrope, which is all that phi3 has")
    share = next(iter(shares), 1.0)
    turned = int(common["head_dim"] * share)
    fields.read.add("auto_map")
    original = fields.maybe("original_max_position_embeddings")
    if rope.kind == "longrope" and original != rope.original_length:  # transformers looks at this one alone, and has 4096 without it
        raise UsageError(f"{fields.where}: original_max_position_embeddings is {original}, and {rope.original_length} within rope_scaling; "
                         "expected the same in both")
    for divisors in (rope.short_factor, rope.long_factor):
        if divisors is not None and len(divisors) != turned // 2:
            raise ArtifactError(f"{fields.where}: rope has {len(divisors)} factors for {turned // 2} frequencies")
    found: dict[str, Any] = {"rotary_dim": None if turned == common["head_dim"] else turned}
    if rope.kind == "longrope":  # within the original length, unless both sets of factors are one
        found["max_length"] = common["max_length"] if rope.short_factor == rope.long_factor else rope.original_length
    return found


def _olmo2_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    return {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True}


def _granite_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    number = (int, float)
    return {"embedding_scale": float(fields.need("embedding_multiplier", number)),
            "residual_scale": float(fields.need("residual_multiplier", number)),
            "attention_scale": float(fields.need("attention_multiplier", number)),
            "logit_scale": 1 / float(fields.need("logits_scaling", number))}


def _smollm3_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    depth, every = common["depth"], fields.maybe("no_rope_layer_interval") or 4
    fields.read.add("pretraining_tp")  # how it was trained; its class does not look at it
    turned = fields.maybe("no_rope_layers", list) or [int((layer + 1) % every != 0) for layer in range(depth)]
    if len(turned) < depth or set(turned) - {0, 1}:
        raise UsageError(f"{fields.where}: no_rope_layers {turned} does not say 0 or 1 for each of {depth} layers")
    return {"unrotated": tuple(layer for layer in range(depth) if not turned[layer])}


def _qwen_moe_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    depth, step = common["depth"], fields.maybe("decoder_sparse_step") or 1
    only = fields.maybe("mlp_only_layers", list) or []
    if fields.maybe("use_sliding_window", bool) or "sliding_attention" in (fields.maybe("layer_types", list) or []):
        raise UsageError(f"{fields.where}: use_sliding_window, or sliding_attention, in a mixture of experts is not supported")
    fields.read.update(("sliding_window", "max_window_layers", "router_aux_loss_coef"))
    shared = fields.need("shared_expert_intermediate_size") if common["family"] == "qwen2_moe" else None
    experts = Experts(
        count=_expert_count(fields), active=fields.need("num_experts_per_tok"),
        hidden=fields.need("moe_intermediate_size"), normalised=_said(fields, "norm_topk_prob"), router_bias=False, bias=False,
        shared_hidden=shared, clamp=None, alpha=None, balance=float(fields.fields.get("router_aux_loss_coef") or 0.0),
        dense_layers=tuple(layer for layer in range(depth) if layer in only or (layer + 1) % step))
    biased = {"qkv_bias": fields.fields.get("qkv_bias", True) is not False, "out_bias": False} if shared else {"qk_norm": True}
    fields.read.add("qkv_bias")
    return biased | {"experts": experts, "windows": (None,) * depth}


def _expert_count(fields: ConfigFields) -> int:
    """Number of experts, under either of its names; where both stand they must agree."""
    counts = {count for count in (fields.maybe("num_experts"), fields.maybe("num_local_experts")) if count is not None}
    if len(counts) != 1:
        raise UsageError(f"{fields.where}: num_experts and num_local_experts say {sorted(counts) or 'nothing'}; expected one count")
    return counts.pop()


def _gpt_oss_features(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    fields.read.add("router_aux_loss_coef")
    if not (fields.fields.get("rope_parameters") or fields.fields.get("rope_scaling")):  # its class has a YaRN of its own then
        raise UsageError(f"{fields.where}: rope_scaling is missing (rope_parameters too); geometry is never guessed, add it to the config")
    experts = Experts(
        count=_expert_count(fields), active=fields.need("num_experts_per_tok"), hidden=common["hidden"], normalised=True,
        router_bias=True, bias=True, shared_hidden=None, dense_layers=(), clamp=float(fields.need("swiglu_limit", (int, float))),
        alpha=float(fields.maybe("swiglu_alpha", (int, float)) or 1.702),  # older files leave it to the class, which has it fixed
        balance=float(fields.fields.get("router_aux_loss_coef") or 0.0))
    return {"experts": experts, "sinks": True, "windows": _patterned_windows(fields, common["depth"], every=2)}


FEATURES: dict[str, Callable[[ConfigFields, Mapping[str, Any]], dict[str, Any]]] = {
    "qwen2": _qwen2_features, "qwen3": lambda fields, common: {"qk_norm": True}, "gemma2": _gemma2_features,
    "gemma3_text": _gemma3_features, "phi3": _phi3_features, "olmo2": _olmo2_features, "granite": _granite_features,
    "smollm3": _smollm3_features, "qwen2_moe": _qwen_moe_features, "qwen3_moe": _qwen_moe_features, "gpt_oss": _gpt_oss_features,
}


def _said(fields: ConfigFields, name: str) -> bool:
    if (value := fields.maybe(name, bool)) is None:
        raise UsageError(f"{fields.where}: {name} is missing; geometry is never guessed, add it to the config")
    return value


def _read_gpt2(fields: ConfigFields, tensor_names: Collection[str]) -> ModelConfig:
    width, heads, depth = fields.need("n_embd"), fields.need("n_head"), fields.need("n_layer", most=_DEEPEST)
    return ModelConfig(
        family="gpt2", vocab=fields.need("vocab_size"), width=width, depth=depth, heads=heads, kv_heads=heads,
        head_dim=_head_dim(fields, width, heads), hidden=fields.maybe("n_inner") or 4 * width,
        max_length=fields.need("n_positions"), norm="layer", norm_eps=fields.need("layer_norm_epsilon", float), rope=None,
        activation=_activation(fields, "activation_function", {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}),
        gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=False, windows=(None,) * depth,
        tied=_read_tied(fields, tensor_names), softcap=None, value_residual=False, attention_gate=False)


def _read_assay(fields: ConfigFields) -> ModelConfig:
    geometry = dict(fields.need("geometry", dict))
    sizes = ConfigFields(geometry, fields.where)
    for size in dataclasses.fields(ModelConfig):
        if size.type is int:
            sizes.need(size.name, most=_DEEPEST if size.name == "depth" else _LARGEST)
    return _record(ModelConfig, geometry, fields.where)


def _record(kind: type[Any], values: dict[str, Any], where: str) -> Any:
    """A dataclass from its own JSON: every field that has no default, each of its type, and no other."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {name: _plain_value(value, name, where) for name, value in values.items()}
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    wrong = [name for name, value in values.items() if name not in fields or not _fits(value, fields[name].type)]
    if wrong := sorted({*wrong, *missing}):
        raise UsageError(f"{where}: geometry does not fit this version of Assay: {', '.join(wrong)}")
    try:
        return kind(**values)
    except AssertionError as error:
        raise UsageError(f"{where}: geometry does not fit together: {error}") from None


def _plain_value(value: Any, name: str, where: str) -> Any:
    """JSON has neither tuples nor records."""
    if isinstance(value, dict) and name in ("rope", "local_rope", "experts"):
        return _record(Experts if name == "experts" else Rope, value, where)
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> bool:
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return value in options
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(item, options[0]) for item in value)
    return any(_fits(value, option) for option in options) if options else type(value) is kind


def _head_dim(fields: ConfigFields, width: int, heads: int) -> int:
    """Head dimension; absent means width / heads in every family here."""
    head_dim = fields.maybe("head_dim")
    if head_dim is None and width % heads:
        raise UsageError(f"{fields.where}: width {width} is not a multiple of {heads} heads and head_dim is missing")
    return head_dim or width // heads


def _activation(fields: ConfigFields, name: str, known: dict[str, str]) -> Any:
    value = fields.need(name, str)
    if value not in known:
        raise UsageError(f"{fields.where}: {name} is {value!r}; expected one of: {', '.join(known)}")
    return known[value]


def _read_tied(fields: ConfigFields, tensor_names: Collection[str]) -> bool:
    """A config that is silent is settled by the file: a model without lm_head can only be tied."""
    tied = fields.maybe("tie_word_embeddings", bool)
    return "lm_head.weight" not in tensor_names if tied is None else tied


def _read_windows(family: str, fields: ConfigFields, depth: int) -> tuple[int | None, ...]:
    """Sliding windows of the layers, as transformers' class of the family reads them. Where that looks at no window, or has one of its own,
    nothing is guessed."""
    window, kinds = fields.maybe("sliding_window"), fields.maybe("layer_types", list)
    switched = family in SWITCHED_WINDOWS
    used = family in WINDOWED and (not switched or bool(fields.maybe("use_sliding_window", bool)))
    fields.read.update(("max_window_layers",) if switched else ())
    if window is not None and family not in WINDOWED:
        raise UsageError(f"{fields.where}: sliding_window is {window}, and a {family} has no window; set it to null")
    if used and family != "phi3" and "sliding_window" not in fields.fields:  # the class would have 4096 of its own
        raise UsageError(f"{fields.where}: sliding_window is missing; geometry is never guessed, add it to the config (null: no window)")
    if window is None or not used:
        if kinds and "sliding_attention" in kinds:
            raise UsageError(f"{fields.where}: layer_types asks for sliding_attention, but no sliding_window is in use")
        return (None,) * depth
    if switched:
        kinds = kinds or (fields.need("layer_types", list) if family == "smollm3" else _layers_by_number(fields, depth))
    elif kinds and "full_attention" in kinds:
        raise UsageError(f"{fields.where}: layer_types has full_attention, and the window of a {family} is in every layer")
    return _windows_of(kinds or ["sliding_attention"] * depth, window, depth, fields.where)


def _layers_by_number(fields: ConfigFields, depth: int) -> list[str]:
    """Qwen's older way to say which layers have a window: those from a number on."""
    first = fields.fields.get("max_window_layers")  # 0 is a value here, so not `need`
    if type(first) is not int or first < 0:
        raise UsageError(f"{fields.where}: max_window_layers is {first!r} and layer_types is missing; geometry is never guessed, add one")
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(depth)]


def _patterned_windows(fields: ConfigFields, depth: int, every: int) -> tuple[int | None, ...]:
    """Sliding windows by a pattern: every so many layers one sees everything; the others see a window, as the family's definition has it
    where no list says so."""
    kinds = fields.maybe("layer_types", list)
    kinds = kinds or ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(depth)]
    window = fields.need("sliding_window") if "sliding_attention" in kinds else fields.maybe("sliding_window")
    return _windows_of(kinds, window, depth, fields.where)


def _windows_of(kinds: list[str], window: int | None, depth: int, where: str) -> tuple[int | None, ...]:
    if len(kinds) != depth or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UsageError(f"{where}: layer_types {kinds} does not fit {depth} layers of full or sliding attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_rope(fields: ConfigFields) -> Rope:
    """transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling; where both stand they must agree."""
    base = fields.maybe("rope_theta", (int, float))
    old = fields.maybe("rope_scaling", dict)
    new = fields.maybe("rope_parameters", dict)
    found = [_rope(scaling, base, fields) for scaling in (new, old) if scaling]
    if not found:
        if base is None:
            raise UsageError(f"{fields.where}: rope_theta is missing (rope_parameters too); geometry is never guessed")
        return Rope(float(base))
    if (base is not None and any(rope.base != base for rope in found)) or len(set(found)) > 1:
        raise ArtifactError(f"{fields.where}: rope_theta {base}, rope_scaling {old} and rope_parameters {new} disagree; keep one")
    return found[0]


def _read_gemma3_ropes(fields: ConfigFields) -> tuple[Rope, Rope]:
    """(of layers that see everything, of those with a window). transformers 5 nests them, 4 had a field for each."""
    base, local = fields.maybe("rope_theta", (int, float)), fields.maybe("rope_local_base_freq", (int, float))
    old, new = fields.maybe("rope_scaling", dict), fields.maybe("rope_parameters", dict)
    ropes = []
    for kind, flat, scaling in (("full_attention", base, old), ("sliding_attention", local, None)):
        nested = (new or {}).get(kind)
        said = {_rope(each, flat, fields) for each in (nested, scaling) if each} or ({Rope(float(flat))} if flat is not None else set())
        if len(said) != 1 or (flat is not None and next(iter(said)).base != flat):
            raise UsageError(f"{fields.where}: rope of {kind} layers: found {new}, rope_theta {base}, rope_local_base_freq {local} and "
                             f"rope_scaling {old}; expected one base and one scaling for each kind of layer")
        ropes.append(said.pop())
    return ropes[0], ropes[1]


_ROPE_NEEDS = {"default": (), "linear": ("factor",),
               "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
               "yarn": ("factor", "original_max_position_embeddings"), "longrope": ("short_factor", "long_factor")}
_ROPE_FIELDS = {"rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
                "partial_rotary_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
                "short_factor", "long_factor"}


def _rope(scaling: dict[str, Any], base: float | None, fields: ConfigFields) -> Rope:
    where = fields.where
    for name in scaling:
        if name not in _ROPE_FIELDS:
            raise UsageError(f"{where}: unknown rope field {name!r}{nearest(name, _ROPE_FIELDS)}")
    said = ConfigFields(scaling, where)
    base = said.maybe("rope_theta", (int, float)) or base
    if base is None:
        raise UsageError(f"{where}: rope_theta is missing; geometry is never guessed")
    kind: Any = said.maybe("rope_type", str) or said.maybe("type", str)
    if fields.fields.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # as Phi-3's first files called it, and as transformers reads them
    if kind not in _ROPE_NEEDS:
        raise UsageError(f"{where}: rope type {kind!r} is not supported; expected one of: {', '.join(_ROPE_NEEDS)}")
    if fields.fields.get("model_type") != "phi3" and scaling.get("partial_rotary_factor") not in (None, 1):
        raise UsageError(f"{where}: partial_rotary_factor is {scaling['partial_rotary_factor']!r}; only phi3 turns a part of a head")
    if kind == "longrope":
        return _longrope(float(base), said, fields)
    for name in _ROPE_NEEDS[kind]:
        said.need(name, (int, float))
    factor, low, high, length = (said.maybe(name, (int, float)) if name in _ROPE_NEEDS[kind] else None for name in _ROPE_NEEDS["llama3"])
    rope = Rope(float(base), kind, factor and float(factor), low and float(low), high and float(high), length and int(length))
    return _yarn(rope, said) if kind == "yarn" else rope


def _yarn(rope: Rope, said: ConfigFields) -> Rope:
    """Defaults as the paper has them, and transformers with it."""
    number, factor = (int, float), rope.factor or 1.0
    scale, all_scale = said.maybe("mscale", number), said.maybe("mscale_all_dim", number)
    usual = _attention_growth(factor, scale) / _attention_growth(factor, all_scale) if scale and all_scale else _attention_growth(factor)
    truncate = said.maybe("truncate", bool)
    return dataclasses.replace(
        rope, beta_fast=float(said.maybe("beta_fast", number) or 32), beta_slow=float(said.maybe("beta_slow", number) or 1),
        attention_factor=float(said.maybe("attention_factor", number) or usual), truncate=True if truncate is None else truncate)


def _attention_growth(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(base: float, said: ConfigFields, fields: ConfigFields) -> Rope:
    number, longest = (int, float), fields.need("max_position_embeddings")
    length = said.maybe("original_max_position_embeddings") or fields.need("original_max_position_embeddings")
    factor = float(said.maybe("factor", number) or longest / length)
    usual = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    divisors = [_divisors(said, name) for name in ("short_factor", "long_factor")]
    return Rope(base, "longrope", factor, original_length=length, attention_factor=float(said.maybe("attention_factor", number) or usual),
                short_factor=divisors[0], long_factor=divisors[1], longest=longest)


def _divisors(said: ConfigFields, name: str) -> tuple[float, ...]:
    values = said.need(name, list)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values):
        raise UsageError(f"{said.where}: {name} is {values!r}; expected positive numbers")
    return tuple(float(value) for value in values)


def _nested(fields: ConfigFields, name: str) -> list[Any]:
    return [(fields.fields.get(rope) or {}).get(name) for rope in ("rope_parameters", "rope_scaling")]


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    assert config.rope is not None
    longest = config.rope.longest if config.rope.kind == "longrope" else config.max_length
    fields: dict[str, Any] = {
        "hidden_size": config.width, "intermediate_size": config.hidden, "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "hidden_act": "silu", "max_position_embeddings": longest, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.base, "rope_parameters": _write_rope(config.rope),
        "rope_scaling": None if config.rope.kind == "default" else _write_rope(config.rope)}
    if config.family in ("llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3", "qwen3_moe", "gpt_oss"):
        fields["attention_bias"] = config.qkv_bias
    if config.family in ("llama", "granite", "smollm3"):
        fields["mlp_bias"] = config.mlp_bias
    windows = [window for window in config.windows if window is not None]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    if config.family in ("mistral", "phi3"):
        fields["sliding_window"] = windows[0] if windows else None
    elif config.family in ("qwen2", "qwen3", "smollm3"):
        fields |= {"use_sliding_window": bool(windows), "sliding_window": windows[0] if windows else None, "layer_types": kinds}
    elif config.family in ("gemma2", "gemma3_text", "gpt_oss"):
        fields |= {"sliding_window": windows[0] if windows else None, "layer_types": kinds}
    if config.family in ("qwen2", "qwen3"):
        fields["max_window_layers"] = kinds.index("sliding_attention") if windows else config.depth
    if config.family in ("gemma2", "gemma3_text", "phi3", "olmo2", "smollm3"):
        fields["pad_token_id"] = None  # else the class has one of its own, whatever the tokenizer says
    return fields | _write_features(config)


def _write_features(config: ModelConfig) -> dict[str, Any]:
    """Config fields that one family has beyond the others, as FEATURES reads them."""
    e, rope = config.experts, config.rope
    assert rope is not None
    if config.family in ("gemma2", "gemma3_text"):
        scalar = config.head_dim if config.attention_scale is None else round(config.attention_scale**-2)
        found: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                                 "query_pre_attn_scalar": scalar, "final_logit_softcapping": config.softcap,
                                 "attn_logit_softcapping": config.attention_softcap}
        if config.local_rope is not None:
            found |= {"rope_local_base_freq": config.local_rope.base, "rope_parameters": {
                "full_attention": _write_rope(rope), "sliding_attention": _write_rope(config.local_rope)}}
        return found
    if config.family == "phi3":
        share = (config.rotary_dim or config.head_dim) / config.head_dim
        ropes: dict[str, Any] = {name: _write_rope(rope) | {"partial_rotary_factor": share} for name in ("rope_parameters", "rope_scaling")}
        ropes = ropes if rope.kind == "longrope" else ropes | {"rope_scaling": None}
        return {"partial_rotary_factor": share, "original_max_position_embeddings": rope.original_length or config.max_length, **ropes}
    if config.family == "granite":
        return {"embedding_multiplier": config.embedding_scale, "residual_multiplier": config.residual_scale,
                "attention_multiplier": config.attention_scale, "logits_scaling": 1 / (config.logit_scale or 1.0)}
    if config.family == "smollm3":
        return {"no_rope_layers": [int(layer not in config.unrotated) for layer in range(config.depth)]}
    if config.family in ("qwen2_moe", "qwen3_moe"):
        assert e is not None
        shared = {"shared_expert_intermediate_size": e.shared_hidden, "qkv_bias": config.qkv_bias} if e.shared_hidden else {}
        return shared | {"num_experts": e.count, "num_experts_per_tok": e.active, "moe_intermediate_size": e.hidden,
                         "norm_topk_prob": e.normalised, "decoder_sparse_step": 1, "mlp_only_layers": list(e.dense_layers),
                         "use_sliding_window": False, "router_aux_loss_coef": e.balance}
    if config.family == "gpt_oss":
        assert e is not None
        return {"num_local_experts": e.count, "num_experts_per_tok": e.active, "swiglu_limit": e.clamp, "swiglu_alpha": e.alpha,
                "router_aux_loss_coef": e.balance}
    return {}


def _write_rope(rope: Rope) -> dict[str, Any]:
    values = {"rope_theta": rope.base, "rope_type": rope.kind, "factor": rope.factor, "low_freq_factor": rope.low_freq_factor,
              "high_freq_factor": rope.high_freq_factor, "original_max_position_embeddings": rope.original_length,
              "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor,
              "truncate": rope.truncate, "short_factor": rope.short_factor and list(rope.short_factor),
              "long_factor": rope.long_factor and list(rope.long_factor)}
    return {name: value for name, value in values.items() if value is not None}


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {"n_embd": config.width, "n_head": config.heads, "n_layer": config.depth, "n_inner": config.hidden,
            "n_positions": config.max_length, "n_ctx": config.max_length, "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

# ---------------------------------------------------------------- tensors


@functools.cache
def hf_layout(config: ModelConfig) -> dict[str, list[ForeignTensor]]:
    """Our parameter name → the Hugging Face tensors that hold its rows, in order."""
    return _gpt2_layout(config) if config.family == "gpt2" else _llama_layout(config)


def gguf_layout(config: ModelConfig) -> dict[str, list[ForeignTensor]]:
    """Our parameter name → the GGUF tensors that hold its rows, in order."""
    q, kv, e = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.experts
    q_heads = config.heads if FAMILIES[config.family].gguf_interleaves_heads else None
    k_heads = config.kv_heads if FAMILIES[config.family].gguf_interleaves_heads else None
    split = {"attn.qkv": [ForeignTensor("attn_q", q, heads=q_heads), ForeignTensor("attn_k", kv, heads=k_heads),
                          ForeignTensor("attn_v", kv)],
             "mlp.up": [ForeignTensor("ffn_gate", config.hidden), ForeignTensor("ffn_up", config.hidden)]}
    whole = {"attn.out": "attn_output", "mlp.down": "ffn_down"}
    norms = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm",
             "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}
    if config.family in ("gpt2", "phi3"):
        split, whole = {}, whole | {"attn.qkv": "attn_qkv", "mlp.up": "ffn_up"}
    top = {"embed": "token_embd", "position": "position_embd", "norm": "output_norm", "head": "output"}
    leaves = split | {ours: [ForeignTensor(name, None)] for ours, name in whole.items()}
    leaves |= {ours: [ForeignTensor(name, None, offset=float(config.norm_plus_one))] for ours, name in norms.items()}
    mixture = {} if e is None else {
        "mlp.router": [ForeignTensor("ffn_gate_inp", None)],
        "mlp.up": [ForeignTensor(f"ffn_{name}_exps", e.hidden, experts=e.count) for name in ("gate", "up")],
        "mlp.down": [ForeignTensor("ffn_down_exps", config.width, experts=e.count)]}
    return _layout(config, top, leaves, "blk.{layer}.{leaf}", mixture)


def _llama_layout(config: ModelConfig) -> dict[str, list[ForeignTensor]]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    leaves = {"attn.qkv": [ForeignTensor("self_attn.q_proj", q), ForeignTensor("self_attn.k_proj", kv),
                           ForeignTensor("self_attn.v_proj", kv)],
              "mlp.up": [ForeignTensor("mlp.gate_proj", config.hidden), ForeignTensor("mlp.up_proj", config.hidden)],
              "attn.sinks": [ForeignTensor("self_attn.sinks", None, suffixes=("", ""))]}
    if not config.gated:
        leaves["mlp.up"] = [ForeignTensor("mlp.up_proj", None)]
    if config.family == "phi3":  # stored as we hold them
        leaves |= {"attn.qkv": [ForeignTensor("self_attn.qkv_proj", None)], "mlp.up": [ForeignTensor("mlp.gate_up_proj", None)]}
    whole = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attn.out": "self_attn.o_proj",
             "mlp.down": "mlp.down_proj", "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
             "attn.mix": "self_attn.value_mix", "attn.gate": "self_attn.head_gate"}
    if config.post_norms:  # the name that others have for the norm before the MLP
        whole |= {"attn_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
                  "mlp_post_norm": "post_feedforward_layernorm"}
    top = {"embed": "model.embed_tokens", "position": "model.embed_positions", "norm": "model.norm", "head": "lm_head"}
    leaves |= {ours: [ForeignTensor(name, None)] for ours, name in whole.items()}
    return _layout(config, top, leaves, "model.layers.{layer}.{leaf}", _mixture_leaves(config))


def _mixture_leaves(config: ModelConfig) -> dict[str, list[ForeignTensor]]:
    """Tensors of a layer with experts: Qwen's files have three for each expert, gpt-oss two for all, with inputs before outputs."""
    e = config.experts
    if e is None:
        return {}
    if config.family == "gpt_oss":
        return {"mlp.router": [ForeignTensor("mlp.router", None)],
                "mlp.up": [ForeignTensor("mlp.experts.gate_up_proj", 2 * e.hidden, True, experts=e.count, alternating=True,
                                         suffixes=("", "_bias"))],
                "mlp.down": [ForeignTensor("mlp.experts.down_proj", config.width, True, experts=e.count, suffixes=("", "_bias"))]}
    names = [f"mlp.experts.{expert}" for expert in range(e.count)]
    shared = e.shared_hidden or 0
    return {"mlp.router": [ForeignTensor("mlp.gate", None)],
            "mlp.up": [ForeignTensor(f"{name}.{leaf}", e.hidden) for name in names for leaf in ("gate_proj", "up_proj")],
            "mlp.down": [ForeignTensor(f"{name}.down_proj", config.width) for name in names],
            "mlp.shared.up": [ForeignTensor("mlp.shared_expert.gate_proj", shared), ForeignTensor("mlp.shared_expert.up_proj", shared)],
            "mlp.shared.down": [ForeignTensor("mlp.shared_expert.down_proj", None)],
            "mlp.shared_gate": [ForeignTensor("mlp.shared_expert_gate", None)]}


def _gpt2_layout(config: ModelConfig) -> dict[str, list[ForeignTensor]]:
    """GPT-2 keeps its linear layers transposed (Conv1D: in × out)."""
    transposed = {"attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    leaves = {ours: [ForeignTensor(name, None, True)] for ours, name in transposed.items()}
    leaves |= {"attn_norm": [ForeignTensor("ln_1", None)], "mlp_norm": [ForeignTensor("ln_2", None)]}
    top = {"embed": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
    return _layout(config, top, leaves, "transformer.h.{layer}.{leaf}")


def _layout(config: ModelConfig, top: dict[str, str], leaves: dict[str, list[ForeignTensor]], pattern: str,
            mixture: dict[str, list[ForeignTensor]] | None = None) -> dict[str, list[ForeignTensor]]:
    """`mixture` has what is other where a layer has experts."""
    layout = {}
    for ours in parameter_shapes(config):
        stem, kind = ours.rpartition(".")[::2]
        if not stem.startswith("blocks."):
            layout[ours] = [ForeignTensor(f"{top[stem]}.{kind}", None, offset=leaves["attn_norm"][0].offset if stem == "norm" else 0.0)]
            continue
        _, layer, leaf = stem.split(".", 2)
        found = leaves | (mixture or {}) if config.mixture_at(int(layer)) else leaves
        layout[ours] = [piece._replace(name=pattern.format(layer=layer, leaf=piece.name) + piece.suffixes[kind == "bias"],
                                       transposed=piece.transposed and kind == "weight") for piece in found[leaf]]
    return layout


@functools.cache
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our parameter names and shapes, as the architecture demands them."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(config).named_parameters()}


def to_foreign(layout: dict[str, list[ForeignTensor]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under foreign names. Views where possible."""
    foreign = {}
    for ours, pieces in layout.items():
        start = 0
        for piece in pieces:
            rows = tensors[ours] if piece.experts is None else tensors[ours].unflatten(0, (piece.experts, -1))
            along = 0 if piece.experts is None else 1
            part = rows if piece.rows is None else rows.narrow(along, start, piece.rows)
            start += piece.rows or 0
            part = part if piece.heads is None else interleave_heads(part, piece.heads)
            part = part.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if piece.alternating else part
            part = part + piece.offset if piece.offset else part
            foreign[piece.name] = part.mT if piece.transposed else part
    return foreign


def from_foreign(config: ModelConfig, layout: dict[str, list[ForeignTensor]], foreign: Mapping[str, Tensor], where: str,
                 moved: Callable[[Tensor], Tensor] = lambda tensor: tensor,
                 kept: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor) -> dict[str, Tensor]:
    """Strict: every expected tensor once and in the right shape, nothing unknown, a redundant tied head equal to the embedding.

    `moved` brings a foreign tensor to where ours shall be, `kept` says what is held of ours: each is asked tensor by tensor.
    """
    foreign = _without_redundant(config, layout, foreign, where)
    expected = {piece.name for pieces in layout.values() for piece in pieces}
    for problem, names in (("missing", expected - foreign.keys()), ("not part of this architecture", foreign.keys() - expected)):
        if names:
            shown = ", ".join(sorted(names)[:4]) + (" …" if len(names) > 4 else "")
            raise ArtifactError(f"{where}: {len(names)} tensor(s) {problem}: {shown}; "
                                f"a {config.family} of {config.depth} layers has exactly {len(expected)}")
    wanted = parameter_shapes(config)
    return {ours: kept(ours, _joined(pieces, foreign, wanted[ours], where, moved)) for ours, pieces in layout.items()}


def one_from_foreign(config: ModelConfig, layout: dict[str, list[ForeignTensor]], foreign: Mapping[str, Tensor],
                     where: str) -> Callable[[str], Tensor]:
    """Reader of single tensors, as `from_foreign` would make them, from tensors that it has accepted: each is made when it is asked for,
    and nobody keeps it."""
    foreign, wanted = _without_redundant(config, layout, foreign, where), parameter_shapes(config)
    return lambda ours: _joined(layout[ours], foreign, wanted[ours], where, lambda tensor: tensor)


def _joined(pieces: list[ForeignTensor], foreign: Mapping[str, Tensor], shape: tuple[int, ...], where: str,
            moved: Callable[[Tensor], Tensor]) -> Tensor:
    parts = [_piece(moved(foreign[piece.name]), piece, shape, where) for piece in pieces]
    stacked = pieces[0].experts is not None
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1 if stacked else 0)
    return joined.flatten(0, 1) if stacked else joined


def _piece(tensor: Tensor, piece: ForeignTensor, ours: tuple[int, ...], where: str) -> Tensor:
    shape = ours if piece.rows is None else (piece.rows, *ours[1:])
    shape = shape if piece.experts is None else (piece.experts, *shape)
    shape = (*shape[:-2], shape[-1], shape[-2]) if piece.transposed else shape
    if tuple(tensor.shape) != shape:
        raise ArtifactError(f"{where}: {piece.name} has shape {list(tensor.shape)}; the config asks for {list(shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:  # float8 means nothing without its scales
        raise ArtifactError(f"{where}: {piece.name} is {tensor.dtype}, quantised or not floating point; dequantise it first")
    tensor = tensor.mT.contiguous() if piece.transposed else tensor
    tensor = tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if piece.alternating else tensor
    tensor = tensor - piece.offset if piece.offset else tensor
    return tensor if piece.heads is None else deinterleave_heads(tensor, piece.heads)


def _without_redundant(config: ModelConfig, layout: dict[str, list[ForeignTensor]], foreign: Mapping[str, Tensor],
                       where: str) -> dict[str, Tensor]:
    """Drop what carries no information: buffers of old files, a tied head stored twice; restore GPT-2's missing prefix."""
    buffers = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    tensors = {name: tensor for name, tensor in foreign.items() if not name.endswith(buffers)}
    if config.family == "gpt2" and "wte.weight" in tensors:
        tensors = {name if name.startswith("lm_head.") else f"transformer.{name}": t for name, t in tensors.items()}
    (embed,) = layout["embed.weight"]
    head = "lm_head.weight" if "lm_head.weight" in tensors else "output.weight"
    if config.tied and head in tensors:
        if embed.name in tensors and not torch.equal(tensors[head], tensors[embed.name]):
            raise ArtifactError(f"{where}: the config says the head is tied to the embedding, but {head} and {embed.name} differ; "
                                "set tie_word_embeddings to false if both were trained")
        tensors.pop(head)
    return tensors


def interleave_heads(rows: Tensor, heads: int) -> Tensor:
    """Hugging Face's rotary order (first halves, second halves) → llama.cpp's (pairs side by side)."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def deinterleave_heads(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
