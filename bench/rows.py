"""How fast rows are deduplicated, mixed and split on two cores, and what memory it takes.

    python -m bench.rows [--megabytes 200] [--workers 2] [--out results/rows.txt]

The rows are made up: documents of 300 to 900 words drawn from 50,000, as JSON lines with a `text`; one in twenty is a copy of another,
one in twenty a near copy (2 % of its words changed). The clock counts everything: reading, parsing, hashing, comparing, writing, fsync.
Processor seconds are of all processes together: where other programs compete for the cores, bytes per processor second tell more than
the clock. Then what MinHash finds: of documents and changed copies of them, by the true similarity of their runs of five words, the
share that is found at a threshold of 0.8; and how many documents that are like none are taken for another.
"""

import argparse
import datetime
import json
import os
import platform
import random
import resource
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from assay.data.mixture import WeightedSource
from assay.data.near_duplicates import RUN_WORDS, document_prints, find_duplicates
from assay.data.row_files import deduplicate, mix_rows, split_rows

GOAL = 20.0  # MB/s over two cores
THRESHOLD = 0.8
EDGES = (0.0, 0.5, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)  # of true similarities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3000, help="documents with a changed copy, to see what is found")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [f"$ python -m bench.rows --megabytes {args.megabytes} --workers {args.workers}",
             f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy "
             f"{np.__version__}, load before {os.getloadavg()[0]:.1f}",
             f"{'':26} {'MB':>7} {'s':>7} {'MB/s':>7} {'cpu s':>7} {'MB/cpu s':>9}"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        written = write_documents(folder / "rows.jsonl", args.megabytes * 10**6)
        rows = str(folder / "rows.jsonl")
        dedup = partial(deduplicate, [rows], field=None, workers=args.workers)
        sources = [WeightedSource(rows, Fraction(9)), WeightedSource(str(folder / "exact.jsonl"), Fraction(1))]
        jobs: dict[str, Callable[[], dict[str, Any]]] = {
            "dedup, MinHash": partial(dedup, str(folder / "near.jsonl"), threshold=THRESHOLD),
            "dedup, exact": partial(dedup, str(folder / "exact.jsonl"), threshold=None),
            "mix, 1 process": partial(mix_rows, sources, str(folder / "mixed.jsonl"), rows=None, epochs=1, seed=0),
            "split, 1 process": partial(split_rows, rows, str(folder / "parts"), held_out=0.05, seed=0)}
        for name, job in jobs.items():
            lines.append(timed(name, written["bytes"], job, written))
            print(lines[-1], flush=True)
    own, worker = (resource.getrusage(who).ru_maxrss / 1e3 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    lines.append(f"peak memory of this process {own:,.0f} MB (the mixture holds its files), of a worker {worker:,.0f} MB; goal {GOAL:g} "
                 "MB/s over two cores")
    lines += found_by_similarity(args.pairs)
    print("\n".join([lines[1], *lines[-len(EDGES) - 2 :]]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


def timed(name: str, size: int, job: Callable[[], dict[str, Any]], written: dict[str, int]) -> str:
    start, busy = time.perf_counter(), processor_seconds()
    found = job()
    seconds, busy = time.perf_counter() - start, processor_seconds() - busy
    told = f"  {found['exact']} copies of {written['copies']}, {found['near']} near of {written['near']}" if "near" in found else ""
    return f"{name:26} {size / 1e6:7.1f} {seconds:7.2f} {size / 1e6 / seconds:7.1f} {busy:7.2f} {size / 1e6 / busy:9.1f}{told}"


def found_by_similarity(count: int) -> list[str]:
    """Documents and their changed copies, each by its true similarity: which were found, and which of others' were."""
    draw, words = random.Random(1), [f"w{number}" for number in range(20_000)]
    texts, similarities = list[list[str]](), list[float]()
    for number in range(count):
        text = draw.choices(words, k=draw.randint(100, 600))
        share = 0.15 * (number + 1) / count  # of the words that are changed
        texts += [text, [draw.choice(words) if draw.random() < share else word for word in text]]
        similarities.append(jaccard(*texts[-2:]))
    prints = document_prints([" ".join(text).encode() for text in texts])
    first, own = find_duplicates(prints, THRESHOLD).first, np.arange(count)
    found, true = first[1::2] == 2 * own, np.array(similarities)
    strange = int((first[0::2] // 2 != own).sum() + (first[1::2] // 2 != own).sum())
    lines = [f"true similarity        pairs  found at a threshold of {THRESHOLD:g}"]
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


def write_documents(path: Path, size: int) -> dict[str, int]:
    draw, found = random.Random(0), {"bytes": 0, "copies": 0, "near": 0}
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(50_000)]
    kept: list[list[str]] = []
    with path.open("w") as file:
        while found["bytes"] < size:
            chance = draw.random()
            if kept and chance < 0.1:
                text = list(draw.choice(kept))
                found["copies" if chance < 0.05 else "near"] += 1
                for _ in range(0 if chance < 0.05 else len(text) // 50):
                    text[draw.randrange(len(text))] = draw.choice(words)
            else:
                text = draw.choices(words, k=draw.randint(300, 900))
                kept = [*kept[-999:], text]
            found["bytes"] += file.write(json.dumps({"text": " ".join(text)}) + "\n")
    return found


if __name__ == "__main__":
    main()
