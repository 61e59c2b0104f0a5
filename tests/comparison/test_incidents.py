"""Real incidents, from nothing but the numbers that were reported of them: what `assay compare` says.

Fork regression: OpenPipe/ART issue 672: malformed texts in 35 of 72 samples of 4 runs on the new code, in 0 of 108 of 6 on the old
    one; some runs of the new code were clean.
Reasoning pipeline: SFT, then 500 steps of GRPO on GPT-2 124M: reward 0.600 → 0.541, GSM8K pass@1 1.5 % → 2.0 % of 200 problems,
    and every prompt that was not mathematics was answered with arithmetic. It was declared passed.
Record attempt: openai/parameter-golf PR 1886: one seed near 1.0696 bits per byte, seeds 314 and 1337 collapsed to 1.1214.
Early stop: aprender PR 1074: stopped at epoch 5 of 24 with a patience of 2; the validation mean of two batches moves by 0.04.
Empty export: aprender PR 1856, 200 bytes after 25 hours, has nothing to compare: `assay prove` refuses its like.
"""

import json

import numpy as np
import pytest

from assay.config import parse
from assay.errors import UsageError
from assay.statistics.early_stopping import Noise, plan_stopping
from assay.statistics.effects import counts_power, needed_counts
from assay.verbs import compare as verb


@pytest.fixture
def said(tmp_path, capsys):
    def compared(table, *options):
        path = tmp_path / "incident.csv"
        path.write_text(table)
        assert verb.run(parse(verb.FLAGS, [str(path), *options], prog="assay compare")) == 0
        return capsys.readouterr().out

    return compared


FORK = "arm,runs,count,n,metric\nold,6,0,108,malformed\nnew,4,35,72,malformed\n"
PASS_AT_1 = "arm,count,n,metric\nsft,3,200,pass@1\ngrpo,4,200,pass@1\n"
REWARD = "arm,step,reward\ngrpo,0,0.600\ngrpo,500,0.541\n"
RECORD = "run,bits per byte\n42,1.0696\n314,1.1214\n1337,1.1214\n"


def test_fork_regression_4_against_6_runs_are_suggestive_at_most(said):
    words = said(FORK, "--per-completion")
    assert "(n=10) runs" in words
    assert "not shown: suggestive at most, the interval includes 0" in words
    assert "runs per arm would be needed for this effect" in words
    assert "taken as 2, the fewest that can hold them" in words
    assert "1\u0336.\u03368\u0336e\u0336-\u03361\u03367\u0336" in words  # 1.8e-17 per completion, struck through


def test_fork_regression_how_many_runs_would_settle_it(said):
    found = json.loads(said(FORK, "--json"))["comparisons"][0]
    assert 8 <= found["needed"] <= 15
    if_half_the_runs_are_bad = needed_counts(0.5, 0.0)
    assert if_half_the_runs_are_bad == 10
    assert counts_power(10, 0.5, 0.0) >= 0.8 > counts_power(9, 0.5, 0.0)


def test_reasoning_pipeline_no_gain(said):
    words = said(PASS_AT_1)
    assert "sft: pass@1 0.015 [0.003, 0.043] (n=200)" in words
    assert "grpo: pass@1 0.020 [0.005, 0.050] (n=200)" in words
    assert "not shown: the interval includes 0; about 10,793 problems per arm would be needed for this effect" in words


@pytest.mark.parametrize("shared", range(4))
def test_reasoning_pipeline_no_gain_however_the_problems_were_paired(said, shared):
    """3 right before and 4 after: whether none, one, two or all three of them are the same problems."""
    before, after = set(range(3)), set(range(3 - shared, 3 - shared + 4))
    rows = [f"{name},{i},{int(i in right)}\n" for name, right in (("sft", before), ("grpo", after)) for i in range(200)]
    assert "not shown" in said("arm,id,score\n" + "".join(rows))


def test_reasoning_pipeline_the_reward_did_not_rise(said):
    words = said(REWARD, "--metric", "reward")
    assert "not shown to rise: it ended 0.059 lower" in words
    rng = np.random.default_rng(0)  # the same fall with a log of it
    log = [f"grpo,{step},{0.600 - 0.059 * step / 500 + rng.normal(0, 0.03):.4f}\n" for step in range(0, 501, 5)]
    assert "shown: it falls" in said("arm,step,reward\n" + "".join(log), "--metric", "reward")


def test_reasoning_pipeline_off_domain_collapse(said):
    """The probe's view: on topic or not, by domain; ten prompts each."""
    rows = [f"{arm},{group},{i},{score}\n" for arm, group, score in (
        ("sft", "mathematics", 1), ("sft", "other", 1), ("grpo", "mathematics", 1), ("grpo", "other", 0)) for i in range(10)]
    words = said("arm,group,id,on topic\n" + "".join(rows), "--metric", "on topic")
    assert "grpo against sft on other: on topic -1.000" in words
    assert words.count("shown worse") == 1


def test_record_attempt_two_modes(said):
    words = said(RECORD, "--metric", "bits per byte")
    assert "two modes: {42} near 1.0696 and {314, 1337} near 1.1214" in words
    assert "a mean is not a summary" in words
    assert "worst seed 1.1214" in words


def test_record_attempt_against_the_record(said):
    """The record stood at 1.06957, the mean of three seeds, whatever each was."""
    rows = "".join(f"record,{seed},1.06957\n" for seed in (1, 2, 3)) + "attempt,42,1.0696\nattempt,314,1.1214\nattempt,1337,1.1214\n"
    words = said("arm,run,bits per byte\n" + rows, "--metric", "bits per byte")
    assert "2 of 3 against 0 of 3 runs" in words
    assert "shown better" not in words


def test_early_stop_is_noise_not_stagnation(said):
    """Five epochs of a loss that falls by 0.012 each, seen through two batches whose mean moves by 0.04."""
    noise = np.random.default_rng(0).normal(0, 0.04 * np.sqrt(2), (5, 2))
    rows = [f"{epoch},{batch},{9.8 - 0.012 * epoch + noise[epoch, batch]:.4f}\n" for epoch in range(5) for batch in range(2)]
    assert "noise, not stagnation" in said("step,id,loss\n" + "".join(rows), "--metric", "loss")


def test_early_stop_two_batches_cannot_decide_it():
    with pytest.raises(UsageError, match="would stop on noise; hold out at least") as refused:
        plan_stopping(Noise(0.04 * np.sqrt(2), 2), 0.024, patience=2, evaluations=24)
    assert "moves by ±0.04" in str(refused.value)
