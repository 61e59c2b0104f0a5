"""Report page: one HTML file that shows a run; the same files give the same bytes.

It is made of the run's ledger, metrics, manifests and pictures alone.
Nothing on it is fetched: scripts and styles are inside, and its own policy forbids the browser to load or run anything else.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path, PurePath

from assay.report.curves import charts_json, curves_section
from assay.report.findings import not_checked, proofs_section, results_section, verdicts_section
from assay.report.html import Html, badge, joined, tag
from assay.report.lineage_graph import lineage_section
from assay.report.pictures import pictures_section
from assay.report.provenance import data_section, events_section, reproduce_section
from assay.report.run_record import RunRecord, SavedCheckpoint, read_run, saved_in
from assay.report.run_status import held_out_summary, last_proven, run_status, steps_taken
from assay.report.sample_sections import EvaluationFolder, probes_section, read_evaluation, samples_section
from assay.store import durable


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
    not_there = [*no_samples, *no_probes, *_not_recorded(record)]
    sections = [results_section(record), verdicts_section(record), not_checked(record, saved, not_there),
                curves_section(record.metrics.rows), pictures_section(record.folder), proofs_section(record, saved),
                lineage_section(saved, parents, parent.name if parent else None, wrong), samples, probes, data_section(record),
                events_section(record), reproduce_section(record, saved)]
    return _document(record, joined(_header(record, saved), tag("main", sections)))


def _header(record: RunRecord, saved: Sequence[SavedCheckpoint]) -> Html:
    now = run_status(record)
    taken = steps_taken(record)
    made = [one for one in saved if one.name.startswith("step-")] or saved  # what was handed over comes from one of these
    ancestors = [found for one in made if (found := one.ancestor("parent") or one.ancestor("base"))]
    parent = f"{'/'.join(PurePath(ancestors[0]['path']).parts[-3:])} ({ancestors[0]['weights'][:12]})" if ancestors else None
    facts = [("recipe", record.recipe), ("steps", "unknown" if taken is None else f"{taken:,}"),
             ("held out", held_out_summary(record) or "unknown"), ("last proven", last_proven(record) or "none"),
             ("parent", parent or "none on record")]
    remarks = [tag("li", remark) for remark in record.remarks]
    return tag("header", tag("p", "assay report", class_="kicker"), tag("h1", record.name),
               tag("p", badge(str(now.outcome)), " ", tag("strong", now.state), tag("span", f": {now.sentence}"), class_="standing"),
               tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts]),
               tag("ul", remarks, class_="remarks") if remarks else None, _contents())


def _contents() -> Html:
    places = (("verdicts", "Verdicts"), ("unchecked", "Not checked"), ("curves", "Curves"), ("proofs", "Proofs"), ("lineage", "Lineage"),
              ("samples", "Samples"), ("data", "Data and options"), ("reproduce", "Make it again"))
    return tag("nav", [tag("a", title, href=f"#{anchor}") for anchor, title in places])


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


def _document(record: RunRecord, body: Html) -> str:
    styles = _asset("uPlot.min.css") + _asset("page.css")
    scripts = [_licensed(), _asset("page.js")]
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:; base-uri 'none'; form-action 'none'"
    head = [tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy), tag("title", f"{record.name}: assay report"),
            tag("style", Html(styles))]
    drawn = tag("script", charts_json(record.metrics.rows), type="application/json", id="charts")
    page = tag("html", tag("head", head), tag("body", body, drawn, [tag("script", Html(text)) for text in scripts]), lang="en")
    return f"<!doctype html>\n{page}\n"


def _licensed() -> str:
    """uPlot with its licence, which asks to travel with every copy."""
    return f"/*\n{_asset('uPlot-LICENSE')}*/\n{_asset('uPlot.iife.min.js')}"


def _asset(name: str) -> str:
    return (resources.files("assay.report") / "assets" / name).read_text(encoding="utf-8")
