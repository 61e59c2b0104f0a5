"""assay ttt: test-time training: read documents while learning from them, every chunk scored before it is learned from."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from assay.recipes.ttt_options import Ttt as FLAGS
from assay.verbs.terminal import headline_of, keep_silent, line_printer, print_headline

if TYPE_CHECKING:
    from assay.recipes.ttt import TttOutcome

EXAMPLES = """  assay ttt smollm2-135m --text wiki.txt --documents 20 --out runs/ttt
  assay ttt runs/a/model --text docs.jsonl --targets q v head --rank 4 --learning-rate 3e-3 --out runs/ttt-b
  assay ttt runs/a/model --text wiki.txt --warm-start --weight-decay 1 --out runs/ttt-c
  assay ttt runs/a/model --text wiki.txt --carry-over --batch-size 4 --learning-rate 3e-4 --out runs/ttt-e
  assay seeds ttt runs/a/model --text wiki.txt --warm-start --seeds 42 314 1337 --over weight-decay=0.5,1,2 --out runs/ttt-d"""
_SHOWN = 5  # documents at each end of the table

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.ttt import ttt

    outcome = ttt(flags, keep_silent if flags.quiet else line_printer(json=flags.json))
    if flags.json:
        documents = [{"name": text.name, "bytes": text.bytes, "bits_without": text.without, "bits_with": text.with_}
                     for text in outcome.documents]
        print(json.dumps({"outcome": str(outcome.standing), "headline": headline_of(outcome.folder),
                          "estimates": {name: asdict(found) for name, found in outcome.results.items()}, "documents": documents,
                          "left_out": outcome.left_out, "norms": outcome.norms, "seconds": outcome.seconds,
                          "verdicts": [verdict.to_json() for verdict in outcome.verdicts]}, indent=1))
        return outcome.exit_code
    if not flags.quiet:
        print_documents(outcome)
    print("\n".join(f"  {verdict}" for verdict in outcome.verdicts))
    print_headline(outcome.folder)
    return outcome.exit_code


def print_documents(outcome: "TttOutcome") -> None:
    best_first = sorted(outcome.documents, key=lambda text: -text.saved)
    shown = best_first if len(best_first) <= 2 * _SHOWN else [*best_first[:_SHOWN], *best_first[-_SHOWN:]]
    for text in shown:
        print(f"  {text.name:44} {text.without / text.bytes:.4f} → {text.with_ / text.bytes:.4f}  saved {text.saved:+.4f}")
    for name, estimate in outcome.results.items():
        print(f"  {name:44} {estimate}")
    print("  seconds: " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in outcome.seconds.items()))
