"""Known mutants, one of each kind, on one short evaluation: what the campaign makes of them, as JSON. For the test of the campaign."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.mutants import forked_runs
from tests.mutants.campaign import ROOT, Bench, run_mutants
from tests.mutants.reference_runs import ReferenceRun
from tests.mutants.rules import Mutant

WORDS = ("eval", "base", "--out", "scores", "--data", "sums.jsonl", "--task", "graded", "--grader", "answer", "--raw", "-k", "2",
         "--temperature", "1", "--max-new-tokens", "4", "--limit", "8", "--device", "cpu", "--witness", "0")
KNOWN = {  # kind → file, before, after
    "crashed": ("assay/seeds.py", '[:8], "big")', '[:8], "bog")'),
    "stopped": ("assay/seeds.py", "for part in (seed, *address))", "for part in (seed,))"),
    "equivalent": ("assay/generate/policy_logprobs.py", "_ROWS = 512", "_ROWS = 1024"),
    "silent": ("assay/kernels/draw_tokens.py", "uniforms(key_N, counter_N)", "uniforms(counter_N, key_N)"),  # other draws, as good
}


def known_mutant(kind: str) -> Mutant:
    file, before, after = KNOWN[kind]
    start = (ROOT / file).read_bytes().index(before.encode())
    return Mutant(file, f"known to be {kind}", 1, 10**6, start, start + len(before.encode()), before, after, within=True)


def sort_known(scratch: Path) -> dict[str, str]:
    forked_runs.preload(("torch", "tokenizers"))
    bench = Bench(scratch, 1, [ReferenceRun("eval-base", WORDS, ("base", "sums.jsonl"))], lambda _: None, clean=2)
    bench.prepare()
    run_mutants(bench, map(known_mutant, KNOWN), scratch / "results.jsonl", say=lambda _: None)
    rows = [json.loads(line) for line in (scratch / "results.jsonl").read_text().splitlines()]
    return {row["rule"].removeprefix("known to be "): row["kind"] for row in rows}


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(prefix="assay-mutants-"))
    try:
        json.dump(sort_known(place), sys.stdout)
    finally:
        shutil.rmtree(place, ignore_errors=True)
