"""assay report: write one page about a run: curves, verdicts with evidence, lineage, samples, and what was not checked."""

import json
from dataclasses import dataclass
from pathlib import Path

from assay.config import argument, option


@dataclass(frozen=True)
class FLAGS:
    """Write report.html: one self-contained file, made only from the run's ledger, metrics and manifests, so that the same files give
    the same bytes. The page says where a ledger or metrics file is torn, damaged or missing. It includes RUN/probe.json, the output
    of `assay probe --history RUN --json`, if there is one. Exits with 0 once the page is written, whatever the run's outcome."""

    run: str = argument("folder of a run")
    out: str | None = option("file to write", metavar="FILE", default=None, default_text="RUN/report.html")
    against: str | None = option("run of the parent: its samples are shown beside this run's, and its checkpoints in the lineage",
                                 metavar="RUN",
                                 default=None)
    evals: tuple[str, ...] = option("folders of assay eval results, the parent's first, shown side by side, example by example",
                                    metavar="FOLDER",
                                    default=())
    json: bool = option("print the path of the page and the outcome of the run as JSON", default=False)


EXAMPLES = """  assay report runs/a
  assay report runs/b --against runs/a --out b.html
  assay report runs/b --evals evals/before evals/after"""


def run(flags: FLAGS) -> int:
    from assay.report.headline import headline
    from assay.report.page import write_report
    from assay.report.run_status import run_status

    folder = Path(flags.run)
    out = Path(flags.out) if flags.out else folder / "report.html"
    record = write_report(folder, out, against=Path(flags.against) if flags.against else None, evals=[Path(one) for one in flags.evals])
    now = run_status(record)
    if flags.json:
        print(json.dumps({"report": str(out), "run": flags.run, "headline": str(headline(record)), "state": now.state,
                          "outcome": str(now.outcome), "sentence": now.sentence, "remarks": record.remarks}, indent=1))
    else:
        print(f"{out}: {headline(record)}: {now.sentence}")
    return 0
