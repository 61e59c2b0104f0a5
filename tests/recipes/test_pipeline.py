"""Pipelines: mistakes are found before anything runs, what is unchanged is not run again, gates stop what does not hold."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from assay.cli import run as cli_run
from assay.errors import UsageError
from assay.recipes import pipeline
from assay.recipes.pipeline import StageProcesses, check_proven, digest_of_path, run_pipeline, stage_key
from assay.recipes.pipeline_plan import KINDS, Gate, PipelinePlan, Stage, read_plan
from assay.report.pipeline_page import (
    StageStory,
    pipeline_headline,
    pipeline_purpose,
    read_pipeline,
    render_pipeline,
    with_later_gate,
    write_pipeline_page,
)
from assay.store.checkpoint import open_checkpoint, quarantine_checkpoint, write_hallmark
from assay.store.ledger import Ledger
from assay.testing.tiny_models import save_model, tiny_model
from assay.verbs.demo.stages import empty_weights_of_another_tool
from assay.verbs.pipeline import flags_of
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

ROOT = Path(__file__).parents[2]
TEXT = "\n".join(f"line {i} of {i * i} is not the {i % 7}th of many others, nor the last one" for i in range(300)) + "\n"


def plan(folder: Path, text: str, **changed: str) -> PipelinePlan:
    (folder / "p.yaml").write_text(text)
    return read_plan(folder / "p.yaml", folder / "out", flags_of, [f"{name}={value}" for name, value in changed.items()])


def scores(path: Path, values: list[float]) -> Path:
    path.write_text("id,score\n" + "".join(f"{i},{value}\n" for i, value in enumerate(values)))
    return path


def record(folder: Path) -> dict[str, dict]:
    return {stage["name"]: stage for stage in json.loads((folder / "out" / "pipeline.json").read_text())["stages"]}


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize(("text", "sentence"), [
    ("stages: {}", "no stage stands under `stages`"),
    ("stages: {a: {verb: sfft}}", "unknown verb 'sfft'; did you mean 'sft'?"),
    ("stages: {../x: {verb: prove}}", "not a name for a stage"), ("stages: {'<b>': {verb: prove}}", "not a name for a stage"),
    ("stages: {logs: {verb: prove}}", "not a name for a stage"),
    ("stages: {a: {verb: prove, optoins: {}}}", "'optoins', which nothing asks for"),
    ("stages: {prove: {options: {path: '${stages.b.model}'}}}", "no such stage"),
    ("stages: {prove: {options: {path: '${stages.prove.model}'}}}", "assay prove hands over no model"),
    ("stages: {prove: {options: {path: '${stages.prove.out}'}}}", "wait for one another"),
    ("stages: {a: {verb: export, options: {path: '${stages.b.model}', to: hf}}, b: {verb: export, options: {path: '${stages.a.model}', "
     "to: hf}}}", "the stages a, b wait for one another"),
    ("stages: {prove: {options: {path: '${stage.x.model}'}}}", "is no reference; expected ${stages.NAME.model}"),
    ("stages: {prove: {options: {path: '${inputs.x}'}}}", "no such input"),
    ("stages: {prove: {options: {path: nowhere}}}", "nowhere: no such file or folder"),
    ("stages: {compare: {options: {results: ['a=here.csv', 'b=nowhere.csv']}}}", "nowhere.csv: no such file or folder"),
    ("stages: {tiny: {options: {what: sums, waht: 1}}}", "unknown option 'waht'; did you mean 'what'?"),
    ("stages: {tiny: {options: {what: sum}}}", "what is 'sum'; expected one of sums, facts"),
    ("stages: {tiny: {options: {}}}", "missing what"),
    ("stages: {tiny: {options: {what: sums, out: x}}}", "out: the pipeline itself gives it"),
    ("stages: {tiny: {options: {what: sums}, require: prooven}}", "is no gate; expected one of: proven"),
    ("stages: {tiny: {options: {what: sums}, require: shown better than x on y}}", "scores nothing"),
    ("stages: {compare: {options: {results: [here.csv]}, require: proven}}", "hands over no model"),
    ("stages: {compare: {options: {results: [here.csv]}, require: shown better than base on score}}", "the first of `results`"),
    ("stages: {tiny: {options: {what: sums}, budget: ten}}", "expected a time such as 90 s"),
    ("stages: {tiny: {options: {what: sums}}, tiny: {options: {what: facts}}}", "stands twice"),
    ("budget: 0 s\nstages: {tiny: {options: {what: sums}}}", "expected a time"), ("- a", "expected a JSON object"),
])
def test_mistakes_are_refused_before_anything_runs(text, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores(tmp_path / "here.csv", [1, 2])
    with pytest.raises(UsageError, match=None) as error:
        plan(tmp_path, text)
    assert sentence in str(error.value)
    assert not (tmp_path / "out").exists()


def test_references_lead_to_what_the_stages_will_write_in_an_order_that_makes_it_first(tmp_path):
    scores(tmp_path / "d.jsonl", [1])
    found = plan(tmp_path, """
inputs: {data: d.jsonl, steps: 3}
stages:
  after:
    verb: eval
    options: {path: "${stages.tune.model}", task: graded, data: "${inputs.data}"}
    require: not shown worse than before on graded
  before: {verb: eval, options: {path: "${stages.base.model}", task: graded, data: "${inputs.data}"}}
  tune: {verb: sft, options: {model: "${stages.base.model}", data: "${stages.base.out}/learned.jsonl", max-steps: "${inputs.steps}"}}
  base: {verb: tiny, options: {what: sums}}
""", data=str(tmp_path / "d.jsonl"))
    assert [stage.name for stage in found.stages] == ["base", "before", "tune", "after"]
    by_name, out = {stage.name: stage for stage in found.stages}, tmp_path / "out"
    assert f"--data={out}/base/learned.jsonl" in by_name["tune"].words
    assert "--max-steps=3" in by_name["tune"].words
    assert by_name["after"].words[0] == f"{out}/tune/model"
    assert set(by_name["after"].needs) == {"tune", "before"}


def test_models_that_are_merged_pruned_and_published_come_from_stages_before(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    found = plan(tmp_path, """
inputs: {data: DATA}
stages:
  publish: {options: {path: '${stages.prune.model}', to: published, gguf: q8_0}}
  prune: {options: {model: '${stages.merge.model}', drop: [0]}, require: proven}
  merge: {options: {models: ['${stages.a.model}=0.5', '${stages.b.model}=0.5'], base: '${stages.tiny.model}',
                   method: task}, require: proven}
  a: {verb: kto, options: {model: '${stages.tiny.model}', data: '${inputs.data}'}}
  b: {verb: sft, options: {model: '${stages.tiny.model}', data: '${inputs.data}'}}
  judge: {verb: reward-model, options: {model: '${stages.tiny.model}', data: '${inputs.data}'}, require: proven}
  tiny: {options: {what: sums}}
""", data=str(tmp_path / "pairs.jsonl"))
    by_name, out = {stage.name: stage for stage in found.stages}, tmp_path / "out"
    assert found.stages[0].name == "tiny"
    assert set(by_name["merge"].inputs) == {f"{out}/a/model", f"{out}/b/model", f"{out}/tiny/model"}
    assert by_name["merge"].words[:2] == (f"{out}/a/model=0.5", f"{out}/b/model=0.5")
    assert by_name["prune"].inputs == (by_name["merge"].model,)
    assert "--json" in by_name["publish"].words
    assert by_name["publish"].needs == ("prune",)


@pytest.mark.parametrize("verb", KINDS)
def test_every_verb_of_a_stage_has_the_options_that_its_kind_names(verb):
    named = {field.name for field in dataclasses.fields(flags_of(verb))}
    assert {*KINDS[verb].files, *KINDS[verb].models} <= named
    assert not KINDS[verb].prints or "json" in named


def test_the_guide_names_every_verb_of_a_stage():
    told = (ROOT / "docs" / "guide.md").read_text().partition("- **Verbs**: ")[2].partition(". ")[0]
    assert set(re.findall(r"`([\w-]+)`", told)) == set(KINDS)


@pytest.mark.parametrize("name", ["tiny", "reasoning", "distil", "chain"])
def test_the_shipped_pipelines_read(name, tmp_path, monkeypatch, capsys):
    """What they need from outside is named under `inputs`."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for file in ("gsm8k-train.jsonl", "gsm8k-test.jsonl", "counterfact.json", "wiki.txt", "chats.jsonl"):
        (tmp_path / file).write_text("{}\n")
    assert cli_run(["pipeline", str(ROOT / "pipelines" / f"{name}.yaml"), "--dry-run"]) == 0
    assert "require: proven" in capsys.readouterr().out


# ---------------------------------------------------------------- what is run, and what is not run again


def test_only_what_changed_and_what_reads_it_runs_again(tmp_path, monkeypatch):
    """The corpus reads the tokenizer; the comparison reads neither."""
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT)
    scores(tmp_path / "c.csv", [0.0, 1.0, 0.5] * 4)
    text = f"""
stages:
  tokenizer: {{options: {{text: {tmp_path}/a.txt, vocab-size: 280}}}}
  corpus: {{options: {{text: {tmp_path}/b.txt, tokenizer: "${{stages.tokenizer.out}}", document-bytes: 64, max-overlap: 1, workers: 1}}}}
  compare: {{options: {{results: ["base={tmp_path}/c.csv", "new={tmp_path}/c.csv"]}}}}
"""
    assert run_pipeline(plan(tmp_path, text), lambda _: None) == 0
    first = record(tmp_path)
    assert [stage["sittings"] for stage in first.values()] == [1, 1, 1]
    assert run_pipeline(plan(tmp_path, text), lambda _: None) == 0
    assert all(stage["ran_before"] for stage in record(tmp_path).values())
    (tmp_path / "b.txt").write_text(TEXT + "one more line\n")
    assert run_pipeline(plan(tmp_path, text), lambda _: None) == 0
    assert {name: stage["ran_before"] for name, stage in record(tmp_path).items()} == {"tokenizer": True, "corpus": False, "compare": True}
    assert (tmp_path / "out" / "earlier" / "1-corpus").is_dir()
    (tmp_path / "out" / "tokenizer" / "tokenizer.json").write_text("{}")  # what a stage made is not what it made any more
    assert run_pipeline(plan(tmp_path, text.replace("new=", "other=")), lambda _: None) == 0
    assert {name: stage["ran_before"] for name, stage in record(tmp_path).items()} == {"tokenizer": False, "corpus": True, "compare": False}
    ran = [event["stage"] for event in Ledger(tmp_path / "out" / "pipeline.jsonl").events() if event["kind"] == "stage"]
    assert ran == ["tokenizer", "corpus", "compare", "corpus", "tokenizer", "compare"]


def test_marks_that_a_later_proof_leaves_are_no_change(tmp_path):
    checkpoint = save_model(tmp_path / "m", tiny_model())
    before = digest_of_path(tmp_path / "m")
    write_hallmark(checkpoint, [proven("x", "y")])
    assert digest_of_path(tmp_path / "m") == before
    (tmp_path / "m" / "config.json").rename(tmp_path / "m" / "configs.json")  # the same bytes in the same order
    assert digest_of_path(tmp_path / "m") != before
    (tmp_path / "m" / "configs.json").rename(tmp_path / "m" / "config.json")
    assert digest_of_path(tmp_path / "m") == before
    (tmp_path / "m" / "config.json").write_text("{}")
    assert digest_of_path(tmp_path / "m") != before


def test_a_stage_that_ends_well_and_wrote_nothing_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.StageProcesses, "run", lambda *_, **__: pipeline.StageEnd(0, "all is well", 0.1))
    assert run_pipeline(plan(tmp_path, "stages: {tiny: {options: {what: sums}}}"), lambda _: None) == 1
    assert (record(tmp_path)["tiny"]["state"], record(tmp_path)["tiny"]["made"]) == ("failed", None)
    assert record(tmp_path)["tiny"]["sentence"] == f"it ended with 0, and {tmp_path}/out/tiny is not there"


@pytest.mark.parametrize(("given", "said"), [
    ([proven("whole", "all there"), unproven("health", "2 texts say little")], "UNPROVEN: health: 2 texts say little"),
    ([unproven("health", "2 texts say little"), refuted("values", "a hole")], "REFUTED: values: a hole")])
def test_a_stage_says_which_verdict_went_against_it(given, said):
    printed = {"verdicts": [verdict.to_json() for verdict in given]}
    assert pipeline._end_in_words(3, [], printed) == f"a verdict went against it: {said}"
    assert pipeline._end_in_words(0, [], {**printed, "outcome": "PROVEN"}) == "PROVEN", "what was not asked for stands in its log"


@pytest.mark.parametrize(("verb", "options", "read"), [
    ("grpo", "environment: 'mine.py:Env'", ["mine.py"]), ("grpo", "metric: 'mine.py:right'", ["mine.py"]),
    ("grpo", "environment: search, environment-options: ['file=docs.jsonl', k=3]", ["docs.jsonl"]),
    ("grpo", "reward: ['json_schema[file=docs.jsonl]:0.5', 'model:rm:1']", ["docs.jsonl", "rm"]),
    ("eval", "grader: 'json_schema[file=docs.jsonl]', task: graded, path: rm", ["docs.jsonl"]),
    ("eval", "suite: suite.yaml, against: rm, path: rm", ["suite.yaml", "docs.jsonl", "mine.py", "beginnings.txt"]),
    ("export", "path: rm, to: gptq, text: docs.jsonl", ["docs.jsonl"])])
def test_whatever_an_option_names_is_read_by_the_stage(verb, options, read, tmp_path, monkeypatch):
    """What is in none of them may change, and the stage would stand as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm").mkdir()
    for name in ("mine.py", "docs.jsonl", "beginnings.txt"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "suite.yaml").write_text("tasks: {a: {task: graded, data: docs.jsonl, grader: 'mine.py:right'}}\n"
                                         "probes: {prompts: beginnings.txt}\n")
    more = "model: rm, " if verb == "grpo" else ""
    stage = plan(tmp_path, f"stages: {{{verb}: {{options: {{{more}{options}}}}}}}").stages[0]
    assert {str(tmp_path / name) for name in read} <= {os.path.abspath(name) for name in stage.inputs}
    before = stage_key(stage)
    (tmp_path / read[-1] / "x" if read[-1] == "rm" else tmp_path / read[-1]).write_text("y\n")
    assert stage_key(stage) != before


def test_a_stage_whose_model_was_quarantined_since_is_run_again(tmp_path, monkeypatch):
    def made(_, stage, log, **__):
        save_model(Path(stage.model), tiny_model())
        return pipeline.StageEnd(0, "done", 0.1)

    monkeypatch.setattr(pipeline.StageProcesses, "run", made)
    text, said = "stages: {tiny: {options: {what: sums}}}", list[str]()
    assert run_pipeline(plan(tmp_path, text), said.append) == 0
    assert run_pipeline(plan(tmp_path, text), said.append) == 0
    assert said[-1] == "tiny: unchanged, not run again"
    quarantine_checkpoint(open_checkpoint(tmp_path / "out" / "tiny" / "model"), [refuted("x", "it talks nonsense")])
    assert run_pipeline(plan(tmp_path, text), said.append) == 0
    assert next(line for line in said[-3:] if "it talks nonsense" in line).startswith("tiny: run again: ")
    assert open_checkpoint(tmp_path / "out" / "tiny" / "model").quarantined is None


def test_a_stage_that_ended_and_was_not_noted_makes_room_for_itself(tmp_path, monkeypatch):
    """An edit refuses to go on in the folder of one that ended."""
    def made(_, stage, log, **__):
        assert not Path(stage.out).exists()
        save_model(Path(stage.model), tiny_model())
        (Path(stage.out) / "edits.json").write_text("{}")
        if not (tmp_path / "out" / "earlier").exists():
            raise KeyboardInterrupt
        return pipeline.StageEnd(0, "done", 0.1)

    monkeypatch.setattr(pipeline.StageProcesses, "run", made)
    for name in ("facts", "text", "parent"):
        (tmp_path / name).write_text("x")
    text = f"stages: {{edit: {{options: {{path: {tmp_path}/parent, facts: {tmp_path}/facts, text: {tmp_path}/text}}}}}}"
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(plan(tmp_path, text), lambda _: None)
    assert run_pipeline(plan(tmp_path, text), lambda _: None) == 0
    assert (tmp_path / "out" / "earlier" / "1-edit" / "edits.json").exists()


def test_a_pipeline_that_was_killed_goes_on_where_it_stopped(tmp_path):
    """What was done is not done again, and the stage that was cut short is run to its end."""
    (tmp_path / "a.txt").write_text(TEXT)
    text = f"""
stages:
  first: {{verb: tokenizer, options: {{text: {tmp_path}/a.txt, vocab-size: 280}}}}
  second: {{verb: tokenizer, options: {{text: {tmp_path}/a.txt, vocab-size: 281}}}}
"""
    plan(tmp_path, text)
    command = [sys.executable, "-m", "assay", "pipeline", str(tmp_path / "p.yaml"), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("second: assay tokenizer"):
                while record(tmp_path)["second"]["state"] != "running":
                    time.sleep(0.005)
                process.kill()
    assert record(tmp_path)["second"]["state"] == "running"
    said: list[str] = []
    assert run_pipeline(plan(tmp_path, text), said.append) == 0
    assert "first: unchanged, not run again" in said
    assert {name: stage["sittings"] for name, stage in record(tmp_path).items()} == {"first": 1, "second": 2}


def test_a_stage_that_is_refused_ends_the_pipeline_with_its_code_and_its_sentence(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "a.csv").write_text("id,score\n1,0\n2,1\n")
    found = plan(tmp_path, f"""
stages:
  tokenizer: {{options: {{text: {tmp_path}/empty.txt}}}}
  compare: {{options: {{results: ["a={tmp_path}/a.csv", "b={tmp_path}/a.csv"]}}}}
""")
    assert run_pipeline(found, lambda _: None) == 2
    stages = record(tmp_path)
    assert stages["tokenizer"]["sentence"].startswith("it was refused: ")
    assert stages["compare"]["state"] == "not begun"
    assert pipeline_headline(read_pipeline(tmp_path / "out")).startswith("not reached: tokenizer: failed: it was refused")


def test_stages_that_need_nothing_of_each_other_run_side_by_side_where_asked(tmp_path):
    """What needs another waits for it, and the record and the clock say how it went."""
    (tmp_path / "a.txt").write_text(TEXT)
    found = plan(tmp_path, f"""
stages:
  one: {{verb: tokenizer, options: {{text: {tmp_path}/a.txt, vocab-size: 280}}}}
  last: {{verb: corpus, options: {{text: {tmp_path}/a.txt, tokenizer: "${{stages.one.out}}", document-bytes: 64, max-overlap: 1,
                                  workers: 1}}}}
  two: {{verb: tokenizer, options: {{text: {tmp_path}/a.txt, vocab-size: 281}}}}
""")
    seen: list[tuple[str, ...]] = []
    assert run_pipeline(found, lambda _: None,
                        lambda: seen.append(tuple(stage["state"] for stage in record(tmp_path).values())), jobs=2) == 0
    assert ("running", "not begun", "running") in seen
    assert {one for one, last, _ in seen if last != "not begun"} == {"done"}
    document = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    assert document["wall"] > document["stages"][0]["seconds"] + document["stages"][1]["seconds"] - 0.1  # it is in tenths
    assert f"{document['wall']:.1f} s by the clock" in render_pipeline(read_pipeline(tmp_path / "out"), tmp_path / "out")
    assert run_pipeline(found, lambda _: None, jobs=2) == 0  # nothing is run again; the clock goes on from where it stood
    assert json.loads((tmp_path / "out" / "pipeline.json").read_text())["wall"] >= document["wall"]


def test_where_one_of_two_is_refused_the_other_ends_and_none_begins(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text("")
    drawn = random.Random(0)
    (tmp_path / "long.txt").write_text("".join(f"{drawn.getrandbits(400):x}\n" for _ in range(20_000)))  # takes longer than to refuse
    found = plan(tmp_path, f"""
stages:
  bad: {{verb: tokenizer, options: {{text: {tmp_path}/empty.txt}}}}
  good: {{verb: tokenizer, options: {{text: {tmp_path}/long.txt, vocab-size: 800}}}}
  later: {{verb: tokenizer, options: {{text: {tmp_path}/a.txt, vocab-size: 281}}}}
""")
    assert run_pipeline(found, lambda _: None, jobs=2) == 2
    assert [stage["state"] for stage in record(tmp_path).values()] == ["failed", "done", "not begun"]


def test_a_signal_reaches_both_stages_that_run(tmp_path):
    big = tmp_path / "big.txt"
    big.write_text("\n".join(f"{i * i} {i ** 3} {i}" for i in range(100_000)))
    plan(tmp_path, f"""
stages:
  one: {{verb: tokenizer, options: {{text: {big}, vocab-size: 30000}}}}
  two: {{verb: tokenizer, options: {{text: {big}, vocab-size: 30001}}}}
""")
    command = [sys.executable, "-m", "assay", "pipeline", str(tmp_path / "p.yaml"), "--out", str(tmp_path / "out"), "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "out" / "pipeline.json").exists() or {one["state"] for one in record(tmp_path).values()} != {"running"}:
            time.sleep(0.01)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143  # the library at work hears a signal at its end
    assert [(one["state"], one["exit_code"]) for one in record(tmp_path).values()] == [("failed", 143)] * 2


def test_a_budget_that_is_spent_stops_the_stage(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    found = plan(tmp_path, f"stages: {{tokenizer: {{options: {{text: {tmp_path}/a.txt}}, budget: 0.01 s}}}}")
    assert run_pipeline(found, lambda _: None) == 4
    assert record(tmp_path)["tokenizer"]["state"] == "out of budget"
    assert "its budget is spent" in record(tmp_path)["tokenizer"]["sentence"]


# ---------------------------------------------------------------- gates


def test_what_is_not_shown_better_stops_the_pipeline_and_hostile_text_stays_text(tmp_path):
    hostile = "<script>alert(1)</script>"
    base, new = scores(tmp_path / "base.csv", [0.0, 1.0] * 20), scores(tmp_path / "new.csv", [1.0, 0.0] * 20)
    (tmp_path / "a.txt").write_text(TEXT)
    text = f"""
purpose: "{hostile}"
stages:
  compare: {{options: {{results: ["base={base}", "new={new}"]}}, require: shown better than base on score}}
  tokenizer: {{options: {{text: {tmp_path}/a.txt, vocab-size: 280}}}}
"""

    def show() -> None:
        write_pipeline_page(tmp_path / "out")

    assert run_pipeline(plan(tmp_path, text), lambda _: None, show) == 3
    stages = record(tmp_path)
    assert (stages["compare"]["state"], stages["tokenizer"]["state"]) == ("stopped at a gate", "not begun")
    assert stages["compare"]["gates"][0]["outcome"] == "UNPROVEN"
    page = (tmp_path / "out" / "pipeline.html").read_text()
    assert hostile not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "not reached: compare: stopped at a gate" in page
    scores(new, [1.0, 1.0] * 20)
    assert run_pipeline(plan(tmp_path, text), lambda _: None, show) == 0
    assert pipeline_purpose(read_pipeline(tmp_path / "out")).outcome is Outcome.PROVEN
    assert pipeline_headline(read_pipeline(tmp_path / "out")).startswith("reached: 2 of 2 purposes and gates shown")
    scores(new, [1.0, 0.0] * 20)
    assert run_pipeline(plan(tmp_path, text), lambda _: None, show) == 3
    assert record(tmp_path)["tokenizer"]["state"] == "done before"  # nobody has looked whether it still stands
    assert pipeline_headline(read_pipeline(tmp_path / "out")).endswith("0 of 2 stages done")


@pytest.mark.parametrize(("arms", "gate", "own", "outcome"), [
    (("before", "after"), "PROVEN", "UNPROVEN", "PROVEN"),
    (("after", "before"), "PROVEN", "UNPROVEN", "UNPROVEN"),  # the parent is shown better
    (("before", "before"), "PROVEN", "UNPROVEN", "UNPROVEN"),  # of other models
    (("before", "after"), "UNPROVEN", "UNPROVEN", "UNPROVEN"),
    (("elsewhere", "after"), "PROVEN", "UNPROVEN", "UNPROVEN"),  # better than what no stage evaluated
    (("before", "after"), "PROVEN", "REFUTED", "REFUTED")])  # what was shown against it stands
@pytest.mark.parametrize(("verb", "parent"), [("grpo", "--model=runs/sft/model"), ("grpo", "--optimizer-state=fresh"),
                                              ("sft", "--model=runs/sft/model")])
def test_a_gain_that_a_stage_could_not_see_is_shown_by_a_gate_that_asks_the_same(verb, parent, arms, gate, own, outcome):
    def story(verb, command, out, model=None, **more):
        return StageStory({"verb": verb, "command": ["assay", verb, *command], "out": out, "model": model, **more})

    grpo = dataclasses.replace(story(verb, ["--out=runs/grpo", parent], "runs/grpo", "runs/grpo/model"),
                               purpose=Verdict("grpo", Outcome(own), "no gain shown"))
    better = [{"check": "shown better than before on gsm8k", "outcome": gate, "reason": "+0.01"}]
    stages = [grpo, story("eval", ["runs/sft/model", "--out=runs/before"], "runs/before"),
              story("eval", ["runs/grpo/model", "--out=runs/after"], "runs/after"),
              story("compare", [f"{name}=runs/{name}" for name in arms] + ["--json"], "runs/compare.json", gates=better)]
    found = with_later_gate(grpo, stages).purpose
    alike = verb == "grpo" and parent.startswith("--model")
    assert found.outcome == (outcome if alike else own)
    assert "no gain shown" in found.reason


def test_a_hostile_record_stays_text(tmp_path):
    hostile = "\"><img src=x onerror=alert(1)>\u202e"
    facts = {"name": hostile, "verb": hostile, "command": [hostile], "out": hostile, "model": hostile, "log": "javascript:alert(1)",
             "state": "failed", "sentence": hostile, "seconds": 1.0, "sittings": 1, "ran_before": False,
             "gates": [{"check": hostile, "outcome": "REFUTED", "reason": hostile}]}
    (tmp_path / "pipeline.json").write_text(json.dumps({"purpose": hostile, "stages": [facts]}))
    page = render_pipeline(read_pipeline(tmp_path), tmp_path)
    assert "<img" not in page
    assert "\u202e" not in page
    assert "href=\"javascript" not in page


def stage_with(model: Path) -> Stage:
    return Stage("x", "sft", {}, (), (), (), str(model.parent), str(model))


def test_a_hallmark_opens_the_gate_and_a_quarantine_closes_it(tmp_path):
    gate, checkpoint = Gate("proven", "proven"), save_model(tmp_path / "model", tiny_model())
    write_hallmark(checkpoint, [proven("x", "y")])
    assert check_proven(gate, stage_with(checkpoint.folder), None, None).outcome is Outcome.PROVEN
    quarantine_checkpoint(checkpoint, [refuted("x", "it talks nonsense")])
    found = check_proven(gate, stage_with(checkpoint.folder), None, None)
    assert (found.outcome, "it talks nonsense" in found.reason) == (Outcome.REFUTED, True)


def test_no_stage_begins_on_an_export_of_200_bytes(tmp_path):
    """There is no hallmark, so the gate asks for a proof, which refuses it."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model.safetensors").write_bytes(bytes(200))
    stage = Stage("x", "export", {}, (), (), (), str(tmp_path / "x"), str(tmp_path / "x"))
    held = SimpleNamespace(plan=PipelinePlan("p.yaml", tmp_path, "", None, (stage,)))
    found = check_proven(Gate("proven", "proven"), stage, held, StageProcesses(lambda _: None))
    assert (found.outcome, "this is not a model folder" in found.reason) == (Outcome.REFUTED, True)


@pytest.mark.slow
def test_no_stage_begins_on_an_export_without_weights(tmp_path):
    """Forty bytes where the weights should be: there is no hallmark, so the gate proves, and refuses."""
    text = f"""
stages:
  tiny: {{options: {{what: sums}}, require: proven}}
  compare: {{options: {{results: ["a={scores(tmp_path / 'a.csv', [1, 0])}", "b={tmp_path}/a.csv"]}}}}
"""
    def empty(line: str) -> None:
        if line.startswith("tiny: ") and line.endswith(" s)"):  # it has ended, and its gate is still to come
            for name in ("hallmark.json", "trainer.json"):
                (tmp_path / "out" / "tiny" / "model" / name).touch()
            empty_weights_of_another_tool(tmp_path / "out" / "tiny" / "model")

    assert run_pipeline(plan(tmp_path, text), empty) == 3
    stages = record(tmp_path)
    assert (stages["tiny"]["state"], stages["compare"]["state"]) == ("stopped at a gate", "not begun")
    assert stages["tiny"]["gates"][0]["outcome"] == "REFUTED"


@pytest.mark.slow
def test_a_stage_that_was_stopped_goes_on_and_the_exit_code_passes_through(tmp_path):
    """SIGTERM reaches the stage, which saves; the same command goes on from that save."""
    from assay.testing.tiny_training import tiny_corpus

    text = f"""
stages:
  pretrain:
    options: {{corpus: {tiny_corpus().folder}, depth: 1, tokens: 256000, max-length: 16, batch-tokens: 256, num-train-epochs: 80,
              save-steps: 500, eval-documents: 4, warmup-steps: 3, probe-samples: 0, device: cpu}}  # long enough to be stopped
"""
    def stop(line: str) -> None:
        if "step 1 " in line:  # once: a second signal stops at once, without a save
            os.kill(os.getpid(), signal.SIGTERM)

    assert run_pipeline(plan(tmp_path, text), stop) == 143
    assert record(tmp_path)["pretrain"]["state"] == "failed"
    code = run_pipeline(plan(tmp_path, text), lambda _: None)
    found = record(tmp_path)["pretrain"]
    assert (code, found["state"], found["sittings"]) == (0, "done", 2)
    kinds = [event["kind"] for event in Ledger(tmp_path / "out" / "pretrain" / "ledger.jsonl").events()]
    assert {"resume", "resumed"} <= set(kinds)


def test_the_demo_runs_the_tiny_pipeline():
    asked = subprocess.run(["make", "-n", "-o", ".venv/.ready", "-o", "sandbox", "demo"], cwd=ROOT, capture_output=True, text=True)
    assert "-m assay pipeline pipelines/tiny.yaml --out demo-run/pipeline" in asked.stdout, asked.stderr


@pytest.mark.slow
def test_the_tiny_pipeline_runs_whole(tmp_path):
    command = [sys.executable, "-m", "assay", "pipeline", str(ROOT / "pipelines" / "tiny.yaml"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "not reached" not in done.stdout.splitlines()[-1]
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0
    assert again.stdout.count("unchanged, not run again") == 8
