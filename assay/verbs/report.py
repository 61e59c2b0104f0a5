"""assay report: write one page about a run: curves, verdicts with evidence, lineage, samples, and what was not checked."""

import json
from dataclasses import dataclass
from pathlib import Path

from assay.config import argument, option


@dataclass(frozen=True)
class FLAGS:
    """Write report.html: one file without anything to fetch, made of the run's ledger, metrics and manifests alone, so that the same
    files give the same bytes. A ledger or metrics file that is torn, damaged or missing is said on the page. Where RUN/probe.json
    holds what `assay probe --history RUN --json` printed, it is shown. Exits with 0 once the page is written, whatever it says."""

    run: str = argument("folder of a run")
    out: str | None = option("file to write", metavar="FILE", default=None, default_text="RUN/report.html")
    against: str | None = option("the parent's run: its samples stand beside this run's, its checkpoints in the lineage", metavar="RUN",
                                 default=None)
    evals: tuple[str, ...] = option("folders of assay eval, the parent's first: shown side by side, example by example", metavar="FOLDER",
                                    default=())
    json: bool = option("print where the page is and how the run stands, as JSON", default=False)


EXAMPLES = """  assay report runs/a
  assay report runs/b --against runs/a --out b.html
  assay report runs/b --evals evals/before evals/after"""


def run(flags: FLAGS) -> int:
    from assay.report.page import write_report
    from assay.report.run_status import run_status

    folder = Path(flags.run)
    out = Path(flags.out) if flags.out else folder / "report.html"
    record = write_report(folder, out, against=Path(flags.against) if flags.against else None, evals=[Path(one) for one in flags.evals])
    now = run_status(record)
    if flags.json:
        print(json.dumps({"report": str(out), "run": flags.run, "state": now.state, "outcome": str(now.outcome), "sentence": now.sentence,
                          "remarks": record.remarks}, indent=1))
    else:
        print(f"{out}: {now.state}: {now.sentence}")
    return 0
