"""Report page: one HTML file that shows a run; the same files give the same bytes.

It is made of the run's ledger, metrics, manifests and pictures alone.
Nothing on it is fetched: scripts and styles are inside, and its own policy forbids the browser to load or run anything else.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

from markupsafe import Markup

from assay.report.figures import charts_json, curves_section, pictures_section
from assay.report.findings import not_checked, proofs_section, results_section, verdicts_section
from assay.report.headline import headline
from assay.report.provenance import lineage_section, provenance_section
from assay.report.run_record import RunRecord, SavedCheckpoint, read_run, saved_in
from assay.report.run_status import held_out_summary, last_proven, run_status, steps_taken
from assay.report.sample_sections import EvaluationFolder, probes_section, read_evaluation, samples_section
from assay.report.templates import templates
from assay.store import durable

CONTENTS = (("verdicts", "Verdicts"), ("unchecked", "Not checked"), ("curves", "Curves"), ("proofs", "Proofs"), ("lineage", "Lineage"),
            ("samples", "Samples"), ("data", "Data and options"), ("reproduce", "Make it again"))


def write_report(run: Path, out: Path, *, against: Path | None = None, evals: Sequence[Path] = ()) -> RunRecord:
    """`against` is the parent's run; `evals` are folders of `assay eval`, shown side by side in their order."""
    record = read_run(run)
    page = render_report(record, None if against is None else read_run(against), [read_evaluation(folder) for folder in evals])
    durable.replace_file(out, page.encode())
    return record


def render_report(record: RunRecord, parent: RunRecord | None = None, evaluations: Sequence[EvaluationFolder] = ()) -> str:
    saved, wrong = saved_in(record.folder)
    parents = saved_in(parent.folder)[0] if parent else []
    samples, no_samples = samples_section(record.folder, parent.folder if parent else None, evaluations)
    probes, no_probes = probes_section(record.folder, record.events)
    rows = record.metrics.rows
    sections = {
        "results": results_section(record), "verdicts": verdicts_section(record), "curves": curves_section(rows),
        "unchecked": not_checked(record, saved, [*no_samples, *no_probes, *_not_recorded(record)]),
        "pictures": pictures_section(record.folder), "proofs": proofs_section(record, saved), "samples": samples, "probes": probes,
        "lineage": lineage_section(saved, parents, parent.name if parent else None, wrong), "provenance": provenance_section(record, saved)}
    return templates().get_template("page.html.j2").render(
        record=record, status=run_status(record), headline=headline(record), facts=_facts(record, saved), contents=CONTENTS,
        charts_json=charts_json(rows), **sections, **page_assets())


def _facts(record: RunRecord, saved: Sequence[SavedCheckpoint]) -> list[tuple[str, str]]:
    taken = steps_taken(record)
    made = [one for one in saved if one.name.startswith("step-")] or saved  # what was handed over comes from one of these
    ancestors = [found for one in made if (found := one.ancestor("parent") or one.ancestor("base"))]
    parent = f"{'/'.join(PurePath(ancestors[0]['path']).parts[-3:])} ({ancestors[0]['weights'][:12]})" if ancestors else None
    return [("recipe", record.recipe), ("steps", "unknown" if taken is None else f"{taken:,}"),
            ("held out", held_out_summary(record) or "unknown"), ("last proven", last_proven(record) or "none"),
            ("parent", parent or "none on record")]


def _not_recorded(record: RunRecord) -> list[str]:
    """Stages that a finished training run has, and this one does not."""
    kinds = {event["kind"] for event in record.events}
    if not record.events:
        return ["no ledger: whether anything was checked is unknown"]
    told = {"preflight": "no preflight: nothing on record shows that the loss was the loss and that every tensor could learn",
            "account": "no account: nothing on record shows which weights moved and which did not",
            "hand over": "no hand-over: nothing on record shows that exported bytes were read back and score what was recorded"}
    due = ("preflight",) if record.recipe in ("edit", "ttt") else ("preflight", "account", "hand over")
    return [told[kind] for kind in due if kind not in kinds]


def page_assets() -> dict[str, Any]:
    """Styles and scripts, which stand in the page as they are, and the policy that lets these scripts run and no others."""
    licensed = f"/*\n{_asset('uPlot-LICENSE')}*/\n{_asset('uPlot.iife.min.js')}"  # the licence asks to travel with every copy
    scripts = [licensed, _asset("page.js")]
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:; base-uri 'none'; form-action 'none'"
    return {"styles": Markup(_asset("uPlot.min.css") + _asset("page.css")), "scripts": [Markup(text) for text in scripts], "policy": policy}


def _asset(name: str) -> str:
    return (resources.files("assay.report") / "assets" / name).read_text(encoding="utf-8")
