"""Mutation campaign: how many small mistakes in the code that makes results get past the guards.

    OMP_NUM_THREADS=1 python -m tests.mutants --jobs 2 --count 2000 --clean 200     # or: make mutants

Slow, resumable (what results/mutants.jsonl has is not run again) and deterministic by seed. It ends by writing results/mutants.txt.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tests.mutants import forked_runs
from tests.mutants.campaign import ROOMS, ROOT, Bench, candidates, drawn, found_again, is_new, run_clean, run_mutants
from tests.mutants.reference_runs import REFERENCE_RUNS
from tests.mutants.rules import Mutant
from tests.mutants.table import write_table

IN_MEMORY = Path("/dev/shm")
ROOM_OF_A_JOB = 128 << 20  # bytes
HASH_SEED = {"PYTHONHASHSEED": "0"}  # sets have one order in every campaign


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="runs at a time")
    parser.add_argument("--minutes", type=float, help="stop cleanly after so long, what is made beforehand included")
    parser.add_argument("--count", type=int, default=2000, help="how many mutants, those already in the results included")
    parser.add_argument("--skip", type=int, default=0, help="leave the first so many of the drawn mutants to others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", action="append", choices=ROOMS, help="only this room (again for more)")
    parser.add_argument("--run", action="append", choices=[run.name for run in REFERENCE_RUNS],
                        help="only this reference run (again for more)")
    parser.add_argument("--beyond", action="store_true", help="only lines that no reference run but those of --run reaches")
    parser.add_argument("--again", type=Path, metavar="RESULTS", help="only an earlier campaign's silent mutants, in the code as it is")
    parser.add_argument("--since", metavar="COMMIT", help="only lines written since this commit")
    parser.add_argument("--tries", type=int, default=1, help="reference runs on which a mutant that looks equivalent is tried")
    parser.add_argument("--clean", type=int, default=0, help="so many clean runs with other seeds and settings, before the mutants")
    parser.add_argument("--scratch", type=Path, help="where everything is run; a disk that syncs is several times slower. "
                                                     "Default: /dev/shm where it has the room, else the system's folder")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "mutants.jsonl")
    parser.add_argument("--table", type=Path, default=ROOT / "results" / "mutants.txt", help="where the table goes")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left behind
    until = None if chosen.minutes is None else time.monotonic() + 60 * chosen.minutes - 20
    if not chosen.only_table:
        scratch = Path(tempfile.mkdtemp(prefix="assay-mutants-", dir=chosen.scratch or in_memory(chosen.jobs)))
        try:
            campaign(chosen, scratch, until)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    if chosen.results.exists():
        write_table(chosen.results, chosen.table)
        print(f"table: {chosen.table}")


def in_memory(jobs: int) -> Path | None:
    return IN_MEMORY if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > (1 << 30) + jobs * ROOM_OF_A_JOB else None


def campaign(chosen: argparse.Namespace, scratch: Path, until: float | None) -> None:
    began = time.monotonic()
    forked_runs.preload()
    runs = [run for run in REFERENCE_RUNS if not chosen.run or run.name in chosen.run]
    others = [run for run in REFERENCE_RUNS if run not in runs] if chosen.beyond else []
    bench = Bench(scratch / "bench", chosen.jobs, runs, say, others=others)
    bench.prepare()
    say(f"ready after {time.monotonic() - began:.0f} s")
    if chosen.clean:
        run_clean(bench, chosen.clean, chosen.results, chosen.seed, until=until, say=say)
    began = time.monotonic()
    count = run_mutants(bench, islice(chosen_mutants(chosen, bench), chosen.skip, chosen.skip + chosen.count), chosen.results, until=until,
                        tries=chosen.tries, say=say)
    say(f"{count} mutants in {(time.monotonic() - began) / 60:.1f} minutes")


def chosen_mutants(chosen: argparse.Namespace, bench: Bench) -> Iterator[Mutant]:
    if chosen.again:
        rows = [json.loads(line) for line in chosen.again.read_text().splitlines()]
        return found_again(bench, [row for row in rows if row["kind"] == "silent"], say)

    def wanted(mutant: Mutant) -> bool:
        return (not chosen.since or is_new(mutant, chosen.since)) and (not chosen.beyond or bench.is_beyond(mutant))

    found = candidates(bench, tuple(chosen.room or ROOMS), wanted)
    say("mutants that a reference run reaches: " + ", ".join(f"{room} {sum(map(len, rules.values()))}" for room, rules in found.items()))
    return drawn(found, chosen.seed)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    if os.environ.items() >= HASH_SEED.items():
        sys.exit(main())
    os.execve(sys.executable, [sys.executable, "-m", "tests.mutants", *sys.argv[1:]], os.environ | HASH_SEED)
