"""Held-out documents for evaluation, so that every raw byte of every document is paid for exactly once.

A document is boundary, ids, boundary. Its first token is predicted from the boundary and its end is predicted too, so
the sum of its losses is the cost of the whole text and of knowing where it stops. Bytes are those of the source, never
of decoded tokens: a tokenizer that drops or adds a space cannot change them. Documents whose ids do not decode to their
bytes are left out, because their losses are those of another text: lower-casing would look like better modelling.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import PADDING, Batch
from assay.data.token_corpus import Corpus
from assay.errors import DataError, UsageError


@dataclass(frozen=True)
class DocumentLosses:
    """Aligned by document: what bits per byte, its standard error and paired comparisons are made of."""

    ids: NDArray[np.uint64]
    nll: NDArray[np.float64]  # nats, summed over the document's tokens and its end
    bytes: NDArray[np.int64]  # raw, of the source
    tokens: NDArray[np.int64]  # predicted: the ids and the end


@dataclass(frozen=True)
class _Piece:
    """Part of a document in a row: `context` leading tokens were predicted in the piece before, or by nothing."""

    document: int
    tokens: NDArray[np.int64]
    context: int


def measurable_documents(corpus: Corpus, count: int | None = None) -> NDArray[np.int64]:
    """Numbers of the held-out documents whose ids decode to their bytes; or the `count` of them with the smallest ids.

    Ids are hashes, so the smallest are a random sample, and the same one for every tokenizer.
    """
    index = corpus.held_out.index
    numbers = np.flatnonzero(index["lossless"] == 1)
    if not len(index):
        raise DataError(f"{corpus.folder} has no held-out documents; build the corpus with --held-out")
    if not len(numbers):
        raise DataError(f"{corpus.folder}: none of {len(index)} held-out documents decodes to its own bytes under this "
                        "tokenizer, so bits per byte would be of another text; use a byte-level tokenizer")
    if count is not None:
        numbers = np.sort(numbers[np.argsort(index["id"][numbers], kind="stable")[:count]])
    return numbers


def held_out_document_batches(corpus: Corpus, *, rows: int, length: int, context: int = 1,
                              documents: NDArray[np.int64] | None = None) -> Iterator[Batch]:
    """The documents, packed. A document's losses do not depend on its neighbours: pieces start at its own beginning.

    A document longer than a row goes on in the next piece, which repeats `context` tokens with weight 0. `documents` in
    the batch number the records of corpus.held_out.index; a row's ids are the documents it holds.
    """
    if rows < 1 or length < 2 or not 1 <= context < length:
        raise UsageError(f"rows {rows}, length {length}, context {context}: expected rows and context from 1, and "
                         "context below length")
    numbers = measurable_documents(corpus) if documents is None else documents
    waiting: list[list[_Piece]] = []
    for row in _packed(_pieces(corpus, numbers, length, context), length):
        waiting.append(row)
        if len(waiting) == rows:
            yield _batch(corpus, waiting, length)
            waiting = []
    if waiting:
        yield _batch(corpus, waiting, length)


def document_losses(corpus: Corpus, scored: Iterable[tuple[Batch, Tensor]]) -> DocumentLosses:
    """Sums of per-token losses (nats, (B, T), token t's loss at t) by document; each token must come exactly once."""
    size = corpus.held_out.documents
    nll, tokens = np.zeros(size), np.zeros(size, np.int64)
    for batch, losses in scored:
        assert batch.documents is not None
        counts = (batch.weight > 0).cpu().numpy()
        of = batch.documents.cpu().numpy()[counts]
        nll += np.bincount(of, losses.detach().double().cpu().numpy()[counts], minlength=size)
        tokens += np.bincount(of, minlength=size)
    seen = np.flatnonzero(tokens)
    index = corpus.held_out.index[seen]
    wrong = np.flatnonzero(tokens[seen] != index["tokens"].astype(np.int64) - 1)
    if not len(seen) or len(wrong):
        named = f"document {index['id'][wrong[0]]:016x} was scored on {tokens[seen][wrong[0]]} tokens of " \
                f"{index['tokens'][wrong[0]] - 1}" if len(wrong) else "no document was scored"
        raise DataError(f"{corpus.folder}: {named}; every token must be scored exactly once")
    return DocumentLosses(index["id"].copy(), nll[seen], index["bytes"].astype(np.int64), tokens[seen])


def _pieces(corpus: Corpus, numbers: NDArray[np.int64], length: int, context: int) -> Iterator[_Piece]:
    for number in numbers:
        ids = corpus.held_out.document(int(number)).astype(np.int64)
        yield _Piece(int(number), ids[:length], 1)
        for start in range(length - context, len(ids) - context, length - context):
            yield _Piece(int(number), ids[start : start + length], context)


def _packed(pieces: Iterable[_Piece], length: int) -> Iterator[list[_Piece]]:
    """Pieces packed into rows, in order; a row ends where the next piece does not fit. Only a document's last piece shares a row."""
    row: list[_Piece] = []
    room = length
    for piece in pieces:
        if len(piece.tokens) > room:
            yield row
            row, room = [], length
        row.append(piece)
        room -= len(piece.tokens)
    if row:
        yield row


def _batch(corpus: Corpus, rows: list[list[_Piece]], length: int) -> Batch:
    shape = (len(rows), length)
    tokens = np.full(shape, corpus.boundary, np.int64)
    weight = np.zeros(shape, np.float32)
    documents, positions = np.full(shape, PADDING, np.int32), np.zeros(shape, np.int32)
    for number, row in enumerate(rows):
        column = 0
        for piece in row:
            end = column + len(piece.tokens)
            tokens[number, column:end] = piece.tokens
            weight[number, column + piece.context : end] = 1
            documents[number, column:end] = piece.document
            positions[number, column:end] = np.arange(end - column)
            column = end
    ids = tuple(tuple(f"{corpus.held_out.index['id'][piece.document]:016x}" for piece in row) for row in rows)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(weight), torch.from_numpy(documents),
                 torch.from_numpy(positions), ids)
