"""Held-out loss of a model: an estimate with its interval over documents, and a loss per document for pairing."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import Batch
from assay.data.held_out_documents import DocumentLosses, document_losses, held_out_document_batches, measurable_documents
from assay.data.token_corpus import Corpus
from assay.errors import GuardStop
from assay.learn.objectives import Objective, next_token
from assay.model.attention import PADDING
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.statistics.estimate import Estimate, bits_per_byte, cost_ratio

SAME_SUM = 1e-6  # relative: sums in another order


@dataclass(frozen=True)
class HeldOut:
    estimate: Estimate  # in `unit`
    # blended: a teacher's term is in it
    unit: Literal["bits per byte", "nats per token", "blended nats per token", "loss per pair", "loss per example"]
    loss: float  # nats per token, over all tokens
    per_document: NDArray[np.float64]  # nats per token of each document, in the same order at every evaluation
    documents: DocumentLosses | None = None  # of a corpus, whose raw bytes are known
    tokens: NDArray[np.float64] | None = None  # that counted in each conversation
    digest: str | None = None  # of the text that was scored: two evaluations compare where it is the same
    columns: Mapping[str, float] = field(default_factory=dict)  # what else was measured, for a line of metrics
    words: str = ""  # of them
    doubts: Sequence[str] = ()  # what they do not tell

    @property
    def token_counts(self) -> NDArray[np.float64] | None:
        """Tokens that counted in each document: with them as weights the mean of `per_document` is `loss`."""
        return self.documents.tokens.astype(np.float64) if self.documents is not None else self.tokens

    @property
    def bits_per_byte(self) -> Estimate:
        assert self.unit == "bits per byte", f"scored in {self.unit}"
        return self.estimate


def score_corpus(model: Transformer, corpus: Corpus, *, rows: int, length: int, context: int = 1, count: int | None = None) -> HeldOut:
    """`count` documents, or all. A document longer than a row is read in pieces that see `context` tokens of the one before."""
    batches = held_out_document_batches(corpus, rows=rows, length=length, context=context, documents=measurable_documents(corpus, count))
    read = hashlib.sha256()
    tally = HeldOutTally()
    losses = document_losses(corpus, tally.counted(_scored(model, noted_batches(batches, read), rows)))
    mean = float(losses.nll.sum() / losses.tokens.sum())
    found = HeldOut(bits_per_byte(losses.nll, losses.bytes), "bits per byte", mean, losses.nll / losses.tokens, losses,
                    digest=read.hexdigest())
    tally.require_same(found)
    if count is not None and found.estimate.n > count:
        raise GuardStop(f"held-out loss: {found.estimate.n} documents were scored, {count} were asked for")
    return found


def score_examples(model: Transformer, batches: Iterable[Batch], *, rows: int, objective: Objective = next_token,
                   unit: Literal["nats per token", "blended nats per token"] = "nats per token") -> HeldOut:
    """Conversations, each a packed document of its row: what each one's supervised tokens cost, the estimate over conversations."""
    nll, tokens, read, tally = [], [], hashlib.sha256(), HeldOutTally()
    for batch, losses in tally.counted(_scored(model, noted_batches(batches, read), rows, objective)):
        documents = batch.documents if batch.documents is not None else torch.zeros_like(batch.tokens, dtype=torch.int32)
        places = documents.long() + (int(documents.max()) + 1) * torch.arange(len(batch))[:, None]
        used = documents != PADDING
        weight = batch.weight.double()
        sums = torch.zeros(int(places.max()) + 1, dtype=torch.float64)
        nll.append(sums.clone().index_add_(0, places[used], (losses.cpu().double() * weight)[used]))
        tokens.append(sums.index_add_(0, places[used], weight[used]))
    cost, count = (torch.cat(parts).numpy() for parts in (nll, tokens))
    cost, count = cost[count > 0], count[count > 0]
    found = HeldOut(cost_ratio(cost, count), unit, float(cost.sum() / count.sum()), cost / count, tokens=count, digest=read.hexdigest())
    tally.require_same(found)
    return found


class HeldOutTally:
    """Losses summed a second time, over batches and no documents: what is told of documents must come to the same."""

    def __init__(self) -> None:
        self.nll, self.weight = 0.0, 0.0

    def counted(self, scored: Iterable[tuple[Batch, Tensor]]) -> Iterator[tuple[Batch, Tensor]]:
        for batch, losses in scored:
            weight = batch.weight.double().cpu()
            self.nll += float(torch.where(weight > 0, losses.double().cpu() * weight, 0.0).sum())
            self.weight += float(weight.sum())
            yield batch, losses

    def require_same(self, found: HeldOut) -> None:
        """Compare the batches' own sum with the loss that is printed, and with the documents' losses, weighted by their tokens."""
        due, tokens = self.nll / self.weight, found.token_counts
        assert tokens is not None
        for name, loss in (("the loss", found.loss), ("the documents' losses", float((found.per_document * tokens).sum() / tokens.sum()))):
            if not math.isclose(loss, due, rel_tol=SAME_SUM, abs_tol=SAME_SUM):
                raise GuardStop(f"held-out loss: {name} came to {loss:.6g} nats a token, and the batches to {due:.6g}: they were not "
                                "added up as they were scored")


def noted_batches(batches: Iterable[Batch], read: "hashlib._Hash") -> Iterator[Batch]:
    """Batches whose every token, with how much it counts, goes into the digest `read` as it is read."""
    for batch in batches:
        for stream in (batch.tokens, batch.weight):
            read.update(f"{tuple(stream.shape)}".encode() + stream.cpu().contiguous().numpy().tobytes())
        yield batch


@torch.no_grad()
def _scored(model: Transformer, batches: Iterator[Batch], rows: int, objective: Objective = next_token) -> Iterator[tuple[Batch, Tensor]]:
    training, device = model.training, model.embed.weight.device
    model.eval()
    try:
        for batch in batches:
            with uncompiled():
                result = objective(model, with_padding_rows(batch, rows).to(device))
            assert result.losses is not None
            yield batch, result.losses[: len(batch)]
    finally:
        model.train(training)


def with_padding_rows(batch: Batch, rows: int) -> Batch:
    """The last batch with rows of padding: of another shape, products would be rounded otherwise."""
    missing = rows - len(batch)
    if not missing:
        return batch
    padded: dict[str, Any] = {
        name: torch.cat([stream, stream.new_full((missing, *stream.shape[1:]), PADDING if name == "documents" else 0)])
        for name, stream in batch.streams().items()}
    return replace(batch, **padded, ids=())
