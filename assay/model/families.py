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
from assay.model.transformer import ModelConfig, Rope, Transformer

# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class Family:
    name: str  # Hugging Face's model_type
    architecture: str  # Hugging Face's class
    gguf: str | None  # llama.cpp's architecture
    gguf_interleaves_heads: bool  # llama.cpp stores q and k rows in its own rotary order for this one
    adaptable: tuple[str, ...]  # leaf names of the linear layers, as PEFT knows them


class ForeignTensor(NamedTuple):
    """One foreign tensor: some rows of one of ours, perhaps transposed."""

    name: str
    rows: int | None  # None: the whole tensor
    transposed: bool = False
    heads: int | None = None  # for q and k: how many heads its rows hold


LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", "gpt2", False, ("c_attn", "c_proj", "c_fc")),
        Family("llama", "LlamaForCausalLM", "llama", True, LLAMA_LAYERS),
        Family("mistral", "MistralForCausalLM", "llama", True, LLAMA_LAYERS),
        Family("qwen2", "Qwen2ForCausalLM", "qwen2", False, LLAMA_LAYERS),
        Family("qwen3", "Qwen3ForCausalLM", "qwen3", False, LLAMA_LAYERS),
        # Ours: what no foreign architecture can express (soft cap, relu², …). Only Assay loads it.
        Family("assay", "AssayForCausalLM", None, False, LLAMA_LAYERS),
    )
}

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
}
# Fields that change the computation in a way we do not implement: only the value that changes nothing is accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None), "rope_interleaved": (False,), "partial_rotary_factor": (1, None),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    "is_decoder": (False, True), "tie_encoder_decoder": (False,), "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,), "quantization_config": (None,), "use_mrope": (False,),
}

# ---------------------------------------------------------------- config.json


def config_from_hf(fields: Mapping[str, Any], tensor_names: Collection[str], where: str) -> ModelConfig:
    """`tensor_names` settle what a config may leave open: whether the head is tied, whether there are biases."""
    family = family_named(fields.get("model_type"), where)
    if "auto_map" in fields:
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
    """What no foreign architecture computes and this model does, in words."""
    own = {"soft cap": config.softcap is not None, "squared relu": config.activation == "relu2",
           "mixing of the first layer's values": config.value_residual, "gates on attention's output": config.attention_gate}
    return [what for what, found in own.items() if found]


def family_named(name: Any, where: str) -> Family:
    if name is None:
        raise UsageError(f"{where}: no model_type; expected one of: {', '.join(FAMILIES)}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UsageError(f"{where}: architecture {name!r} is not supported{nearest(str(name), FAMILIES)}")
    return FAMILIES[name]


ROPE_KINDS = {int: "a whole number", float: "a number with a point", (int, float): "a number", bool: "true or false", str: "text",
         list: "a list", dict: "an object"}


class ConfigFields:
    """Reads config.json field by field and remembers which, so that `finish` can name what nobody asked for."""

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
    width, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    depth, kv_heads = fields.need("num_hidden_layers", most=_DEEPEST), fields.maybe("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UsageError(f"{fields.where}: {heads} heads cannot share {kv_heads} key/value heads evenly")
    if family == "qwen2":  # Qwen2 has biases on q, k, v and nowhere else, by definition of its class
        qkv_bias, out_bias, mlp_bias = True, False, False
    else:  # an absent flag means no bias; a bias tensor in the file would then be refused as unknown
        qkv_bias = out_bias = bool(fields.maybe("attention_bias", bool))
        mlp_bias = bool(fields.maybe("mlp_bias", bool))
    if family == "qwen3" and mlp_bias:
        raise UsageError(f"{fields.where}: mlp_bias is not part of qwen3")
    return ModelConfig(
        family=family, vocab=fields.need("vocab_size"), width=width, depth=depth, heads=heads,
        kv_heads=kv_heads, head_dim=_head_dim(fields, width, heads),
        hidden=fields.need("intermediate_size"), max_length=fields.need("max_position_embeddings"),
        norm="rms", norm_eps=fields.need("rms_norm_eps", float), rope=_read_rope(fields),
        activation=_activation(fields, "hidden_act", {"silu": "silu"}), gated=True,
        qkv_bias=qkv_bias, out_bias=out_bias, mlp_bias=mlp_bias, qk_norm=family == "qwen3",
        windows=_read_windows(family, fields, depth), tied=_read_tied(fields, tensor_names), softcap=None,
        value_residual=False, attention_gate=False)


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
    rope, windows = geometry.get("rope"), geometry.get("windows")
    geometry["rope"] = _record(Rope, rope, fields.where) if isinstance(rope, dict) else rope
    geometry["windows"] = tuple(windows) if isinstance(windows, list) else windows
    return _record(ModelConfig, geometry, fields.where)


def _record(kind: type[Any], values: dict[str, Any], where: str) -> Any:
    """A dataclass from its own JSON: every field, of its type, and no other."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    wrong = [name for name in types if name not in values or not _fits(values[name], types[name])]
    if wrong := sorted({*wrong, *(values.keys() - types.keys())}):
        raise UsageError(f"{where}: geometry does not fit this version of Assay: {', '.join(wrong)}")
    try:
        return kind(**values)
    except AssertionError as error:
        raise UsageError(f"{where}: geometry does not fit together: {error}") from None


def _fits(value: Any, kind: Any) -> bool:
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return value in options
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(item, options[0]) for item in value)
    return any(_fits(value, option) for option in options) if options else type(value) is kind


def _head_dim(fields: ConfigFields, width: int, heads: int) -> int:
    """Absent means width / heads in every family here."""
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
    window = fields.maybe("sliding_window")
    kinds = fields.maybe("layer_types", list)
    used = fields.maybe("use_sliding_window", bool)
    fields.read.add("max_window_layers")
    first = fields.fields.get("max_window_layers") or 0  # 0 is a value here, so not `need`
    if window is None or (family in ("qwen2", "qwen3") and not used):
        if kinds and "sliding_attention" in kinds:
            raise UsageError(f"{fields.where}: layer_types asks for sliding_attention, but no sliding_window is in use")
        return (None,) * depth
    if kinds is None:
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(depth)]
    if len(kinds) != depth or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UsageError(f"{fields.where}: layer_types {kinds} does not fit {depth} layers of full or sliding attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_rope(fields: ConfigFields) -> Rope:
    """transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling; where both stand they must agree."""
    base = fields.maybe("rope_theta", (int, float))
    old = fields.maybe("rope_scaling", dict)
    new = fields.maybe("rope_parameters", dict)
    found = [_rope(scaling, base, fields.where) for scaling in (new, old) if scaling]
    if not found:
        if base is None:
            raise UsageError(f"{fields.where}: rope_theta is missing (rope_parameters too); geometry is never guessed")
        return Rope(float(base))
    if (base is not None and any(rope.base != base for rope in found)) or len(set(found)) > 1:
        raise ArtifactError(f"{fields.where}: rope_theta {base}, rope_scaling {old} and rope_parameters {new} disagree; keep one")
    return found[0]


def _rope(scaling: dict[str, Any], base: float | None, where: str) -> Rope:
    known = {"rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    for name in scaling:
        if name not in known:
            raise UsageError(f"{where}: unknown rope field {name!r}{nearest(name, known)}")
    fields = ConfigFields(scaling, where)
    base = fields.maybe("rope_theta", (int, float)) or base
    if base is None:
        raise UsageError(f"{where}: rope_theta is missing; geometry is never guessed")
    kind: Any = fields.maybe("rope_type", str) or fields.maybe("type", str)
    needs = {"default": [], "linear": ["factor"],
             "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
    if kind not in needs:
        raise UsageError(f"{where}: rope type {kind!r} is not supported; expected one of: {', '.join(needs)}")
    factor, low, high, length = (fields.need(name, (int, float)) if name in needs[kind] else None for name in needs["llama3"])
    return Rope(float(base), kind, factor and float(factor), low and float(low), high and float(high), length and int(length))


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    assert config.rope is not None
    fields: dict[str, Any] = {
        "hidden_size": config.width, "intermediate_size": config.hidden, "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "hidden_act": "silu", "max_position_embeddings": config.max_length, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.base, "rope_parameters": _write_rope(config.rope),
        "rope_scaling": None if config.rope.kind == "default" else _write_rope(config.rope)}
    if config.family in ("llama", "qwen3"):
        fields["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    windows = [window for window in config.windows if window is not None]
    if config.family == "mistral":
        fields["sliding_window"] = windows[0] if windows else None
    elif config.family in ("qwen2", "qwen3"):
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        fields |= {"use_sliding_window": bool(windows), "sliding_window": windows[0] if windows else None, "layer_types": kinds,
                   "max_window_layers": kinds.index("sliding_attention") if windows else config.depth}
    return fields


def _write_rope(rope: Rope) -> dict[str, Any]:
    values = {"rope_theta": rope.base, "rope_type": rope.kind, "factor": rope.factor, "low_freq_factor": rope.low_freq_factor,
              "high_freq_factor": rope.high_freq_factor, "original_max_position_embeddings": rope.original_length}
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
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    q_heads = config.heads if FAMILIES[config.family].gguf_interleaves_heads else None
    k_heads = config.kv_heads if FAMILIES[config.family].gguf_interleaves_heads else None
    split = {"attn.qkv": [ForeignTensor("attn_q", q, heads=q_heads), ForeignTensor("attn_k", kv, heads=k_heads),
                          ForeignTensor("attn_v", kv)],
             "mlp.up": [ForeignTensor("ffn_gate", config.hidden), ForeignTensor("ffn_up", config.hidden)]}
    whole = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "attn.out": "attn_output", "mlp.down": "ffn_down",
             "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}
    if config.family == "gpt2":
        split, whole = {}, whole | {"attn.qkv": "attn_qkv", "mlp.up": "ffn_up"}
    top = {"embed": "token_embd", "position": "position_embd", "norm": "output_norm", "head": "output"}
    return _layout(config, top, split | {ours: [ForeignTensor(name, None)] for ours, name in whole.items()}, "blk.{layer}.{leaf}")


def _llama_layout(config: ModelConfig) -> dict[str, list[ForeignTensor]]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    leaves = {"attn.qkv": [ForeignTensor("self_attn.q_proj", q), ForeignTensor("self_attn.k_proj", kv),
                           ForeignTensor("self_attn.v_proj", kv)],
              "mlp.up": [ForeignTensor("mlp.gate_proj", config.hidden), ForeignTensor("mlp.up_proj", config.hidden)]}
    if not config.gated:
        leaves["mlp.up"] = [ForeignTensor("mlp.up_proj", None)]
    whole = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attn.out": "self_attn.o_proj",
             "mlp.down": "mlp.down_proj", "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
             "attn.mix": "self_attn.value_mix", "attn.gate": "self_attn.head_gate"}
    top = {"embed": "model.embed_tokens", "position": "model.embed_positions", "norm": "model.norm", "head": "lm_head"}
    return _layout(config, top, leaves | {ours: [ForeignTensor(name, None)] for ours, name in whole.items()}, "model.layers.{layer}.{leaf}")


def _gpt2_layout(config: ModelConfig) -> dict[str, list[ForeignTensor]]:
    """GPT-2 keeps its linear layers transposed (Conv1D: in × out)."""
    transposed = {"attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    leaves = {ours: [ForeignTensor(name, None, True)] for ours, name in transposed.items()}
    leaves |= {"attn_norm": [ForeignTensor("ln_1", None)], "mlp_norm": [ForeignTensor("ln_2", None)]}
    top = {"embed": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
    return _layout(config, top, leaves, "transformer.h.{layer}.{leaf}")


def _layout(config: ModelConfig, top: dict[str, str], leaves: dict[str, list[ForeignTensor]], pattern: str) -> dict[str,
                                                                                                                    list[ForeignTensor]]:
    layout = {}
    for ours in parameter_shapes(config):
        stem, kind = ours.rpartition(".")[::2]
        if not stem.startswith("blocks."):
            layout[ours] = [ForeignTensor(f"{top[stem]}.{kind}", None)]
            continue
        _, layer, leaf = stem.split(".", 2)
        layout[ours] = [piece._replace(name=f"{pattern.format(layer=layer, leaf=piece.name)}.{kind}",
                                       transposed=piece.transposed and kind == "weight") for piece in leaves[leaf]]
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
            part = tensors[ours] if piece.rows is None else tensors[ours][start:start + piece.rows]
            start += piece.rows or 0
            part = part if piece.heads is None else interleave_heads(part, piece.heads)
            foreign[piece.name] = part.t() if piece.transposed else part
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
    wanted, ours_by_name = parameter_shapes(config), {}
    for ours, pieces in layout.items():
        parts = [_piece(moved(foreign[piece.name]), piece, wanted[ours], where) for piece in pieces]
        ours_by_name[ours] = kept(ours, parts[0] if len(parts) == 1 else torch.cat(parts))
    return ours_by_name


def _piece(tensor: Tensor, piece: ForeignTensor, ours: tuple[int, ...], where: str) -> Tensor:
    shape = ours if piece.rows is None else (piece.rows, *ours[1:])
    shape = shape[::-1] if piece.transposed else shape
    if tuple(tensor.shape) != shape:
        raise ArtifactError(f"{where}: {piece.name} has shape {list(tensor.shape)}; the config asks for {list(shape)}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:  # float8 means nothing without its scales
        raise ArtifactError(f"{where}: {piece.name} is {tensor.dtype}, quantised or not floating point; dequantise it first")
    tensor = tensor.t().contiguous() if piece.transposed else tensor
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
