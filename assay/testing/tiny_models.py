"""Tiny models of every family, their artifacts on disk, and tools that damage them.

A job that saves, merges or exports enters `plant` around that act alone: what is proven afterwards, by code that is
whole again, is the bytes. A job on bytes enters it once they lie on the disk.
"""

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.guard.proof import ProofRequest, examine_artifact
from assay.guard.proof_subject import ProofSampling
from assay.model.families import hf_layout, to_foreign
from assay.model.lora import LoraLinear, fresh, plan
from assay.model.patch import Patch
from assay.model.special_tokens import SpecialTokens, resolve_special_tokens
from assay.model.tokenizer import BYTE_OF, Tokenizer
from assay.model.transformer import Experts, ModelConfig, Rope, Transformer, initialised
from assay.seeds import generator
from assay.store import checkpoint
from assay.store.artifact import Destination, build_model, open_artifact
from assay.store.checkpoint import Checkpoint
from assay.store.safetensors_files import read_tensors, write_sharded, write_tensors
from assay.store.saving import Ancestor, Lineage, adapter_contents, model_contents, model_files
from assay.store.scratch import scratch_folder
from assay.testing.fault_injection import Job, Plant, nothing, on_disk
from assay.verdict import Verdict, proven, refuted

TINY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def tiny_config(family: str = "llama", vocab: int = 320) -> ModelConfig:
    """Two layers of width 64; grouped heads where the family has them, so that no layout error can hide in symmetry."""
    llama = ModelConfig(
        family="llama", vocab=vocab, width=64, depth=2, heads=4, kv_heads=2, head_dim=16, hidden=96, max_length=256, norm="rms",
        norm_eps=1e-5, rope=Rope(10000.0), activation="silu", gated=True, qkv_bias=False, out_bias=False, mlp_bias=False,
        qk_norm=False, windows=(None, None), tied=True, softcap=None, value_residual=False, attention_gate=False)
    variants = {
        "llama": llama,
        "llama3": replace(llama, rope=Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 32), tied=False),
        "mistral": replace(llama, family="mistral", windows=(24, 24), tied=False),
        "qwen2": replace(llama, family="qwen2", qkv_bias=True, rope=Rope(1000000.0)),
        "qwen3": replace(llama, family="qwen3", qk_norm=True, head_dim=24, rope=Rope(1000000.0)),
        "gpt2": replace(llama, family="gpt2", kv_heads=4, hidden=256, norm="layer", rope=None, activation="gelu_tanh", gated=False,
                        qkv_bias=True, out_bias=True, mlp_bias=True),
        "assay": replace(llama, family="assay", qk_norm=True, activation="relu2", gated=False, softcap=15.0),
        **_tiny_families(llama),
        "mixed": replace(llama, family="assay", depth=3, windows=(None, 24, None), value_residual=True, attention_gate=True),
    }
    return variants[family]


def _tiny_families(llama: ModelConfig) -> dict[str, ModelConfig]:
    """Tiny configs of the later families, each feature with a value at which its loss shows."""
    small = replace(llama, width=32, head_dim=8, hidden=48)
    gemma = replace(small, family="gemma2", norm_eps=1e-6, activation="gelu_tanh", post_norms=True, norm_plus_one=True,
                    embedding_scale=32**0.5, attention_scale=12**-0.5, softcap=3.0, attention_softcap=2.0, windows=(20, None))
    qwen = replace(small, family="qwen3_moe", qk_norm=True, tied=False, experts=Experts(
        count=6, active=2, hidden=24, normalised=True, router_bias=False, bias=False, shared_hidden=None, dense_layers=(), clamp=None,
        alpha=None, balance=0.001))
    assert qwen.experts is not None
    yarn = Rope(10000.0, "yarn", 4.0, original_length=64, beta_fast=32.0, beta_slow=1.0, attention_factor=1.1386294361119891, truncate=True)
    divisors = tuple(1.0 + 0.25 * i for i in range(3))
    longrope = Rope(10000.0, "longrope", 4.0, original_length=256, attention_factor=1.118033988749895, short_factor=divisors,
                    long_factor=tuple(3 * divisor for divisor in divisors), longest=1024)
    oss = replace(qwen.experts, router_bias=True, bias=True, clamp=1.5, alpha=1.702, hidden=48)
    return {
        "gemma2": gemma,
        "gemma3_text": replace(gemma, family="gemma3_text", qk_norm=True, softcap=None, attention_softcap=None, attention_scale=None,
                               rope=Rope(1000000.0, "linear", 8.0), local_rope=Rope(10000.0)),
        "phi3": replace(small, family="phi3", rope=longrope, rotary_dim=6, tied=False),
        "olmo2": replace(small, family="olmo2", pre_norms=False, post_norms=True, qk_norm=True, qk_norm_whole=True, tied=False),
        "smollm3": replace(small, family="smollm3", unrotated=(1,)),
        "granite": replace(small, family="granite", embedding_scale=12.0, residual_scale=0.22, attention_scale=0.5, logit_scale=1 / 8),
        "qwen3_moe": qwen,
        "qwen2_moe": replace(qwen, family="qwen2_moe", qk_norm=False, qkv_bias=True, experts=replace(
            qwen.experts, normalised=False, shared_hidden=40, dense_layers=(0,))),
        "gpt_oss": replace(qwen, family="gpt_oss", qk_norm=False, qkv_bias=True, out_bias=True, sinks=True, windows=(20, None),
                           rope=replace(yarn, truncate=False), experts=oss),
        "yarn": replace(small, family="qwen3", qk_norm=True, rope=yarn),
    }


def tiny_tokenizer(template: bool = True, words: Iterable[str] = ("Ġthe", "Ġand", "Ġis", "ing", "er")) -> Tokenizer:
    """Bytes, a few words of one token each, three special tokens and ChatML: real in kind, small in size."""
    vocab = dict(BYTE_OF) | {token: 256 + i for i, token in enumerate(TINY_SPECIAL_TOKENS)}
    merges: list[list[str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[:end - 1], word[end - 1]])
    added = [{"id": vocab[token], "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for token in TINY_SPECIAL_TOKENS]
    byte_level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    document = {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
                "decoder": byte_level, "truncation": None, "padding": None,
                "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                          "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}}
    stop = "<|im_end|>" if template else "<|endoftext|>"
    return Tokenizer.from_parts(document, TINY_CHAT_TEMPLATE if template else None, bos_token=None, eos_token=stop,
                                pad_token="<|endoftext|>")


WEIGHTS_FILE, ADAPTER_FILE, INDEX_FILE = "model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json"
_SHARD_BYTES = 60_000  # a tiny model makes six shards of these
ADAPTED_LAYERS, _RANK, ALPHA = ("q_proj", "v_proj", "down_proj"), 4, 8

# ---------------------------------------------------------------- models and folders


@functools.cache
def tokenizer_and_stops() -> tuple[Tokenizer, SpecialTokens]:
    tokenizer = tiny_tokenizer()
    return tokenizer, resolve_special_tokens(tokenizer, {}, {})


def tiny_model(family: str = "llama", seed: int = 0, **geometry: Any) -> Transformer:
    return initialised(replace(tiny_config(family), **geometry), seed)


def nudge(model: Transformer, far: float = 1e-3, seed: int = 0) -> Transformer:
    """Move the weights as after some training: each element that may learn has moved, by `far` at most."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                chance = generator(seed, "nudge", name)
                parameter.add_(torch.empty_like(parameter).uniform_(-far, far, generator=chance))
    return model


def save_model(where: Path, model: Transformer, lineage: Lineage | None = None, *, tokenizer: Tokenizer | None = None,
               sharded: bool = False, **parts: Any) -> Checkpoint:
    """A checkpoint of ours."""
    words = (tokenizer, resolve_special_tokens(tokenizer, {}, {})) if tokenizer else tokenizer_and_stops()
    contents = model_contents(model, *words, lineage or Lineage(), **parts)
    return checkpoint.write_checkpoint(where, contents, max_shard_bytes=_SHARD_BYTES if sharded else 10**9)


def save_hf_folder(where: Path, model: Transformer, *, sharded: bool = False) -> Path:
    """A Hugging Face folder: weights, config and tokenizer, and nothing that accounts for them."""
    where.mkdir(parents=True)
    weights = to_foreign(hf_layout(model.config), dict(model.named_parameters()))
    write_sharded(where, weights, _SHARD_BYTES if sharded else 10**9)
    for name, data in model_files(model.config, *tokenizer_and_stops(), torch.float32).items():
        (where / name).write_bytes(data)
    return where


def adapted_model(base: Path, *, far: float = 0.05, rslora: bool = False,
                  replaced: tuple[str, ...] = (), held: str | None = None) -> tuple[Transformer, Patch]:
    """A trained adapter on `base`, live, and the patch that it is; `replaced` names tensors that were trained whole, `held` the dtype
    that the base is held in."""
    artifact = open_artifact(base, to=None if held is None else Destination("cpu"), held=held)
    scale = ALPHA / (_RANK**0.5 if rslora else _RANK)
    planned = fresh(artifact.config, plan(artifact.config, ADAPTED_LAYERS), _RANK, scale, 0, artifact.digest)
    whole = {name: artifact.tensors[name] + 0.01 for name in replaced}
    model = nudge(build_model(replace(artifact, patch=replace(planned, replaced=whole))), far)
    return model, replace(live_patch(model, artifact.digest), replaced=whole)


def live_patch(model: Transformer, parent: str) -> Patch:
    """Patch that `detach` would return, with the model left as it is."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    return Patch(parent, {f"{name}.weight": layer.parts() for name, layer in layers.items()})


def save_adapter(where: Path, base: Path, *, rslora: bool = False, held: str | None = None, **options: Any) -> Checkpoint:
    """A checkpoint of ours that holds an adapter."""
    model, patch = adapted_model(base, rslora=rslora, held=held, **options)
    ground = Ancestor(open_artifact(base, held=held).digest, str(base), held)
    contents = adapter_contents(model, patch, ground, tokenizer_and_stops()[0], Lineage("moved", ground), rslora=rslora)
    return checkpoint.write_checkpoint(where, contents)


def save_peft_folder(where: Path, base: Path, **options: Any) -> Path:
    """A PEFT folder, which names its base by path and records nothing else about it."""
    save_adapter(where, base, **options)
    return forget_manifest(where)


def forget_manifest(folder: Path) -> Path:
    """Remove the manifest: what remains is what any other tool would have written."""
    for name in ("manifest.json", "probes.safetensors"):
        (folder / name).unlink()
    return folder

# ---------------------------------------------------------------- verdicts


def examine_folder(path: Path, **request: Any) -> list[Verdict]:
    """Verdicts of a proof, without `probing` of how the model speaks unless that is asked for: an untrained model babbles. A model that we
    refuse to understand (`assay prove` exits with 2) fits no architecture."""
    try:
        return examine_artifact(ProofRequest(str(path), **{"probing": ProofSampling(samples=0)} | request))
    except UsageError as error:
        return [refuted("architecture", str(error))]


def save_and_examine(where: Path, act: Callable[[], object], plant: Plant, **request: Any) -> list[Verdict]:
    """The fault strikes while saving: the save is refused, or what it wrote is examined."""
    try:
        with plant(where):
            act()
    except (ArtifactError, UsageError) as error:
        return [refuted("save", str(error))]
    return [proven("save", "it was written"), *examine_folder(where, **request)]

# ---------------------------------------------------------------- jobs


@functools.cache
def a_checkpoint(family: str = "llama", *, sharded: bool = False) -> Job:
    """Job: a checkpoint of ours, saved well; struck on the disk, or in our own code while it loads."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        where = save_model(folder / "checkpoint", tiny_model(family), sharded=sharded).folder
        with plant(where):
            return examine_folder(where)
    return job


@functools.cache
def a_folder(family: str = "llama", *, sharded: bool = False) -> Job:
    """Job: another tool's folder, struck on the disk: there is no manifest to help."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        where = save_hf_folder(folder / "model", tiny_model(family), sharded=sharded)
        with plant(where):
            return examine_folder(where)
    return job


@functools.cache
def a_save(family: str = "llama") -> Job:
    """Struck while our own code saves."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        where = folder / "checkpoint"
        return save_and_examine(where, lambda: save_model(where, tiny_model(family)), plant)
    return job


@functools.cache
def a_child(*, frozen: tuple[str, ...] = (), far: float = 1e-3) -> Job:
    """A trained model is saved beside its parent; struck while it is saved."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        parent = save_model(folder / "parent", tiny_model()).folder
        ancestor = Ancestor(open_artifact(parent).digest, str(parent))
        child = tiny_model()
        for name in frozen:
            child.get_parameter(name).requires_grad_(False)
        lineage, where = Lineage("moved", ancestor, frozen, movement_bound=far), folder / "child"
        return save_and_examine(where, lambda: save_model(where, nudge(child, far), lineage), plant)
    return job


def a_finetuned_folder(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: another tool's folder, proven against the model that it was trained from; struck on the disk."""
    if plant is nothing:
        return list(_clean_finetuned_folder())
    return _finetuned_folder(folder, plant)


@functools.cache
def _clean_finetuned_folder() -> list[Verdict]:
    """Verdicts on the clean twin, once for all faults."""
    with scratch_folder() as folder:
        return _finetuned_folder(folder, nothing)


def _finetuned_folder(folder: Path, plant: Plant) -> list[Verdict]:
    parent = save_hf_folder(folder / "parent", tiny_model())
    where = save_hf_folder(folder / "model", nudge(tiny_model()))
    with plant(where):
        return examine_folder(where, against=str(parent))

# ---------------------------------------------------------------- tools to plant with


def rewrite_tensors(file: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """A valid safetensors file of changed tensors in the place of the old one."""
    tensors = {name: tensor.clone() for name, tensor in read_tensors(file).items()}
    file.unlink()
    write_tensors(file, change(tensors))


def edit_json(file: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def changed_tensors(name: str, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Plant:
    """A file of the folder holds other tensors."""
    return on_disk(functools.wraps(change)(lambda folder: rewrite_tensors(folder / name, change)))  # it is of the module that changes


def changed_json(name: str, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Plant:
    """A file of the folder holds other fields."""
    return on_disk(functools.wraps(change)(lambda folder: edit_json(folder / name, change)))


def flip_bit(file: Path, byte: int, bit: int = 6) -> None:
    data = bytearray(file.read_bytes())
    data[byte] ^= 1 << bit
    file.write_bytes(data)


def truncate(file: Path, share: float = 0.5) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:int(len(data) * share)])


def exchange_files(one: Path, other: Path) -> None:
    aside = one.with_name(one.name + ".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*-of-*.safetensors"))


def copy_folder(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def rounded_to_four_bits(tensor: Tensor) -> Tensor:
    """Rounded in blocks of 32, as quantised bases are."""
    if tensor.dim() == 1:
        return tensor
    blocks = tensor.reshape(-1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 7
    return ((blocks / step).round() * step).reshape(tensor.shape)
