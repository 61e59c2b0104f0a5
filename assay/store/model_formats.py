"""Model formats: what every reader asks of a kind of file or folder that holds a model, one record for each kind.

Single files that hold a whole model (GGUF, squeezed) say here how they are read, described and compared; folders are read by
artifact.py, which also holds the register of all formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig

FOREIGN = "UNPROVEN: another tool wrote it; assay prove shows what can be proven"


@dataclass(frozen=True)
class FileModel:
    """A model out of one file that holds all of it."""

    config: ModelConfig
    tensors: dict[str, Tensor]  # under our names, as float32
    tokenizer: Tokenizer
    stops: SpecialTokens
    facts: dict[str, Any]  # the file's metadata or header


@dataclass(frozen=True)
class Description:
    """Description of a file or folder from its headers and hashes, without loading a weight."""

    architecture: dict[str, Any]
    tensors: dict[str, dict[str, Any]]  # name → dtype, shape
    lineage: dict[str, Any] = field(default_factory=dict)
    verdict: str = FOREIGN


@dataclass(frozen=True)
class ModelFormat:
    """`rounding` is the function of the source's tensors and the file's facts that gives its weights to the last bit; `bound` is how
    far a file may answer from its source, where its weights only come near, and `tensor_bounds` how far each of its tensors may be."""

    name: str
    describe: Callable[[Path], Description]
    suffix: str | None = None  # of a single file; None: a folder
    read: Callable[[Path], FileModel] | None = None  # of a single file
    rounding: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] | None = None
    bound: Callable[[Path], float] | None = None
    tensor_bounds: Callable[[Path], Mapping[str, float]] | None = None
    verified: str | None = None  # what reading it has checked already, in words
    unreadable: str | None = None  # why no other tool reads it, in words


def shown_geometry(config: ModelConfig) -> dict[str, Any]:
    e = config.experts
    mixture = {} if e is None else {"experts": f"{e.active} of {e.count}, each of {e.hidden}"}
    return {"family": config.family, "layers": config.depth, "width": config.width,
            "heads": f"{config.heads}/{config.kv_heads} of {config.head_dim}", "mlp": config.hidden, "vocabulary": config.vocab,
            "context": config.max_length, "rope base": config.rope.base if config.rope else "none",
            "head": "tied" if config.tied else "separate", **mixture}
