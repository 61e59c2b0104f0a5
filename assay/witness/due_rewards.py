"""Due rewards: what the rules of --reward and --metric give a completion, by the rules in docs/witness.md or by the user's own function."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from assay.witness.due_answers import is_same, lenient_answer, row_gold, strict_answer
from assay.witness.due_rows import kept_contents
from assay.witness.due_texts import NotWitnessed, Row, file_rows, named_sources

SAME_SCORE, GRADER_SECONDS = 1e-6, 60.0
_SPEC = re.compile(r"(?P<name>[^\[\]]+?)(?:\[(?P<options>.*)\])?(?::(?P<weight>[-+.\deE]+))?", re.DOTALL)
_ASK_FUNCTION = """import json, runpy, sys
from pathlib import Path
file, name = sys.argv[1:]
sys.path.insert(0, str(Path(file).parent))
function = runpy.run_path(file)[name]
print("\\n" + json.dumps([float(function(*given)) for given in json.load(sys.stdin)]))
"""
Given = tuple[str, str, Mapping[str, Any]]  # prompt, completion, row


class DueRule(NamedTuple):
    """NAME[OPTION=VALUE]:WEIGHT, or FILE.py:FUNCTION:WEIGHT."""

    name: str
    options: dict[str, str]
    weight: float


def due_rules(specs: Sequence[str]) -> list[DueRule]:
    found = [match for spec in specs if (match := _SPEC.fullmatch(spec.strip())) is not None]
    return [DueRule(match["name"], dict(part.split("=", 1) for part in re.split(r",(?=\w+=)", match["options"] or "") if part),
                 float(match["weight"] or 1)) for match in found]


def due_metric(options: Mapping[str, Any]) -> DueRule:
    """--metric, or the heaviest rule of --reward."""
    rules = [rule for rule in due_rules([options["metric"]] if options["metric"] else options["reward"]) if rule.name != "judge"]
    if not rules:
        raise NotWitnessed("no rule says what is wanted")
    return max(rules, key=lambda rule: rule.weight)


def due_scores(rule: DueRule, given: Sequence[Given]) -> list[float]:
    """Scores by one reward rule, before the weight."""
    if ".py:" in rule.name:
        file, name = rule.name.rsplit(":", 1)
        return ask_function(file, name, given)
    if rule.name == "answer" and not set(rule.options) - {"how"}:
        read = lenient_answer if rule.options.get("how") == "lenient" else strict_answer
        if not all({"gold", "answer"} & set(row) for _, _, row in given):
            raise NotWitnessed("rows without `gold` or `answer` are not graded here")
        return [float(is_same(read(text), row_gold(row))) for _, text, row in given]
    if rule.name == "regex" and (rule.options.get("pattern") or all("pattern" in row for _, _, row in given)):
        return [float(re.search(rule.options.get("pattern") or row["pattern"], text) is not None) for _, text, row in given]
    raise NotWitnessed(f"the rule of {rule.name}{'' if not rule.options else ' with its options'} is not written down twice")


def ask_function(file: str, name: str, given: Sequence[Given]) -> list[float]:
    """The user's own function, in a process of its own that imports nothing else."""
    try:
        said = subprocess.run([sys.executable, "-c", _ASK_FUNCTION, file, name], input=json.dumps(given, default=str), capture_output=True,
                              text=True, timeout=GRADER_SECONDS)
    except subprocess.TimeoutExpired:
        raise NotWitnessed(f"{file}:{name} took more than {GRADER_SECONDS:g} s") from None
    if said.returncode:
        raise NotWitnessed(f"{file}:{name} died: {(said.stderr.strip().splitlines() or ['no output'])[-1][:200]}")
    return json.loads(said.stdout.strip().splitlines()[-1])

# ---------------------------------------------------------------- rows


def rows_to_grade(options: Mapping[str, Any], *, held_out: bool) -> list[tuple[Row, Mapping[str, Any]]]:
    """The rows that are held out, or those that are not, with their values for whoever grades."""
    def read(file: str, limit: int | None) -> list[tuple[Row, Mapping[str, Any]]]:
        return [(Row(Path(file).name, number, values, options["gsm8k"]), values)
                for number, values in enumerate(islice(file_rows(Path(file)), limit), 1)]

    apart = options["held_out_data"]
    if apart is not None and held_out:
        return read(apart, None)
    rows = [each for file, _ in named_sources(options) for each in read(file, options.get("limit"))]
    if apart is not None:
        return rows
    trained_on = kept_contents([row.content for row, _ in rows], options["held_out"], options["seed"])
    return [(row, values) for row, values in rows if (row.content not in trained_on) == held_out]

# ---------------------------------------------------------------- of a rollout


def wrong_rewards(groups: Sequence[Mapping[str, Any]], texts: Sequence[Sequence[str]], options: Mapping[str, Any]) -> list[str]:
    """Completions of a kept rollout whose reward is not the weighted sum of its rules. Only where all rules are written down twice: what a
    user's function, a model or a judge says is asked twice by the run itself."""
    rules = due_rules(options["reward"])
    if options["overlong_buffer"] or any(rule.name not in ("answer", "regex") for rule in rules):
        return []
    values = {row.name: values for row, values in rows_to_grade(options, held_out=False)}
    given = [("", text, values[group["prompt"]]) for group, said in zip(groups, texts, strict=True) for text in said]
    try:
        scores = [due_scores(rule, given) for rule in rules]
    except NotWitnessed:
        return []
    due = [sum(rule.weight * score for rule, score in zip(rules, each, strict=True)) for each in zip(*scores, strict=True)]
    found = [reward for group in groups for reward in group["rewards"]]
    wrong = [(text, one, other) for (_, text, _), one, other in zip(given, found, due, strict=True)
             if one is not None and abs(one - other) > SAME_SCORE]
    return [f"{len(wrong)} of {len(found)} completions have another reward than their rules give: {wrong[0][0][-60:]!r} has "
            f"{wrong[0][1]:g}, due is {wrong[0][2]:g}"] if wrong else []
