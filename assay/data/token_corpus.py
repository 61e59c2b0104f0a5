"""Corpus of token shards with a manifest: train and held-out in separate files, every file hashed; and its token budget.

    DIR/manifest.json            written last: format, sha256 of every file, tokenizer, counts, sources, rules, overlap
    DIR/train-00000.bin …        token ids, little-endian; a document is boundary token, ids, boundary token
    DIR/held-00000.bin …         the same for held-out documents: no batch of training can reach them
    DIR/train-index.bin, held-index.bin     one INDEX record a document
    DIR/samples.jsonl            a few texts with their ids, encoded again at every opening
    DIR/tokenizer.json           the tokenizer that made the ids

The boundary token on both sides makes a document complete in itself: its first token is predicted from the boundary, so
that every byte is paid for, and its end is predicted too. It costs two tokens a document.
"""

import hashlib
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.encode import encode_plain, plain_backend
from assay.errors import ArtifactError, DataError, UsageError
from assay.model.tokenizer import Tokenizer
from assay.store.durable import hash_file
from assay.strict_json import NATURAL, parse_json, read_json_lines, read_small_file, require_shape

CORPUS_FORMAT = "assay-corpus/1"
INDEX_RECORD = np.dtype([("id", "<u8"), ("offset", "<u8"), ("tokens", "<u4"), ("bytes", "<u4"),
                         ("text", "<u8"),  # first 64 bits of the sha256 of the raw bytes
                         ("words", "<u8"),  # fingerprint of the words: equal for documents that differ in spacing only
                         ("lossless", "<i4")])  # 1: the ids decode to the raw bytes, 0: they do not, -1: not looked
Files = dict[str, dict[str, Any]]  # name → bytes and sha256, as a manifest has them
SIDES = ("train", "held")
_COUNTS = {"documents": NATURAL, "tokens": NATURAL, "bytes": NATURAL}
CORPUS_MANIFEST = {
    "tokenizer": {"digest": str, "vocabulary": NATURAL}, "boundary": {"id": NATURAL, "token": str}, "dtype": str, "train": _COUNTS,
    "held_out": _COUNTS | {"digest": str, "lossy?": NATURAL}, "overlap": {"bound": float, "share?": float},
    "files": {str: {"bytes": NATURAL, "sha256": str}}}
SAMPLE = {"id": str, "text": str, "ids": [NATURAL], "agree": NATURAL}


@dataclass(frozen=True)
class Split:
    """One side of a corpus: a stream of ids over its shards, and the documents in it."""

    shards: tuple[NDArray[Any], ...]
    starts: tuple[int, ...]  # of each shard in the stream, and the end
    index: NDArray[Any]  # INDEX records, in stream order

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Offset of each document: side by side in memory, because searching a column of records would copy it."""
        return np.ascontiguousarray(self.index["offset"]).astype(np.int64)

    @property
    def documents(self) -> int:
        return len(self.index)

    @property
    def bytes(self) -> int:
        return int(self.index["bytes"].sum())

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Ids start..stop of the stream, across shards; without a copy inside one."""
        first = bisect_right(self.starts, start) - 1
        if stop <= self.starts[first + 1]:
            return self.shards[first][start - self.starts[first] : stop - self.starts[first]]
        last = bisect_left(self.starts, stop)
        return np.concatenate([self.shards[i][max(start - self.starts[i], 0) : stop - self.starts[i]] for i in range(first, last)])

    def document(self, number: int) -> NDArray[Any]:
        """A document's ids, with the boundary token on both sides."""
        record = self.index[number]
        return self.read(int(record["offset"]), int(record["offset"]) + int(record["tokens"]))


@dataclass(frozen=True)
class Corpus:
    folder: Path
    manifest: dict[str, Any]
    digest: str  # sha256 of manifest.json: names everything in the folder
    train: Split
    held_out: Split

    @property
    def boundary(self) -> int:
        return int(self.manifest["boundary"]["id"])

    @property
    def tokenizer_digest(self) -> str:
        return str(self.manifest["tokenizer"]["digest"])

    @property
    def held_out_digest(self) -> str:
        """Names the held-out documents and their bytes, whatever the tokenizer: where it is equal, scores compare."""
        return str(self.manifest["held_out"]["digest"])


def open_corpus(folder: Path, *, tokenizer_digest: str | None = None, verify: bool = True) -> Corpus:
    """Open a corpus; refused unless every file has its hash, the samples encode to their ids, and the tokenizer is the one asked for.

    `verify=False` skips the hashes and samples: for a second opening in a process that has just verified.
    """
    manifest, digest = _read_manifest(folder)
    if tokenizer_digest is not None and tokenizer_digest != manifest["tokenizer"]["digest"]:
        raise DataError(f"{folder} was encoded by tokenizer {manifest['tokenizer']['digest'][:12]}, the model uses "
                        f"{tokenizer_digest[:12]}: its ids mean other text. Build the corpus again with --tokenizer")
    _check_files(folder, manifest["files"], verify)
    train, held = (_open_split(folder, side, manifest, verify) for side in SIDES)
    corpus = Corpus(folder, manifest, digest, train, held)
    if verify:
        _check_samples(corpus)
    return corpus


def assert_disjoint(corpus: Corpus, other: Corpus | None = None) -> None:
    """Refuse to train where a held-out document, by id or by its words, stands in the training side beyond the bound.

    With `other`, its held-out side is compared instead: an evaluation set made apart from the training corpus.
    """
    held = (other or corpus).held_out.index
    train = corpus.train.index
    if other is None and (same := np.intersect1d(train["id"], held["id"])).size:
        raise DataError(f"{corpus.folder}: {same.size} documents are both trained on and held out, among them "
                        f"{same[0]:016x}; build the corpus again")
    twins = np.isin(held["words"], train["words"])
    bound = float(corpus.manifest["overlap"]["bound"])
    if twins.sum() > bound * len(held):
        named = ", ".join(f"{i:016x}" for i in held["id"][twins][:5])
        raise DataError(f"{corpus.folder}: {twins.sum()} of {len(held)} held-out documents stand in training, bound"
                        f" {bound:.2%}: {named}. Held-out numbers would measure memory; remove them from one side")


def _read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "manifest.json"
    if not path.is_file():
        raise UsageError(f"{folder} is not a corpus: no manifest.json; make one with: assay corpus TEXT --out {folder}")
    data = read_small_file(path)
    manifest = parse_json(data, where=str(path), advice="build the corpus again")
    if not isinstance(manifest, dict) or manifest.get("format") != CORPUS_FORMAT or any(k not in manifest for k in CORPUS_MANIFEST):
        raise ArtifactError(f"{path}: not a manifest of the format {CORPUS_FORMAT}; build the corpus again")
    require_shape(manifest, CORPUS_MANIFEST, where=str(path))
    if manifest["dtype"] not in ("<u2", "<u4"):
        raise ArtifactError(f"{path}: its ids are {manifest['dtype']!r:.20}; expected <u2 or <u4")
    return manifest, hashlib.sha256(data).hexdigest()


def _check_files(folder: Path, files: Files, verify: bool) -> None:
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ArtifactError(f"{folder}: the manifest names {name!r}, which is not a file of this folder")
        if path.stat().st_size != entry["bytes"]:
            raise ArtifactError(f"{path}: {path.stat().st_size} bytes, the manifest says {entry['bytes']}")
        if verify and hash_file(path) != entry["sha256"]:
            raise ArtifactError(f"{path}: its sha256 is not the manifest's; the bytes changed. Build the corpus again")


def _open_split(folder: Path, side: str, manifest: dict[str, Any], verify: bool) -> Split:
    split = open_split(folder, side, manifest["files"], manifest["dtype"])
    ends = split.index["offset"] + split.index["tokens"]
    begins = np.concatenate([np.zeros(1, np.uint64), ends])[: len(ends)]
    told = manifest["train" if side == "train" else "held_out"]
    found = {"documents": split.documents, "tokens": split.tokens, "bytes": split.bytes}
    if not np.array_equal(split.index["offset"], begins) or any(told[key] != count for key, count in found.items()):
        raise ArtifactError(f"{folder}: {side}-index.bin does not describe the {side} shards; build the corpus again")
    if any(shard.max() >= manifest["tokenizer"]["vocabulary"] for shard in split.shards if verify):
        raise ArtifactError(f"{folder}: a {side} shard holds ids beyond the tokenizer's {manifest['tokenizer']['vocabulary']}; build again")
    return split


def open_split(folder: Path, side: str, files: Files, dtype: str) -> Split:
    names = sorted(name for name in files if name.startswith(f"{side}-") and name != f"{side}-index.bin")
    for name, width in (*((name, np.dtype(dtype).itemsize) for name in names), (f"{side}-index.bin", INDEX_RECORD.itemsize)):
        if name not in files or files[name]["bytes"] % width or not (files[name]["bytes"] or name not in names):
            raise ArtifactError(f"{folder / name}: missing, or not a whole number of records; build the corpus again")
    shards = tuple(np.memmap(folder / name, dtype, "r").view(np.ndarray) for name in names)
    index: NDArray[Any] = np.fromfile(folder / f"{side}-index.bin", INDEX_RECORD)
    return Split(shards, tuple(accumulate(map(len, shards), initial=0)), index)


def _check_samples(corpus: Corpus) -> None:
    """A cache made by another tokenizer, or poisoned, shows here: ids are made again and found in the shards."""
    tokenizer = Tokenizer.from_folder(corpus.folder)
    if tokenizer.digest != corpus.tokenizer_digest:
        raise ArtifactError(f"{corpus.folder}: tokenizer.json is not the tokenizer that the manifest names")
    backend = plain_backend(tokenizer)
    for sample in read_json_lines(corpus.folder / "samples.jsonl", SAMPLE):
        ids = np.frombuffer(encode_plain(backend, sample["text"], corpus.manifest["dtype"]), corpus.manifest["dtype"])
        if not re.fullmatch("[0-9a-f]{16}", sample["id"]):
            raise ArtifactError(f"{corpus.folder / 'samples.jsonl'}: {sample['id'][:40]!r} is no document's id; build the corpus again")
        stored = stored_ids([corpus.train, corpus.held_out], int(sample["id"], 16))
        if ids.tolist() != sample["ids"] or leading_matches(ids, stored) < sample["agree"]:
            raise ArtifactError(f"{corpus.folder}: document {sample['id']} does not encode to its stored ids; another "
                                "tokenizer, or another version of it, made the shards. Build the corpus again")


def stored_ids(splits: Iterable[Split], number: int) -> NDArray[Any]:
    """A document's own ids, found by its id."""
    for split in splits:
        if (row := np.flatnonzero(split.index["id"] == number)).size:
            return split.document(int(row[0]))[1:-1]
    raise ArtifactError(f"the sampled document {number:016x} is in no shard; build the corpus again")


def leading_matches(ids: NDArray[Any], stored: NDArray[Any]) -> int:
    """How many leading ids are the same."""
    length = min(len(ids), len(stored))
    differ = np.flatnonzero(ids[:length] != stored[:length])
    return int(differ[0]) if differ.size else length

# ---------------------------------------------------------------- token budget


TOKENS_PER_PARAMETER = 20  # about optimal for a given compute: Hoffmann et al. 2022, arXiv 2203.15556
EPOCHS_LIKE_NEW = 4  # up to here repeats are worth almost what new text is: Muennighoff et al. 2023, arXiv 2305.16264
REPEATS_DECAY = 15.39  # their fit: after so many repeats a further one adds 1/e of what new text would


@dataclass(frozen=True)
class TokenBudget:
    parameters: int
    tokens: int  # to train on
    unique: int  # in the corpus
    epochs: float
    tokens_per_parameter: float
    worth: float  # new tokens that would do as much, by the fit above
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        plain = (f"{self.tokens:,} tokens for {self.parameters:,} parameters: {self.tokens_per_parameter:.2g} tokens "
                 f"per parameter, {self.epochs:.2f} epochs over {self.unique:,} tokens")
        return "\n".join([plain, *(f"warning: {warning}" for warning in self.warnings)])


def token_budget(corpus: Corpus, parameters: int, tokens: int) -> TokenBudget:
    unique = corpus.train.tokens
    epochs = tokens / unique
    repeats = max(epochs - 1, 0.0)
    worth = min(tokens, unique * (1 + REPEATS_DECAY * (1 - math.exp(-repeats / REPEATS_DECAY))))
    return TokenBudget(parameters, tokens, unique, epochs, tokens / parameters, worth,
                       tuple(_warnings(epochs, tokens / parameters, unique / parameters, worth / tokens)))


def _warnings(epochs: float, per_parameter: float, unique_per_parameter: float, worth: float) -> list[str]:
    warnings = []
    if epochs > EPOCHS_LIKE_NEW:
        warnings.append(f"{epochs:.1f} epochs: beyond about {EPOCHS_LIKE_NEW}, repeated text is worth less than new; "
                        f"this run's tokens do what {worth:.0%} as many new ones would (arXiv 2305.16264)")
    if epochs > 1 and unique_per_parameter < 1:
        warnings.append(f"{unique_per_parameter:.2g} different tokens per parameter, read {epochs:.1f} times: the "
                        "model can learn the text by heart, and held-out loss may rise while training loss falls. "
                        "Choose checkpoints by held-out loss")
    if per_parameter < TOKENS_PER_PARAMETER:
        warnings.append(f"{per_parameter:.2g} tokens per parameter: below about {TOKENS_PER_PARAMETER}, a smaller "
                        "model trained on more text is better for the same compute (arXiv 2203.15556)")
    return warnings
