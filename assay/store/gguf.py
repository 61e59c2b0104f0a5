"""GGUF files in and out: llama.cpp's format, with the model's geometry and its tokenizer in the metadata.

Geometry is read key by key and never defaulted; a key of the architecture that nobody asked for is an error naming it.
Keys outside the architecture and the tokenizer (general.*, quantize.*, a publisher's own) say where a file comes from.
"""

import contextlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.families import FAMILIES, ConfigFields, from_foreign, gguf_layout, to_foreign, unexportable_features
from assay.model.gguf_tokenizer import generation_from_gguf, tokenizer_from_gguf, tokenizer_to_gguf
from assay.model.special_tokens import SpecialTokens, resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Experts, ModelConfig, Rope, inverse_frequencies
from assay.store import durable
from assay.store.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from assay.store.model_formats import Description, FileModel, ModelFormat, shown_geometry
from assay.strict_json import open_regular

_LARGEST = 1 << 24  # of any number of the geometry
Precision = Literal["f16", "bf16", "q8_0", "f32"]
FILE_TYPES: dict[Precision, int] = {"f16": 1, "bf16": 32, "q8_0": 7, "f32": 0}
ROPE_FACTORS = "rope_freqs.weight"  # how llama.cpp stores Llama 3's scaling: a divisor for each frequency
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # and LongRoPE's
FACTORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
GEMMA2_BASE, GEMMA3_LOCAL_BASE, GEMMA3_EVERY, SMOLLM3_EVERY = 10000.0, 10000.0, 6, 4  # what llama.cpp has in its code, not in its files
META_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192}  # as released
# Keys that could change the computation in a way we do not implement, with the value that changes nothing.
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0,
            "rope.scaling.finetuned": True, "tensor_data_layout": "Meta AI original pth"}
# How far the answers (relative) may move by rounding weights to a format: about 3 times what was seen on SmolLM2-135M
# (1.8e-3, 7.7e-3 and 3.5e-2 for 16-bit floats and q8_0).
EXPORT_EXACT = 2e-4
GGUF_ROUNDING: dict[str, float] = {"f32": EXPORT_EXACT, "f16": 5e-3, "bf16": 3e-2, "q8_0": 1e-1, "q6_k": 0.3, "q5_k": 0.8, "q5_0": 0.8,
                                   "q5_1": 0.8, "q4_k": 0.8}  # of 5 bits and less, 0.34 was seen: the tensors below say more
# How far a tensor itself (relative) may be from the source's by its own type: 2 to 4 times what was seen in SmolLM2-135M (of a source in
# four bits) and in matrices of random numbers: 6.5e-3, 2.0e-2, 3.6e-2, 5.3e-2, 7.2e-2 from q8_0 down.
TENSOR_ROUNDING = {"f32": 1.25e-3, "f16": 1.25e-3, "bf16": 7.5e-3, "q8_0": 2.5e-2, "q6_k": 5e-2, "q5_k": 9e-2, "q5_0": 0.12, "q5_1": 0.12,
                   "q4_k": 0.15}


def read_gguf(path: Path) -> FileModel:
    """Read a GGUF model: every tensor once, in the right shape and finite, and the tokenizer that goes with them; else an error."""
    header = read_gguf_header(path)
    config = _config(header, path)
    tensors = _weights(path, header, config)
    tokenizer = tokenizer_from_gguf(header.metadata, str(path))
    stops = resolve_special_tokens(tokenizer, {}, generation_from_gguf(header.metadata))
    return FileModel(config, tensors, tokenizer, stops, header.metadata)


def describe_gguf(path: Path) -> Description:
    """The geometry and the tensor table; the weights are not read."""
    header = read_gguf_header(path)
    tensors = {name: {"dtype": info.type, "shape": list(info.shape)} for name, info in header.tensors.items()}
    return Description(shown_geometry(_config(header, path)), tensors)


def gguf_config(path: Path) -> ModelConfig:
    """The geometry, by the header alone."""
    return _config(read_gguf_header(path), path)


def rounding_in(path: Path) -> float:
    """How far a file may answer from what it was made of, by the coarsest type in it that has been measured."""
    types = [tensor.type.lower() for tensor in read_gguf_header(path).tensors.values()]
    return max((GGUF_ROUNDING.get(type, EXPORT_EXACT) for type in types), default=EXPORT_EXACT)


def tensor_rounding_in(path: Path) -> dict[str, float]:
    """How far each tensor, under our name, may be from what it was made of, by the coarsest type of its pieces; a type that was never
    measured must hold it exactly."""
    header = read_gguf_header(path)
    bounds = {name: TENSOR_ROUNDING.get(tensor.type.lower(), EXPORT_EXACT) for name, tensor in header.tensors.items()}
    layout = gguf_layout(_config(header, path))
    return {ours: max(bounds[piece.name] for piece in pieces) for ours, pieces in layout.items()}


GGUF = ModelFormat("gguf", describe_gguf, ".gguf", read_gguf, bound=rounding_in, tensor_bounds=tensor_rounding_in)


def write_gguf(path: Path, config: ModelConfig, tensors: Mapping[str, Tensor], tokenizer: Tokenizer, dtype: Precision,
               stops: SpecialTokens | None = None) -> None:
    """A new file, whole or not at all. Matrices are rounded to `dtype`; vectors and positions stay float32."""
    if dtype not in FILE_TYPES:
        raise UsageError(f"GGUF is written as one of: {', '.join(FILE_TYPES)}; not {dtype!r}")
    _refuse_inexpressible(config)
    layout = gguf_layout(config)
    foreign = to_foreign(layout, tensors) | _rope_factors(config)
    kept = [ours for ours in layout if ours == "position.weight" or ours.endswith(".mlp.router.weight")]
    exact = {*FACTORS, *(piece.name for ours in kept for piece in layout[ours])}
    types = {name: "F32" if tensor.ndim == 1 or name in exact else dtype.upper() for name, tensor in foreign.items()}
    metadata = _geometry(config, dtype) | tokenizer_to_gguf(tokenizer, config.vocab) | _ends(tokenizer, stops)
    with durable.new_file(path) as temporary:
        _write(temporary, metadata, foreign, types)

# ---------------------------------------------------------------- geometry in


def _config(header: GgufHeader, path: Path) -> ModelConfig:
    family = _family(header.metadata, path)
    prefix, gpt2 = f"{FAMILIES[family].gguf}.", family == "gpt2"
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    keys = ConfigFields(own, str(path))
    heads, width, depth = (keys.need(key) for key in ("attention.head_count", "embedding_length", "block_count"))
    head_dim = _head_dim(keys, width, heads)
    has = {leaf for leaf in ("attn_q.bias", "attn_qkv.bias", "attn_output.bias", "ffn_up.bias", "attn_q_norm.weight")
           if f"blk.0.{leaf}" in header.tensors}
    kv_heads = heads if gpt2 else keys.need("attention.head_count_kv")
    _refuse_absurd(keys, header)
    common: dict[str, Any] = {
        "family": family, "vocab": _vocab(keys, header.metadata), "width": width, "depth": depth, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "hidden": keys.need("feed_forward_length"), "max_length": keys.need("context_length"),
        "norm": "layer" if gpt2 else "rms",
        "norm_eps": keys.need("attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon", float),
        "activation": "gelu_tanh" if gpt2 or family.startswith("gemma") else "silu", "gated": not gpt2,
        "qkv_bias": bool(has & {"attn_q.bias", "attn_qkv.bias"}), "out_bias": "attn_output.bias" in has,
        "mlp_bias": "ffn_up.bias" in has, "qk_norm": "attn_q_norm.weight" in has, "windows": (None,) * depth,
        "tied": "output.weight" not in header.tensors, "softcap": None, "value_residual": False, "attention_gate": False}
    if family == "phi3":
        common["rope"] = _phi3_rope(keys, header, path)
    elif family != "gemma2":
        common["rope"] = None if gpt2 else _rope(keys, header, head_dim, path)
    config = ModelConfig(**(common | _features(family, keys, common)))
    _refuse_unread(keys, prefix)
    return config


def _features(family: str, keys: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    """Features of a llama.cpp architecture beyond Llama's, from its keys or, where it has none for it, by its definition."""
    depth, number = common["depth"], (int, float)
    if family in ("gemma2", "gemma3_text"):
        window, every = keys.need("attention.sliding_window"), 2 if family == "gemma2" else GEMMA3_EVERY
        found: dict[str, Any] = {"post_norms": True, "norm_plus_one": True, "embedding_scale": common["width"] ** 0.5,
                                 "windows": tuple(None if (layer + 1) % every == 0 else window for layer in range(depth))}
        if family == "gemma3_text":
            return found | {"local_rope": Rope(GEMMA3_LOCAL_BASE)}
        base = keys.maybe("rope.freq_base", (int, float)) or GEMMA2_BASE  # the first files have none
        return found | {"rope": Rope(float(base)), "softcap": keys.need("final_logit_softcapping", float),
                        "attention_softcap": keys.need("attn_logit_softcapping", float)}
    if family == "phi3":
        turned, window = keys.need("rope.dimension_count"), keys.maybe("attention.sliding_window")
        rope: Rope = common["rope"]
        short = rope.kind == "longrope" and rope.short_factor != rope.long_factor
        return {"rotary_dim": None if turned == common["head_dim"] else turned, "windows": (window,) * depth,
                "max_length": rope.original_length if short else common["max_length"]}
    if family == "olmo2":
        return {"pre_norms": False, "post_norms": True, "qk_norm_whole": True}
    if family == "granite":
        return {"embedding_scale": keys.need("embedding_scale", number), "residual_scale": keys.need("residual_scale", number),
                "attention_scale": keys.need("attention.scale", number), "logit_scale": 1 / keys.need("logit_scale", number)}
    if family == "smollm3":
        return {"unrotated": tuple(range(SMOLLM3_EVERY - 1, depth, SMOLLM3_EVERY))}
    if family == "qwen3_moe":
        return {"experts": Experts(
            count=keys.need("expert_count"), active=keys.need("expert_used_count"), hidden=keys.need("expert_feed_forward_length"),
            normalised=True, router_bias=False, bias=False, shared_hidden=None, dense_layers=(), clamp=None, alpha=None, balance=0.0)}
    return {}


def _phi3_rope(keys: ConfigFields, header: GgufHeader, path: Path) -> Rope:
    base, longest = float(keys.need("rope.freq_base", (int, float))), keys.need("context_length")
    original = keys.maybe("rope.scaling.original_context_length")
    if SHORT_FACTORS not in header.tensors or LONG_FACTORS not in header.tensors:
        return Rope(base)
    if original is None:
        raise UsageError(f"{path}: LongRoPE's factors without phi3.rope.scaling.original_context_length; geometry is never guessed")
    factors = _dequantised(path, header, {SHORT_FACTORS, LONG_FACTORS})
    short, long = (tuple(factors[name].tolist()) for name in (SHORT_FACTORS, LONG_FACTORS))
    return Rope(base, "longrope", longest / original, original_length=original, short_factor=short, long_factor=long, longest=longest,
                attention_factor=float(keys.need("rope.scaling.attn_factor", (int, float))))


def _family(metadata: Mapping[str, Any], path: Path) -> str:
    architecture, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if kind != "model":
        raise UsageError(f"{path}: general.type is {kind!r}; expected a model")
    if metadata.get("split.count", 1) != 1:
        raise UsageError(f"{path}: one of {metadata['split.count']} parts; join them with llama-gguf-split --merge")
    known = {family.gguf: name for name, family in reversed(FAMILIES.items()) if family.gguf}  # llama, not mistral
    if str(architecture) not in known:
        raise UsageError(f"{path}: architecture {architecture!r} is not supported; those that are: {', '.join(sorted(map(str, known)))}")
    return known[str(architecture)]


def _refuse_absurd(keys: ConfigFields, header: GgufHeader) -> None:
    """Refuse absurd sizes before anything is allocated by them."""
    for name in keys.read:
        if isinstance(keys.fields.get(name), int) and keys.fields[name] > _LARGEST:
            raise ArtifactError(f"{keys.where}: {name} is {keys.fields[name]:,}; that is damaged")
    if keys.need("block_count") > len(header.tensors):
        raise ArtifactError(f"{keys.where}: {keys.need('block_count')} layers in {len(header.tensors)} tensors")
    heads, shared = keys.need("attention.head_count"), keys.maybe("attention.head_count_kv")
    if shared is not None and heads % shared:
        raise ArtifactError(f"{keys.where}: {heads} heads cannot share {shared} key/value heads evenly")


def _head_dim(keys: ConfigFields, width: int, heads: int) -> int:
    """Head dimension; absent means width / heads, in llama.cpp as in every family here; the whole of a head is rotated."""
    names = ["attention.key_length", "attention.value_length", "rope.dimension_count"]
    if "rope.scaling.original_context_length" in keys.fields and "rope.scaling.type" not in keys.fields:
        names.remove("rope.dimension_count")  # Phi-3, of whose heads a part may be rotated
    said = {name: size for name in names if (size := keys.maybe(name)) is not None}
    if len(set(said.values())) > 1 or (not said and width % heads):
        raise UsageError(f"{keys.where}: {heads} heads in a width of {width} with {said} are not supported")
    return next(iter(said.values()), width // heads)


def _vocab(keys: ConfigFields, metadata: Mapping[str, Any]) -> int:
    tokens, said = metadata.get("tokenizer.ggml.tokens"), keys.maybe("vocab_size")
    count = len(tokens) if isinstance(tokens, list) else 0
    if not count or said not in (None, count):
        raise ArtifactError(f"{keys.where}: vocab_size is {said}, and there are {count} tokens")
    return count


def _rope(keys: ConfigFields, header: GgufHeader, head_dim: int, path: Path) -> Rope:
    base, kind = float(keys.need("rope.freq_base", (int, float))), keys.maybe("rope.scaling.type", str)
    factor = keys.maybe("rope.scaling.factor", (int, float))
    if kind in (None, "none") and factor is None:
        return _llama3(base, header, head_dim, path) if ROPE_FACTORS in header.tensors else Rope(base)
    if kind not in ("linear", "yarn") or factor is None or ROPE_FACTORS in header.tensors:
        raise UsageError(f"{path}: rope.scaling.type {kind!r} with factor {factor!r} is not supported; "
                         "expected none, linear or yarn with a factor, or Llama 3's table of factors")
    if kind == "linear":
        return Rope(base, "linear", float(factor))
    return _yarn(base, float(factor), keys.need("rope.scaling.original_context_length"))


def _yarn(base: float, factor: float, original: int) -> Rope:
    """YaRN with the paper's constants, which llama.cpp has in its code."""
    growth = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(base, "yarn", factor, original_length=original, beta_fast=32.0, beta_slow=1.0, attention_factor=growth, truncate=True)


def _llama3(base: float, header: GgufHeader, head_dim: int, path: Path) -> Rope:
    """The file has a divisor for each frequency, not the rule behind them: Meta's, or one we wrote, must give them."""
    factors = _dequantised(path, header, {ROPE_FACTORS})[ROPE_FACTORS]
    rule = META_LLAMA3 | {"factor": factors.max().item()}
    written = ConfigFields({key.removeprefix("assay.rope."): value for key, value in header.metadata.items()}, str(path))
    rule = {name: written.maybe(name, type(usual)) or usual for name, usual in rule.items()}
    rope = Rope(base, "llama3", **rule)
    due = _divisors(rope, head_dim)
    if due.shape != factors.shape or not torch.allclose(due, factors, rtol=1e-4):
        raise UsageError(f"{path}: {ROPE_FACTORS} does not follow Llama 3's rule with {rule}; it is not supported")
    return rope


def _divisors(rope: Rope, head_dim: int) -> Tensor:
    return inverse_frequencies(Rope(rope.base), head_dim) / inverse_frequencies(rope, head_dim)


def _refuse_unread(keys: ConfigFields, prefix: str) -> None:
    for name, value in keys.fields.items():
        if name in keys.read or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        raise UsageError(f"{keys.where}: key {prefix}{name} = {value!r} is not understood; it may change what the "
                         "model computes, so the model is not loaded without it")

# ---------------------------------------------------------------- geometry out


def _refuse_inexpressible(config: ModelConfig) -> None:
    family, rope, e = FAMILIES[config.family], config.rope, config.experts
    biased = config.qkv_bias or config.out_bias or config.mlp_bias
    every = {"gemma2": 2, "gemma3_text": GEMMA3_EVERY, "phi3": config.depth + 1}.get(config.family)
    windows = {window for window in config.windows if window is not None}
    due = tuple(None if every is None or not windows or (layer + 1) % every == 0 else max(windows) for layer in range(config.depth))
    own_scale = config.attention_scale is not None and config.family != "granite"
    yarn = rope is not None and rope.kind == "yarn" and rope != _yarn(rope.base, rope.factor or 1.0, rope.original_length or 0)
    problems = {
        f"the {config.family} family": family.gguf is None,
        "a sliding window": bool(windows) and every is None,
        "sliding windows in this order": every is not None and config.windows != due,
        "biases in a Llama": family.gguf == "llama" and biased,
        f"a scale of scores in {config.family}": own_scale,
        f"YaRN with these constants in {config.family}": yarn,
        "another local rotary base": config.local_rope is not None and config.local_rope != Rope(GEMMA3_LOCAL_BASE),
        "a rope scaling in gemma2": config.family == "gemma2" and rope is not None and rope.kind != "default",
        "these layers without positions": config.family == "smollm3" and config.unrotated != tuple(
            range(SMOLLM3_EVERY - 1, config.depth, SMOLLM3_EVERY)),
        "these experts": e is not None and (bool(e.dense_layers) or not e.normalised),
        "heads that are not width / heads wide in Qwen2": config.family == "qwen2" and config.heads * config.head_dim != config.width,
        "half a soft cap": config.family == "gemma2" and (config.softcap is None or config.attention_softcap is None),
        **dict.fromkeys(unexportable_features(config), True),
    }
    for problem, found in problems.items():
        if found:
            raise UsageError(f"GGUF cannot express {problem} so that its readers compute it; export a folder instead")


def _geometry(config: ModelConfig, dtype: Precision) -> dict[str, Any]:
    architecture = FAMILIES[config.family].gguf
    own: dict[str, Any] = {
        "vocab_size": config.vocab, "context_length": config.max_length, "embedding_length": config.width,
        "block_count": config.depth, "feed_forward_length": config.hidden, "attention.head_count": config.heads}
    if config.rope is None:
        own["attention.layer_norm_epsilon"] = config.norm_eps
    else:
        own |= {"attention.head_count_kv": config.kv_heads, "attention.layer_norm_rms_epsilon": config.norm_eps,
                "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
                "rope.dimension_count": config.rotary_dim or config.head_dim, "rope.freq_base": config.rope.base}
        if config.rope.kind in ("linear", "yarn"):
            own |= {"rope.scaling.type": config.rope.kind, "rope.scaling.factor": config.rope.factor}
        if config.rope.kind in ("yarn", "longrope"):
            own["rope.scaling.original_context_length"] = config.rope.original_length
    own |= _written_features(config)
    general = {"general.architecture": architecture, "general.type": "model", "general.file_type": FILE_TYPES[dtype],
               "general.quantization_version": 2}
    return general | {f"{architecture}.{key}": value for key, value in own.items()} | _llama3_rule(config.rope)


def _written_features(config: ModelConfig) -> dict[str, Any]:
    """Keys that `_features` reads."""
    window = max((window for window in config.windows if window is not None), default=None)
    found: dict[str, Any] = {} if window is None else {"attention.sliding_window": window}
    if config.family == "gemma2":
        found |= {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.softcap}
    if config.family == "phi3" and config.rope is not None:
        found["rope.scaling.original_context_length"] = config.rope.original_length or config.max_length
        if config.rope.kind == "longrope":
            found |= {"context_length": config.rope.longest, "rope.scaling.attn_factor": config.rope.attention_factor}
    if config.family == "granite":
        assert config.logit_scale is not None
        found |= {"embedding_scale": config.embedding_scale, "residual_scale": config.residual_scale,
                  "attention.scale": config.attention_scale, "logit_scale": 1 / config.logit_scale}
    if config.experts is not None:
        found |= {"expert_count": config.experts.count, "expert_used_count": config.experts.active,
                  "expert_feed_forward_length": config.experts.hidden}
    return found


def _llama3_rule(rope: Rope | None) -> dict[str, Any]:
    """Llama 3's rope scaling under our own name, since GGUF has none for it; readers that do not know it have the table."""
    if rope is None or rope.kind != "llama3":
        return {}
    return {f"assay.rope.{name}": getattr(rope, name) for name in (*META_LLAMA3, "factor")}


def _rope_factors(config: ModelConfig) -> dict[str, Tensor]:
    rope = config.rope
    if rope is not None and rope.short_factor is not None and rope.long_factor is not None:
        return {SHORT_FACTORS: torch.tensor(rope.short_factor), LONG_FACTORS: torch.tensor(rope.long_factor)}
    return {ROPE_FACTORS: _divisors(rope, config.head_dim)} if rope is not None and rope.kind == "llama3" else {}


def _ends(tokenizer: Tokenizer, stops: SpecialTokens | None) -> dict[str, int]:
    """Special-token ids that the other files of a model gave, where the tokenizer did not."""
    if stops is None:
        return {}
    named = {"bos": stops.bos, "eos": stops.eos}
    if stops.turn_end in stops.stop_ids and stops.turn_end != stops.eos:
        named["eot"] = stops.turn_end
    return {f"tokenizer.ggml.{name}_token_id": id for name, id in named.items() if id is not None}

# ---------------------------------------------------------------- bytes


def _dequantised(path: Path, header: GgufHeader, names: Collection[str]) -> dict[str, Tensor]:
    with open_regular(path) as fd, open(fd, "rb", closefd=False) as file:
        return {name: _tensor(file, name, info, path) for name, info in header.tensors.items() if name in names}


def _weights(path: Path, header: GgufHeader, config: ModelConfig) -> dict[str, Tensor]:
    """Weights under our names, each read when ours of that name is made: of the file's own no more than one matrix's parts are held at a
    time."""
    unread = {name: torch.empty(info.shape, device="meta") for name, info in header.tensors.items() if name not in FACTORS}
    name_of = {id(tensor): name for name, tensor in unread.items()}
    with open_regular(path) as fd, open(fd, "rb", closefd=False) as file:
        def read(tensor: Tensor) -> Tensor:
            name = name_of[id(tensor)]
            return _tensor(file, name, header.tensors[name], path)

        return from_foreign(config, gguf_layout(config), unread, str(path), read)


def _tensor(file: BinaryIO, name: str, info: GgufTensor, path: Path) -> Tensor:
    package = _package()
    file.seek(info.offset)
    rows = np.fromfile(file, np.uint8, info.bytes)
    if rows.size != info.bytes:
        raise ArtifactError(f"{path}: changed while it was read")
    with np.errstate(all="ignore"):  # a scale that is not finite shows below
        values = package.quants.dequantize(rows.reshape(*info.shape[:-1], -1), package.GGMLQuantizationType[info.type])
    if not np.isfinite(values).all():
        raise ArtifactError(f"{path}: {name} holds values that are not finite; the file is damaged, or was made badly")
    return torch.from_numpy(values.reshape(info.shape))


def _write(path: Path, metadata: dict[str, Any], tensors: Mapping[str, Tensor], types: Mapping[str, str]) -> None:
    """Write a file through the gguf package, one rounded tensor in memory at a time."""
    package = _package()
    with contextlib.closing(package.GGUFWriter(path, metadata["general.architecture"])) as writer:
        for key, value in metadata.items():
            if key != "general.architecture":  # the writer has it
                writer.add_key_value(key, value, _value_type(value))
        for name, tensor in tensors.items():
            kind = package.GGMLQuantizationType[types[name]]
            block, size = package.GGML_QUANT_SIZES[kind]
            if tensor.shape[-1] % block:
                raise UsageError(f"{name} has rows of {tensor.shape[-1]}, and {kind.name} blocks of {block}; use f16")
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.numel() // block * size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            writer.write_tensor_data(_rounded(name, tensor, types[name]))


def _rounded(name: str, tensor: Tensor, type: str) -> np.ndarray:
    package = _package()
    kind = package.GGMLQuantizationType[type]
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    with np.errstate(all="ignore"):  # what overflows shows below
        stored = package.quants.quantize(values, kind)
        back = package.quants.dequantize(stored, kind)
    if not np.isfinite(back).all():
        raise UsageError(f"{name} holds values that {type} cannot (largest: {np.abs(values).max():.3g}); use bf16")
    return stored


def _value_type(value: Any) -> Any:
    """Counts and ids are unsigned 32-bit, as llama.cpp writes them."""
    kinds = _package().GGUFValueType
    types = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}
    return types[type(value)]


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UsageError("GGUF files need the gguf package: pip install 'assay[gguf]'") from None
    return gguf
