"""Teacher log-probabilities, stored: for each token of each example the K likeliest tokens, hashed and keyed.

    DIR/manifest.json    written last: format, tokenizer, teacher, vocabulary, K, temperature, sha256 of every file and of itself
    DIR/index.bin        one INDEX record an example, in the order written
    DIR/ids.bin          (rows, K) token ids: uint16 where the vocabulary fits, else int32
    DIR/logprobs.bin     (rows, K) float16, likeliest first

An example of n tokens has n − 1 rows: nothing predicts its first token. float16 keeps a log-probability to one part in 2,048.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import PADDING, Batch
from assay.errors import ArtifactError, DataError, UsageError
from assay.store import durable
from assay.store.sealed import seal, unseal
from assay.strict_json import NATURAL, read_small_file, require_shape

TEACHER_FORMAT = "assay-teacher/2"
TEACHER_RECORD = np.dtype([("example", "V16"), ("text", "V16"),  # first 128 bits of sha256: of the example's id, of its tokens
                           ("start", "<u8"), ("rows", "<u4")])
TEACHER_MANIFEST = {"tokenizer": str, "teacher": str, "vocab": NATURAL, "k": NATURAL, "temperature": float, "rows": NATURAL, "ids": str,
                    "examples": NATURAL, "files": {str: {"bytes": NATURAL, "sha256": str}}}
FILES = ("index.bin", "ids.bin", "logprobs.bin")
Id = int | str


class TeacherEntry(NamedTuple):
    """One example: its tokens, and for tokens 1, 2, … what the teacher held likeliest in their place."""

    id: Id
    tokens: NDArray[np.int64]  # (n,)
    ids: NDArray[np.integer]  # (n − 1, K)
    logprobs: NDArray[np.floating]  # (n − 1, K)


class ExampleSpan(NamedTuple):
    """Place of an example in a batch."""

    id: Id
    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class StoredTeacher:
    folder: Path
    manifest: dict[str, Any]
    digest: str  # sha256 of manifest.json: names everything in the folder
    index: NDArray[Any]
    ids: NDArray[np.integer]  # (rows, K)
    logprobs: NDArray[np.float16]  # (rows, K)

    @property
    def temperature(self) -> float:
        return float(self.manifest["temperature"])

    @property
    def k(self) -> int:
        return int(self.manifest["k"])

    @cached_property
    def places(self) -> dict[bytes, int]:
        return {key: place for place, key in enumerate(self.index["example"].tolist())}

    def streams_for(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(teacher_ids, teacher_logprobs) of every example in the batch; refused where one was stored for another text or not at all.

        Where nothing is predicted, the entries say that any other token is certain, and no weight may stand there.
        """
        shape = (*batch.tokens.shape, self.k)
        ids, logprobs = np.broadcast_to(np.arange(self.k, dtype=np.int32), shape).copy(), np.full(shape, -np.inf, np.float32)
        tokens, covered = batch.tokens.cpu().numpy(), np.zeros(shape[:2], np.bool_)
        for span in example_spans(batch):
            rows = self._rows(span, tokens[span.row, span.start : span.stop])
            place = span.row, slice(span.start + 1, span.stop)
            ids[place], logprobs[place], covered[place] = self.ids[rows], self.logprobs[rows], True
        if (bare := (batch.weight.cpu().numpy() != 0) & ~covered).any():
            row, column = np.argwhere(bare)[0]
            raise DataError(f"row {row}, column {column}: the token counts, but stands in no example, so the teacher said nothing of it")
        return torch.from_numpy(ids), torch.from_numpy(logprobs)

    def require(self, examples: Iterable[tuple[Id, NDArray[np.integer]]]) -> None:
        """Refuse, before anything is trained, where an example (its id and tokens) has no answers here or those of another text."""
        for id, tokens in examples:
            self._rows(ExampleSpan(id, 0, 0, len(tokens)), np.asarray(tokens, np.int64))

    def _rows(self, span: ExampleSpan, tokens: NDArray[np.int64]) -> slice:
        place = self.places.get(_key(span.id))
        if place is None:
            raise DataError(f"{self.folder}: the teacher was not asked about example {span.id!r}; store its answers for this data")
        record = self.index[place]
        if record["text"].tobytes() != _text_key(tokens):
            raise DataError(f"{self.folder}: the teacher's answers on example {span.id!r} are for {record['rows'] + 1} other tokens than "
                            f"these {len(tokens)}: another text, template or length. Store its answers for this data")
        return slice(int(record["start"]), int(record["start"]) + int(record["rows"]))


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_teacher(folder: Path, entries: Iterable[TeacherEntry], *, tokenizer: str, teacher: str, vocab: int, k: int,
                  temperature: float = 1.0) -> None:
    """Write a teacher's answers, whole or not at all. `tokenizer` and `teacher` are digests; the log-probabilities were taken at
    `temperature`."""
    if not 1 <= k < vocab:
        raise UsageError(f"k is {k} and the vocabulary {vocab}; expected the teacher's 1 to {vocab - 1} likeliest tokens")
    dtype = "<u2" if vocab <= 1 << 16 else "<i4"
    with durable.new_folder(folder) as partial:
        files = {name: durable.HashedFile(partial / name) for name in FILES}
        rows, seen = 0, set[bytes]()
        for entry in entries:
            _check_entry(entry, vocab, k)
            if (key := _key(entry.id)) in seen:
                raise DataError(f"example {entry.id!r} was stored twice; give every example an id of its own")
            seen.add(key)
            files["index.bin"].write(np.array([(key, _text_key(entry.tokens), rows, len(entry.ids))], TEACHER_RECORD).tobytes())
            files["ids.bin"].write(np.asarray(entry.ids).astype(dtype).tobytes())
            files["logprobs.bin"].write(np.asarray(entry.logprobs).astype("<f2").tobytes())
            rows += len(entry.ids)
        if not seen:
            raise DataError(f"{folder}: the teacher answered on no example; there is nothing to store")
        manifest = {
            "format": TEACHER_FORMAT, "tokenizer": tokenizer, "teacher": teacher, "vocab": vocab, "k": k, "temperature": temperature,
            "ids": dtype, "rows": rows, "examples": len(seen), "files": {name: file.close() for name, file in files.items()}}
        durable.write_file(partial / "manifest.json", [seal(manifest, where=str(folder / "manifest.json"), indent=1)])


def teacher_entries(batch: Batch, teacher_ids: Tensor, teacher_logprobs: Tensor) -> Iterator[TeacherEntry]:
    """The examples of a batch, out of streams such as `learn.distill.top_k` gives."""
    tokens, ids, logprobs = (stream.cpu().numpy() for stream in (batch.tokens, teacher_ids, teacher_logprobs))
    for span in example_spans(batch):
        said = span.row, slice(span.start + 1, span.stop)
        yield TeacherEntry(span.id, tokens[span.row, span.start : span.stop], ids[said], logprobs[said])


def example_spans(batch: Batch) -> Iterator[ExampleSpan]:
    """The examples of a batch, by its ids. Each is a document of its row; or, where a row has one id, all of the row but its padding."""
    if not batch.ids:
        raise DataError("this batch does not say which examples it holds; its rows need ids")
    documents = np.zeros(batch.tokens.shape) if batch.documents is None else batch.documents.cpu().numpy()
    for row, ids in enumerate(batch.ids):
        runs = [run for run in _runs(documents[row]) if documents[row, run[0]] != PADDING]
        if len(ids) == 1 and runs:
            runs = [(runs[0][0], runs[-1][1])]
        if len(ids) != len(runs):
            raise DataError(f"row {row} holds {len(runs)} documents and names {len(ids)} examples; expected one id for each, or one "
                            "for the whole row")
        yield from (ExampleSpan(id, row, start, stop) for id, (start, stop) in zip(ids, runs, strict=True))


def _runs(documents: NDArray[Any]) -> list[tuple[int, int]]:
    edges = [0, *(np.flatnonzero(documents[1:] != documents[:-1]) + 1).tolist(), len(documents)]
    return list(pairwise(edges))


def _check_entry(entry: TeacherEntry, vocab: int, k: int) -> None:
    due = (len(entry.tokens) - 1, k)
    if entry.ids.shape != due or entry.logprobs.shape != due:
        raise DataError(f"example {entry.id!r} has {len(entry.tokens)} tokens, teacher ids of shape {entry.ids.shape} and "
                        f"log-probabilities of shape {entry.logprobs.shape}; expected {due}: none for the first token")
    if entry.ids.size and not (entry.ids.min() >= 0 and entry.ids.max() < vocab):
        raise DataError(f"example {entry.id!r}: teacher ids from {entry.ids.min()} to {entry.ids.max()} in a vocabulary of {vocab}")
    # Rounding may lift a sum of probabilities a little above 1; logits in the place of log-probabilities go far beyond.
    total = np.exp(entry.logprobs.astype(np.float64)).sum(-1)
    if not ((entry.logprobs <= 0).all() and (total <= 1.01).all()):
        raise DataError(f"example {entry.id!r}: the teacher's values are not log-probabilities: they reach {entry.logprobs.max()}, and sum "
                        f"to a probability of {total.max():.3g}; expected none above 0 and no sum above 1")


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def open_teacher(folder: Path, *, tokenizer: str | None = None, teacher: str | None = None) -> StoredTeacher:
    """Open a stored teacher; refused unless every byte has its hash and it is of the tokenizer, and of the teacher, whose digests are asked
    for."""
    manifest, digest = _read_manifest(folder)
    if tokenizer is not None and manifest["tokenizer"] != tokenizer:
        raise DataError(f"{folder} was stored with tokenizer {manifest['tokenizer'][:12]}, the student uses {tokenizer[:12]}: its ids mean "
                        "other text. Store the answers of a teacher that shares the tokenizer, or distil through text")
    if teacher is not None and manifest["teacher"] != teacher:
        raise DataError(f"{folder} holds answers of the teacher {manifest['teacher'][:12]}, not of {teacher[:12]}; store them again")
    for name in FILES:
        _check_file(folder / name, manifest["files"].get(name))
    index: NDArray[Any] = np.fromfile(folder / "index.bin", TEACHER_RECORD)
    ids, logprobs = (np.memmap(folder / name, dtype, "r").view(np.ndarray)
                     for name, dtype in (("ids.bin", manifest["ids"]), ("logprobs.bin", "<f2")))
    shape = (manifest["rows"], manifest["k"])
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(index["rows"], dtype=np.uint64)])
    if ids.size != shape[0] * shape[1] or logprobs.size != ids.size or starts[-1] != shape[0] or (index["start"] != starts[:-1]).any():
        raise ArtifactError(f"{folder}: its files do not hold the {shape[0]} rows of {shape[1]} entries that the manifest "
                            "speaks of; store again")
    return StoredTeacher(folder, manifest, digest, index, ids.reshape(shape), logprobs.reshape(shape))


def _read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "manifest.json"
    if not path.is_file():
        raise UsageError(f"{folder} holds no stored teacher: no manifest.json")
    data = read_small_file(path)
    manifest = unseal(data, where=str(path), indent=1)
    if manifest.get("format") != TEACHER_FORMAT:
        raise ArtifactError(f"{path}: not a manifest of the format {TEACHER_FORMAT}; store the teacher's answers again")
    require_shape(manifest, TEACHER_MANIFEST, where=str(path))
    return manifest, hashlib.sha256(data).hexdigest()


def _check_file(path: Path, entry: Mapping[str, Any] | None) -> None:
    if entry is None or not path.is_file() or path.stat().st_size != entry["bytes"] or durable.hash_file(path) != entry["sha256"]:
        raise ArtifactError(f"{path}: missing, or not the bytes that the manifest names; store the teacher's answers again")


def _key(id: Id) -> bytes:
    """Key of an example's id: 7 and "7" are two examples."""
    return _short(f"{type(id).__name__}:{id}".encode())


def _text_key(tokens: NDArray[np.int64]) -> bytes:
    return _short(np.ascontiguousarray(tokens, "<i8").tobytes())


def _short(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]
