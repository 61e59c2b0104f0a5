"""Comparing arms: what is claimed, what is not, and what is refused."""

import json
import shutil

import numpy as np
import pytest

from assay.comparison.pairwise import arm_summary, compare
from assay.comparison.read_results import Arm, ScoredRun, Series, read_results
from assay.comparison.trend import trend
from assay.config import parse
from assay.errors import DataError, UsageError
from assay.verbs import compare as verb
from assay.verdict import proven, refuted


def arm(name, *runs, metric="accuracy", **rest):
    made = tuple(ScoredRun(str(i), {str(p): (float(s),) for p, s in enumerate(scores)}) for i, scores in enumerate(runs))
    return Arm(name, metric, made, rest.pop("lower_is_better", False), **rest)


def numbers(name, *values, metric="loss"):
    return Arm(name, metric, tuple(ScoredRun(str(i), {"": (float(v),)}) for i, v in enumerate(values)), metric == "loss")


def run(*argv):
    return verb.run(parse(verb.FLAGS, list(argv), prog="assay compare"))


# ── what is claimed ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_clear_gain_is_shown_and_its_mirror_is_a_loss():
    before, after = arm("a", [0] * 30 + [1] * 10), arm("b", [1] * 20 + [0] * 10 + [1] * 10)
    assert compare([before, after])[0].claim == "shown better"
    assert compare([after, before])[0].claim == "shown worse"
    loss = [arm(x.name, [s[0] for s in x.runs[0].scores.values()], lower_is_better=True) for x in (before, after)]
    assert compare(loss)[0].claim == "shown worse"


def test_the_difference_within_problems_counts_not_the_spread_between_them():
    level = np.random.default_rng(0).uniform(0.2, 0.8, 60)
    found = compare([arm("a", level), arm("b", level + 0.01)])[0]
    assert found.claim == "shown better"
    assert found.effect.mean == pytest.approx(0.01)


def test_what_is_not_shown_says_what_it_would_take():
    found = compare([arm("a", [1] * 3 + [0] * 197), arm("b", [1] * 4 + [0] * 196)])[0]
    assert found.claim == "not shown"
    assert "not shown: the interval includes 0; about" in found.sentence
    assert "problems per arm would be needed for this effect" in found.sentence
    assert found.needed > 3000


@pytest.mark.parametrize("n", [6, 8])
def test_what_so_many_did_not_show_is_not_said_to_be_shown_by_as_many(n):
    """Five got better and none worse: by the usual formula these are enough, by the exact test they are not."""
    found = compare([arm("a", [0.0] * n), arm("b", [1.0] * 5 + [0.0] * (n - 5))])[0]
    assert (found.claim, found.needed, found.to_json()["more_than"]) == ("not shown", None, n)
    assert f"the interval includes 0; more than these {n} problems per arm would be needed for this effect" in found.sentence


def test_the_run_is_the_unit_where_runs_vary():
    """Two of four runs are bad: overwhelming per completion, and not shown."""
    bad, good = [1] * 18, [0] * 18
    before = arm("old", *[good] * 6, metric="malformed", lower_is_better=True)
    after = arm("new", bad, [*bad[:17], 0], good, good, metric="malformed", lower_is_better=True)
    found = compare([before, after])[0]
    assert (found.unit, found.effect.n, found.claim) == ("runs", 10, "not shown")
    assert found.p > 0.1
    assert found.per_completion_p < 1e-10


def test_runs_that_part_clearly_are_shown():
    rng = np.random.default_rng(1)
    found = compare([numbers("a", *rng.normal(1.10, 0.001, 5)), numbers("b", *rng.normal(1.09, 0.001, 5))])[0]
    assert found.claim == "shown better"


def test_one_run_against_many_shows_nothing():
    found = compare([numbers("a", 1.10, 1.101, 1.102), numbers("b", 0.5)])[0]
    assert found.claim == "not shown"
    assert found.to_json()["effect"]["low"] is None


def test_runs_of_0_and_1_are_counted():
    found = compare([numbers("a", *[0] * 8, metric="works"), numbers("b", *[1] * 7, 0, metric="works")])[0]
    assert found.claim == "shown better"


def test_two_modes_are_not_averaged():
    found = compare([numbers("before", 1.0696, 1.0695, 1.0697), numbers("after", 1.0690, 1.1214, 1.1214)])[0]
    assert found.metric == "share of runs whose loss collapsed"
    assert found.claim == "not shown"
    assert "a mean is not a summary" in found.sentence
    assert "2 of 3 against 0 of 3 runs" in found.sentence


def test_many_arms_share_one_level():
    """Alone each would be claimed at 5 %; five together must not be."""
    rng = np.random.default_rng(5)
    before = rng.random(80) < 0.5
    after = before.copy()
    after[np.flatnonzero(~before)[:6]] = True  # six gains, no loss: p = 0.031
    assert compare([arm("a", before), arm("b", after)])[0].claim == "shown better"
    five = compare([arm("a", before), *(arm(f"b{i}", after) for i in range(5))])
    assert {one.claim for one in five} == {"not shown"}
    assert all(one.effect.contains(0) for one in five)


def test_groups_are_compared_by_themselves():
    found = compare([arm("a", [1] * 9, group="math"), arm("a", [1] * 9, group="other"), arm("b", [1] * 9, group="math"),
                     arm("b", [0] * 9, group="other")])
    assert {one.group: one.claim for one in found} == {"math": "not shown", "other": "shown worse"}


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (arm("a", [1, 0]), arm("b", [1, 0, 1]), r"1 problem\(s\) were scored in one of them only \('2'\)"),
        (arm("a", [1, 0]), arm("b", [1, 0], metric="loss"), "compare one metric"),
        (arm("a", [1, 0], data={"dataset": "x"}), arm("b", [1, 0], data={"dataset": "y"}), "not asked the same: dataset is 'y' and 'x'"),
        (numbers("a", 1.0), numbers("b", 0.9), "nothing says how far such numbers scatter"),
    ],
)
def test_what_is_unlike_is_refused(before, after, says):
    with pytest.raises(DataError, match=says):
        compare([before, after])


def test_one_arm_and_twins_are_refused():
    with pytest.raises(UsageError, match="nothing to compare"):
        compare([arm("a", [1, 0])])
    with pytest.raises(UsageError, match="two arms are called 'a'"):
        compare([arm("a", [1, 0]), arm("a", [1, 0])])
    with pytest.raises(UsageError, match="level 5"):
        compare([arm("a", [1, 0]), arm("b", [1, 0])], level=5)


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────────────


def eval_folder(path, scores, **facts):
    path.mkdir()
    rows = [{"id": str(i), "samples": [{"score": s, "lenient": s, "parsed": True, "ended": "stop", "answer": str(s), "measures": {},
                                        "ids": [1]} for s in samples],
             "checkpoint": facts.get("checkpoint", path.name)} for i, samples in enumerate(scores)]
    (path / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "eval.json").write_text(json.dumps({"task": "t", "dataset": "d", "examples": len(rows), **facts}))
    return path


def test_nothing_follows_from_an_evaluation_that_was_refuted(tmp_path, capsys):
    leak = [refuted("leak", "12 of 12 documents stand whole in training").to_json(), proven("every example", "all").to_json()]
    before, after = (eval_folder(tmp_path / name, [[score]] * 12, verdicts=verdicts) for name, score, verdicts in (
        ("a", 0, leak[1:]), ("b", 1, leak)))
    assert run(str(before), str(after), "--require", "better") == 3
    assert "b: leak: 12 of 12 documents stand whole in training" in capsys.readouterr().out
    clean = eval_folder(tmp_path / "c", [[1]] * 12, verdicts=leak[1:])
    assert run(str(before), str(clean), "--require", "better") == 0
    assert run(str(before), f"new={clean},{after}", "--require", "better") == 3


def test_eval_folders_are_paired_by_id(tmp_path, capsys):
    before, after = eval_folder(tmp_path / "a", [[0, 0]] * 12), eval_folder(tmp_path / "b", [[1, 0]] * 12)
    assert run(str(before), str(after), "--json") == 0
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert (found["claim"], found["n"], found["metric"]) == ("shown better", 12, "pass@1")
    assert run(str(before), str(after), "--metric", "pass@2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["effect"]["mean"] == 1.0
    with pytest.raises(UsageError, match="k must lie between 1"):
        run(str(before), str(after), "--metric", "pass@3")


def test_several_folders_are_runs_of_one_arm(tmp_path, capsys):
    folders = [eval_folder(tmp_path / f"r{i}", [[i % 2], [1], [0]], checkpoint=f"weights-{i}") for i in range(8)]
    joined = [",".join(str(f) for f in folders[:4]), ",".join(str(f) for f in folders[4:])]
    assert run(f"old={joined[0]}", f"new={joined[1]}", "--json") == 0
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert (found["before"], found["after"], found["unit"], found["n"]) == ("old", "new", "runs", 8)


def test_copies_of_one_result_are_not_runs(tmp_path, capsys):
    """Four copies of one result a side were p = 0.029."""
    for side, score in (("a", 0), ("b", 1)):
        first = eval_folder(tmp_path / f"{side}0", [[score], [1], [0]], checkpoint=side)
        for i in range(1, 4):
            shutil.copytree(first, tmp_path / f"{side}{i}")
    old, new = (",".join(str(tmp_path / f"{side}{i}") for i in range(4)) for side in "ab")
    with pytest.raises(DataError, match=r"a1 is a copy of .*a0, and one run counted twice is no second run"):
        run(f"old={old}", f"new={new}", "--require", "better")
    with pytest.raises(DataError, match="is a copy of"):
        run(f"old={old}")
    again = eval_folder(tmp_path / "again", [[1], [1], [0]], checkpoint="a", sampling={"seed": 1})
    with pytest.raises(DataError, match=r"are the same weights .* one run; give other training runs"):
        run(f"old={tmp_path / 'a0'},{again}", str(tmp_path / "b0"))
    with pytest.raises(DataError, match=r"a1 is a copy of .*a0"):  # across the arms
        run(f"old={tmp_path / 'a0'},{tmp_path / 'b0'}", f"new={tmp_path / 'a1'},{tmp_path / 'b1'}")


def test_the_same_weights_at_two_temperatures_are_no_better_model(tmp_path, capsys):
    warm, cold, other, half = (
        eval_folder(tmp_path / name, scores, checkpoint=weights, sampling={"temperature": t, "seed": 0}, dtype=dtype)
        for name, scores, weights, t, dtype in (
            ("warm", [[0]] * 12, "w", 1.0, "float32"), ("cold", [[1]] * 12, "w", 0.1, "float32"),
            ("other", [[1]] * 12, "v", 0.1, "float32"), ("half", [[0]] * 12, "w", 1.0, "bfloat16")))
    assert run(str(warm), str(cold), "--json") == 0
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert (found["claim"], found["same_weights"]) == ("not shown", True)
    assert "both sides are the same weights, asked twice" in found["sentence"]
    assert "asked with temperature 0.1 against 1.0" in found["sentence"]
    assert run(str(warm), str(cold), "--require", "better") == 3
    assert run(str(warm), str(cold), "--require", "not worse") == 3
    again = eval_folder(tmp_path / "again", [[1]] * 12, checkpoint="w", sampling={"temperature": 1.0, "seed": 1}, dtype="float32")
    assert run(str(warm), str(again), "--require", "better") == 3  # another seed is no other model
    assert run(str(warm), str(other), "--require", "better") == 0  # the clean twin: another model
    assert run(str(warm), str(half), "--require", "not worse") == 0  # another number format is a fair question


def test_evaluations_of_other_data_or_with_lost_rows_are_refused(tmp_path):
    one, other = eval_folder(tmp_path / "a", [[0]] * 3), eval_folder(tmp_path / "b", [[0]] * 3, dataset="e")
    with pytest.raises(DataError, match="not asked the same: dataset"):
        run(str(one), str(other))
    lost = eval_folder(tmp_path / "c", [[0]] * 3, examples=4)
    with pytest.raises(DataError, match="4 examples were asked and 3 have a score"):
        run(str(one), str(lost))
    edited = eval_folder(tmp_path / "d", [[0]] * 3, scores_sha256="0" * 64)
    with pytest.raises(DataError, match="edited or damaged"):
        run(str(one), str(edited))


def test_plain_files(tmp_path):
    table = tmp_path / "theirs.csv"
    rows = [f"{a},{r},{i},{int(a == 'b' and i > 1)}\n" for a in "ab" for r in "12" for i in range(4)]
    table.write_text("arm,run,id,score\n" + "".join(rows))
    first, second = read_results(table)
    assert (first.name, len(first.runs), first.problems) == ("a", 2, ("0", "1", "2", "3"))
    assert second.runs[0].score == 0.5
    lines = tmp_path / "theirs.jsonl"
    lines.write_text('{"id": 0, "accuracy": true}\n{"id": 1, "accuracy": false}\n')
    assert read_results(lines, metric="accuracy")[0].runs[0].score == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("id,score\n1,\n", "the score is \"\""),
        ("id,score\n1,nan\n", "the score is nan"),
        ("id,points\n1,2\n", "no column 'score'"),
        ("id,score\n", "no rows"),
        ("arm,count,n,runs\na,3,10,3\n", "the same n in every run"),
    ],
)
def test_a_score_that_is_missing_is_not_0(tmp_path, text, says):
    table = tmp_path / "theirs.csv"
    table.write_text(text)
    with pytest.raises(DataError, match=says):
        read_results(table)


def test_seeds_folders_are_read_and_a_seed_without_a_number_collapsed(tmp_path):
    for name, bad in (("before", False), ("after", True)):
        (tmp_path / name).mkdir()
        scores = {str(s): {"mean": 1.07 + s * 1e-4} if not (bad and s) else None for s in range(3)}
        ends = {str(s): {"exit_code": 0 if scores[str(s)] else 4, "sentence": ""} for s in range(3)}
        (tmp_path / name / "seeds.json").write_text(json.dumps({"recipe": "pretrain", "metric": "bits per byte", "seeds": ends,
                                                                "scores": scores}))
    found = compare([read_results(tmp_path / name)[0] for name in ("before", "after")])[0]
    assert "2 of 3 against 0 of 3 runs" in found.sentence
    assert found.claim == "not shown"


# ── the verb ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_exit_codes_and_the_struck_out_p_value(tmp_path, capsys):
    table = tmp_path / "t.csv"
    table.write_text("arm,id,score\n" + "".join(f"{a},{i},{int(a == 'b' or i < 2)}\n" for a in "ab" for i in range(20)))
    assert run(str(table), "--per-completion") == 0
    said = capsys.readouterr().out
    assert "b against a: score +0.900" in said
    assert "p\u0336" in said
    assert "not valid" in said
    assert run(str(table), "--require", "better") == 0
    table.write_text("arm,id,score\n" + "".join(f"{a},{i},{i % 2}\n" for a in "ab" for i in range(20)))
    assert run(str(table), "--require", "better") == 3
    assert run(str(table), "--require", "not worse") == 0
    assert run(str(table)) == 0


def test_what_is_said_of_results_is_held_against_them(tmp_path, capsys):
    table, reward = tmp_path / "t.csv", tmp_path / "reward.csv"
    table.write_text("arm,id,score\n" + "".join(f"{a},{i},{int(a == 'b' or i % 9 == 0)}\n" for a in "ab" for i in range(40)))
    assert run(str(table), "--claim", "b=better") == 0
    assert run(str(table), "--claim", "b=worse") == 3
    assert "REFUTED   claim: said to be shown worse" in capsys.readouterr().out
    reward.write_text("arm,step,reward\n" + "".join(f"grpo,{step},{0.6 - 0.002 * step + 0.01 * (step % 3)}\n" for step in range(60)))
    assert run(str(reward), "--metric", "reward") == 0
    assert run(str(reward), "--metric", "reward", "--claim", "grpo=passed") == 3
    assert "REFUTED   rise: declared passed" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"expected NAME=better or NAME=worse of an arm after the first \(b\)"):
        run(str(table), "--claim", "c=better")


def test_bad_input_is_exit_2(tmp_path):
    with pytest.raises(UsageError, match="no such file") as refused:
        run(str(tmp_path / "nowhere.csv"))
    assert refused.value.exit_code == 2


# ── series ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def series(values, lower_is_better=False):
    return Series("s", "m", tuple(range(len(values))), tuple((float(v),) for v in values), lower_is_better)


def test_trends():
    rng = np.random.default_rng(2)
    rising = np.linspace(0, 1, 60) + rng.normal(0, 0.1, 60)
    assert trend(series(rising)).direction == "rises"
    assert trend(series(-rising)).direction == "falls"
    assert "it does not rise" in trend(series(-rising)).sentence
    assert trend(series(-rising, lower_is_better=True)).improves
    assert trend(series(rng.normal(0, 1, 60))).direction == "not shown"


def test_a_trend_is_claimed_at_most_as_often_as_the_level_says():
    rng = np.random.default_rng(3)
    claimed = [trend(series(rng.normal(size=n))).direction != "not shown" for n in (6, 12, 50) for _ in range(250)]
    assert np.mean(claimed) <= 0.05 + 0.016


def test_summaries():
    assert arm_summary(arm("a", [1, 0, 0, 0])).startswith("accuracy 0.250 [0.006, 0.806] (n=4) problems")
    assert "two modes" in arm_summary(numbers("a", 1.0696, 1.1214, 1.1214))
