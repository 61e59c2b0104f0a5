"""Steering vectors: a direction of the residual stream that is added after one block while it is wanted, and leaves no trace.

The vector is the mean difference of states at the tokens of answers that show something and of answers that do not (contrastive
activation addition, Rimsky et al., arXiv 2312.06681, over all tokens of an answer). It belongs to one set of weights, named by their
digest, and changes none of them: it is a patch of the forward pass alone.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from assay.data.batch import Batch
from assay.editing.block_hooks import StopForward, block, hooked
from assay.errors import ArtifactError, UsageError
from assay.model.transformer import Transformer
from assay.store import durable
from assay.strict_json import read_json

FILE, RECORD_FILE, _KEY = "steering.safetensors", "steering.json", "vector"


@dataclass(frozen=True)
class SteeringVector:
    parent: str  # digest of the weights that it belongs to
    layer: int
    vector: Tensor  # (D,) fp32


@dataclass(frozen=True)
class AskedSteering:
    """Steering asked for by --steer FILE[:SCALE]. `notes` say what assay steer measured of it, and what nobody has."""

    vector: SteeringVector
    path: str
    scale: float
    notes: tuple[str, ...]

    def facts(self) -> dict[str, str | float | int]:
        return {"path": self.path, "layer": self.vector.layer, "scale": self.scale}


def asked_steering(text: str) -> AskedSteering:
    """FILE or FOLDER, or either with a scale behind a colon; without one, the scale that it was measured at."""
    path, _, scale = text.rpartition(":")
    if Path(text).exists() or not path:
        path, scale = text, ""
    try:
        asked = float(scale) if scale else None
    except ValueError:
        raise UsageError(f"--steer {text}: {scale!r} is no number; expected FILE or FILE:SCALE, as in vectors/polite:1.5") from None
    if asked is not None and not math.isfinite(asked):
        raise UsageError(f"--steer {text}: a scale of {asked}; expected a finite number")
    vector = read_steering(path)
    beside = (Path(path) if Path(path).is_dir() else Path(path).parent) / RECORD_FILE
    found = read_json(beside) if beside.is_file() else None
    measured = None if found is None else float(found["options"]["scale"])
    scale_used = asked if asked is not None else 1.0 if measured is None else measured
    return AskedSteering(vector, path, scale_used, tuple(_measured_notes(found, measured, scale_used)))


def _measured_notes(found: dict[str, Any] | None, measured: float | None, scale: float) -> Iterator[str]:
    if found is None:
        yield f"steering: no {RECORD_FILE} lies beside the vector: neither its effect nor its cost is known"
    elif scale != measured:
        yield f"steering: measured at scale {measured:g} and used at {scale:g}, where neither effect nor cost was measured"
    else:
        yield from (f"steering: {verdict['outcome']} {verdict['check']}: {verdict['reason']}" for verdict in found["verdicts"])


def steer_for_good(model: Transformer, asked: AskedSteering, digest: str) -> None:
    """Steer a model for as long as it lives, unlike `steered`: before an engine is made of it, which samples and is checked with the
    vector."""
    add_vector(model, asked.vector, asked.scale, digest)


@contextlib.contextmanager
def steered(model: Transformer, steering: SteeringVector, scale: float, digest: str) -> Iterator[Transformer]:
    """`scale` times the vector is added to the stream after its block for the length of the `with`; afterwards nothing is left of it."""
    with hooked([add_vector(model, steering, scale, digest)]):
        yield model


def add_vector(model: Transformer, steering: SteeringVector, scale: float, digest: str) -> RemovableHandle:
    """Add a steering vector until the handle is removed. Refused where the vector is of other weights."""
    if steering.parent != digest:
        raise ArtifactError(f"the steering vector belongs to weights {steering.parent[:12]}, these are {digest[:12]}: another model's "
                            "directions mean nothing here; make one of its own")
    if not 0 <= steering.layer < model.config.depth or len(steering.vector) != model.config.width:
        raise ArtifactError(f"the steering vector is of layer {steering.layer} and width {len(steering.vector)}; the model has "
                            f"{model.config.depth} layers of width {model.config.width}")
    added = scale * steering.vector.to(model.embed.weight.device)

    def add(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output + added.to(output.dtype)

    return block(model, steering.layer).register_forward_hook(add)


def contrast_vector(model: Transformer, shown: Sequence[Batch], other: Sequence[Batch], layer: int, digest: str) -> SteeringVector:
    """Steering vector: mean state of answers that show what is wanted minus that of answers that do not, each answer a row; the tokens that
    have a weight are the answer's."""
    return SteeringVector(digest, layer, (answer_states(model, shown, layer) - answer_states(model, other, layer)).float().cpu())


@torch.no_grad()
def answer_states(model: Transformer, batches: Sequence[Batch], layer: int) -> Tensor:
    """(D,) in float64: the mean over answers of each one's mean state after the block."""
    means: list[Tensor] = []

    def look(batch: Batch) -> Callable[..., None]:
        def state(_: nn.Module, __: object, output: Tensor) -> None:
            weight = (batch.weight > 0).double().to(output.device)
            means.append(torch.einsum("btd,bt->bd", output.double(), weight) / weight.sum(1, keepdim=True))
            raise StopForward
        return state

    for batch in batches:
        here = batch.to(model.embed.weight.device)
        with hooked([block(model, layer).register_forward_hook(look(here))]), contextlib.suppress(StopForward):
            model.hidden(here.tokens, documents=here.documents, positions=here.positions)
    return torch.cat(means).mean(0)


def write_steering(steering: SteeringVector, folder: Path) -> Path:
    durable.make_folder(folder)
    facts = {"format": "pt", "parent": steering.parent, "layer": str(steering.layer)}
    durable.replace_file(folder / FILE, safetensors.torch.save({_KEY: steering.vector.contiguous()}, facts))
    return folder / FILE


def read_steering(path: Path | str) -> SteeringVector:
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise UsageError(f"{file}: no such file; expected what assay steer wrote")
    try:
        with safetensors.safe_open(str(file), "pt") as opened:
            facts, vector = opened.metadata() or {}, opened.get_tensor(_KEY)
        return SteeringVector(facts["parent"], int(facts["layer"]), vector.float().reshape(-1))
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"{file}: cannot be read as a steering vector ({error}); expected what assay steer wrote") from None
