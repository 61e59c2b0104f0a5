"""Hooks on transformer blocks: keys, values and states read or changed while the one forward path runs.

A key is what enters a block's MLP down-projection, a value what leaves it, a state the residual stream after the block.
Shapes: B rows, T time, D width, F the MLP's inner width.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from assay.model.attention import PADDING, documents_from_lengths
from assay.model.transformer import Block, Transformer

See = Callable[[int, Tensor], None]


class StopForward(Exception):
    """Raised by a hook once all that was wanted has been seen; the layers above need not run."""


def block(model: Transformer, layer: int) -> Block:
    found = model.blocks[layer]
    assert isinstance(found, Block)
    return found


def down_projection(model: Transformer, layer: int) -> nn.Module:
    return block(model, layer).mlp.down


def down_projection_name(layer: int) -> str:
    """The parameter that edits change."""
    return f"blocks.{layer}.mlp.down.weight"


@contextlib.contextmanager
def hooked(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """The hooks are gone after the block, whatever happened in it."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def watch_keys(model: Transformer, tokens: Tensor, documents: Tensor, layers: Sequence[int], see: See) -> None:
    """`see(layer, keys_BTF)` for each layer, in order; what lies above the last of them does not run."""
    def hook(layer: int) -> RemovableHandle:
        return down_projection(model, layer).register_forward_pre_hook(lambda _, inputs: see(layer, inputs[0]))

    def stop(*_: object) -> None:
        raise StopForward

    handles = [hook(layer) for layer in layers] + [down_projection(model, max(layers)).register_forward_hook(stop)]
    with hooked(handles), contextlib.suppress(StopForward):
        model.hidden(tokens, documents=documents)


@torch.no_grad()
def keys_and_state(model: Transformer, rows: Sequence[Sequence[int]], at: Sequence[int], layer: int,
                   top: int) -> tuple[Tensor, Tensor]:
    """MLP key of `layer` (B, F) and hidden state after block `top` (B, D), at one position of each row."""
    tokens, documents = padded(rows, model.embed.weight.device)
    index, seen = torch.arange(len(rows), device=tokens.device), {}
    places = torch.tensor(at, device=tokens.device)

    def key(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["key"] = inputs[0][index, places]

    def state(_: nn.Module, __: object, output: Tensor) -> None:
        seen["state"] = output[index, places]
        raise StopForward

    handles = [down_projection(model, layer).register_forward_pre_hook(key), block(model, top).register_forward_hook(state)]
    with hooked(handles), contextlib.suppress(StopForward):
        model.hidden(tokens, documents=documents)
    return seen["key"], seen["state"]


def padded(rows: Sequence[Sequence[int]], device: torch.device, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of different length as (tokens, documents); padding belongs to no document."""
    lengths, width = [len(row) for row in rows], max(1, *(len(row) for row in rows))
    documents = documents_from_lengths(lengths, width, left=left)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    tokens[documents != PADDING] = torch.tensor([id for row in rows for id in row], dtype=torch.long)
    return tokens.to(device), documents.to(device)
