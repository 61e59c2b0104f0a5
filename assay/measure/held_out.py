"""Held-out text scored by a model: bits per raw byte with its interval over documents, and a loss per document for pairing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import Batch
from assay.data.corpus import Corpus
from assay.data.held_out import DocumentLosses, document_losses, held_out_batches, measurable
from assay.learn.objectives import next_token
from assay.measure.estimate import Estimate, bits_per_byte
from assay.model.attention import PADDING
from assay.model.transformer import Transformer


@dataclass(frozen=True)
class HeldOut:
    bits_per_byte: Estimate
    loss: float  # nats per token, over all tokens
    per_document: NDArray[np.float64]  # nats per token of each document, in the same order at every evaluation
    documents: DocumentLosses


def score(model: Transformer, corpus: Corpus, *, rows: int, length: int, context: int = 1, count: int | None = None) -> HeldOut:
    """`count` documents, or all. A document longer than a row is read in pieces that see `context` tokens of the one before."""
    batches = held_out_batches(corpus, rows=rows, length=length, context=context, documents=measurable(corpus, count))
    losses = document_losses(corpus, _scored(model, batches, rows))
    mean = float(losses.nll.sum() / losses.tokens.sum())
    return HeldOut(bits_per_byte(losses.nll, losses.bytes), mean, losses.nll / losses.tokens, losses)


@torch.no_grad()
def _scored(model: Transformer, batches: Iterator[Batch], rows: int) -> Iterator[tuple[Batch, Tensor]]:
    training, device = model.training, model.embed.weight.device
    model.eval()
    try:
        for batch in batches:
            result = next_token(model, _filled(batch, rows).to(device))
            assert result.losses is not None
            yield batch, result.losses[: len(batch)]
    finally:
        model.train(training)


def _filled(batch: Batch, rows: int) -> Batch:
    """The last batch with rows of padding: one shape, so that nothing is compiled anew for it."""
    missing = rows - len(batch)
    if not missing:
        return batch
    padded: dict[str, Any] = {
        name: torch.cat([stream, stream.new_full((missing, stream.shape[1]), PADDING if name == "documents" else 0)])
        for name, stream in batch.streams().items()}
    return replace(batch, **padded, ids=())
