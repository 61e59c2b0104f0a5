"""enwik8 in a given time and in given bytes: the whole of `assay pretrain`, the artifact it squeezes, and the code that the artifact needs.

    assay tokenizer train.txt --vocab-size 8192 --document-bytes 65536 --out tok
    assay corpus train.txt --held-out-files valid.txt --document-bytes 65536 --tokenizer tok --out corpus --max-overlap 0.2
    python bench/enwik8.py --corpus corpus --seeds 42 314 1337
    python bench/enwik8.py --corpus corpus --seeds 42 --text valid.txt --ttt="--learning-rate 5e-4"

train.txt is the first 90,000,000 bytes of enwik8, valid.txt the 5,000,000 after them. The clock runs from the start of Python to the exit
code: imports, checks, compilation (each seed begins with empty caches of the compilers), training, evaluations, proofs, squeezing, and
scoring what was read back. Python's bytecode of the libraries is there, as after any installation by pip; where the machine's libraries
have none it is written before the clock. With --within, what a seed took beside its steps says how long the next one may train. With
--text, `assay ttt --carry-over` reads the artifact's held-out text within the same clock: each chunk is
scored before the adapter learns from it. After the clock the artifact is scored once more, by a zip of the modules that this takes and
nothing else of Assay. Bytes are those of model.assayz, which holds the tokenizer too, and of that zip.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from time_to_proof import import_all

from assay.data.token_corpus import Corpus, open_corpus
from assay.recipes.squeezed_code import pack_code, score_afresh
from assay.statistics.estimate import mean

LENGTH, SPARE = 2048, 2.0  # tokens; seconds that one run may take longer than another
PRETRAIN = {"--depth": "7", "--num-train-epochs": "40", "--batch-tokens": "32768", "--max-length": str(LENGTH), "--decay-ratio": "0.9",
            "--save-steps": "50000", "--eval-documents": "32"}
TTT = {"--document-bytes": "65536", "--context": "1024", "--chunk": "256", "--batch-size": "8", "--max-drift": "1000"}


def command(verb: str, *given: str, **options: str) -> list[str]:
    return [verb, *given, *(word for pair in options.items() for word in pair)]


def pairs(options: str) -> dict[str, str]:
    words = shlex.split(options)
    return dict(zip(words[::2], words[1::2], strict=True))


def run(words: list[str], log: Path, environ: dict[str, str]) -> int:
    with log.open("w") as kept:
        return subprocess.run([sys.executable, "-m", "assay", *words], env=os.environ | environ, stdout=kept,
                              stderr=subprocess.STDOUT).returncode


def one_seed(flags: argparse.Namespace, corpus: Corpus, seed: int, home: Path) -> dict[str, Any]:
    home.mkdir(parents=True)
    environ = {name: str(home / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    artifact, began = home / "run" / "model.assayz", time.perf_counter()
    words = command("pretrain", "--corpus", flags.corpus, "--out", str(home / "run"), "--seed", str(seed),
                    "--minutes", f"{flags.minutes:.3f}", "--max-bytes", str(flags.max_bytes), **PRETRAIN | pairs(flags.pretrain))
    exits = [run(words, home / "pretrain.log", environ)]
    trained = time.perf_counter() - began
    print("assay", *words, flush=True)
    print(f"exit {exits[0]} after {trained:.1f} s", flush=True)
    print("  " + "\n  ".join(line for line in (home / "pretrain.log").read_text().splitlines() if worth_a_line(line)), flush=True)
    read = {}
    if flags.text:
        words = command("ttt", str(artifact), "--carry-over", "--text", flags.text, "--out", str(home / "ttt"), **TTT | pairs(flags.ttt))
        exits.append(run(words, home / "ttt.log", environ))
        told = (home / "ttt.log").read_text().splitlines()[-12:]
        print("assay", *words, *told, sep="\n  ", flush=True)
        found = json.loads((home / "ttt" / "ttt.json").read_text())["estimates"]["bits per byte, with"]
        read = {"with test-time training": words_of(found)}
    wall = time.perf_counter() - began
    events = [json.loads(line) for line in (home / "run" / "ledger.jsonl").read_text().splitlines()]
    scored = next(event for event in reversed(events) if event["kind"] == "artifact")
    return {"seed": seed, "exits": exits, "minutes": round(flags.minutes, 3), "wall s": round(wall, 1),
            "model": words_of(scored["unquantised"]), "artifact": words_of(scored["score"]), "mean": scored["score"]["mean"],
            **read, **by_its_code(flags, corpus, artifact)}


def worth_a_line(line: str) -> bool:
    return not line.startswith(("  PROVEN", "step ")) or "held-out" in line or "budget" in line


def words_of(estimate: dict[str, Any]) -> str:
    return f"{estimate['mean']:.4f} [{estimate['low']:.4f}, {estimate['high']:.4f}] (n={estimate['n']})"


def by_its_code(flags: argparse.Namespace, corpus: Corpus, artifact: Path) -> dict[str, Any]:
    """Bytes of the artifact and of the code that opens and scores it, and its score by that code alone."""
    code = artifact.with_name("code.zip")
    length = int(pairs(flags.pretrain).get("--max-length", LENGTH))
    packed = pack_code(score_afresh(artifact, corpus, rows=16, length=length).modules, code)
    alone = score_afresh(artifact, corpus, code=code, rows=16, length=length)
    size = artifact.stat().st_size
    return {"model.assayz": size, "code.zip": packed, "both": size + packed, "by code.zip alone": round(alone.mean, 4),
            "its seconds": round(alone.seconds, 1), "code from": Path(alone.origin).parts[-3]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 314, 1337])
    parser.add_argument("--minutes", type=float, default=2.25, help="of training")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="for a whole run: from the second seed on --minutes is what this "
                                                                        "leaves for training")
    parser.add_argument("--max-bytes", type=int, default=15_780_000, help="of model.assayz; the code comes on top")
    parser.add_argument("--pretrain", default="", metavar="WORDS", help='more options of assay pretrain: --pretrain="--depth 6"')
    parser.add_argument("--text", help="the held-out bytes, to be read with test-time training too")
    parser.add_argument("--ttt", default="", metavar="WORDS", help="more options of assay ttt, likewise")
    parser.add_argument("--home", help="where to work; a temporary folder otherwise")
    flags = parser.parse_args()
    home, corpus, rows = Path(flags.home or tempfile.mkdtemp(prefix="enwik8-")), open_corpus(Path(flags.corpus)), []
    print(import_all({}), flush=True)
    for seed in flags.seeds:
        rows.append(one_seed(flags, corpus, seed, home / f"seed-{seed}"))
        print(json.dumps(rows[-1]), flush=True)
        if flags.within:
            flags.minutes += (flags.within - SPARE - rows[-1]["wall s"]) / 60
    means = [row["mean"] for row in rows]
    print(f"worst of {len(rows)}: {max(means):.4f} bits per byte" + (f"; mean {mean(means)}" if len(rows) > 1 else ""))


if __name__ == "__main__":
    main()
