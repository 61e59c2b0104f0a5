"""Steering vectors: a direction of the residual stream that is added after one block while it is wanted, and leaves no trace.

The vector is the mean difference of states at the tokens of answers that show something and of answers that do not (contrastive
activation addition, Rimsky et al., arXiv 2312.06681, over all tokens of an answer). It belongs to one set of weights, named by their
digest, and changes none of them: it is a patch of the forward pass alone.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from assay.data.batch import Batch
from assay.editing.block_hooks import StopForward, block, hooked
from assay.errors import ArtifactError
from assay.model.transformer import Transformer
from assay.store import durable

FILE, _KEY = "steering.safetensors", "vector"


@dataclass(frozen=True)
class SteeringVector:
    parent: str  # digest of the weights that it belongs to
    layer: int
    vector: Tensor  # (D,) fp32


@contextlib.contextmanager
def steered(model: Transformer, steering: SteeringVector, scale: float, digest: str) -> Iterator[Transformer]:
    """`scale` times the vector is added to the stream after its block for the length of the `with`; afterwards nothing is left of it."""
    if steering.parent != digest:
        raise ArtifactError(f"the steering vector belongs to weights {steering.parent[:12]}, these are {digest[:12]}: another model's "
                            "directions mean nothing here; make one of its own")
    if not 0 <= steering.layer < model.config.depth or len(steering.vector) != model.config.width:
        raise ArtifactError(f"the steering vector is of layer {steering.layer} and width {len(steering.vector)}; the model has "
                            f"{model.config.depth} layers of width {model.config.width}")
    added = scale * steering.vector.to(model.embed.weight.device)

    def add(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output + added.to(output.dtype)

    with hooked([block(model, steering.layer).register_forward_hook(add)]):
        yield model


def contrast_vector(model: Transformer, shown: Sequence[Batch], other: Sequence[Batch], layer: int, digest: str) -> SteeringVector:
    """Of answers that show what is wanted and of answers that do not, each a row; the tokens that have a weight are the answer's."""
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
    try:
        with safetensors.safe_open(str(file), "pt") as opened:
            facts, vector = opened.metadata() or {}, opened.get_tensor(_KEY)
        return SteeringVector(facts["parent"], int(facts["layer"]), vector.float().reshape(-1))
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"{file}: cannot be read as a steering vector ({error}); expected what assay steer wrote") from None
