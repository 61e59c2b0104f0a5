"""Results to compare, read from `assay eval` folders, `assay seeds` folders, and CSV or JSON lines of anybody's.

Plain files have one row per score, with these columns (only `score` is needed; names are taken as they stand):
  score      a number; or the column that --metric names
  arm        what is compared; without it the file is one arm of its own name
  run        the training run or seed; without it the arm is one run
  id         the problem (also `problem`); several rows of one id are samples of it
  group      a domain that is compared by itself
  step       when it was measured: such rows are a series and get a verdict on its trend
or one row per arm with `count` of `n`, and `runs` where they came from several.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.data.data_files import read_rows
from assay.errors import DataError, UsageError
from assay.statistics.estimate import majority, pass_at_k
from assay.store.durable import hash_file
from assay.strict_json import NATURAL, read_json, require_shape
from assay.verdict import Outcome

LOWER_IS_BETTER = ("loss", "nll", "perplexity", "ppl", "bits", "bpb", "error", "malformed", "cap")
Samples = tuple[float, ...]
SAME_ON_BOTH: tuple[str, ...] = ("task", "dataset", "prompts", "grader")  # in eval.json: must be the same on both sides
MAY_DIFFER: tuple[str, ...] = ("k", "raw", "stop", "dtype")  # may differ, and is then said
_EVAL_FACTS = {"checkpoint?": str, "examples?": NATURAL, "sampling?": dict, "scores_sha256?": (str, None),
               "verdicts?": [{"check": str, "outcome": str, "reason": str}]}
_SAMPLE = {"score": object, "answer?": (str, float, bool, None), "ended?": str, "ids?": list, "measures?": {str: (float, bool)}}
_EVAL_ROWS = {  # by what a row of its kind of task holds
    "samples": {"id": str, "unit?": (str, None), "samples": [_SAMPLE]}, "scores": {"id": str, "unit?": (str, None), "scores": dict},
    "nats": {"id": str, "unit?": (str, None), "nats": object, "bytes": object}}
PER_SAMPLE: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "pass@1": lambda sample: sample["score"], "lenient": lambda sample: float(sample["lenient"]),
    "parsed": lambda sample: float(sample["parsed"]), "hit the cap": lambda sample: float(sample["ended"] == "length"),
    "tokens": lambda sample: float(len(sample["ids"]))}
MOST_TALLIED = 10**7
SEEDS = {"scores?": {str: ({"mean": float}, None)}, "seeds": {str: {"exit_code": int}}, "metric?": str, "recipe?": str}


@dataclass(frozen=True)
class ScoredRun:
    """`scores`: problem → the scores of its samples. A run that has one number alone holds it under ''."""

    name: str
    scores: Mapping[str, Samples]
    weights: str = ""  # digest of the weights that were scored, where it is known
    source: str = ""  # digest of the scores as Assay wrote them: the same is one result twice
    against: tuple[str, ...] = ()  # what refuted the evaluation itself: then its scores are not what they say

    @property
    def score(self) -> float:
        """The mean over problems of each one's mean; NaN for a run that ended without a number."""
        return math.fsum(math.fsum(samples) / len(samples) for samples in self.scores.values()) / len(self.scores)


@dataclass(frozen=True)
class Arm:
    name: str
    metric: str
    runs: tuple[ScoredRun, ...]
    lower_is_better: bool
    group: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)  # what says which questions were asked, and how
    tally: tuple[int, int] | None = None  # count of n, where that is all that is known
    notes: tuple[str, ...] = ()
    unit: str = "problems"  # what a run's scores are of

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self.runs[0].scores)

    @property
    def has_problems(self) -> bool:
        return self.problems != ("",)


@dataclass(frozen=True)
class Series:
    """`history`: one array of scores per step, of the same ids in the same order."""

    name: str
    metric: str
    steps: tuple[int, ...]
    history: tuple[Samples, ...]
    lower_is_better: bool


def read_results(path: str | Path, *, metric: str | None = None, lower_is_better: bool | None = None) -> list[Arm | Series]:
    """Every arm and series that stands in a folder or file."""
    path = Path(path)
    if (path / "eval.json").exists():
        return [read_eval(path, metric, lower_is_better)]
    if (path / "seeds.json").exists():
        return [read_seeds(path)]
    if (path / "request.json").exists():
        raise UsageError(f"{path}: the evaluation has not finished; run `assay eval` again with the same options")
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    from assay.comparison.foreign_logs import read_foreign

    if (found := read_foreign(path, metric, lower_is_better)) is not None:
        return found
    if path.is_dir():
        raise UsageError(f"{path}: no results are here; give what `assay eval` or `assay seeds` wrote, the output of lm-eval (with its "
                         "samples), a log of inspect-ai, a trainer's checkpoint, or a file")
    return read_plain(path, metric, lower_is_better)


def read_plain(path: Path, metric: str | None, lower_is_better: bool | None) -> list[Arm | Series]:
    from assay.comparison.foreign_logs import read_foreign_rows

    rows = read_values(path)
    if (found := read_foreign_rows(rows, path, metric, lower_is_better)) is not None:
        return found
    if {"count", "n"} <= rows[0].keys():
        return [arm_of_counts(row, path, metric, lower_is_better) for row in rows]
    return sorted_out(rows, path, metric or "score", lower_is_better)


def read_seeds(folder: Path) -> Arm:
    """Arm of several seeds, one number a seed; a seed that ended without one keeps NaN, and counts as collapsed."""
    facts = read_json(folder / "seeds.json", SEEDS, error=DataError)
    if not facts.get("scores") or not {"metric", "recipe"} <= facts.keys():
        raise DataError(f"{folder / 'seeds.json'}: the set has not finished; run `assay seeds` again with the same options")
    runs, digest = [], hash_file(folder / "seeds.json")
    for seed, score in facts["scores"].items():
        ended = facts["seeds"].get(seed, {}).get("exit_code") in (0, 3)
        runs.append(ScoredRun(seed, {"": (float(score["mean"]) if score and ended else math.nan,)}, source=f"{digest} {seed}"))
    return Arm(folder.name, str(facts["metric"]), tuple(runs), True, data={"recipe": facts["recipe"]})


def refuse_copies(runs: Sequence[ScoredRun], said: str) -> None:
    """Refuse copies, so that every run counts once: a copied folder is no second run, and neither are the same weights asked again."""
    for number, run in enumerate(runs):
        for earlier in runs[:number]:
            if run.source and run.source == earlier.source:
                raise DataError(f"{said}: {run.name} is a copy of {earlier.name}, and one run counted twice is no second run")
            if run.weights and run.weights == earlier.weights:
                raise DataError(f"{said}: {run.name} and {earlier.name} are the same weights ({run.weights[:12]}), evaluated twice: one "
                                "run; give other training runs, or more samples of each with -k")


def arm_of_counts(row: Mapping[str, Any], path: Path, metric: str | None, lower_is_better: bool | None) -> Arm:
    """`count` of `n`. Where they came from several runs but not which, they are taken to lie in as few runs as they can."""
    name = str(row.get("arm") or path.stem)
    count, n = (_whole(row.get(key), f"{path}: {key} of {name!r}") for key in ("count", "n"))
    runs = _whole(row.get("runs") or 1, f"{path}: runs of {name!r}")
    if not (0 <= count <= n and 1 <= n <= MOST_TALLIED and runs >= 1 and n % runs == 0):
        raise DataError(f"{path}: {name!r} has {count} of {n} in {runs} run(s); expected 0 ≤ count ≤ n, the same n in every run")
    called = metric or str(row.get("metric") or "rate")
    each, left, made = n // runs, count, []
    for run in range(runs):
        here = min(each, left)
        made.append(ScoredRun(str(run), {"": (1.0,) * here + (0.0,) * (each - here)}))
        left -= here
    notes = (f"which of the {runs} runs of {name} the {count} of {n} came from is not given: taken as {-(-count // each)}, the fewest "
             "that can hold them",) if runs > 1 and count else ()
    return Arm(name, called, tuple(made), is_lower_better(called, lower_is_better), str(row.get("group") or ""), tally=(count, n),
               notes=notes)


def read_values(path: Path) -> list[dict[str, Any]]:
    """The rows of a table or of JSON lines: at least one."""
    rows = [row.values for row in read_rows(path, otherwise=".jsonl")]
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def read_score(value: Any, where: str) -> float:
    """Unknown is never 0: an empty or missing score is refused by name."""
    named = {"true": 1.0, "false": 0.0}.get(str(value).strip().lower())
    if named is not None:
        return named
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise DataError(f"{where}: the score is {json.dumps(value)}; expected a number. Leave nothing out: score it, or drop the example "
                        "from every arm") from None
    if not math.isfinite(found):
        raise DataError(f"{where}: the score is {found}; find out why, a mean without it would be of other data")
    return found


def is_lower_better(metric: str, said: bool | None) -> bool:
    """Losses and their like are better when lower, unless the caller says otherwise."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER) if said is None else said


def sorted_out(rows: Sequence[Mapping[str, Any]], path: Path, column: str, said: bool | None) -> list[Arm | Series]:
    """Rows into arms and series, in the order in which they first appear."""
    if not any(column in row for row in rows):
        raise DataError(f"{path}: no column {column!r}; found {', '.join(map(str, rows[0]))}. Name the column of scores with --metric")
    series = "step" in rows[0]
    if series:  # the rows of a log need not all have every metric
        rows = [row for row in rows if row.get(column) not in (None, "")]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((str(row.get("arm") or path.stem), str(row.get("group") or "")), []).append(row)
    found: list[Arm | Series] = []
    for (name, group), mine in groups.items():
        if series:
            found.append(_series(f"{name} on {group}" if group else name, column, mine, f"{path}: {name}", is_lower_better(column, said)))
        else:
            found.append(Arm(name, column, _runs(mine, column, f"{path}: {name}"), is_lower_better(column, said), group))
    return found


def _runs(rows: Iterable[Mapping[str, Any]], column: str, where: str) -> tuple[ScoredRun, ...]:
    runs: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        problem = _id(row)
        score = read_score(row.get(column), f"{where}, {problem or 'a row'}")
        runs.setdefault(str(row.get("run") or ""), {}).setdefault(problem, []).append(score)
    return tuple(ScoredRun(name, {problem: tuple(scores) for problem, scores in by.items()}) for name, by in runs.items())


def _series(name: str, column: str, rows: Sequence[Mapping[str, Any]], where: str, lower_is_better: bool) -> Series:
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        step, problem = _whole(row.get("step"), f"{where}, step"), _id(row)
        at_step = by_step.setdefault(step, {})
        if problem in at_step:
            raise DataError(f"{where}: step {step} has two scores" + (f" of {problem!r}" if problem else ""))
        at_step[problem] = read_score(row.get(column), f"{where}, step {step}")
    steps = sorted(by_step)
    names = list(by_step[steps[0]])
    if any(set(by_step[step]) != set(names) for step in steps):
        raise DataError(f"{where}: not every step has a score of the same ids")
    return Series(name, column, tuple(steps), tuple(tuple(by_step[step][n] for n in names) for step in steps), lower_is_better)


def _id(row: Mapping[str, Any]) -> str:
    for name in ("id", "problem"):
        if row.get(name) not in (None, ""):
            return str(row[name])
    return ""


def _whole(value: Any, where: str) -> int:
    found = read_score(value, where)
    if found != int(found):
        raise DataError(f"{where} is {value!r}; expected a whole number")
    return int(found)


# ---------------------------------------------------------------- eval folders


def read_eval(folder: Path, metric: str | None, lower_is_better: bool | None) -> Arm:
    """The headline metric of its kind of task, or the one that is named: a sample's, or of all samples of an example."""
    facts, rows = read_json(folder / "eval.json", _EVAL_FACTS, error=DataError), read_values(folder / "scores.jsonl")
    kind = next((kind for kind in _EVAL_ROWS if kind in rows[0]), "nats")
    for line, row in enumerate(rows, 1):
        require_shape(row, _EVAL_ROWS[kind], where=f"{folder / 'scores.jsonl'}:{line}", error=DataError)
    _refuse_changed(folder, facts, rows)
    chosen = metric or _headline(rows[0])
    scale = _mean_bytes(rows) if "nats" in rows[0] and "samples" not in rows[0] and "scores" not in rows[0] else 1.0
    if len({row["id"] for row in rows}) < len(rows):
        raise DataError(f"{folder / 'scores.jsonl'}: an example stands twice")
    scores: dict[str, Samples] = {}
    for row in rows:
        unit = str(row.get("unit") or row["id"])  # questions of one unit stand or fall together
        scores[unit] = scores.get(unit, ()) + _values(row, chosen, folder, scale)
    data = {key: facts[key] for key in SAME_ON_BOTH if key in facts}
    how = {key: facts[key] for key in MAY_DIFFER if key in facts} | {
        key: value for key, value in facts.get("sampling", {}).items() if key != "seed"}
    against = tuple(f"{one['check']}: {one['reason']}" for one in facts.get("verdicts", []) if one["outcome"] == Outcome.REFUTED)
    run = ScoredRun(folder.name, scores, facts.get("checkpoint", ""), hash_file(folder / "scores.jsonl"), against)
    return Arm(folder.name, chosen, (run,), is_lower_better(chosen, lower_is_better), data=data | {"how": how})


def _headline(row: Mapping[str, Any]) -> str:
    if "samples" in row:
        return "pass@1"
    return next(iter(row["scores"])) if "scores" in row else "bits per byte"


def _values(row: Mapping[str, Any], metric: str, folder: Path, scale: float) -> Samples:
    where = f"{folder}: {metric} of {row['id']!r}"
    if "samples" in row and not row["samples"]:
        raise DataError(f"{where}: no sample of it was scored; evaluate again")
    if "samples" in row:
        return tuple(read_score(value, where) for value in _of_samples(row["samples"], metric, folder))
    if "scores" in row:
        if metric not in row["scores"]:
            raise UsageError(f"{folder}: no metric {metric!r}; it has {', '.join(row['scores'])}")
        value = row["scores"][metric]
        return tuple(read_score(one, where) for one in (value if isinstance(value, list) else [value]))
    if metric != "bits per byte":
        raise UsageError(f"{folder}: no metric {metric!r}; it has bits per byte")
    return (-read_score(row["nats"], where) / math.log(2) / scale,)  # so scaled that the mean over documents is Σ bits / Σ bytes


def _of_samples(samples: list[Mapping[str, Any]], metric: str, folder: Path) -> list[float]:
    if metric in PER_SAMPLE:
        return [PER_SAMPLE[metric](sample) for sample in samples]
    if metric in (measures := samples[0].get("measures", {})):
        return [sample["measures"][metric] for sample in samples]
    right, (name, _, k) = [sample["score"] == 1 for sample in samples], metric.partition("@")
    if name == "pass" and k.isdigit():
        return [pass_at_k(len(samples), sum(right), int(k))]
    if name == "majority":
        return [majority([sample["answer"] for sample in samples], right)]
    known = [*PER_SAMPLE, "pass@K", "majority", *measures]
    raise UsageError(f"{folder}: no metric {metric!r}; it has {', '.join(known)}")


def _mean_bytes(rows: list[dict[str, Any]]) -> float:
    return sum(read_score(row["bytes"], f"bytes of {row['id']!r}") for row in rows) / len(rows)


def _refuse_changed(folder: Path, facts: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Refuse an evaluation that changed: every example that was asked has its score, and the scores are those that eval.json sums up."""
    if "examples" in facts and facts["examples"] != len(rows):
        raise DataError(f"{folder}: {facts['examples']} examples were asked and {len(rows)} have a score; finish the evaluation first")
    recorded = facts.get("scores_sha256")
    if recorded not in (None, hash_file(folder / "scores.jsonl")):
        raise DataError(f"{folder}: scores.jsonl is not the one that eval.json sums up: edited or damaged; evaluate again")
