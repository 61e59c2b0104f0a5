"""Proof subject: the artifact that a proof examines, opened stage by stage, so that each refusal is a verdict of its own."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.guard.kept_artifacts import KeptArtifacts, PlacedArtifact, build_on, place_adapter
from assay.model.lora import experts_in, held_factors
from assay.model.probe_logits import ProbeLogits, compute_probe_logits
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, RawArtifact, with_untied_head
from assay.store.digests import tensor_digests

Expectation = Literal["moved", "same"]


@dataclass(frozen=True)
class ProofSampling:
    """How many texts a proof may sample to each prompt, and where it may compute. Clean ones are enough after the first; 0: none."""

    samples: int = 4
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise UsageError(f"--probe-samples {self.samples}: expected how many texts may be sampled to a prompt, or 0 for none")


DEFAULT_SAMPLING = ProofSampling()


@dataclass
class ProofSubject:
    """`expect` says how it should stand to `against`, its parent or source; `bound` is how far `same` may be off.

    Both are given as they were read and are then on `device`, where everything is computed; `read` is the first as it was read.
    """

    raw: RawArtifact
    artifact: Artifact
    against: Artifact | None = None
    expect: Expectation = "moved"
    bound: float | None = None
    probing: ProofSampling = DEFAULT_SAMPLING
    device: str = "cpu"
    kept: KeptArtifacts = field(default_factory=KeptArtifacts)

    def __post_init__(self) -> None:
        self.read, self._parent_read = self.artifact, self.against
        self.artifact = self._placed(self.artifact)
        self.against = None if self.against is None else self._placed(self.against)

    def _placed(self, artifact: Artifact) -> Artifact:
        if artifact.base is not None:
            return place_adapter(artifact, self.kept.place(artifact.base), self.device)
        return (PlacedArtifact(artifact) if artifact is self.read else self.kept.place(artifact)).on(self.device)

    @property
    def path(self) -> Path:
        return self.artifact.path

    @property
    def facts(self) -> dict:
        """Facts that the checkpoint's manifest recorded; empty for a folder that another tool wrote."""
        return self.raw.checkpoint.facts if self.raw.checkpoint else {}

    @cached_property
    def tensors(self) -> dict[str, tuple[torch.dtype, str]]:
        """dtype and sha256 of every tensor of the files, under its name in the live model."""
        live, known = live_tensors(self.read), {}
        if self.read.base is not None:  # a base that is kept was hashed when it was opened, and its files are as they were
            digests = self.kept.place(self.read.base).digests
            known = {id(tensor): digests[name] for name, tensor in self.read.base.tensors.items()}
        anew = tensor_digests({name: tensor for name, tensor in live.items() if id(tensor) not in known})
        return {name: (tensor.dtype, anew.get(name) or known[id(tensor)]) for name, tensor in live.items()}

    def live_digests(self) -> dict[str, str]:
        """sha256 of every parameter of the live model, as its file's dtype holds it. What it shares with a base's model on a GPU is
        hashed there once, and again where a bit of it has changed since."""
        parameters, shared = dict(self.model.named_parameters()), {}
        if self.device != "cpu" and self.read.base is not None:
            base = self.kept.place(self.read.base)
            digests = base.live_digests(self.device)
            shared = {(of.data_ptr(), of.shape): digests[name] for name, of in base.model(self.device).named_parameters()}
        known = {name: shared[place] for name, of in parameters.items() if (place := (of.data_ptr(), of.shape)) in shared}
        return known | tensor_digests({name: of.detach().to(self.tensors[name][0]) for name, of in parameters.items() if name not in known})

    @cached_property
    def model(self) -> Transformer:
        assert self.tensors  # hashed before there is a model: its parameters may share their memory
        return self._built(self.artifact)

    @cached_property
    def answers(self) -> ProbeLogits:
        return compute_probe_logits(self.model)

    @cached_property
    def against_model(self) -> Transformer:
        assert self.against is not None
        assert self._parent_read is not None
        return self._built(self.against) if self.against.base is not None else self.kept.place(self._parent_read).model(self.device)

    @cached_property
    def against_answers(self) -> ProbeLogits:
        return compute_probe_logits(self.against_model)

    def _built(self, artifact: Artifact) -> Transformer:
        """Build the model of an artifact; on a GPU an adapter's model shares the memory of its base's, which is there once."""
        read = self.read if artifact is self.artifact else self._parent_read
        if self.device != "cpu" and read is not None and read.base is not None:
            base = self.kept.place(read.base).model(self.device)
            artifact = replace(artifact, tensors={name: parameter.detach() for name, parameter in base.named_parameters()})
        return build_on(artifact, self.device)

    @property
    def is_copy(self) -> bool:
        """Said to equal what it is compared with: then the source itself stands for what was not recorded."""
        return self.expect == "same" and self.against is not None


def live_tensors(artifact: Artifact) -> dict[str, Tensor]:
    """Tensors of the files under the names of the live model, in which an adapted layer has its base and its factors."""
    if artifact.patch is None:
        return artifact.tensors
    live = with_untied_head(artifact.tensors, artifact.config) | artifact.patch.replaced
    for name, parts in artifact.patch.low_rank.items():
        layer = name.removesuffix(".weight")
        for kind in ("weight", "bias"):
            if (owned := f"{layer}.{kind}") in live:
                live[f"{layer}.base.{kind}"] = live.pop(owned)
        for i, (left, right) in enumerate(held_factors(parts, experts_in(artifact.config, name))):
            live |= {f"{layer}.lefts.{i}": left, f"{layer}.rights.{i}": right}
    return live
