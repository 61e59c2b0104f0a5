"""Batch: everything an objective may see, as aligned streams of shape (B, T), or (B, T, K) for what has K entries a token.

SFT is pretraining with other weights; a new method adds at most one stream here, and `split` and `to` carry it along.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from assay.errors import DataError
from assay.model.attention import PADDING, document_starts

STREAM_DTYPES = {"tokens": torch.int64, "documents": torch.int32, "positions": torch.int32, "teacher_ids": torch.int32}  # others: float32
DEEP_STREAMS = {"teacher_ids", "teacher_logprobs"}  # streams of shape (B, T, K)
ExampleIds = tuple[tuple[int | str, ...], ...]


@dataclass(frozen=True)
class Batch:
    """`weight[b, t]` is how much predicting token t counts: 0 for context and padding.

    Nothing predicts column 0 nor the first token of a packed document, so their weight must be 0. A row begins anew:
    the same document number in two rows means two pieces that do not see each other.
    """

    tokens: Tensor  # (B, T) int64
    weight: Tensor  # (B, T) float32
    documents: Tensor | None = None  # (B, T) int32: which packed document a token belongs to; -1 = padding
    positions: Tensor | None = None  # (B, T) int32: place within the document's piece in this row; 0 in padding
    ids: ExampleIds = ()  # for each row, the examples it consumed: what the data ledger counts
    advantage: Tensor | None = None  # (B, T) float32: how much better than its group the completion of this token was
    behaviour: Tensor | None = None  # (B, T) float32: log-probability under the distribution the token was sampled from
    reference: Tensor | None = None  # (B, T) float32: log-probability under the reference policy
    baseline: Tensor | None = None  # (B, T) float32: KTO's KL estimate, one number for the whole step, the same at every token
    teacher_ids: Tensor | None = None  # (B, T, K) int32: the teacher's K likeliest tokens in the place of this one
    teacher_logprobs: Tensor | None = None  # (B, T, K) float32: their log-probabilities
    divisor: float | None = None  # what the sum over this batch is divided by, where that is not the sum of its weights
    starts: Tensor | None = None  # not a stream: where documents begin in the flattened rows, made when going to a GPU

    def __post_init__(self) -> None:
        for name, stream in self.streams().items():
            _check_stream(name, stream, self.tokens)
        if self.ids and len(self.ids) != len(self.tokens):
            raise DataError(f"a batch of {len(self.tokens)} rows has ids for {len(self.ids)}; expected one entry a row")
        if self.weight.device.type == "cpu":  # on a GPU the look would wait for the device
            _check_weight(self.weight, self.documents)

    def __len__(self) -> int:
        return len(self.tokens)

    def streams(self) -> dict[str, Tensor]:
        """The tensors this batch has, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor) and name != "starts"}

    def seen(self) -> "Batch":
        """Batch reduced to the streams that a model reads, without those that only the loss uses."""
        return Batch(self.tokens, torch.zeros_like(self.weight), self.documents, self.positions, starts=self.starts)

    def split(self, rows: int) -> Iterator["Batch"]:
        """Micro-batches of at most `rows` rows, in order; together they are this batch."""
        if rows < 1:
            raise DataError(f"cannot split a batch into parts of {rows} rows; expected at least 1")
        for start in range(0, len(self), rows):
            part: dict[str, Any] = {name: stream[start : start + rows] for name, stream in self.streams().items()}
            yield replace(self, **part, ids=self.ids[start : start + rows], starts=None)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """`starts` are counted here, on the CPU, because asking a GPU how many there are would wait for it."""
        starts = self.starts
        if starts is None and self.documents is not None and torch.device(device).type == "cuda":
            starts = document_starts(self.documents)
        moved: dict[str, Any] = {n: s.to(device, non_blocking=non_blocking) for n, s in self.streams().items()}
        return replace(self, **moved, starts=None if starts is None else starts.to(device, non_blocking=non_blocking))


def _check_stream(name: str, stream: Tensor, tokens: Tensor) -> None:
    if tokens.ndim != 2 or stream.shape[:2] != tokens.shape or stream.ndim != (3 if name in DEEP_STREAMS else 2):
        raise DataError(f"{name} has shape {tuple(stream.shape)}, tokens {tuple(tokens.shape)}; "
                        f"every stream of a batch is (rows, length{', entries' if name in DEEP_STREAMS else ''})")
    expected = STREAM_DTYPES.get(name, torch.float32)
    if stream.dtype != expected:
        raise DataError(f"{name} is {stream.dtype}; a batch holds it as {expected}")


def _check_weight(weight: Tensor, documents: Tensor | None) -> None:
    if weight.numel() == 0:
        raise DataError(f"a batch of shape {tuple(weight.shape)} holds no token")
    if weight[:, 0].count_nonzero():
        row = int(weight[:, 0].nonzero()[0])
        raise DataError(f"row {row}: column 0 has weight {weight[row, 0]:g}, but nothing predicts it; expected 0")
    if documents is None:
        return
    first = documents[:, 1:] != documents[:, :-1]
    wrong = ((first | (documents[:, 1:] == PADDING)) & (weight[:, 1:] != 0)).nonzero()
    if len(wrong):
        row, column = int(wrong[0, 0]), int(wrong[0, 1]) + 1
        raise DataError(f"row {row}, column {column}: the first token of a document, or padding, has weight "
                        f"{weight[row, column]:g}; nothing predicts it, so expected 0")
