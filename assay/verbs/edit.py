"""assay edit: write new facts into a model's weights, measured on the bytes that were written."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from assay.recipes.edit_options import Edit as FLAGS
from assay.verbs.terminal import headline_of, keep_silent, line_printer, print_headline

if TYPE_CHECKING:
    from assay.recipes.edit import EditOutcome

EXAMPLES = """  assay edit smollm2-135m --facts counterfact.json --known 50 --text wiki.txt --out runs/edit
  assay edit runs/a/model --facts facts.jsonl --layers 3-8 --text wiki.txt --out runs/b
  assay edit runs/a/model --facts one.json --method rome --layers 5 --text wiki.txt --out runs/c"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.edit import edit

    outcome = edit(flags, keep_silent if flags.quiet else line_printer(json=flags.json))
    if flags.json:
        print(json.dumps({"outcome": str(outcome.standing), "headline": headline_of(outcome.folder), "layers": outcome.layers,
                          "sizes": outcome.sizes, "failed": outcome.failed,
                          "refused": [asdict(one) for one in outcome.refused], "seconds": outcome.seconds,
                          "estimates": {name: asdict(estimate) for name, estimate in outcome.results.items()},
                          "verdicts": [verdict.to_json() for verdict in outcome.verdicts]}, indent=1, default=str))
        return outcome.exit_code
    if not flags.quiet:
        print_measures(outcome)
    print("\n".join(map(str, outcome.verdicts)))
    print_headline(outcome.folder)
    return outcome.exit_code


def print_measures(outcome: "EditOutcome") -> None:
    for name, estimate in outcome.results.items():
        print(f"  {name:44} {estimate}")
    for name, size in outcome.sizes.items():
        print(f"  ‖ΔW‖ / ‖W‖ {name:33} {size:.4f}")
    for failure in outcome.failed:
        print(f"  failed: {failure['fact']}: says {failure['said']!r}; {failure['reason']}")
    print("  seconds: " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in outcome.seconds.items()))
