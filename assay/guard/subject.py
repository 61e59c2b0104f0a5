"""What a proof looks at: an artifact opened stage by stage, so that each stage's refusal becomes a verdict of its own."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from assay.model.probe import Answer, answer
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, Raw, build

Expectation = Literal["moved", "same"]


@dataclass
class Subject:
    """`expect` says how it should stand to `against`, its parent or source; `bound` is how far `same` may be off."""

    raw: Raw
    artifact: Artifact
    against: Artifact | None = None
    expect: Expectation = "moved"
    bound: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.artifact.path

    @property
    def facts(self) -> dict:
        """What the checkpoint's manifest recorded; empty for what another tool wrote."""
        return self.raw.checkpoint.facts if self.raw.checkpoint else {}

    @cached_property
    def model(self) -> Transformer:
        return build(self.artifact)

    @cached_property
    def answers(self) -> Answer:
        return answer(self.model)

    @cached_property
    def against_answers(self) -> Answer:
        assert self.against is not None
        return answer(build(self.against))
