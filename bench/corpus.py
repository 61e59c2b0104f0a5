"""Pretraining text from end to end on two cores: made, deduplicated, tokenised, and read by a few steps of pretraining.

    python bench/corpus.py --gigabytes 5 --home scratch/corpus --out results/corpus.txt
    python bench/corpus.py --gigabytes 0.2

The text is made up, a function of its seed: documents of 100 to 1,500 words from 50,000 by Zipf's law, as JSON lines in files of 100 MB;
one document in fifty is a copy of another, one in fifty a near copy (1 % of its phrases changed). Every other stage is the command that a
user gives: `assay tokenizer` on the first file's first 8 MB, `assay data dedup`, `assay corpus`, `assay pretrain` for a few steps, whose
model is proven. Each line says how long it took by the clock and in processor seconds, what went in, and the most memory that the
command and all its processes held at one time (sampled every quarter of a second, shared pages counted once).

With --home what is done is kept, and a second call goes on with the stage that is missing.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from assay.seeds import derive

FILE_BYTES, SAMPLE_BYTES, MB = 100_000_000, 8_000_000, 1e6
WORDS, PHRASES, PHRASE_WORDS = 50_000, 400_000, 4
LETTERS = np.frombuffer(b"etaoinshrdlucmfwypvbgk", np.uint8)


class Stage(NamedTuple):
    """A command with the folder or file that it makes."""

    name: str
    makes: Path
    command: Sequence[str]


class Used(NamedTuple):
    """What a command took."""

    seconds: float
    busy: float  # processor seconds
    memory: float  # bytes, of all its processes at one time


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(args.home or scratch)
        home.mkdir(parents=True, exist_ok=True)
        lines = [f"$ python bench/corpus.py --gigabytes {args.gigabytes:g} --workers {args.workers} --steps {args.steps}",
                 f"{datetime.date.today()}, {platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, Python "
                 f"{platform.python_version()}, numpy {np.__version__}, load before {os.getloadavg()[0]:.1f}", make_text(home, args)]
        print("\n".join(lines), flush=True)
        size = sum(file.stat().st_size for file in text_files(home))
        for stage in stages(home, args):
            lines.append(taken(stage, size))
            print(lines[-1], flush=True)
        lines += told(home)
        print("\n".join([lines[1], *told(home)]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of pretraining")
    parser.add_argument("--home", help="keep text, corpus and run here, and go on with what is there")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def stages(home: Path, args: argparse.Namespace) -> list[Stage]:
    assay = [sys.executable, "-m", "assay"]
    made = {name: home / name for name in ("tokenizer", "clean.jsonl", "corpus", "run")}
    held_out = f"{0.0004 / max(args.gigabytes, 0.2):.7f}"  # some 80 documents: the hand-over scores them all, twice, on these cores
    return [
        Stage("assay tokenizer (8 MB)", made["tokenizer"], [*assay, "tokenizer", str(home / "sample.jsonl"), "--vocab-size", "8192",
                                                           "--out", str(made["tokenizer"])]),
        Stage("assay data dedup", made["clean.jsonl"], [*assay, "data", "dedup", *map(str, text_files(home)), "--out",
                                                       str(made["clean.jsonl"]), "--workers", str(args.workers), "--json"]),
        Stage("assay corpus", made["corpus"], [*assay, "corpus", str(made["clean.jsonl"]), "--tokenizer", str(made["tokenizer"]), "--out",
                                              str(made["corpus"]), "--workers", str(args.workers), "--held-out", held_out, "--json"]),
        Stage(f"assay pretrain, {args.steps} steps", made["run"], [
            *assay, "pretrain", "--corpus", str(made["corpus"]), "--out", str(made["run"]), "--depth", "1", "--max-length", "256",
            "--batch-tokens", "4096", "--micro-batch-tokens", "1024", "--tokens", str(4096 * args.steps), "--warmup-steps", "1",
            "--eval-documents", "4", "--probe-samples", "1", "--device", "cpu"])]


def taken(stage: Stage, size: int) -> str:
    """The line of a stage: run now, or known from before."""
    record = stage.makes.with_name(f".{stage.makes.name}.line")
    if not (stage.makes.exists() and record.exists()):
        if stage.makes.is_dir():
            shutil.rmtree(stage.makes)
        stage.makes.unlink(missing_ok=True)
        used = run(stage, stage.makes.with_name(f".{stage.makes.name}.said"))
        record.write_text(f"{stage.name:26} {size / MB:9,.0f} MB {used.seconds:8.1f} s {size / MB / used.seconds:7.1f} MB/s "
                          f"{used.busy:8.1f} cpu s {size / MB / used.busy:7.1f} MB/cpu s  {used.memory / MB:7,.0f} MB held")
    return record.read_text()


def run(stage: Stage, said: Path) -> Used:
    """The command, watched. What it prints is kept beside what it makes."""
    began, before, most = time.perf_counter(), os.times(), [0.0]
    with said.open("wb") as out:
        process = subprocess.Popen(stage.command, stdout=out, stderr=subprocess.PIPE)
        watch = threading.Thread(target=partial(watch_memory, process, most))
        watch.start()
        assert process.stderr is not None
        errors = process.stderr.read()
        code = process.wait()
        watch.join()
    after = os.times()
    if code not in (0, 3):  # 3: a verdict went against it, as that a few steps of pretraining did not lower the loss
        raise SystemExit(f"{stage.name} ended with {code}:\n{errors.decode(errors='replace')[-3000:]}")
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return Used(time.perf_counter() - began, busy, most[0])


def watch_memory(process: "subprocess.Popen[bytes]", most: list[float]) -> None:
    while process.poll() is None:
        most[0] = max(most[0], sum(map(own_memory, family(process.pid))))
        time.sleep(0.25)


def family(first: int) -> list[int]:
    """The process and all that come from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
    found = [first]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def own_memory(process: int) -> float:
    """In bytes; what several share is counted by its shares."""
    try:
        rows = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return 1024.0 * sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))


def told(home: Path) -> list[str]:
    """What the commands found, in their own numbers."""
    found = json.loads((home / ".clean.jsonl.said").read_text())
    manifest = json.loads((home / "corpus" / "manifest.json").read_text())
    made = json.loads((home / "made.json").read_text())
    sides = {side: manifest[side] for side in ("train", "held_out") if side in manifest}
    steps = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    return [f"{found['rows']:,} documents, {found['kept']:,} kept; {found['exact']:,} copies of {made['copies']:,} and {found['near']:,} "
            f"near copies of {made['near']:,} left out",
            "corpus: " + ", ".join(f"{side} {value.get('tokens', 0):,} tokens in {value.get('documents', 0):,} documents"
                                   for side, value in sides.items() if isinstance(value, dict)),
            f"pretraining read {len(steps)} steps of it, loss {steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f}"]

# ---------------------------------------------------------------- the text


def text_files(home: Path) -> list[Path]:
    return sorted((home / "text").glob("*.jsonl"))


def make_text(home: Path, args: argparse.Namespace) -> str:
    """home/text/*.jsonl by two processes, and a sample for the tokenizer; nothing where it is there."""
    began, sizes = time.perf_counter(), part_sizes(round(args.gigabytes * 1e9))
    if not (home / "made.json").exists():
        (home / "text").mkdir(exist_ok=True)
        with ProcessPoolExecutor(args.workers) as pool:
            found = list(pool.map(partial(write_part, home / "text"), range(len(sizes)), sizes))
        with (home / "text" / "part-0000.jsonl").open("rb") as file:
            (home / "sample.jsonl").write_bytes(file.read(SAMPLE_BYTES).rpartition(b"\n")[0] + b"\n")
        (home / "made.json").write_text(json.dumps({name: sum(each[name] for each in found) for name in ("copies", "near")}))
    return f"text made in {time.perf_counter() - began:.1f} s: {sum(sizes) / MB:,.0f} MB in {len(sizes)} files"


def part_sizes(size: int) -> list[int]:
    return [min(FILE_BYTES, size - at) for at in range(0, size, FILE_BYTES)]


@cache
def phrases() -> list[str]:
    """Of four words each, common ones often: a text of these repeats no thirteen words by chance."""
    draw = np.random.default_rng(derive(0, "words"))
    lengths = draw.integers(2, 10, WORDS)
    words = [bytes(draw.choice(LETTERS, length)).decode() for length in lengths]
    chance = 1 / np.arange(1, WORDS + 1)
    chosen = draw.choice(WORDS, (PHRASES, PHRASE_WORDS), p=chance / chance.sum())
    return [" ".join(words[word] for word in row) for row in chosen.tolist()]


def write_part(folder: Path, number: int, size: int) -> dict[str, int]:
    draw, known, found = np.random.default_rng(derive(0, "part", number)), phrases(), {"bytes": 0, "copies": 0, "near": 0}
    kept: list[NDArray[np.int64]] = []
    with (folder / f"part-{number:04d}.jsonl").open("w") as file:
        while found["bytes"] < size:
            chance = draw.random()
            if kept and chance < 0.04:
                text = kept[int(draw.integers(len(kept)))].copy()
                found["copies" if chance < 0.02 else "near"] += 1
                changed = 0 if chance < 0.02 else max(1, len(text) // 100)
                text[draw.integers(0, len(text), changed)] = draw.integers(0, PHRASES, changed)
            else:
                text = draw.integers(0, PHRASES, int(draw.integers(25, 375)))
                kept = [*kept[-199:], text]
            found["bytes"] += file.write('{"text": "' + " ".join([known[phrase] for phrase in text.tolist()]) + '"}\n')
    return found


if __name__ == "__main__":
    sys.exit(main())
