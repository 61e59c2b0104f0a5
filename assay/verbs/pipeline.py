"""assay pipeline: run stages from a YAML file in their order, with gates between them, and show the whole on one page."""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.config import argument, option
from assay.verbs.terminal import line_printer

if TYPE_CHECKING:
    from assay.recipes.pipeline_plan import PipelinePlan


@dataclass(frozen=True)
class FLAGS:
    """Run the stages of FILE, each as a process of its own with the options of the command line, and stop where a gate does not hold.
    `require: proven` reads a model's hallmark, and proves the model where it has none; `require: shown better than STAGE on NAME`
    reads the comparison; `budget: 10 min` ends a stage after a save. Mistakes in the file are found before anything runs. A stage
    whose options and inputs are unchanged, by digest, is not run again; the same command resumes a killed pipeline. OUT/pipeline.html
    shows all stages."""

    file: str = argument("YAML file of stages; begin with pipelines/tiny.yaml")
    out: str | None = option("folder for the output of the stages, pipeline.json and pipeline.html", metavar="FOLDER", default=None,
                             default_text="runs/ and the name of FILE")
    input: tuple[str, ...] = option("other values for the names under `inputs` in FILE", metavar="NAME=VALUE", default=())
    jobs: int = option("stages that may run at the same time, where neither needs the other; they share the device and its memory",
                       default=1, least=1)
    dry_run: bool = option("check FILE and show the commands of its stages in order, without running them", default=False)
    json: bool = option("print pipeline.json with the headline at the end", default=False)


EXAMPLES = """  assay pipeline pipelines/tiny.yaml
  assay pipeline pipelines/reasoning.yaml --input train=gsm8k-train.jsonl test=gsm8k-test.jsonl --jobs 2
  assay pipeline pipelines/distil.yaml --dry-run"""


def run(flags: FLAGS) -> int:
    from assay.recipes.pipeline import run_pipeline
    from assay.recipes.pipeline_plan import read_plan
    from assay.report.pipeline_page import pipeline_headline, pipeline_purpose, read_pipeline, write_pipeline_page

    file = Path(flags.file)
    plan = read_plan(file, Path(flags.out or f"runs/{file.stem}"), flags_of, flags.input)
    if flags.dry_run:
        print(json.dumps(plan_document(plan), indent=1) if flags.json else plan_text(plan))
        return 0
    code = run_pipeline(plan, line_printer(json=flags.json), lambda: write_pipeline_page(plan.out), flags.jobs)
    story = read_pipeline(plan.out)
    if flags.json:
        print(json.dumps({"headline": pipeline_headline(story), "purpose": pipeline_purpose(story).to_json(), "exit_code": code,
                          "page": str(plan.out / "pipeline.html"), "stages": [dict(stage.facts) for stage in story.stages]}, indent=1))
    else:
        print(f"{pipeline_headline(story)}: {plan.out / 'pipeline.html'}", flush=True)
    return code


def flags_of(verb: str) -> type:
    return importlib.import_module(f"assay.verbs.{verb.replace('-', '_')}").FLAGS


def plan_document(plan: "PipelinePlan") -> list[dict[str, object]]:
    return [{"stage": stage.name, "command": ["assay", stage.verb, *stage.words], "needs": list(stage.needs),
             "require": [gate.words for gate in stage.gates], "budget": stage.budget} for stage in plan.stages]


def plan_text(plan: "PipelinePlan") -> str:
    lines = []
    for stage in plan.stages:
        gates = [f"require: {gate.words}" for gate in stage.gates] + ([f"budget: {stage.budget:g} s"] if stage.budget else [])
        lines += [f"{stage.name}: assay {' '.join([stage.verb, *stage.words])}", *(f"  {gate}" for gate in gates)]
    return "\n".join(lines)
