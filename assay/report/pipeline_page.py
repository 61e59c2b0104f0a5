"""Pipeline page: one HTML file that shows every stage with its purpose, verdicts, gates, times and paths; and the pipeline's headline.

It is made of pipeline.json and of what the stages left: run folders, evaluations, comparisons, proofs. What is missing is said.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError
from assay.report.headline import artifact_status, headline, purpose_of
from assay.report.page import page_assets
from assay.report.run_record import finite_number, is_run, read_json_or_remark, read_run, verdicts_of
from assay.report.run_status import result_verdicts
from assay.report.templates import templates
from assay.store import durable
from assay.verdict import Outcome, Verdict, overall, without_optional

_STATES = {"done": Outcome.PROVEN, "failed": Outcome.REFUTED, "stopped at a gate": Outcome.REFUTED, "out of budget": Outcome.REFUTED}
_CLAIMS = {"shown better": Outcome.PROVEN, "shown worse": Outcome.REFUTED}


@dataclass(frozen=True)
class StageStory:
    """Report of one stage: its purpose and whether that was reached, where it says so; whether its artifact is proven; every verdict."""

    facts: Mapping[str, Any]  # as pipeline.json has them
    purpose: Verdict | None = None
    artifact: Verdict | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    figures: list[tuple[str, str]] = field(default_factory=list)
    report: str | None = None  # of a run: its own page

    @property
    def state(self) -> Outcome:
        return _STATES.get(str(self.facts.get("state")), Outcome.UNPROVEN)

    @property
    def gates(self) -> list[Verdict]:
        return list(verdicts_of({"verdicts": self.facts.get("gates", [])}))


@dataclass(frozen=True)
class PipelineStory:
    name: str
    wanted: str  # the file's own sentence
    stages: list[StageStory]
    remark: str | None = None
    wall: float | None = None  # seconds by the clock, over all sessions

    @property
    def purposes(self) -> list[Verdict]:
        """Purposes of the pipeline: its gates, and what each stage was to reach."""
        return [one for stage in self.stages for one in [*([stage.purpose] if stage.purpose else []), *stage.gates]]

    @property
    def stopped(self) -> StageStory | None:
        return next((stage for stage in self.stages if stage.state is not Outcome.PROVEN), None)


def read_pipeline(out: Path) -> PipelineStory:
    document, remark = read_json_or_remark(out / "pipeline.json")
    stages = [_story(facts) for facts in (document or {}).get("stages", [])]
    return PipelineStory(out.resolve().name, str((document or {}).get("purpose", "")), [with_later_gate(one, stages) for one in stages],
                         remark or (None if document else "pipeline.json is not here"), finite_number((document or {}).get("wall")))


def pipeline_purpose(story: PipelineStory) -> Verdict:
    """Verdict on a pipeline's purpose: reached only where every stage is done, every gate holds, and every stage that has a purpose shows
    it."""
    found = story.purposes
    stopped = story.stopped
    if stopped is not None:
        outcome = Outcome.REFUTED if stopped.state is Outcome.REFUTED else Outcome.UNPROVEN
        return Verdict("purpose", outcome, f"not reached: {stopped.facts.get('name')}: {stopped.facts.get('state')}: "
                                           f"{stopped.facts.get('sentence') or 'it waits for those before'}")
    against = [one for one in found if one.outcome is not Outcome.PROVEN]
    shown = f"{len(found) - len(against)} of {len(found)} purposes and gates shown" if found else "no stage has a purpose or a gate"
    aims = [stage.purpose for stage in story.stages if stage.purpose is not None]
    first = against or aims or found[-1:]  # what was reached, before what it was reached with
    words = f"{'not ' if against or not found else ''}reached: {shown}{''.join(f'; {one.check}: {one.reason}' for one in first)}"
    return Verdict("purpose", overall(found), words)


def artifacts_in_words(story: PipelineStory) -> str:
    found = [stage.artifact for stage in story.stages if stage.artifact is not None]
    good = sum(one.outcome is Outcome.PROVEN for one in found)
    return f"{good} of {len(found)} artifacts proven" if found else "no artifact was handed over"


def pipeline_headline(story: PipelineStory) -> str:
    """The command's last line: the purpose first, then the artifacts and the stages."""
    done = sum(stage.state is Outcome.PROVEN for stage in story.stages)
    return f"{pipeline_purpose(story).reason}; {artifacts_in_words(story)}; {done} of {len(story.stages)} stages done"


def write_pipeline_page(out: Path) -> PipelineStory:
    story = read_pipeline(out)
    durable.replace_file(out / "pipeline.html", render_pipeline(story, out).encode())
    return story


def render_pipeline(story: PipelineStory, out: Path) -> str:
    seconds = [found for stage in story.stages if (found := finite_number(stage.facts.get("seconds"))) is not None]
    done = sum(stage.state is Outcome.PROVEN for stage in story.stages)
    facts = [("stages", f"{done} of {len(story.stages)} done"), ("artifacts", artifacts_in_words(story)),
             ("gates", f"{sum(g.outcome is Outcome.PROVEN for s in story.stages for g in s.gates)} of "
                       f"{sum(len(s.gates) for s in story.stages)} hold"),
             ("time", _time_in_words(sum(seconds), story.wall)), ("folder", str(out))]
    return templates().get_template("pipeline.html.j2").render(story=story, purpose=pipeline_purpose(story), facts=facts,
                                                               link=lambda path: _link(path, out), **page_assets())


def _time_in_words(of_stages: float, wall: float | None) -> str:
    """Time of the stages and by the clock; the stages' own seconds are more where some ran side by side, and less by the gates between
    them."""
    return f"{of_stages:.1f} s of stages" + ("" if wall is None else f", {wall:.1f} s by the clock")


def _link(path: object, out: Path) -> str | None:
    """Relative to the page, where it lies beside it."""
    place = Path(str(path))
    return place.relative_to(out).as_posix() if path and place.is_relative_to(out) and place.exists() else None


# ---------------------------------------------------------------- what a stage left


def _story(facts: Mapping[str, Any]) -> StageStory:
    """Story of a stage; nothing of one that did not end: what lies in its folder may be of an earlier session."""
    name, out = str(facts.get("name")), Path(str(facts.get("out")))
    if facts.get("state") not in ("done", "stopped at a gate", "failed"):
        return StageStory(facts)
    if out.is_dir() and is_run(out):
        return _run_story(facts, name, out)
    verdicts, figures = list[Verdict](), list[tuple[str, str]]()
    purposes = list[Verdict]()
    for path in (out / "eval.json", out if out.suffix == ".json" else out.with_suffix(".json")):
        document, remark = read_json_or_remark(path)
        if remark:
            verdicts.append(Verdict(path.name, Outcome.UNPROVEN, remark))
        if document:
            verdicts += verdicts_of(document)
            figures += list(_figures(document))
            purposes += list(_compared(name, document))
    proof = facts.get("verb") in ("export", "prove")
    artifact = Verdict(name, overall(without_optional(verdicts)), "its proof") if proof and verdicts else None
    purpose = Verdict(name, overall(purposes), "; ".join(one.reason for one in purposes)) if purposes else None
    return StageStory(facts, purpose, artifact, [*purposes, *verdicts], figures)


def _run_story(facts: Mapping[str, Any], name: str, out: Path) -> StageStory:
    try:
        record = read_run(out)
    except (ArtifactError, OSError) as error:
        return StageStory(facts, verdicts=[Verdict(name, Outcome.UNPROVEN, str(error))])
    aim, status = purpose_of(record), artifact_status(record)
    page = out / "report.html"
    return StageStory(facts, None if aim is None else Verdict(name, aim.outcome, aim.sentence),
                      Verdict(name, status.outcome, f"{headline(record).artifact}: {status.sentence}"),
                      result_verdicts(record),
                      report=os.fspath(page) if page.is_file() else None)


def with_later_gate(stage: StageStory, stages: Sequence[StageStory]) -> StageStory:
    """Reinforcement that could not show its gain on the few examples that it held out has shown it where a gate of the pipeline shows the
    same by more: what it made is better than what it was made from. What it said itself is kept beside."""
    if stage.facts.get("verb") != "grpo" or stage.purpose is None or stage.purpose.outcome is not Outcome.UNPROVEN:
        return stage  # a loss that was not lowered is not shown by a score that rose
    parent, made = _option(stage.facts, "--model"), stage.facts.get("model")
    if parent is None or made is None:  # an evaluation that no stage made has no model either: the two must not be taken for one
        return stage
    for gate in (gate for other in stages if _evaluated_models(other, stages) == [parent, made] for gate in other.gates):
        if gate.check.startswith("shown better") and gate.outcome is Outcome.PROVEN:
            words = f"{gate.reason} (gate); by its own look: {stage.purpose.reason}"
            return replace(stage, purpose=Verdict(stage.purpose.check, Outcome.PROVEN, words))
    return stage


def _evaluated_models(stage: StageStory, stages: Sequence[StageStory]) -> list[str | None]:
    """Models whose evaluations a comparison compares, in order; None for one that no stage evaluated."""
    if stage.facts.get("verb") != "compare":
        return []
    of_evaluations = {str(one.facts.get("out")): _option(one.facts, "eval") for one in stages if one.facts.get("verb") == "eval"}
    return [of_evaluations.get(word.split("=", 1)[-1]) for word in _words(stage.facts)[2:] if not word.startswith("-")]


def _option(facts: Mapping[str, Any], name: str) -> str | None:
    """Value that follows a word of the stage's command, after an equals sign or a space."""
    words = _words(facts)
    joined = next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), None)
    return joined or next((after for word, after in pairwise(words) if word == name), None)


def _words(facts: Mapping[str, Any]) -> list[str]:
    return [str(word) for word in facts.get("command") or []]


def _compared(name: str, document: Mapping[str, Any]) -> Iterator[Verdict]:
    for one in document.get("comparisons") or []:
        outcome = Outcome.UNPROVEN if one.get("same_weights") else _CLAIMS.get(str(one.get("claim")), Outcome.UNPROVEN)
        yield Verdict(name, outcome, str(one.get("sentence")))


def _figures(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    estimates = document.get("estimates")
    for name, one in (estimates.items() if isinstance(estimates, dict) else ()):
        numbers = [finite_number(one.get(key)) if isinstance(one, dict) else None for key in ("mean", "low", "high")]
        shown = "unknown" if None in numbers else f"{numbers[0]:.4g} [{numbers[1]:.4g}, {numbers[2]:.4g}] (n={one.get('n', 'unknown')})"
        yield str(name), shown
