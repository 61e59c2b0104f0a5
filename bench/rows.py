"""How fast rows are deduplicated, mixed, split and looked at on two cores, and what memory it takes.

    python -m bench.rows [--megabytes 300] [--workers 2] [--out results/rows.txt]

The rows are made up. Half of the bytes are documents of 300 to 900 words drawn from 50,000, as JSON lines with a `text`; the other half
are turns of 20 to 60 words, of which there are some fifteen times as many. One in twenty is a copy of another, one in twenty a near copy
(2 % of its words changed). The clock counts everything: reading, parsing, hashing, comparing, writing, fsync. Processor seconds are of
all processes together: where other programs compete for the cores, bytes per processor second tell more than the clock. Memory is the
peak of the one process that does the work, new for each line, less what it held before: what its imports take is no matter of rows.
Then what MinHash finds: of documents and changed copies of them, by the true similarity of their runs of five words, the
share that is found at a threshold of 0.8; and how many documents that are like none are taken for another.
"""

import argparse
import datetime
import gzip
import json
import os
import platform
import random
import resource
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from assay.data.mixture import WeightedSource
from assay.data.near_duplicates import RUN_WORDS, document_prints, find_duplicates
from assay.data.row_files import deduplicate, look_at_rows, mix_rows, split_rows

GOAL = 20.0  # MB/s over two cores
THRESHOLD = 0.8
EDGES = (0.0, 0.5, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)  # of true similarities
LONG, SHORT = (300, 900), (20, 60)  # words of a row
PAGE, REMARK = (100, 600), (6, 40)  # words of a document with a changed copy
Job = Callable[[], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3000, help="documents with a changed copy, to see what is found")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [f"$ python -m bench.rows --megabytes {args.megabytes} --workers {args.workers}",
             f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy "
             f"{np.__version__}, load before {os.getloadavg()[0]:.1f}, n=1; goal {GOAL:g} MB/s over two cores",
             f"{'':26} {'MB':>7} {'rows':>9} {'s':>7} {'MB/s':>7} {'cpu s':>7} {'MB/cpu s':>9} {'MB held':>8}"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = {name: write_documents(folder / f"{name}.jsonl", args.megabytes * 10**6 // 2, words)
                for name, words in (("documents", LONG), ("turns", SHORT))}
        both = {count: rows["documents"][count] + rows["turns"][count] for count in rows["turns"]}
        for name, (counts, job) in jobs_on(folder, rows | {"both": both}, args.workers).items():
            lines.append(measured(name, counts, job))
            print(lines[-1], flush=True)
    for words in (PAGE, REMARK):
        lines += found_by_similarity(args.pairs, words)
        print("\n".join(lines[-len(EDGES) - 1 :]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


def jobs_on(folder: Path, counts: dict[str, dict[str, int]], workers: int) -> dict[str, tuple[dict[str, int], Job]]:
    """Jobs by name, each with what is in the rows that it reads."""
    long, short = (str(folder / f"{name}.jsonl") for name in ("documents", "turns"))
    weights = [Fraction(counts[name]["rows"]) for name in ("documents", "turns")]
    shares = [Fraction(round(100 * weight / sum(weights)), 100) for weight in weights]  # both run out at about the same row
    sources = [WeightedSource(name, share) for name, share in zip((long, short), shares, strict=True)]
    dedup = partial(deduplicate, [long, short], field=None, workers=workers)
    mix, columns = partial(mix_rows, rows=None, epochs=1, seed=0), as_parquet(short)
    jobs: dict[str, tuple[str, Job]] = {
        "dedup, MinHash": ("both", partial(dedup, str(folder / "near.jsonl"), threshold=THRESHOLD)),
        "dedup, exact": ("both", partial(dedup, str(folder / "exact.jsonl"), threshold=None)),
        "mix, 1 process": ("both", partial(mix, sources, str(folder / "mixed.jsonl"))),
        "mix of .jsonl.gz": ("turns", partial(mix, [WeightedSource(packed(short), Fraction(1))], str(folder / "unpacked.jsonl"))),
        "mix of .parquet": ("turns", partial(mix, [WeightedSource(columns, Fraction(1))], str(folder / "columns.jsonl"))),
        "split documents, 1 process": ("documents", partial(split_rows, long, str(folder / "long"), held_out=0.05, seed=0)),
        "split turns, 1 process": ("turns", partial(split_rows, short, str(folder / "short"), held_out=0.05, seed=0)),
        "look at documents": ("documents", partial(look_at_rows, long)),
        "look at turns": ("turns", partial(look_at_rows, short)),
        "look at .parquet": ("turns", partial(look_at_rows, columns))}
    return {name: (counts[what], job) for name, (what, job) in jobs.items()}


def packed(name: str) -> str:
    with Path(name).open("rb") as plain, gzip.open(f"{name}.gz", "wb", compresslevel=1) as file:
        shutil.copyfileobj(plain, file)
    return f"{name}.gz"


def as_parquet(name: str) -> str:
    """The same rows in one group, in which pyarrow writes up to a million unless it is told otherwise."""
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(list(map(json.loads, Path(name).read_bytes().splitlines()))), f"{name}.parquet")
    return f"{name}.parquet"


def measured(name: str, counts: dict[str, int], job: Job) -> str:
    """A job in a process of its own: its time, and its peak of memory less what it began with."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found, seconds, busy, held = pool.submit(costs, job).result()
    told = f"  {found['exact']} copies of {counts['copies']}, {found['near']} near of {counts['near']}" if "exact" in found else ""
    size = counts["bytes"] / 1e6
    return (f"{name:26} {size:7.1f} {counts['rows']:9,d} {seconds:7.2f} {size / seconds:7.1f} {busy:7.2f} {size / busy:9.1f} "
            f"{held / 1e6:8,.0f}{told}")


def costs(job: Job) -> tuple[dict[str, Any], float, float, int]:
    """(what it found, seconds, processor seconds, bytes held at the peak more than before)."""
    before, start, busy = peak_memory(), time.perf_counter(), processor_seconds()
    found = job()
    return found, time.perf_counter() - start, processor_seconds() - busy, peak_memory() - before


def peak_memory() -> int:
    """Most bytes that this process has held so far: not those of the program that started it, which getrusage counts."""
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))


def found_by_similarity(count: int, length: tuple[int, int]) -> list[str]:
    """Documents of so many words and their changed copies, each by its true similarity: which were found, and which of others' were."""
    draw, words = random.Random(1), [f"w{number}" for number in range(20_000)]
    texts, similarities = list[list[str]](), list[float]()
    for number in range(count):
        text = draw.choices(words, k=draw.randint(*length))
        share = 0.15 * (number + 1) / count  # of the words that are changed
        texts += [text, [draw.choice(words) if draw.random() < share else word for word in text]]
        similarities.append(jaccard(*texts[-2:]))
    prints = document_prints([" ".join(text).encode() for text in texts])
    first, own = find_duplicates(prints, THRESHOLD).first, np.arange(count)
    found, true = first[1::2] == 2 * own, np.array(similarities)
    strange = int((first[0::2] // 2 != own).sum() + (first[1::2] // 2 != own).sum())
    lines = [f"true similarity        pairs  found at a threshold of {THRESHOLD:g}, of {length[0]} to {length[1]} words"]
    for low, high in pairwise(EDGES):
        inside = (true >= low) & ((true < high) | (high == EDGES[-1]))
        lines.append(f"{low:4.2f} to {high:4.2f} {int(inside.sum()):14,d}  {found[inside].mean() if inside.any() else float('nan'):.3f}")
    return [*lines, f"joined with a document that is not theirs: {strange} of {2 * count:,}"]


def jaccard(one: list[str], other: list[str]) -> float:
    here, there = ({tuple(words[at : at + RUN_WORDS]) for at in range(len(words) - RUN_WORDS + 1)} for words in (one, other))
    return len(here & there) / len(here | there)


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def write_documents(path: Path, size: int, length: tuple[int, int]) -> dict[str, int]:
    draw, found = random.Random(0), {"bytes": 0, "rows": 0, "copies": 0, "near": 0}
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(50_000)]
    kept = deque[list[str]](maxlen=1000)
    with path.open("w") as file:
        while found["bytes"] < size:
            chance = draw.random()
            if kept and chance < 0.1:
                text = list(draw.choice(kept))
                found["copies" if chance < 0.05 else "near"] += 1
                for _ in range(0 if chance < 0.05 else max(1, len(text) // 50)):
                    text[draw.randrange(len(text))] = draw.choice(words)
            else:
                text = draw.choices(words, k=draw.randint(*length))
                kept.append(text)
            found["bytes"] += file.write(json.dumps({"text": " ".join(text)}) + "\n")
            found["rows"] += 1
    return found


if __name__ == "__main__":
    main()
