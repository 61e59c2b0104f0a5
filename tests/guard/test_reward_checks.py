"""Before the first rollout: right completions get full marks and nothing else does. Later: reward and metric stay together."""

from pathlib import Path

import numpy as np
import pytest

from assay.errors import DataError
from assay.guard.reward_checks import check_proxy, completion_style, preflight_rewards
from assay.reward.canary import STYLES, canaries, gold_completion
from assay.reward.reward_functions import parse_rewards
from assay.reward.worker_pool import RewardWorkers
from assay.verdict import Outcome

ROWS = [{"question": f"What is {a} and {b}?", "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\nThat is all.\n#### {a + b}"}
        for a, b in ((1, 2), (30, 12), (5, 5), (900, 300), (-9, 2), (7, 7))]
WORDS = [{"prompt": "Capital?", "gold": city} for city in ("Paris", "Rome", "Oslo")]

MINE = '''
import re
from assay.reward.answer import gold_answer, read_answer, same_answer

def said(completion):
    return read_answer(completion, "lenient") or ""

def good(p, c, r): return float(same_answer(read_answer(c), gold_answer(r)))
def either_within(p, c, r): return float(said(c) in gold_answer(r) or gold_answer(r) in said(c))
def gold_within(p, c, r): return float(gold_answer(r) in c)
def always_one(p, c, r): return 1.0
def swallowed(p, c, r):
    try:
        return float(c.answer == r.gold)
    except Exception:
        return 0.0
def of_the_prompt(p, c, r): return float(len(p) % 7)
def raises_on_empty(p, c, r): return good(p, c, r) if c[0] else 0.0
def inverted(p, c, r): return 1 - good(p, c, r)
def in_a_sentence(p, c, r): return float(f'The answer is {gold_answer(r)}.' in c)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(MINE)
    return path


def refutes(specs: list[str], rows=ROWS, **more) -> set[str]:
    with RewardWorkers(parse_rewards(specs), count=1) as workers:
        return {verdict.check for verdict in preflight_rewards(workers.rewards, rows, workers, **more)
                if verdict.outcome is Outcome.REFUTED}


@pytest.mark.parametrize("specs", [
    ["answer:1"], ["answer:1", "format:0.1"], ["answer[form=boxed]:1"], ["answer:1", "format:1"],
    ["answer[form=tag]:2", "format:1", "length[longest=60,margin=20]:0.5"], ["answer[form=last]:1"]])
def test_sound_rewards_pass(specs: list[str]):
    with RewardWorkers(parse_rewards(specs), count=1) as workers:
        verdicts = preflight_rewards(workers.rewards, ROWS, workers)
    assert [str(verdict) for verdict in verdicts if verdict.outcome is not Outcome.PROVEN] == []
    assert {verdict.check for verdict in verdicts} == {
        "reward_golds", "reward_errors", "reward_scored", "reward_gold", "reward_wrong", "reward_empty", "reward_all_options",
        "reward_repeated", "reward_truncated", "reward_echo", "reward_flat", "reward_scale"}


def test_answers_in_words_pass_too():
    assert refutes(["answer:1"], WORDS) == set()
    assert refutes(["answer:1", "format:0.5"], WORDS) == set()


def test_a_users_own_reward_passes(file: Path):
    assert refutes([f"{file}:good:1", "format:0.1"]) == set()


@pytest.mark.parametrize(("name", "check"), [
    ("either_within", "reward_empty"), ("gold_within", "reward_all_options"), ("gold_within", "reward_repeated"),
    ("always_one", "reward_flat"), ("swallowed", "reward_flat"),
    ("of_the_prompt", "reward_wrong"), ("raises_on_empty", "reward_scored"), ("inverted", "reward_gold")])
def test_an_unsound_reward_is_refused_by_name(file: Path, name: str, check: str):
    assert check in refutes([f"{file}:{name}:1"])


@pytest.mark.parametrize(("specs", "checks"), [
    (["answer[how=lenient]:1"], {"reward_all_options", "reward_repeated", "reward_truncated"}),
    (["answer:0.1", "format:1"], {"reward_scale"}),
    (["answer:1", "length[longest=6,margin=5]:0.1"], {"reward_gold"}),
    (["answer:-1"], {"reward_wrong", "reward_empty", "reward_all_options", "reward_repeated", "reward_truncated", "reward_echo",
                     "reward_scale"})])
def test_options_and_weights_are_judged_as_they_are(specs: list[str], checks: set[str]):
    assert refutes(specs) == checks


def test_a_gold_that_cannot_be_read_is_refused_wherever_it_stands():
    rows = [*ROWS * 50, {"question": "?", "answer": "no idea\n####"}, {"question": "?"}]
    assert refutes(["answer:1"], rows) == {"reward_golds"}
    assert refutes(["answer:1"], [*ROWS, {"question": "?", "gold": "see \\boxed{3}\n#### 3\nor #### 4"}]) == set()
    assert refutes(["answer:1"], [*ROWS, {"question": "?", "gold": "</answer>"}], style="tag") >= {"reward_golds"}


def test_rewards_of_form_alone_are_not_said_to_know_the_answer():
    with RewardWorkers(parse_rewards(["format:1"]), count=1) as workers:
        outcomes = {verdict.check: verdict.outcome for verdict in preflight_rewards(workers.rewards, ROWS, workers)}
    assert outcomes["reward_wrong"] is outcomes["reward_scale"] is Outcome.UNPROVEN
    assert outcomes["reward_empty"] is outcomes["reward_flat"] is Outcome.PROVEN
    assert Outcome.REFUTED not in outcomes.values()


def test_a_reward_that_wants_a_sentence_around_the_answer_is_told_what_is_missing(file: Path):
    with RewardWorkers(parse_rewards([f"{file}:in_a_sentence:1"]), count=1) as workers:
        against = {verdict.check: verdict.reason for verdict in preflight_rewards(workers.rewards, ROWS, workers)
                   if verdict.outcome is Outcome.REFUTED}
        assert "in_a_sentence gives 0 to every completion tried" in against["reward_gold"]
        assert "add a column 'gold_completion' that holds a right completion whole" in against["reward_gold"]
        assert "reward_wrong" not in against, "of canaries in another form nothing can be said"
        whole = [{**row, "gold_completion": f"The answer is {row['answer'].rpartition(' ')[2]}."} for row in ROWS]
        assert not [v for v in preflight_rewards(workers.rewards, whole, workers)
                    if v.outcome is Outcome.REFUTED and v.check in ("reward_gold", "reward_flat", "reward_wrong")]


def test_without_a_gold_nothing_is_proven():
    with RewardWorkers(parse_rewards(["regex[pattern=x]:1"]), count=1) as workers:
        verdicts = preflight_rewards(workers.rewards, [{"prompt": "p"}], workers)
    assert verdicts[-1].outcome is Outcome.UNPROVEN
    assert "none of 1 rows has a gold answer" in verdicts[-1].reason


def test_a_gold_completion_may_be_given_whole():
    rows = [{"prompt": f"{n}?", "pattern": f"^<{n}>$", "gold_completion": f"<{n}>"} for n in range(4)]
    assert refutes(["regex:1"], rows) == set()
    assert refutes(["regex[pattern=.]:1"], rows) == {"reward_truncated", "reward_echo"}


@pytest.mark.parametrize("style", STYLES)
def test_gold_completions_and_canaries_are_what_they_say(style):
    row = ROWS[1]
    assert gold_completion(row, style).count("42") >= 1
    made = canaries(row, ROWS, style, row["question"])
    assert set(made) == {"wrong", "empty", "all_options", "repeated", "truncated", "echo"}
    assert all("43" in text and "42" in text for text in made["all_options"])
    assert made["empty"][0] == ""
    assert all(len(text) < len(gold_completion(row, style)) for text in made["truncated"])


def test_the_style_follows_the_rewards_and_the_data():
    assert completion_style(parse_rewards(["answer", "format:0.1"]), ROWS) == "tag"
    assert completion_style(parse_rewards(["answer[form=boxed]"]), ROWS) == "boxed"
    assert completion_style(parse_rewards(["answer"]), ROWS) == "hash"
    assert completion_style(parse_rewards(["answer"]), WORDS) == "plain"


# ---------------------------------------------------------------- proxy and metric

RISE = np.linspace(0.2, 0.9, 16)


def test_reward_and_metric_that_part_are_told_in_a_sentence():
    metric = np.concatenate([np.linspace(0.1, 0.4, 6), np.linspace(0.38, 0.05, 10)])
    verdict = check_proxy(RISE, metric)
    assert verdict.outcome is Outcome.REFUTED
    assert "while the held-out metric fell from 0.4 (evaluation 5) to 0.05" in verdict.reason


@pytest.mark.parametrize("metric", [np.linspace(0.1, 0.5, 16), np.full(16, 0.3)])
def test_reward_and_metric_that_rise_or_stand_do_not_part(metric):
    assert check_proxy(RISE, metric).outcome is Outcome.PROVEN


def test_a_metric_that_falls_with_its_reward_is_no_case_of_parting():
    assert check_proxy(-RISE, -RISE).outcome is Outcome.PROVEN


def test_few_evaluations_prove_nothing_and_unequal_series_are_refused():
    assert check_proxy(RISE[:6], -RISE[:6]).outcome is Outcome.UNPROVEN
    assert check_proxy(RISE[:7], -RISE[:7]).outcome is Outcome.REFUTED
    with pytest.raises(DataError, match="one of each"):
        check_proxy(RISE, RISE[:5])


def test_noise_under_a_rising_reward_seldom_alarms():
    """Asked after every evaluation: 1.2 % of runs of 20 in 20,000 simulated; of 300 at most 11 then, at 1 in 1,000."""
    noise = np.random.default_rng(3)
    alarms = 0
    for _ in range(300):
        metric = noise.normal(0.4, 0.02, 20)
        alarms += any(check_proxy(np.arange(n), metric[:n]).outcome is Outcome.REFUTED for n in range(7, 21))
    assert 0 < alarms <= 11
