"""An `assay eval` folder as an arm of a comparison: one metric of every example, checked to be whole and of the data it says."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import DataError, UsageError
from assay.measure.arms import FILE_LIMIT, Arm, Run, Samples, lower, number, read_object, read_rows
from assay.measure.estimate import majority, pass_at_k
from assay.store.durable import read_file

ASKED: tuple[str, ...] = ("task", "dataset", "prompts")  # in eval.json: must be the same on both sides
HOW: tuple[str, ...] = ("k", "raw", "stop", "dtype")  # may differ, and is then said
OF_A_SAMPLE = {"lenient": "lenient", "parsed": "parsed"}
UNITS = ("total", "byte", "token")


def read_eval(folder: Path, metric: str | None, lower_is_better: bool | None) -> Arm:
    """The headline metric of its kind of task, or the one that is named: a sample's, or of all samples of an example."""
    facts, rows = read_object(folder / "eval.json"), read_rows(folder / "scores.jsonl")
    _refuse_changed(folder, facts, rows)
    chosen = metric or _headline(rows[0])
    scale = _mean_bytes(rows) if "nats" in rows[0] and "samples" not in rows[0] and "scores" not in rows[0] else 1.0
    if len({row["id"] for row in rows}) < len(rows):
        raise DataError(f"{folder / 'scores.jsonl'}: an example stands twice")
    scores: dict[str, Samples] = {}
    for row in rows:
        unit = str(row.get("unit") or row["id"])  # questions of one unit stand or fall together
        scores[unit] = scores.get(unit, ()) + _values(row, chosen, folder, scale)
    data = {key: facts[key] for key in ASKED if key in facts}
    how = {key: facts[key] for key in HOW if key in facts} | {
        key: value for key, value in facts.get("sampling", {}).items() if key != "seed"}
    return Arm(folder.name, chosen, (Run(folder.name, scores),), lower(chosen, lower_is_better), data=data | {"how": how})


def _headline(row: Mapping[str, Any]) -> str:
    if "samples" in row:
        return "pass@1"
    return next(iter(row["scores"])) if "scores" in row else "bits per byte"


def _values(row: Mapping[str, Any], metric: str, folder: Path, scale: float) -> Samples:
    where = f"{folder}: {metric} of {row['id']!r}"
    if "samples" in row:
        return tuple(number(value, where) for value in _of_samples(row["samples"], metric, folder))
    if "scores" in row:
        if metric not in row["scores"]:
            raise UsageError(f"{folder}: no metric {metric!r}; it has {', '.join(row['scores'])}")
        value = row["scores"][metric]
        return tuple(number(one, where) for one in (value if isinstance(value, list) else [value]))
    if metric != "bits per byte":
        raise UsageError(f"{folder}: no metric {metric!r}; it has bits per byte")
    return (-number(row["nats"], where) / math.log(2) / scale,)  # so scaled that the mean over documents is Σ bits / Σ bytes


def _of_samples(samples: list[Mapping[str, Any]], metric: str, folder: Path) -> list[float]:
    right = [sample["score"] == 1 for sample in samples]
    name, _, k = metric.partition("@")
    if metric == "pass@1":
        return [sample["score"] for sample in samples]
    if name == "pass" and k.isdigit():
        return [pass_at_k(len(samples), sum(right), int(k))]
    if name == "majority":
        return [majority([sample["answer"] for sample in samples], right)]
    if metric in OF_A_SAMPLE:
        return [float(sample[OF_A_SAMPLE[metric]]) for sample in samples]
    if metric == "hit the cap":
        return [float(sample["ended"] == "length") for sample in samples]
    if metric == "tokens":
        return [float(len(sample["ids"])) for sample in samples]
    if metric in samples[0]["measures"]:
        return [sample["measures"][metric] for sample in samples]
    known = ["pass@1", "pass@K", "majority", *OF_A_SAMPLE, "hit the cap", "tokens", *samples[0]["measures"]]
    raise UsageError(f"{folder}: no metric {metric!r}; it has {', '.join(known)}")


def _mean_bytes(rows: list[dict[str, Any]]) -> float:
    return sum(number(row["bytes"], f"bytes of {row['id']!r}") for row in rows) / len(rows)


def _refuse_changed(folder: Path, facts: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Every example that was asked has its score, and the scores are those that eval.json sums up."""
    if "examples" in facts and facts["examples"] != len(rows):
        raise DataError(f"{folder}: {facts['examples']} examples were asked and {len(rows)} have a score; finish the evaluation first")
    recorded = facts.get("scores_sha256")
    if recorded not in (None, hashlib.sha256(read_file(folder / "scores.jsonl", limit=FILE_LIMIT)).hexdigest()):
        raise DataError(f"{folder}: scores.jsonl is not the one that eval.json sums up: edited or damaged; evaluate again")
