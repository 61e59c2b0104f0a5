"""Proof subject: the artifact that a proof examines, opened stage by stage, so that each refusal is a verdict of its own."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.model.lora import experts_in, held_factors
from assay.model.probe_logits import ProbeLogits, compute_probe_logits
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, RawArtifact, build_model, with_untied_head
from assay.store.safetensors_files import tensor_sha256

Expectation = Literal["moved", "same"]


@dataclass(frozen=True)
class ProofSampling:
    """How many texts a proof may sample to each prompt, and where. Clean ones are enough after the first; 0: none at all."""

    samples: int = 4
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise UsageError(f"--probe-samples {self.samples}: expected how many texts may be sampled to a prompt, or 0 for none")


DEFAULT_SAMPLING = ProofSampling()


@dataclass
class ProofSubject:
    """`expect` says how it should stand to `against`, its parent or source; `bound` is how far `same` may be off."""

    raw: RawArtifact
    artifact: Artifact
    against: Artifact | None = None
    expect: Expectation = "moved"
    bound: float | None = None
    probing: ProofSampling = DEFAULT_SAMPLING

    @property
    def path(self) -> Path:
        return self.artifact.path

    @property
    def facts(self) -> dict:
        """What the checkpoint's manifest recorded; empty for what another tool wrote."""
        return self.raw.checkpoint.facts if self.raw.checkpoint else {}

    @cached_property
    def tensors(self) -> dict[str, tuple[torch.dtype, str]]:
        """dtype and sha256 of every tensor of the files, under its name in the live model."""
        return {name: (tensor.dtype, tensor_sha256(tensor)) for name, tensor in live_tensors(self.artifact).items()}

    @cached_property
    def model(self) -> Transformer:
        assert self.tensors  # hashed before there is a model: its parameters may share their memory
        return build_model(self.artifact)

    @cached_property
    def answers(self) -> ProbeLogits:
        return compute_probe_logits(self.model)

    @cached_property
    def against_model(self) -> Transformer:
        assert self.against is not None
        return build_model(self.against)

    @cached_property
    def against_answers(self) -> ProbeLogits:
        return compute_probe_logits(self.against_model)

    @property
    def is_copy(self) -> bool:
        """Said to equal what it is compared with: then the source itself stands for what was not recorded."""
        return self.expect == "same" and self.against is not None


def live_tensors(artifact: Artifact) -> dict[str, Tensor]:
    """What the files hold, under the names of the live model: there an adapted layer has its base and its parts."""
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
