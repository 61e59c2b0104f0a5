"""How fast text becomes a corpus, beside the tokenizers library encoding the same text on the same cores.

    python -m bench.tokenise TEXT --tokenizer FOLDER [FOLDER …] [--workers 2] [--out results/tokenise.txt]

Ours is all of `assay corpus`: both readings, encoding, 13-gram overlap, hashing, fsync and rename. The library's row is
`encode_batch_fast` alone, on the first part of the text already in memory, with as many threads as there are cores. The
processor seconds are of all processes together: where other programs compete for the cores, bytes per processor second
tell more than the clock. Then the cost of a batch of 64 × 1024 tokens at random steps.
"""

import argparse
import datetime
import os
import platform
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tokenizers

from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.data_files import DocumentRule, find_sources, iter_documents
from assay.data.order import Order
from assay.data.token_corpus import Corpus, open_corpus
from assay.model.tokenizer import Tokenizer

GOAL = 8.0  # MB/s over two cores
PEER_BYTES = 16_000_000
RULE = DocumentRule(document_bytes=65536)


def main() -> None:
    args = arguments()
    lines = [f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
             f"tokenizers {tokenizers.__version__}, {args.workers} workers, load before {os.getloadavg()[0]:.1f}",
             f"{'':34} {'MB':>7} {'s':>7} {'MB/s':>7} {'cpu s':>7} {'MB/cpu s':>9}"]
    for folder in args.tokenizer:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "corpus"
            seconds, busy = timed(partial(build_corpus, [args.text], out, folder, CorpusPlan(RULE), workers=args.workers))
            corpus = open_corpus(out)
            lines.append(row(f"assay corpus, {folder.name}", corpus.train.bytes + corpus.held_out.bytes, seconds, busy))
            lines.append(row(f"tokenizers, {folder.name}", *library(args.text, folder)))
            lines.append(f"  batch of 64 × 1024 tokens: {batch_ms(corpus):.2f} ms of one core")
        print("\n".join(lines[-3:]), flush=True)
    lines.append(f"goal: {GOAL:g} MB/s over two cores")
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", type=Path, nargs="+", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of all processors in this process and its children."""
    began, busy = time.perf_counter(), processor()
    work()
    return time.perf_counter() - began, processor() - busy


def processor() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def library(text: Path, folder: Path) -> tuple[int, float, float]:
    backend = Tokenizer.from_folder(folder).backend
    texts: list[str] = []
    size = 0
    for document in iter_documents(find_sources([text])[0], RULE, Counter()):
        texts.append(document.raw.decode())
        size += len(document.raw)
        if size >= PEER_BYTES:
            break
    return size, *timed(lambda: [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)])


def batch_ms(corpus: Corpus) -> float:
    order = Order(corpus, seed=0, rows=64, length=1024, epochs=100)
    times = []
    for step in range(0, order.steps, max(order.steps // 50, 1)):
        began = time.process_time()
        order.batch(step)
        times.append(time.process_time() - began)
    return 1000 * statistics.median(times)


def row(name: str, size: int, seconds: float, busy: float) -> str:
    return f"{name:34} {size / 1e6:7.1f} {seconds:7.2f} {size / 1e6 / seconds:7.2f} {busy:7.2f} {size / 1e6 / busy:9.2f}"


if __name__ == "__main__":
    main()
