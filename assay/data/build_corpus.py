"""Corpus building: the sources are read twice, encoded in parallel, written whole or not at all.

Which documents are held out is decided by their ids and the seed before anything is read. The first reading counts,
refuses bad rows and remembers the held-out side; the second encodes, and looks training text up in what was remembered.
"""

import hashlib
import heapq
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from assay.data.data_files import Document, DocumentRule, FileKind, TextSource, find_sources, iter_documents
from assay.data.encode import encode_plain, plain_backend
from assay.data.encode_workers import EncodedDocument, EncodeResult, EncodeTask, Encoding, start_encoders, text_hash
from assay.data.overlap import HeldOutText, Overlap
from assay.data.token_corpus import CORPUS_FORMAT, INDEX_RECORD, SIDES, Corpus, Files, leading_matches, open_corpus, open_split, stored_ids
from assay.errors import ArtifactError, DataError, UsageError
from assay.model.tokenizer import Tokenizer
from assay.seeds import derive
from assay.store import durable
from assay.store.durable import HashedFile, write_entry

TASK_BYTES = 1 << 19
_SAMPLES, SAMPLE_BYTES = 8, 4096
_EDGE = 8  # ids at the end of a cut text that may differ from the document's


@dataclass(frozen=True)
class CorpusPlan:
    """Settings that decide what a corpus will hold, but for the texts and the tokenizer."""

    rule: DocumentRule = field(default_factory=DocumentRule)
    held_out: float = 0.05  # share of the documents
    held_out_files: tuple[Path, ...] = ()  # held out whole
    seed: int = 0
    boundary: str | None = None  # token before and after every document; None: the tokenizer's EOS
    shard_tokens: int = 100_000_000
    max_overlap: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise UsageError(f"--held-out is {self.held_out}; expected a share from 0 up to 1")
        if self.shard_tokens < 1:
            raise UsageError(f"--shard-tokens is {self.shard_tokens}; expected at least 1")

    def holds_out(self, document: Document, whole_file: bool) -> bool:
        """Whether a document is held out, by id and seed alone: the text has no say, and neither has any other document."""
        return whole_file or derive(self.seed, "held-out", document.id) < self.held_out * (1 << 63)


@dataclass(frozen=True)
class CorpusProgress:
    stage: str  # "reading" or "encoding"
    done: int  # raw bytes
    total: int | None  # unknown while reading
    tokens: int
    seconds: float


def build_corpus(texts: Iterable[Path], out: Path, tokenizer: Path, plan: CorpusPlan, *, workers: int = 1,
                 progress: Callable[[CorpusProgress], None] = lambda _: None) -> Corpus:
    """`tokenizer` is a folder with tokenizer.json. Refused, with nothing written, above the plan's overlap."""
    sources = _sources(texts, plan.held_out_files)
    _refuse_rule_without_effect(plan.rule, {source.kind for source, _ in sources})
    # The hashes lie inside of what is unfinished: where a kill leaves both, the next build of this folder sweeps both away.
    with durable.new_folder(out) as folder, tempfile.TemporaryDirectory(dir=folder, prefix=".hashes-") as hashes:
        loaded = Tokenizer.from_folder(tokenizer)
        encoding, files = _write_tokenizer(folder, loaded, plan.boundary)
        clock = _Clock(progress)
        writers = {side: _Writer(folder, side, plan.shard_tokens, encoding) for side in SIDES}
        with start_encoders(encoding, Path(hashes), workers) as encode:
            survey = _survey(sources, plan, clock)
            survey.held.save(Path(hashes))
            for result in encode(_tasks(sources, plan)):
                _take(result, survey, writers)
                clock.tick("encoding", sum(w.bytes for w in writers.values()), survey.total, sum(w.offset for w in writers.values()))
        _refuse_change(sources, survey, writers)
        overlap = survey.held.overlap()
        _refuse_overlap(overlap, plan.max_overlap)
        files |= writers["train"].close() | writers["held"].close()
        files |= _write_samples(folder, survey, loaded, encoding, files)
        write_entry(folder / "manifest.json", _manifest(plan, encoding, survey, writers, overlap, files))
    return open_corpus(out, verify=False)


def _sources(texts: Iterable[Path], held_out_files: Iterable[Path]) -> list[tuple[TextSource, bool]]:
    """Text sources, each with whether it is held out whole."""
    train, held = find_sources(texts), find_sources(held_out_files)
    if clash := {source.name for source in train} & {source.name for source in held}:
        raise UsageError(f"{min(clash)!r} is given both as training text and as --held-out-files")
    return [(source, False) for source in train] + [(source, True) for source in held]


def _refuse_rule_without_effect(rule: DocumentRule, kinds: set[FileKind]) -> None:
    if "text" not in kinds and (rule.split is not None or rule.document_bytes is not None):
        raise UsageError(f"--{'split' if rule.split is not None else 'document-bytes'} cuts text files, and none is given: every row of "
                         "the others is a document; leave it out")
    if kinds == {"text"} and rule.field != DocumentRule.field:
        raise UsageError(f"--field {rule.field} names what rows hold their text under, and only text files are given; leave it out")


# ---------------------------------------------------------------- first reading

@dataclass
class _Survey:
    """Result of the survey of a corpus."""

    held: HeldOutText = field(default_factory=HeldOutText)
    held_texts: list[tuple[int, int]] = field(default_factory=list)  # (id, text hash)
    samples: list[tuple[int, int, bytes, bool]] = field(default_factory=list)  # a heap: (-key, id, text, whole)
    documents: Counter[str] = field(default_factory=Counter)  # by source
    bytes: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    stats: dict[str, tuple[int, int]] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def _survey(sources: list[tuple[TextSource, bool]], plan: CorpusPlan, clock: "_Clock") -> _Survey:
    """Survey the sources; ends in an error, or with at least one document on every side that was asked for."""
    survey = _Survey()
    for source, whole_file in sources:
        survey.stats[source.name] = _stat(source)
        survey.sha256[source.name] = durable.hash_file(source.path)
        for document in iter_documents(source, plan.rule, survey.left_out):
            survey.documents[source.name] += 1
            survey.bytes[source.name] += len(document.raw)
            _keep_sample(survey, document, plan.seed)
            if plan.holds_out(document, whole_file):
                survey.held.add(f"{document.source}#{document.ordinal}", document.raw)
                survey.held_texts.append((document.id, text_hash(document.raw)))
            clock.tick("reading", survey.total, None, 0)
    found, held = survey.documents.total(), len(survey.held_texts)
    if not found:
        left_out = ", ".join(f"{count} {kind} documents left out" for kind, count in survey.left_out.items())
        raise DataError(f"no text in {', '.join(str(s.path) for s, _ in sources)}: {left_out or 'no documents'}")
    if held == found or (not held and (plan.held_out or plan.held_out_files)):
        raise DataError(f"{held} of {found} documents are held out, so one side is empty; make more documents "
                        "(--document-bytes, --split), change --held-out, or hold out whole files (--held-out-files)")
    return survey


def _keep_sample(survey: _Survey, document: Document, seed: int) -> None:
    """The documents with the smallest keys: a random few, the same in any order of reading."""
    key = -derive(seed, "sample", document.id)
    if len(survey.samples) == _SAMPLES and key <= survey.samples[0][0]:
        return
    text = document.raw if len(document.raw) <= SAMPLE_BYTES else _beginning(document.raw)
    heapq.heappush(survey.samples, (key, document.id, text, text == document.raw))
    if len(survey.samples) > _SAMPLES:
        heapq.heappop(survey.samples)


def _beginning(raw: bytes) -> bytes:
    """The first whole words of a long document: its ids begin as the document's do, but perhaps for the last few."""
    text = raw[:SAMPLE_BYTES].decode(errors="ignore")
    return text[: max(text.rfind(" "), text.rfind("\n"), 0) or len(text)].encode()


# ---------------------------------------------------------------- second reading

def _tasks(sources: list[tuple[TextSource, bool]], plan: CorpusPlan) -> Iterator[list[EncodeTask]]:
    """Documents in bundles of about TASK_BYTES, so that handing them over costs little."""
    bundle: list[EncodeTask] = []
    size = 0
    for source, whole_file in sources:
        for document in iter_documents(source, plan.rule, Counter()):
            bundle.append(EncodeTask(document.id, document.raw, plan.holds_out(document, whole_file)))
            size += len(document.raw)
            if size >= TASK_BYTES:
                yield bundle
                bundle, size = [], 0
    if bundle:
        yield bundle


def _take(result: EncodeResult, survey: _Survey, writers: dict[str, "_Writer"]) -> None:
    survey.held.note(result.grams, result.prints)
    for document in result.documents:
        writers["held" if document.held_out else "train"].add(document)


def _refuse_change(sources: list[tuple[TextSource, bool]], survey: _Survey, writers: dict[str, "_Writer"]) -> None:
    changed = [str(s.path) for s, _ in sources if _stat(s) != survey.stats[s.name]]
    if changed or sum(writer.bytes for writer in writers.values()) != survey.total:
        raise DataError(f"{' '.join(changed) or 'the text'} changed while it was being read; build again")


def _refuse_overlap(overlap: Overlap, bound: float) -> None:
    if overlap.share > bound:
        worst = "; ".join(f"{name} ({'whole' if twin else f'{share:.0%}'})" for name, share, twin in overlap.worst)
        raise DataError(f"{overlap}: more than --max-overlap {bound:.2%}. Held-out numbers would measure memory. "
                        f"Worst: {worst}. Remove the doubles, hold out whole files, or raise --max-overlap knowingly")


# ---------------------------------------------------------------- writing

class _Writer:
    """Writer of documents into the shards of one side. A document never straddles two shards."""

    def __init__(self, folder: Path, side: str, shard_tokens: int, encoding: Encoding):
        self.folder, self.side = folder, side
        self.width = np.dtype(encoding.dtype).itemsize
        self.boundary = np.asarray([encoding.boundary], encoding.dtype).tobytes()
        self.shard_bytes = shard_tokens * self.width
        self.files: Files = {}
        self.offset = self.documents = self.bytes = self.shards = self.lossy = 0
        self.index = HashedFile(folder / f"{side}-index.bin")
        self.shard: HashedFile | None = None

    def add(self, document: EncodedDocument) -> None:
        if self.shard is None:
            self.shard = HashedFile(self.folder / f"{self.side}-{self.shards:05d}.bin")
            self.shards += 1
        self.shard.write(self.boundary + document.ids + self.boundary)
        tokens = len(document.ids) // self.width + 2
        record = (document.id, self.offset, tokens, document.bytes, document.text, document.words, document.lossless)
        self.index.write(np.array([record], INDEX_RECORD).tobytes())
        self.offset += tokens
        self.documents += 1
        self.bytes += document.bytes
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
        return {"documents": self.documents, "tokens": self.offset, "bytes": self.bytes}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, boundary: str | None) -> tuple[Encoding, Files]:
    """Write the tokenizer's files first: the workers and every later opening read these, not the ones they were copied from."""
    files = {name: write_entry(folder / name, data) for name, data in tokenizer.files().items() if "/" not in name}
    return Encoding.of(tokenizer, boundary, folder), files


def _write_samples(folder: Path, survey: _Survey, tokenizer: Tokenizer, encoding: Encoding, files: Files) -> Files:
    """Encoded by the plain twin; `agree` counts the leading ids that stand in the shards."""
    backend = plain_backend(tokenizer)
    splits = [open_split(folder, side, files, encoding.dtype) for side in SIDES]
    lines = []
    for _, number, raw, whole in sorted(survey.samples, reverse=True):
        text = raw.decode()
        ids = np.frombuffer(encode_plain(backend, text, encoding.dtype), encoding.dtype)
        agree = leading_matches(ids, stored_ids(splits, number))
        if agree < len(ids) - (0 if whole else _EDGE):
            raise ArtifactError(f"document {number:016x} was stored with other ids than its tokenizer gives from place "
                                f"{agree} on; please report this tokenizer.json")
        lines.append(json.dumps({"id": f"{number:016x}", "text": text, "ids": ids.tolist(), "agree": agree}) + "\n")
    return {"samples.jsonl": write_entry(folder / "samples.jsonl", "".join(lines).encode())}


def _manifest(plan: CorpusPlan, encoding: Encoding, survey: _Survey, writers: dict[str, _Writer], overlap: Overlap,
              files: Files) -> bytes:
    digest = hashlib.sha256(b"".join(f"{i:016x} {text:016x}\n".encode() for i, text in sorted(survey.held_texts)))
    manifest = {
        "format": CORPUS_FORMAT,
        "tokenizer": {"digest": encoding.digest, "vocabulary": encoding.vocabulary, "file": "tokenizer.json"},
        "boundary": {"token": encoding.boundary_token, "id": encoding.boundary, "before": True, "after": True},
        "dtype": encoding.dtype,
        "train": writers["train"].counts(),
        "held_out": {**writers["held"].counts(), "lossy": writers["held"].lossy, "digest": digest.hexdigest()},
        "rule": asdict(plan.rule),
        "held_out_rule": {"share": plan.held_out, "seed": plan.seed, "by": "derive(seed, 'held-out', id) < share 2^63",
                          "files": [source.name for source in find_sources(plan.held_out_files)]},
        "left_out": dict(survey.left_out),
        "overlap": {"bound": plan.max_overlap, **overlap.to_json()},
        "sources": [{"name": name, "bytes": survey.stats[name][0], "sha256": sha256, "text_bytes": survey.bytes[name],
                     "documents": survey.documents[name]} for name, sha256 in survey.sha256.items()],
        "files": dict(sorted(files.items())),
    }
    return json.dumps(manifest, indent=1, ensure_ascii=False).encode()


# ---------------------------------------------------------------- small things

def _stat(source: TextSource) -> tuple[int, int]:
    stat = source.path.stat()
    return stat.st_size, stat.st_mtime_ns


class _Clock:
    """Clock that tells `progress` now and then, not for every document."""

    def __init__(self, progress: Callable[[CorpusProgress], None], every: float = 0.25):
        self.progress, self.every = progress, every
        self.began = self.told = time.monotonic()

    def tick(self, stage: str, done: int, total: int | None, tokens: int) -> None:
        now = time.monotonic()
        if now - self.told >= self.every:
            self.told = now
            self.progress(CorpusProgress(stage, done, total, tokens, now - self.began))
