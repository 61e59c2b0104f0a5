"""Encoding processes: documents go through them and come back in order, in bounded memory."""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np

from assay.data.encode import Encoder, boundary_id, id_type
from assay.data.overlap import Hashes, OverlapLookup
from assay.errors import AssayError
from assay.model.tokenizer import Tokenizer

TASKS_UNDER_WAY = 3  # for each worker


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


class EncodeTask(NamedTuple):
    """One document on its way to a worker."""

    id: int
    raw: bytes
    held_out: bool


class EncodedDocument(NamedTuple):
    """Document on its way back from a worker, encoded."""

    id: int
    ids: bytes
    held_out: bool
    bytes: int
    text: int
    words: int
    lossless: int  # as in INDEX


class EncodeResult(NamedTuple):
    documents: list[EncodedDocument]
    grams: Hashes  # held-out 13-grams that training text hit
    prints: Hashes  # and whole documents


class EncodeWorker:
    """The tokenizer with its memory, and the held-out hashes to look training text up in."""

    def __init__(self, encoding: Encoding, hashes: Path):
        self.encoder, self.hashes = Encoder(Tokenizer.from_folder(encoding.folder), encoding.dtype), hashes

    @cached_property
    def lookup(self) -> OverlapLookup:
        return OverlapLookup(self.hashes)

    def encode(self, tasks: list[EncodeTask]) -> EncodeResult:
        done: list[EncodedDocument] = []
        grams, prints = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
        for task in tasks:
            ids = self.encoder.encode(task.raw)
            hit_grams, hit_print, words = self.lookup.hits(task.raw)
            if not task.held_out:
                grams.append(hit_grams)
                prints.append(hit_print)
            lossless = self._decodes_to(task.raw, ids) if task.held_out else -1
            done.append(EncodedDocument(task.id, ids, task.held_out, len(task.raw), text_hash(task.raw), words, lossless))
        return EncodeResult(done, np.unique(np.concatenate(grams)), np.unique(np.concatenate(prints)))

    def _decodes_to(self, raw: bytes, ids: bytes) -> int:
        numbers = np.frombuffer(ids, self.encoder.dtype).tolist()
        return int(self.encoder.backend.decode(numbers, skip_special_tokens=False) == raw.decode())


@contextmanager
def start_encoders(encoding: Encoding, hashes: Path,
                   workers: int) -> Iterator[Callable[[Iterable[list[EncodeTask]]], Iterator[EncodeResult]]]:
    """A function from tasks to results in the same order, whatever the workers' pace. One worker is this process itself.

    Processes start at once, and load the tokenizer during the first reading; `hashes` must hold its files by the first task.
    """
    if workers <= 1:
        yield lambda tasks: map(EncodeWorker(encoding, hashes).encode, tasks)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, (encoding, hashes)) as pool:
        for _ in range(workers):
            pool.submit(_work, [])
        try:
            yield partial(_through, pool, TASKS_UNDER_WAY * workers)
        except BrokenProcessPool:
            raise AssayError("an encoding process died, perhaps for want of memory; try fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _through(pool: ProcessPoolExecutor, under_way: int, tasks: Iterable[list[EncodeTask]]) -> Iterator[EncodeResult]:
    """Results of tasks run in the pool, few under way at a time, so memory does not grow with the text."""
    waiting: deque[Future[EncodeResult]] = deque()
    for task in tasks:
        waiting.append(pool.submit(_work, task))
        if len(waiting) >= under_way:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def text_hash(raw: bytes) -> int:
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "little")


_worker: EncodeWorker | None = None  # set in a worker process only


def _start(encoding: Encoding, hashes: Path) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = EncodeWorker(encoding, hashes)


def _end_with_parent() -> None:
    """A pool's processes do not see that it was killed, and would wait for its next task for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(tasks: list[EncodeTask]) -> EncodeResult:
    assert _worker is not None
    return _worker.encode(tasks)
