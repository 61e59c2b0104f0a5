"""Where faults strike: tiny models and adapters made in a blink, the jobs that faults share, the tools to plant them.

A job that saves, merges or exports enters `plant` around that act alone: what is proven afterwards, by code that is
whole again, is the bytes. A job on bytes enters it once they lie on the disk.
"""

import contextlib
import functools
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.guard.proof import Request, examine
from assay.model.families import hf_layout, to_foreign
from assay.model.lora import LoraLinear, fresh, plan
from assay.model.patch import Patch
from assay.model.stops import Stops, resolve_stops
from assay.model.tiny import tiny_config, tiny_tokenizer
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer, initialised
from assay.seeds import generator
from assay.store import checkpoint
from assay.store.artifact import build, open_artifact
from assay.store.checkpoint import Checkpoint
from assay.store.pack import Ancestor, Lineage, adapter_contents, model_contents, model_files
from assay.store.tensors import read_tensors, write_sharded, write_tensors
from assay.verdict import Verdict, proven, refuted
from assay.zoo.fault import Job, Plant, fault

WEIGHTS, ADAPTER, INDEX = "model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 60_000  # a tiny model makes six shards of these
TARGETS, RANK, ALPHA = ("q_proj", "v_proj", "down_proj"), 4, 8

# ---------------------------------------------------------------- models and folders


@functools.cache
def words() -> tuple[Tokenizer, Stops]:
    tokenizer = tiny_tokenizer()
    return tokenizer, resolve_stops(tokenizer, {}, {})


def tiny(family: str = "llama", seed: int = 0, **geometry: Any) -> Transformer:
    return initialised(replace(tiny_config(family), **geometry), seed)


def nudged(model: Transformer, far: float = 1e-3, seed: int = 0) -> Transformer:
    """As after some training: each element that may learn has moved, by `far` at most."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                chance = generator(seed, "nudge", name)
                parameter.add_(torch.empty_like(parameter).uniform_(-far, far, generator=chance))
    return model


def save(where: Path, model: Transformer, lineage: Lineage | None = None, *, sharded: bool = False,
         **parts: Any) -> Checkpoint:
    """A checkpoint of ours."""
    contents = model_contents(model, *words(), lineage or Lineage(), **parts)
    return checkpoint.write(where, contents, max_shard_bytes=SHARD_BYTES if sharded else 10**9)


def save_as_others_do(where: Path, model: Transformer, *, sharded: bool = False) -> Path:
    """A Hugging Face folder: weights, config and tokenizer, and nothing that accounts for them."""
    where.mkdir(parents=True)
    weights = to_foreign(hf_layout(model.config), dict(model.named_parameters()))
    write_sharded(where, weights, SHARD_BYTES if sharded else 10**9)
    for name, data in model_files(model.config, *words(), torch.float32).items():
        (where / name).write_bytes(data)
    return where


def adapted(base: Path, *, far: float = 0.05, rslora: bool = False,
            replaced: tuple[str, ...] = ()) -> tuple[Transformer, Patch]:
    """A trained adapter on `base`, live, and the patch that it is; `replaced` names tensors that were trained whole."""
    artifact = open_artifact(base)
    scale = ALPHA / (RANK**0.5 if rslora else RANK)
    planned = fresh(artifact.config, plan(artifact.config, TARGETS), RANK, scale, 0, artifact.digest)
    whole = {name: artifact.tensors[name] + 0.01 for name in replaced}
    model = nudged(build(replace(artifact, patch=replace(planned, replaced=whole))), far)
    return model, replace(live_patch(model, artifact.digest), replaced=whole)


def live_patch(model: Transformer, parent: str) -> Patch:
    """What `detach` would return, with the model left as it is."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    return Patch(parent, {f"{name}.weight": layer.parts() for name, layer in layers.items()})


def save_adapter(where: Path, base: Path, *, rslora: bool = False, **options: Any) -> Checkpoint:
    """A checkpoint of ours that holds an adapter."""
    model, patch = adapted(base, rslora=rslora, **options)
    ground = Ancestor(open_artifact(base).digest, str(base))
    contents = adapter_contents(model, patch, ground, words()[0], Lineage("moved", ground), rslora=rslora)
    return checkpoint.write(where, contents)


def save_adapter_as_others_do(where: Path, base: Path, **options: Any) -> Path:
    """A PEFT folder, which names its base by path and records nothing else about it."""
    save_adapter(where, base, **options)
    return forget_manifest(where)


def forget_manifest(folder: Path) -> Path:
    """What remains is what any other tool would have written."""
    for name in ("manifest.json", "probes.safetensors"):
        (folder / name).unlink()
    return folder

# ---------------------------------------------------------------- verdicts


def examined(path: Path, **request: Any) -> list[Verdict]:
    """What a proof says. A model that we refuse to understand (`assay prove` exits with 2) fits no architecture."""
    try:
        return examine(Request(str(path), **request))
    except UsageError as error:
        return [refuted("architecture", str(error))]


def saved_and_examined(where: Path, act: Callable[[], object], plant: Plant, **request: Any) -> list[Verdict]:
    """The fault strikes while saving: the save is refused, or what it wrote is examined."""
    try:
        with plant(where):
            act()
    except (ArtifactError, UsageError) as error:
        return [refuted("save", str(error))]
    return [proven("save", "it was written"), *examined(where, **request)]

# ---------------------------------------------------------------- jobs


def a_checkpoint(family: str = "llama", *, sharded: bool = False) -> Job:
    """Ours, saved well; struck on the disk, or in our own code while it loads."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        where = save(folder / "checkpoint", tiny(family), sharded=sharded).folder
        with plant(where):
            return examined(where)
    return job


def a_folder(family: str = "llama", *, sharded: bool = False) -> Job:
    """Another tool's, struck on the disk: there is no manifest to help."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        where = save_as_others_do(folder / "model", tiny(family), sharded=sharded)
        with plant(where):
            return examined(where)
    return job


def a_save(family: str = "llama") -> Job:
    """Struck while our own code saves."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        where = folder / "checkpoint"
        return saved_and_examined(where, lambda: save(where, tiny(family)), plant)
    return job


def a_child(*, frozen: tuple[str, ...] = (), far: float = 1e-3) -> Job:
    """A trained model is saved beside its parent; struck while it is saved."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        parent = save(folder / "parent", tiny()).folder
        ancestor = Ancestor(open_artifact(parent).digest, str(parent))
        child = tiny()
        for name in frozen:
            child.get_parameter(name).requires_grad_(False)
        lineage, where = Lineage("moved", ancestor, frozen, movement_bound=far), folder / "child"
        return saved_and_examined(where, lambda: save(where, nudged(child, far), lineage), plant)
    return job

def a_finetuned_folder(folder: Path, plant: Plant) -> list[Verdict]:
    """Another tool's, proven against the model that it was trained from; struck on the disk."""
    parent = save_as_others_do(folder / "parent", tiny())
    where = save_as_others_do(folder / "model", nudged(tiny()))
    with plant(where):
        return examined(where, against=str(parent))

# ---------------------------------------------------------------- tools to plant with


def fault_where(package: str) -> Callable[..., Callable[[Plant], Plant]]:
    """`fault`, where the package is installed: what cannot be read on this machine cannot fail on it."""
    return fault if importlib.util.find_spec(package) else lambda name, **facts: lambda plant: plant


def on_disk(strike: Callable[[Path], None]) -> Plant:
    """A plant that changes bytes; the folder goes when the job is done, so nothing is put back."""
    @contextlib.contextmanager
    @functools.wraps(strike)
    def plant(folder: Path) -> Iterator[None]:
        strike(folder)
        yield
    return plant


@contextlib.contextmanager
def swapped(owner: Any, name: str, other: Any) -> Iterator[None]:
    """`owner.name` is another for the length of the block."""
    kept = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def rewrite(file: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """A valid safetensors file of changed tensors in the place of the old one."""
    tensors = {name: tensor.clone() for name, tensor in read_tensors(file).items()}
    file.unlink()
    write_tensors(file, change(tensors))


def edit_json(file: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def flip_bit(file: Path, byte: int, bit: int = 6) -> None:
    data = bytearray(file.read_bytes())
    data[byte] ^= 1 << bit
    file.write_bytes(data)


def truncate(file: Path, share: float = 0.5) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:int(len(data) * share)])


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name(one.name + ".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*-of-*.safetensors"))


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def four_bits(tensor: Tensor) -> Tensor:
    """Rounded in blocks of 32, as quantised bases are."""
    if tensor.dim() == 1:
        return tensor
    blocks = tensor.reshape(-1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 7
    return ((blocks / step).round() * step).reshape(tensor.shape)
