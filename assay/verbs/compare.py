"""assay compare: compare two or more results, with intervals and verdicts in words."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from assay.config import argument, option
from assay.errors import UsageError
from assay.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from assay.comparison.pairwise import Comparison
    from assay.comparison.read_results import Arm, Series


@dataclass(frozen=True)
class FLAGS:
    """Compare results with the first one: paired per problem, an effect with its interval, and a verdict: shown better, shown
    worse, or not shown and what it would take. With several runs per arm the run is the unit, not the completion. All
    comparisons made together hold at the level together (Holm). A comparison that could be made exits with 0, whatever it says.

    Results are folders of `assay eval` and `assay seeds`; lm-eval's output (with its samples), inspect-ai's logs, trainer_state.json and
    Weights & Biases' exports, as they come; or CSV and JSON lines of anybody's. name=PATH names an arm; paths joined by commas are runs of
    one arm. Columns of a file:
      score   a number, or the column that --metric names (needed)
      arm     what is compared; without it the file is one arm
      run     the training run or seed; without it the arm is one run
      id      the problem (or `problem`); several rows of one id in one run are its samples
      group   a domain that is compared by itself
      step    when it was measured: such rows are a series and get a verdict on its trend
    or one row per arm: arm, count, n, and runs where the count comes from several."""

    results: tuple[str, ...] = argument("results to compare; each is compared with the first")
    metric: str | None = option("metric to compare, where there are several", default=None, default_text="the only one")
    level: float = option("allowed rate of wrong claims, over all comparisons together", default=0.05)
    lower_is_better: bool = option("lower scores are better; known already for losses, perplexities, errors and malformed rates",
                                   default=False)
    per_completion: bool = option("also show the p-value that would treat every completion as independent, struck through", default=False)
    require: Literal["better", "not worse"] | None = option("exit with 3 unless every arm is shown better, or none is shown worse",
                                                            default=None)
    claim: tuple[str, ...] = option("claims about the results, as in new=better, new=worse, or for a series grpo=passed; exit with 3 "
                                    "where the results do not show one", metavar="NAME=CLAIM", default=())
    summary: str | None = option("file to which the results are appended as Markdown tables, such as $GITHUB_STEP_SUMMARY", metavar="FILE",
                                 default=None, default_text="none")
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay compare evals/before evals/after
  assay compare base=evals/a1,evals/a2,evals/a3,evals/a4 new=evals/b1,evals/b2,evals/b3,evals/b4
  assay compare runs/three-seeds runs/other-three
  assay compare theirs.csv --metric accuracy --require better
  assay compare run/metrics.jsonl --metric reward
  assay compare before=lm-eval/base after=lm-eval/tuned --metric exact_match
  assay compare logs/2026-01-31_base.eval logs/2026-01-31_tuned.eval
  assay compare outputs/checkpoint-500 --metric eval_loss
  assay compare base=evals/before new=evals/after --claim new=better
  assay compare evals/before evals/after --require 'not worse' --summary $GITHUB_STEP_SUMMARY"""


def run(flags: FLAGS) -> int:
    from assay.comparison.pairwise import arm_summary, compare
    from assay.comparison.second_opinion import check_comparisons, check_evaluations, check_summaries
    from assay.comparison.trend import trend
    from assay.statistics.known_answers import check_statistics

    arms, series = read_arms(flags)
    trends = [trend(one, level=flags.level) for one in series]
    alone = series if not arms else len(arms) == 1 and len(arms[0].runs) > 1  # what needs nothing to be held against
    found = [] if alone else compare(arms, level=flags.level)
    summaries = [(arm, arm_summary(arm)) for arm in arms]
    claims = check_claims(flags, arms, series)
    opinions = [check_statistics(of_counts=True), check_evaluations(arms), check_summaries(summaries, told=flags.lower_is_better),
                *([check_comparisons(arms, found, flags.level)] if found else [])]
    good = satisfied(flags.require, found) and all(verdict.outcome is Outcome.PROVEN for verdict in (*claims, *opinions))
    told = [comparison_text(one, flags.per_completion) for one in found] + [one.sentence for one in trends]
    named = [f"{arm.name}{f' on {arm.group}' if arm.group else ''}" for arm in arms]
    if flags.summary is not None:
        append_comparison(flags.summary, list(zip(named, [words for _, words in summaries], strict=True)), told, [*claims, *opinions])
    if flags.json:
        print(json.dumps({"arms": [{"name": arm.name, "group": arm.group or None, "summary": words} for arm, words in summaries],
                          "comparisons": [one.to_json() for one in found], "trends": [one.to_json() for one in trends],
                          "claims": [verdict.to_json() for verdict in claims],
                          "checks": [verdict.to_json() for verdict in opinions]}, indent=1, allow_nan=False))
        return 0 if good else 3
    for name, (_, words) in zip(named, summaries, strict=True):
        print(f"{name}: {words}")
    refuted = [verdict for verdict in opinions if verdict.outcome is Outcome.REFUTED]
    print("\n".join([*told, *map(str, [*claims, *refuted])]))
    return 0 if good else 3


def append_comparison(path: str, arms: Sequence[tuple[str, str]], told: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    """Append what is printed to a file, as Markdown: arms with their scores, what they show of each other, and the verdicts on it."""
    from assay.report.markdown import append_summary, markdown_text, table, verdict_table

    parts = ["### assay compare", *(f"- {markdown_text(sentence)}" for sentence in told)]
    tables = [table(("arm", "score"), [(markdown_text(name), markdown_text(words)) for name, words in arms])] if arms else []
    append_summary(path, "\n\n".join([*parts, *tables, *([verdict_table(verdicts)] if verdicts else [])]))


def check_claims(flags: FLAGS, arms: "Sequence[Arm]", series: "Sequence[Series]") -> list[Verdict]:
    """Check what is said of each named arm or series against what the results show, with every arm that was given counted."""
    from assay.guard.conclusion_checks import check_claim, check_rise

    verdicts = []
    for given in flags.claim:
        name, _, said = given.rpartition("=")
        curve = next((one for one in series if one.name == name), None)
        if curve is not None and said == "passed":
            verdicts.append(check_rise(curve, passed=True, level=flags.level))
        elif name in [arm.name for arm in arms[1:]] and said in ("better", "worse"):
            verdicts.append(check_claim(name, arms, "shown better" if said == "better" else "shown worse", level=flags.level))
        else:
            raise UsageError(f"--claim {given}: expected NAME=better or NAME=worse of an arm after the first "
                             f"({', '.join(arm.name for arm in arms[1:]) or 'there is none'}), or NAME=passed of a series "
                             f"({', '.join(one.name for one in series) or 'there is none'})")
    return verdicts


def read_arms(flags: FLAGS) -> "tuple[list[Arm], list[Series]]":
    from assay.comparison.read_results import Arm

    lower = True if flags.lower_is_better else None
    read = [one for given in flags.results for one in arms_of(given, flags.metric, lower)]
    return [one for one in read if isinstance(one, Arm)], [one for one in read if not isinstance(one, Arm)]


def arms_of(given: str, metric: str | None, lower: bool | None) -> "Sequence[Arm | Series]":
    """name=PATH,PATH…: one arm of several runs; a single path may hold several arms."""
    from assay.comparison.read_results import Arm, read_results, refuse_copies

    name, named, paths = given.rpartition("=") if not Path(given).exists() else ("", "", given)
    parts = [path for path in paths.split(",") if path] if not Path(paths).exists() else [paths]
    if not parts:
        raise UsageError(f"{given!r}: names no result; expected PATH, name=PATH or name=PATH,PATH,…")
    if twice := [path for path, times in Counter(map(os.path.realpath, parts)).items() if times > 1]:
        raise UsageError(f"{given}: {twice[0]} stands there twice, and one run counted twice is no second run")
    found = [one for path in parts for one in read_results(path, metric=metric, lower_is_better=lower)]
    if len(parts) == 1:
        return [replace(one, name=name) for one in found] if named and len({one.name for one in found}) == 1 else found
    arms = [one for one in found if isinstance(one, Arm)]
    if len(arms) != len(parts):
        raise UsageError(f"{given}: expected one result at each of the {len(parts)} paths, found {len(arms)}")
    for arm in arms[1:]:
        if (arm.metric, arm.data) != (arms[0].metric, arms[0].data):
            raise UsageError(f"{given}: {arms[0].name} and {arm.name} were not asked the same, so they are not runs of one arm")
    runs = tuple(replace(one, name=path) for arm, path in zip(arms, parts, strict=True) for one in arm.runs)
    refuse_copies(runs, given)
    return [replace(arms[0], name=name or arms[0].name, runs=runs)]


def comparison_text(found: "Comparison", per_completion: bool) -> str:
    if not per_completion or found.per_completion_p is None:
        return found.sentence
    from assay.comparison.pairwise import NOT_INDEPENDENT

    return f"{found.sentence}\n  {struck(f'per completion p = {found.per_completion_p:.2g}')} not valid: {NOT_INDEPENDENT}"


def struck(text: str) -> str:
    return "".join(f"{letter}\u0336" for letter in text)


def satisfied(require: str | None, found: "Sequence[Comparison]") -> bool:
    """Whether a requirement is satisfied; the same weights asked twice show nothing about a model, so they satisfy none."""
    if require is not None and any(one.same_weights for one in found):
        return False
    if require == "better":
        return bool(found) and all(one.claim == "shown better" for one in found)
    return require is None or all(one.claim != "shown worse" for one in found)
