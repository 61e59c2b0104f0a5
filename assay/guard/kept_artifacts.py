"""Kept artifacts: what a proving process has opened and may use again while its files are untouched: a parent, or an adapter's base.

Nothing of the artifact that is being proven is ever kept: its bytes are read anew for each proof.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.generate.sampler_weights import fingerprint
from assay.model.patch import LowRank, Patch
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, build_model, locate_artifact, open_artifact
from assay.store.digests import tensor_digests
from assay.store.safetensors_files import tensor_bytes

MOST_KEPT = 2  # artifacts: a parent and a base
MUCH_OF_GPU = 16  # one in so many bytes of a GPU is much for one proof of several
SPARE_OF_GPU = 8  # one in so many bytes of a GPU is left free
MOST_HOST_BYTES = 4 << 30  # of a kept model; the tensors of its files are mapped, and cost nothing
WORKSPACE = 1 << 30  # bytes of a GPU that a proof takes beside its models

FileStamps = tuple[tuple[str, int, int, int, int], ...]


@dataclass
class PlacedArtifact:
    """An artifact as it was read, and what was made of it on a device."""

    read: Artifact
    stamps: FileStamps = ()
    asked: str | None = None  # the dtype that it was to be held in
    proofs: int = 0  # that have used it
    _placed: dict[str, Artifact] = field(default_factory=dict)
    _models: dict[str, Transformer] = field(default_factory=dict)
    _live: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)  # fingerprint and digests of a model's parameters
    _consumers: dict[str, nn.Module] = field(default_factory=dict)  # another library's models of it
    _lent: dict[str, str] = field(default_factory=dict)  # the fingerprints of those when they were loaded

    def on(self, device: str) -> Artifact:
        if device == "cpu":
            return self.read
        if device not in self._placed:
            self._placed[device] = replace(self.read, tensors={name: tensor.to(device) for name, tensor in self.read.tensors.items()})
        return self._placed[device]

    def model(self, device: str) -> Transformer:
        if device not in self._models:
            self._models[device] = build_on(self.on(device), device)
        return self._models[device]

    @cached_property
    def digests(self) -> dict[str, str]:
        """name → sha256 of the tensors as they were read."""
        return tensor_digests(self.read.tensors)

    def live_digests(self, device: str) -> dict[str, str]:
        """name → sha256 of the model's parameters there, each as its file's dtype holds it. Hashed again unless no bit has changed."""
        model = self.model(device)
        mark = fingerprint(model)
        if self._live.get(device, ("",))[0] != mark:
            stored = {name: parameter.detach().to(self.read.tensors[name].dtype) for name, parameter in model.named_parameters()}
            self._live[device] = mark, tensor_digests(stored)
        return self._live[device][1]

    def lend_consumer(self, device: str, load: Callable[[], nn.Module]) -> nn.Module:
        """Lend another library's model of the artifact, for `take_back`; on a GPU the one that was lent before, if it came back as it
        was."""
        model = self._consumers.pop(device, None)
        if model is None:
            model = load()
            self._lent[device] = "" if device == "cpu" else fingerprint(model)
        return model

    def take_back(self, device: str, model: nn.Module) -> None:
        """Take a lent model back; one that is not what was lent, or is elsewhere, is not kept."""
        there = all(parameter.device.type == torch.device(device).type for parameter in model.parameters())
        if device != "cpu" and there and fingerprint(model) == self._lent[device]:
            self._consumers[device] = model

    def bytes_on(self, device: str) -> int:
        """Bytes that the artifact takes on a device now."""
        models = [where[device] for where in (self._models, self._consumers) if device in where]
        tensors: list[Tensor] = [tensor for model in models for tensor in model.parameters()]
        tensors += self._placed[device].tensors.values() if device in self._placed else []
        return sum({tensor.data_ptr(): tensor_bytes(tensor) for tensor in tensors}.values())

    def leave(self, device: str) -> None:
        """Leave a device: the memory there is given back once nobody else holds it."""
        made: tuple[dict[str, Any], ...] = (self._placed, self._models, self._live, self._consumers, self._lent)
        for kept in made:
            kept.pop(device, None)

    @property
    def devices(self) -> set[str]:
        return self._placed.keys() | self._models.keys() | self._consumers.keys()


class KeptArtifacts:
    """Cache of opened artifacts, whole models alone: an adapter is small, and opened anew on the base that is kept."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self._kept: list[PlacedArtifact] = []
        self.reused: list[Path] = []  # by the proof under way, though an earlier one opened them

    def open(self, path: str | Path, base: str | Path | None = None, *, held: str | None = None) -> Artifact:
        """Open an artifact as `open_artifact` does. One that was opened before, and whose files are the same files since, is not read
        again."""
        place = locate_artifact(path)
        if place.adapter:
            return open_artifact(path, base=base, opened=self.open, held=held)
        stamps = file_stamps(place.path)
        for kept in self._kept:
            if kept.read.path == place.path and kept.asked == held and kept.stamps == stamps:
                if kept.proofs and place.path not in self.reused:
                    self.reused.append(place.path)
                return kept.read
        artifact = open_artifact(path, base=base, held=held)
        self._kept = [kept for kept in self._kept if (kept.read.path, kept.asked) != (place.path, held)]
        if stamps == file_stamps(place.path):
            self._kept.append(PlacedArtifact(artifact, stamps, held))
        return artifact

    def place(self, artifact: Artifact) -> PlacedArtifact:
        """The kept one, if this is it."""
        return next((kept for kept in self._kept if kept.read is artifact), None) or PlacedArtifact(artifact)

    def bytes_on(self, device: str) -> int:
        return sum(kept.bytes_on(device) for kept in self._kept)

    def begin(self) -> None:
        self.reused = []

    def end(self) -> None:
        """End a proof: the oldest artifacts go, and on a GPU nothing stays that another program may need."""
        self._kept = self._kept[-self.most:]
        for kept in self._kept:
            kept.proofs += 1
            if fp32_bytes(kept.read.tensors) > MOST_HOST_BYTES:
                kept.leave("cpu")
        if torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()
            if free < total // SPARE_OF_GPU:
                for kept in self._kept:
                    for device in kept.devices - {"cpu"}:
                        kept.leave(device)
            torch.cuda.empty_cache()


def file_stamps(path: Path) -> FileStamps:
    """Name, size, times and inode of every file of a model."""
    files = [path] if path.is_file() else sorted(child for child in path.iterdir() if child.is_file())
    found = [(file.name, os.stat(file)) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in found)


def place_adapter(artifact: Artifact, base: PlacedArtifact, device: str) -> Artifact:
    """The adapter on a device, over the tensors that its base has there."""
    if device == "cpu" or artifact.patch is None:
        return artifact
    placed = base.on(device)
    return replace(artifact, tensors=placed.tensors, patch=_patch_on(artifact.patch, device), base=placed)


def build_on(artifact: Artifact, device: str) -> Transformer:
    """The model over tensors that lie there already: its parameters are those very tensors where they are fp32, and only tables move."""
    model = build_model(artifact)
    for module in model.modules():
        for name, table in module.named_buffers(recurse=False):
            setattr(module, name, table.to(device))
    return model


def _patch_on(patch: Patch, device: str) -> Patch:
    def moved(part: LowRank) -> LowRank:
        return replace(part, left=part.left.to(device), right=part.right.to(device))

    return replace(patch, low_rank={name: tuple(map(moved, parts)) for name, parts in patch.low_rank.items()},
                   replaced={name: tensor.to(device) for name, tensor in patch.replaced.items()})


def proof_device(asked: str, needed: int, headroom: int = 0) -> tuple[str, str | None]:
    """Device of a proof: the GPU it may use, if so many bytes are free there beside what the run still needs; else the CPU, and why."""
    if asked == "cpu":
        return "cpu", None
    free, total = torch.cuda.mem_get_info(asked)
    if free - needed - headroom >= total // SPARE_OF_GPU:
        return asked, None
    return "cpu", (f"proven on the CPU: {needed / 2**30:.1f} GiB are needed on {asked}, {free / 2**30:.1f} of {total / 2**30:.0f} GiB are "
                   f"free, and the run may take {(headroom + total // SPARE_OF_GPU) / 2**30:.1f} of them")


@contextlib.contextmanager
def gpu_turn(device: str, needed: int) -> Iterator[None]:
    """Proofs side by side each ask what is free: those that take much of a GPU go one after another, whoever asked for them."""
    if device == "cpu" or needed <= torch.cuda.mem_get_info(device)[1] // MUCH_OF_GPU:
        yield
        return
    with (Path(tempfile.gettempdir()) / f"assay-proofs-{os.getuid()}").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fp32_bytes(tensors: dict[str, Tensor]) -> int:
    return 4 * sum(tensor.numel() for tensor in tensors.values())
