"""assay edit: write new facts into a model's weights, measured on the bytes that were written."""

import json
from dataclasses import asdict

from assay.recipes.edit_options import Edit as FLAGS
from assay.verbs.terminal import line_printer
from assay.verdict import Outcome, overall

EXAMPLES = """  assay edit smollm2-135m --facts counterfact.json --known 50 --text wiki.txt --out runs/edit
  assay edit runs/a/model --facts facts.jsonl --layers 3-8 --text wiki.txt --out runs/b
  assay edit runs/a/model --facts one.json --method rome --layers 5 --text wiki.txt --out runs/c"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.guard.proof import without_optional
    from assay.recipes.edit import edit

    report = edit(flags, line_printer(json=flags.json))
    outcome = overall(without_optional(report.verdicts))
    if flags.json:
        print(json.dumps({"outcome": str(outcome), "layers": report.layers, "sizes": report.sizes, "failed": report.failed,
                          "refused": [asdict(one) for one in report.refused], "seconds": report.seconds,
                          "estimates": {name: asdict(estimate) for name, estimate in report.estimates.items()},
                          "verdicts": [verdict.to_json() for verdict in report.verdicts]}, indent=1, default=str))
        return 0 if outcome is Outcome.PROVEN else 3
    for name, estimate in report.estimates.items():
        print(f"  {name:44} {estimate}")
    for name, size in report.sizes.items():
        print(f"  ‖ΔW‖ / ‖W‖ {name:33} {size:.4f}")
    for failure in report.failed:
        print(f"  failed: {failure['fact']}: says {failure['said']!r}; {failure['reason']}")
    print("  seconds: " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items()))
    print("\n".join(map(str, report.verdicts)))
    return 0 if outcome is Outcome.PROVEN else 3
