"""A second opinion on comparisons: silent on what is right, loud where a p-value, a claim or an interval was got wrong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from assay.cli import run as assay
from assay.comparison import pairwise
from assay.comparison.pairwise import arm_summary, compare
from assay.comparison.read_results import Arm, read_results
from assay.comparison.second_opinion import check_comparisons, check_summaries
from assay.statistics import effects
from assay.statistics.estimate import Estimate
from assay.verdict import Outcome


def arms(folder: Path, *, gain: float, n: int = 60, seed: int = 0) -> list[Arm]:
    drawn = np.random.default_rng(seed)
    base = drawn.random(n)
    for name, scores in (("before", base), ("after", np.clip(base + gain + 0.1 * drawn.standard_normal(n), 0, 1))):
        lines = [json.dumps({"id": str(i), "score": float(score)}) for i, score in enumerate(scores)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [arm for name in ("before", "after") for arm in read_results(str(folder / f"{name}.jsonl")) if isinstance(arm, Arm)]


@pytest.mark.parametrize("gain", [0.0, 0.02, 0.3, -0.3])
@pytest.mark.parametrize("seed", range(5))
def test_a_right_comparison_is_silent(gain: float, seed: int, tmp_path: Path):
    given = arms(tmp_path, gain=gain, seed=seed)
    verdict = check_comparisons(given, compare(given), 0.05)
    assert verdict.outcome is Outcome.PROVEN, verdict


def test_an_adjustment_that_is_never_written_is_refuted_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                       capsys: pytest.CaptureFixture[str]):
    arms(tmp_path, gain=0.0)
    monkeypatch.setattr(pairwise, "holm", lambda p_values: [0.0] * len(p_values))
    assert assay(["compare", str(tmp_path / "before.jsonl"), str(tmp_path / "after.jsonl")]) == 3
    assert "no test gives that" in capsys.readouterr().out


def test_an_interval_to_the_end_of_the_scale_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = effects._t_bounds
    monkeypatch.setattr(effects, "_t_bounds", lambda *given: lambda level: (right(*given)(level)[0], 1.0))
    given = arms(tmp_path, gain=0.1)
    assert check_comparisons(given, compare(given), 0.05).outcome is Outcome.REFUTED


@pytest.mark.parametrize("change", [{"claim": "shown worse"}, {"p": 0.9}, {"effect": Estimate(0.5, 0.4, 0.6, 60)}])
def test_what_is_said_otherwise_than_the_scores_is_refuted(change: dict, tmp_path: Path):
    given = arms(tmp_path, gain=0.3)
    said = [replace(one, **change) for one in compare(given)]
    assert check_comparisons(given, said, 0.05).outcome is Outcome.REFUTED


@pytest.mark.parametrize("change", [{"same_weights": True}, {"claim": "not shown"}, {"per_completion_p": None}, {"per_completion_p": 0.5},
                                    {"effect": Estimate(0.25, 0.0, 0.3, 60)}, {"group": "other"}, {"after": "before"}])
def test_what_is_told_of_a_pair_comes_from_its_arms(change: dict, tmp_path: Path):
    given = arms(tmp_path, gain=0.3)
    said = [replace(one, **change) for one in compare(given)]
    assert check_comparisons(given, said, 0.05).outcome is Outcome.REFUTED


def test_every_pair_is_compared_once(tmp_path: Path):
    given = arms(tmp_path, gain=0.3)
    found = compare(given)
    assert check_comparisons(given, [], 0.05).outcome is check_comparisons(given, [*found, *found], 0.05).outcome is Outcome.REFUTED


def test_an_arm_is_what_its_scores_say(tmp_path: Path):
    given = [replace(arm, metric="accuracy") for arm in arms(tmp_path, gain=0.3)]
    right = [(arm, arm_summary(arm)) for arm in given]
    assert check_summaries(right, told=False).outcome is Outcome.PROVEN
    assert check_summaries([(arm, words.replace("0.", "1.", 1)) for arm, words in right], told=False).outcome is Outcome.REFUTED
    turned = [(replace(arm, lower_is_better=True), words) for arm, words in right]
    assert check_summaries(turned, told=False).outcome is Outcome.REFUTED
    assert check_summaries(turned, told=True).outcome is Outcome.PROVEN
