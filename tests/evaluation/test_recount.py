"""The figures of an evaluation, counted again from its rows."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.evaluation.recount import check_figures, check_read_back, check_sample_endings
from assay.statistics.estimate import Estimate, clustered_rate, mean, mean_rate, pass_at_k
from assay.verdict import Outcome

STOP, CAP = 9, 6


def rows(n: int = 40, k: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    drawn = np.random.default_rng(seed)
    made = []
    for i in range(n):
        samples = []
        for _ in range(k):
            length = int(drawn.integers(1, CAP + 1))
            ids = [1] * (length - 1) + [1 if length == CAP else STOP]
            samples.append({"ids": ids, "ended": "length" if length == CAP else "stop", "score": float(drawn.random() < 0.4),
                            "lenient": 1.0, "parsed": bool(drawn.random() < 0.9)})
        made.append({"id": str(i), "samples": samples})
    return made


def figures(given: list[dict[str, Any]]) -> dict[str, Estimate]:
    samples, owner = [s for row in given for s in row["samples"]], [row["id"] for row in given for _ in row["samples"]]
    capped = [float(s["ended"] == "length") for s in samples]
    return {"pass@1": clustered_rate([s["score"] for s in samples], owner),
            "parsed": clustered_rate([float(s["parsed"]) for s in samples], owner),
            "pass@1 read leniently": clustered_rate([s["lenient"] for s in samples], owner), "hit the cap": clustered_rate(capped, owner),
            "stopped": clustered_rate([1 - value for value in capped], owner),
            "tokens": mean([float(len(s["ids"])) for s in samples])} | passed(given)


def passed(given: list[dict[str, Any]]) -> dict[str, Estimate]:
    k, right = len(given[0]["samples"]), [sum(s["score"] == 1 for s in row["samples"]) for row in given]
    return {f"pass@{j}": mean_rate([pass_at_k(k, each, j) for each in right]) for j in (2, 4) if j <= k}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("k", [1, 4])
def test_right_figures_and_endings_are_proven(seed: int, k: int):
    given = rows(seed=seed, k=k)
    assert check_figures(given, figures(given)).outcome is Outcome.PROVEN
    assert check_sample_endings(given, {STOP}, CAP).outcome is Outcome.PROVEN


@pytest.mark.parametrize("fault", ["another mean", "vanished", "an interval of nothing", "an interval of everything"])
def test_wrong_figures_are_refuted(fault: str):
    given = rows(n=400)
    found = figures(given)
    right = found["hit the cap"]
    wrong = {"another mean": Estimate(right.mean + 0.01, right.low, right.high + 0.01, right.n),
             "an interval of nothing": Estimate(right.mean, right.mean, right.mean, right.n),
             "an interval of everything": Estimate(right.mean, 0.0, 1.0, right.n)}
    changed = {name: value for name, value in found.items() if name != "hit the cap"} | (
        {"hit the cap": wrong[fault]} if fault in wrong else {})
    assert check_figures(given, changed).outcome is Outcome.REFUTED


@pytest.mark.parametrize("name", ["pass@2", "majority@4"])
def test_a_figure_that_is_left_out_or_added_is_refuted(name: str):
    given = rows()
    found = figures(given)
    changed = {other: value for other, value in found.items() if other != name} if name in found else found | {name: found["parsed"]}
    assert name in check_figures(given, changed).reason
    assert check_figures(given, changed).outcome is Outcome.REFUTED


def test_what_lies_in_the_folder_is_read_back(tmp_path: Path):
    given = rows()
    found = figures(given)
    lines = "".join(json.dumps(row) + "\n" for row in given)
    (tmp_path / "scores.jsonl").write_text(lines)

    def write(**other: Any) -> Outcome:
        document = {"estimates": {name: asdict(value) for name, value in found.items()}, "k": 4,
                    "scores_sha256": hashlib.sha256(lines.encode()).hexdigest()} | other
        (tmp_path / "eval.json").write_text(json.dumps(document))
        return check_read_back(tmp_path, given, found, {"k": 4}).outcome

    assert write() is Outcome.PROVEN
    assert write(k=2) is write(scores_sha256="0") is write(estimates={}) is Outcome.REFUTED
    (tmp_path / "scores.jsonl").write_text(lines + lines)
    assert write(scores_sha256=hashlib.sha256((lines + lines).encode()).hexdigest()) is Outcome.REFUTED
    (tmp_path / "eval.json").write_text("{}{}")
    assert check_read_back(tmp_path, given, found, {}).outcome is Outcome.REFUTED


@pytest.mark.parametrize("change", [{"ended": "stop"}, {"ids": [1, 1]}, {"ids": [1, 1, 1, STOP, 1, 1]}])
def test_a_sample_that_did_not_end_as_it_says_is_refuted(change: dict[str, Any]):
    given = [{"id": "a", "samples": [{"ids": [1] * CAP, "ended": "length"} | change]}]
    assert check_sample_endings(given, {STOP}, CAP).outcome is Outcome.REFUTED
