"""Corpus: text → token shards with a manifest; train and held-out in separate files, every file hashed.

    DIR/manifest.json            written last: format, sha256 of every file, tokenizer, counts, sources, rules, overlap
    DIR/train-00000.bin …        token ids, little-endian; a document is boundary token, ids, boundary token
    DIR/held-00000.bin …         the same for held-out documents: no batch of training can reach them
    DIR/train-index.bin, held-index.bin     one INDEX record a document
    DIR/samples.jsonl            a few texts with their ids, encoded again at every opening
    DIR/tokenizer.json           the tokenizer that made the ids

The boundary token on both sides makes a document complete in itself: its first token is predicted from the boundary, so
that every byte is paid for, and its end is predicted too. It costs two tokens a document.

Which documents are held out is decided by their ids and the seed before anything is read. `build` reads all sources
twice: first to count, refuse bad rows and remember the held-out side, then to encode and look training text up in it.
"""

import hashlib
import heapq
import json
import os
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.encode import Encoder, boundary_id, encode_plain, id_type, plain_backend
from assay.data.overlap import Hashes, HeldOutText, Lookup, Overlap
from assay.data.text import Document, Rule, Source, documents, find_sources, sha256_of
from assay.errors import ArtifactError, DataError, UsageError
from assay.model.tokenizer import Tokenizer
from assay.seeds import derive

FORMAT = "assay-corpus/1"
INDEX = np.dtype([("id", "<u8"), ("offset", "<u8"), ("tokens", "<u4"), ("bytes", "<u4"),
                  ("text", "<u8"),  # first 64 bits of the sha256 of the raw bytes
                  ("words", "<u8"),  # fingerprint of the words: equal for documents that differ in spacing only
                  ("lossless", "<i4")])  # 1: the ids decode to the raw bytes, 0: they do not, -1: not looked
TASK_BYTES = 1 << 19
SAMPLES, SAMPLE_BYTES = 8, 4096
EDGE = 8  # ids at the end of a cut text that may differ from the document's
SIDES = ("train", "held")
Files = dict[str, dict[str, Any]]  # name → bytes and sha256, as the manifest has them


@dataclass(frozen=True)
class Split:
    """One side of a corpus: a stream of ids over its shards, and the documents in it."""

    shards: tuple[NDArray[Any], ...]
    starts: NDArray[np.int64]  # of each shard in the stream, and the end
    index: NDArray[Any]  # INDEX records, in stream order

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        return len(self.index)

    @property
    def bytes(self) -> int:
        return int(self.index["bytes"].sum())

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Ids start..stop of the stream, across shards; without a copy inside one."""
        first, last = np.searchsorted(self.starts, [start, max(stop - 1, start)], side="right") - 1
        if first == last:
            return self.shards[first][start - self.starts[first] : stop - self.starts[first]]
        parts = [self.shards[i][max(start - self.starts[i], 0) : stop - self.starts[i]] for i in range(first, last + 1)]
        return np.concatenate(parts)

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


@dataclass(frozen=True)
class Progress:
    stage: str  # "reading" or "encoding"
    done: int  # raw bytes
    total: int | None  # unknown while reading
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Everything that decides what a corpus will hold."""

    rule: Rule = field(default_factory=Rule)
    held_out: float = 0.05
    held_out_files: tuple[Path, ...] = ()
    seed: int = 0
    boundary: str | None = None
    shard_tokens: int = 100_000_000
    max_overlap: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise UsageError(f"--held-out is {self.held_out}; expected a share from 0 up to 1")
        if self.shard_tokens < 1:
            raise UsageError(f"--shard-tokens is {self.shard_tokens}; expected at least 1")

    def holds_out(self, document: Document, whole_file: bool) -> bool:
        """By id and seed alone: the text has no say, and neither has any other document."""
        return whole_file or derive(self.seed, "held-out", document.id) < self.held_out * (1 << 63)


def build(texts: Iterable[Path], out: Path, tokenizer: Path, plan: Plan, *, workers: int = 1,
          progress: Callable[[Progress], None] = lambda _: None) -> Corpus:
    """Write the corpus whole or not at all. `tokenizer` is a folder with tokenizer.json."""
    if out.exists():
        raise UsageError(f"{out} exists; a corpus is never changed: give another --out or remove it")
    held_files = find_sources(plan.held_out_files)
    sources = [(s, False) for s in find_sources(texts)] + [(s, True) for s in held_files]
    if clash := {s.name for s, whole in sources if whole} & {s.name for s, whole in sources if not whole}:
        raise UsageError(f"{min(clash)!r} is given both as training text and as --held-out-files")
    with committed(out) as folder, tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{out.name}.") as hashes:
        encoding, files = _write_tokenizer(folder, Tokenizer.from_folder(tokenizer), plan.boundary)
        clock = _Clock(progress)
        survey = _survey(sources, plan, clock)
        survey.held.save(Path(hashes))
        writers = {side: _Writer(folder, side, plan.shard_tokens, encoding.dtype) for side in SIDES}
        _encode(sources, plan, encoding, Path(hashes), workers, writers, survey, clock)
        files |= writers["train"].close() | writers["held"].close()
        overlap = survey.held.overlap()
        _refuse(overlap, plan.max_overlap)
        files |= _write_samples(folder, survey.samples, encoding, files)
        write_file(folder / "manifest.json", _manifest(plan, encoding, survey, writers, overlap, files))
    return open_corpus(out, verify=False)


def open_corpus(folder: Path, *, tokenizer_digest: str | None = None, verify: bool = True) -> Corpus:
    """Refused unless every file has its hash, the samples encode to their ids, and the tokenizer is the one asked for.

    `verify=False` skips the hashes and samples: for a second opening in a process that has just verified.
    """
    manifest, digest = _read_manifest(folder)
    if tokenizer_digest is not None and tokenizer_digest != manifest["tokenizer"]["digest"]:
        raise DataError(f"{folder} was encoded by tokenizer {manifest['tokenizer']['digest'][:12]}, the model uses "
                        f"{tokenizer_digest[:12]}: its ids mean other text. Build the corpus again with --tokenizer")
    _check_files(folder, manifest["files"], verify)
    train, held = (_open_split(folder, side, manifest) for side in SIDES)
    corpus = Corpus(folder, manifest, digest, train, held)
    if verify:
        _check_samples(corpus)
    return corpus


def assert_disjoint(corpus: Corpus, other: Corpus | None = None) -> None:
    """Before training: no held-out document, by id or by its words, stands in the training side beyond the bound.

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


# ---------------------------------------------------------------- the tokenizer's side

@dataclass(frozen=True)
class Encoding:
    """The tokenizer as a corpus uses it; `folder` holds its files."""

    folder: Path
    digest: str
    vocabulary: int
    dtype: str
    boundary: int
    boundary_token: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, boundary: str | None, folder: Path) -> "Encoding":
        number = boundary_id(tokenizer, boundary)
        return cls(folder, tokenizer.digest, tokenizer.size, id_type(tokenizer), number, tokenizer.tokens[number])


@dataclass(frozen=True)
class Encoded:
    """What a worker hands back for one document."""

    ids: bytes
    held_out: bool
    id: int
    bytes: int
    text: int
    words: int
    lossless: int


class _Worker:
    """Lives in its own process: the tokenizer's memory and the held-out hashes."""

    def __init__(self, encoding: Encoding, hashes: Path):
        self.encoder = Encoder(Tokenizer.from_folder(encoding.folder), encoding.dtype)
        self.lookup = Lookup(hashes)

    def encode(self, tasks: list[tuple[int, bytes, bool]]) -> tuple[list[Encoded], Hashes, Hashes]:
        """Documents as (id, raw, held out) → their ids, and what training text hit of the held-out hashes."""
        done, grams, prints = [], [], []
        for number, raw, held_out in tasks:
            text = raw.decode()
            ids = self.encoder.encode(text)
            hit_grams, hit_print, words = self.lookup.hits(raw)
            if not held_out:
                grams.append(hit_grams)
                prints.append(hit_print)
            lossless = self._decodes_to(text, ids) if held_out else -1
            done.append(Encoded(ids, held_out, number, len(raw), text_hash(raw), words, lossless))
        empty = [np.zeros(0, np.uint64)]
        return done, np.unique(np.concatenate(grams or empty)), np.unique(np.concatenate(prints or empty))

    def _decodes_to(self, text: str, ids: bytes) -> int:
        numbers = np.frombuffer(ids, self.encoder.dtype).tolist()
        return int(self.encoder.backend.decode(numbers, skip_special_tokens=False) == text)


_worker: _Worker | None = None  # in a worker process only


def _start_worker(encoding: Encoding, hashes: Path) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = _Worker(encoding, hashes)


def _work(tasks: list[tuple[int, bytes, bool]]) -> tuple[list[Encoded], Hashes, Hashes]:
    assert _worker is not None
    return _worker.encode(tasks)


# ---------------------------------------------------------------- building

@dataclass
class _Survey:
    """What the first reading found."""

    held: HeldOutText = field(default_factory=HeldOutText)
    held_digests: list[tuple[int, int]] = field(default_factory=list)  # (id, text hash)
    samples: list[tuple[int, int, bytes, bool]] = field(default_factory=list)  # a heap: (-key, id, text, whole)
    documents: Counter[str] = field(default_factory=Counter)  # by source
    bytes: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    stats: dict[str, tuple[int, int]] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    sources: list[tuple[Source, bool]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def _survey(sources: list[tuple[Source, bool]], plan: Plan, clock: "_Clock") -> _Survey:
    """The first reading. It ends in an error, or with at least one document on every side that was asked for."""
    survey = _Survey(sources=sources)
    for source, whole_file in sources:
        survey.stats[source.name] = _stat(source)
        survey.sha256[source.name] = sha256_of(source.path)
        for document in documents(source, plan.rule, survey.left_out):
            survey.documents[source.name] += 1
            survey.bytes[source.name] += len(document.raw)
            _keep_sample(survey, document, plan.seed)
            if plan.holds_out(document, whole_file):
                survey.held.add(f"{document.source}#{document.ordinal}", document.raw)
                survey.held_digests.append((document.id, text_hash(document.raw)))
            clock.tick("reading", survey.total, None, 0)
    found, held = survey.documents.total(), len(survey.held.names)
    if not found:
        raise DataError(f"no text in {', '.join(str(s.path) for s, _ in sources)}: {_counted(survey.left_out)}")
    if held == found or (not held and (plan.held_out or plan.held_out_files)):
        raise DataError(f"{held} of {found} documents are held out, so one side is empty; make more documents "
                        "(--document-bytes, --split), change --held-out, or hold out whole files (--held-out-files)")
    return survey


def _encode(sources: list[tuple[Source, bool]], plan: Plan, encoding: Encoding, hashes: Path, workers: int,
            writers: dict[str, "_Writer"], survey: _Survey, clock: "_Clock") -> None:
    """The second reading: documents through the workers into the writers, in the order of the sources."""
    boundary = np.asarray([encoding.boundary], encoding.dtype).tobytes()
    done = 0
    for batch, grams, prints in _through(_tasks(sources, plan), encoding, hashes, workers):
        survey.held.note(grams, prints)
        for encoded in batch:
            writers["held" if encoded.held_out else "train"].add(encoded, boundary)
            done += encoded.bytes
        clock.tick("encoding", done, survey.total, sum(w.offset for w in writers.values()))
    changed = [s.path for s, _ in sources if _stat(s) != survey.stats[s.name]]
    if changed or done != survey.total:
        raise DataError(f"{changed[0] if changed else 'the text'} changed while it was being read; build again")
    clock.tick("encoding", done, survey.total, sum(w.offset for w in writers.values()), last=True)


def _tasks(sources: list[tuple[Source, bool]], plan: Plan) -> Iterator[list[tuple[int, bytes, bool]]]:
    """Documents in bundles of about TASK_BYTES, so that handing them over costs little."""
    bundle: list[tuple[int, bytes, bool]] = []
    size = 0
    for source, whole_file in sources:
        for document in documents(source, plan.rule, Counter()):
            bundle.append((document.id, document.raw, plan.holds_out(document, whole_file)))
            size += len(document.raw)
            if size >= TASK_BYTES:
                yield bundle
                bundle, size = [], 0
    if bundle:
        yield bundle


def _through(tasks: Iterator[list[tuple[int, bytes, bool]]], encoding: Encoding, hashes: Path,
             workers: int) -> Iterator[tuple[list[Encoded], Hashes, Hashes]]:
    """Results in the order of the tasks. At most a few tasks a worker are under way: memory does not grow."""
    if workers <= 1:
        yield from map(_Worker(encoding, hashes).encode, tasks)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoding, hashes)) as pool:
        waiting: deque[Future[tuple[list[Encoded], Hashes, Hashes]]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(_work, task))
                if len(waiting) >= 3 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class _Writer:
    """Appends documents to shards of one side. A document never straddles two shards."""

    def __init__(self, folder: Path, side: str, shard_tokens: int, dtype: str):
        self.folder, self.side, self.width = folder, side, np.dtype(dtype).itemsize
        self.shard_bytes = shard_tokens * self.width
        self.files: Files = {}
        self.offset = self.documents = self.raw_bytes = self.shards = self.lossy = 0
        self.index = _HashedFile(folder / f"{side}-index.bin")
        self.shard: _HashedFile | None = None

    def add(self, document: Encoded, boundary: bytes) -> None:
        if self.shard is None:
            self.shard = _HashedFile(self.folder / f"{self.side}-{self.shards:05d}.bin")
            self.shards += 1
        tokens = len(document.ids) // self.width + 2
        for part in (boundary, document.ids, boundary):
            self.shard.write(part)
        record = (document.id, self.offset, tokens, document.bytes, document.text, document.words, document.lossless)
        self.index.write(np.array([record], INDEX).tobytes())
        self.offset += tokens
        self.documents += 1
        self.raw_bytes += document.bytes
        self.lossy += document.lossless == 0
        if self.shard.size >= self.shard_bytes:
            self._end_shard()

    def _end_shard(self) -> None:
        if self.shard is not None:
            self.files[self.shard.path.name] = self.shard.close()
            self.shard = None

    def close(self) -> Files:
        self._end_shard()
        self.files[self.index.path.name] = self.index.close()
        return self.files

    def counts(self) -> dict[str, int]:
        return {"documents": self.documents, "tokens": self.offset, "bytes": self.raw_bytes}


class _HashedFile:
    """Hashes what it writes, and is on the disk when closed."""

    def __init__(self, path: Path):
        self.path, self.size, self.sha256 = path, 0, hashlib.sha256()
        self.file = path.open("xb")

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"bytes": self.size, "sha256": self.sha256.hexdigest()}


def _refuse(overlap: Overlap, bound: float) -> None:
    if overlap.share > bound:
        worst = "; ".join(f"{name} ({'whole' if twin else f'{share:.0%}'})" for name, share, twin in overlap.worst)
        raise DataError(f"{overlap}: more than --max-overlap {bound:.2%}. Held-out numbers would measure memory. "
                        f"Worst: {worst}. Remove the doubles, hold out whole files, or raise --max-overlap knowingly")


def _manifest(plan: Plan, encoding: Encoding, survey: _Survey, writers: dict[str, _Writer], overlap: Overlap,
              files: Files) -> bytes:
    digest = hashlib.sha256(b"".join(f"{i:016x} {text:016x}\n".encode() for i, text in sorted(survey.held_digests)))
    held_rule = {"share": plan.held_out, "seed": plan.seed, "by": "derive(seed, 'held-out', id) < share * 2^63",
                 "files": [s.name for s, whole in survey.sources if whole]}
    manifest = {
        "format": FORMAT,
        "tokenizer": {"digest": encoding.digest, "vocabulary": encoding.vocabulary, "file": "tokenizer.json"},
        "boundary": {"token": encoding.boundary_token, "id": encoding.boundary, "before": True, "after": True},
        "dtype": encoding.dtype,
        "train": writers["train"].counts(),
        "held_out": {**writers["held"].counts(), "lossy": writers["held"].lossy, "digest": digest.hexdigest()},
        "rule": asdict(plan.rule),
        "held_out_rule": held_rule,
        "left_out": dict(survey.left_out),
        "overlap": {"bound": plan.max_overlap, **overlap.to_json()},
        "sources": [{"name": name, "bytes": survey.stats[name][0], "sha256": sha256, "text_bytes": survey.bytes[name],
                     "documents": survey.documents[name]} for name, sha256 in survey.sha256.items()],
        "files": dict(sorted(files.items())),
    }
    return json.dumps(manifest, indent=1, ensure_ascii=False).encode()


# ---------------------------------------------------------------- samples

def _keep_sample(survey: _Survey, document: Document, seed: int) -> None:
    """The documents with the smallest keys: a random few, the same for every number of workers and any order."""
    key = -derive(seed, "sample", document.id)
    if len(survey.samples) == SAMPLES and key <= survey.samples[0][0]:
        return
    text = document.raw if len(document.raw) <= SAMPLE_BYTES else _beginning(document.raw)
    row = (key, document.id, text, text == document.raw)
    heapq.heappush(survey.samples, row) if len(survey.samples) < SAMPLES else heapq.heapreplace(survey.samples, row)


def _beginning(raw: bytes) -> bytes:
    """The first whole words of a long document: its ids begin as the document's do, but perhaps for the last few."""
    text = raw[:SAMPLE_BYTES].decode(errors="ignore")
    return text[: max(text.rfind(" "), text.rfind("\n"), 0) or len(text)].encode()


def _write_samples(folder: Path, samples: list[tuple[int, int, bytes, bool]], encoding: Encoding,
                   files: Files) -> Files:
    """Encoded by the plain twin; `agree` counts the leading ids that stand in the shards."""
    backend = plain_backend(Tokenizer.from_folder(folder))
    splits = {side: _split(folder, side, files, encoding.dtype) for side in SIDES}
    lines = []
    for _, number, raw, whole in sorted(samples, reverse=True):
        text = raw.decode()
        ids = np.frombuffer(encode_plain(backend, text, encoding.dtype), encoding.dtype)
        agree = _agreement(ids, _stored(splits, number))
        if agree < len(ids) - (0 if whole else EDGE):
            raise ArtifactError(f"document {number:016x} was stored with other ids than its tokenizer gives from place "
                                f"{agree} on; please report this tokenizer.json")
        lines.append(json.dumps({"id": f"{number:016x}", "text": text, "ids": ids.tolist(), "agree": agree}))
    return {"samples.jsonl": write_file(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines).encode())}


def _check_samples(corpus: Corpus) -> None:
    """A cache made by another tokenizer, or poisoned, shows here: ids are made again and found in the shards."""
    backend = plain_backend(Tokenizer.from_folder(corpus.folder))
    splits = {"train": corpus.train, "held": corpus.held_out}
    for line in (corpus.folder / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        sample = json.loads(line)
        ids = np.frombuffer(encode_plain(backend, sample["text"], corpus.manifest["dtype"]), corpus.manifest["dtype"])
        stored = _stored(splits, int(sample["id"], 16))
        if ids.tolist() != sample["ids"] or _agreement(ids, stored) < sample["agree"]:
            raise ArtifactError(f"{corpus.folder}: document {sample['id']} does not encode to its stored ids; another "
                                "tokenizer, or another version of it, made the shards. Build the corpus again")


def _stored(splits: dict[str, Split], number: int) -> NDArray[Any]:
    """A document's own ids, found by its id."""
    for split in splits.values():
        if (row := np.flatnonzero(split.index["id"] == number)).size:
            return split.document(int(row[0]))[1:-1]
    raise ArtifactError(f"the sampled document {number:016x} is in no shard; build the corpus again")


def _agreement(ids: NDArray[Any], stored: NDArray[Any]) -> int:
    """How many leading ids are the same."""
    length = min(len(ids), len(stored))
    differ = np.flatnonzero(ids[:length] != stored[:length])
    return int(differ[0]) if differ.size else length


# ---------------------------------------------------------------- files

@contextmanager
def committed(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes `out` whole, or is gone: written beside, fsynced, renamed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
    try:
        yield folder
        folder.chmod(0o755)
        _fsync_folder(folder)
        os.rename(folder, out)
        _fsync_folder(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    file = _HashedFile(path)
    file.write(data)
    return file.close()


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, boundary: str | None) -> tuple[Encoding, Files]:
    """Its files come first: the workers and every later opening read these, not the ones they were copied from."""
    files = {name: write_file(folder / name, data) for name, data in tokenizer.files().items() if "/" not in name}
    return Encoding.of(tokenizer, boundary, folder), files


def _read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "manifest.json"
    if not path.is_file():
        raise UsageError(f"{folder} is not a corpus: no manifest.json; make one with: assay corpus TEXT --out {folder}")
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON ({error}); build the corpus again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtifactError(f"{path}: not of the format {FORMAT}; build the corpus again")
    return manifest, hashlib.sha256(data).hexdigest()


def _check_files(folder: Path, files: Files, verify: bool) -> None:
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ArtifactError(f"{folder}: the manifest names {name!r}, which is not a file of this folder")
        if path.stat().st_size != entry["bytes"]:
            raise ArtifactError(f"{path}: {path.stat().st_size} bytes, the manifest says {entry['bytes']}")
        if verify and sha256_of(path) != entry["sha256"]:
            raise ArtifactError(f"{path}: its sha256 is not the manifest's; the bytes changed. Build the corpus again")


def _open_split(folder: Path, side: str, manifest: dict[str, Any]) -> Split:
    split = _split(folder, side, manifest["files"], manifest["dtype"])
    ends = split.index["offset"] + split.index["tokens"]
    begins = np.concatenate([np.zeros(1, np.uint64), ends])[: len(ends)]
    told = manifest["train" if side == "train" else "held_out"]
    found = {"documents": split.documents, "tokens": split.tokens, "bytes": split.bytes}
    if not np.array_equal(split.index["offset"], begins) or any(told[key] != count for key, count in found.items()):
        raise ArtifactError(f"{folder}: {side}-index.bin does not describe the {side} shards; build the corpus again")
    return split


def _split(folder: Path, side: str, files: Files, dtype: str) -> Split:
    names = sorted(name for name in files if name.startswith(f"{side}-") and name != f"{side}-index.bin")
    shards = tuple(np.memmap(folder / name, dtype, "r").view(np.ndarray) for name in names)
    index: NDArray[Any] = np.fromfile(folder / f"{side}-index.bin", INDEX)
    return Split(shards, np.cumsum([0, *map(len, shards)], dtype=np.int64), index)


# ---------------------------------------------------------------- small things

def text_hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "little")


def _stat(source: Source) -> tuple[int, int]:
    stat = source.path.stat()
    return stat.st_size, stat.st_mtime_ns


def _counted(left_out: Counter[str]) -> str:
    return ", ".join(f"{count} {kind} documents left out" for kind, count in left_out.items()) or "no documents"


class _Clock:
    """Tells `progress` now and then, not for every document."""

    def __init__(self, progress: Callable[[Progress], None], every: float = 0.25):
        self.progress, self.every = progress, every
        self.began = self.told = time.monotonic()

    def tick(self, stage: str, done: int, total: int | None, tokens: int, *, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self.told >= self.every:
            self.told = now
            self.progress(Progress(stage, done, total, tokens, now - self.began))
