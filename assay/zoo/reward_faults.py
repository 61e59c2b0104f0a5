"""Reward and judge faults: errors scored 0, answers read too kindly, form that outweighs the answer, groups that vanish."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.guard.judge_checks import (
    check_groups_judged,
    check_judge_agreement,
    check_judge_order,
    check_judge_parser,
    check_judge_places,
    check_position_bias,
)
from assay.guard.reward_checks import check_proxy, preflight_rewards
from assay.reward import llm_judge, worker_pool
from assay.reward.endpoint import HttpReply, Unanswered, Unreadable
from assay.reward.llm_judge import Judge, Judged, JudgeGroup, Scores, Sheet, judge_group
from assay.reward.reward_functions import parse_rewards
from assay.reward.worker_pool import RewardWorkers, ScoredItem
from assay.seeds import derive
from assay.testing.fault_injection import Plant, fault, in_place_of, on_disk, swap
from assay.verdict import Verdict

REWARDS, _ROWS, MINE = "rewards.json", "rows.jsonl", "mine.py"
_HEAD = "from assay.reward.answer import gold_answer, read_answer, same_answer\n"
SOUND = _HEAD + "def right(prompt, completion, row):\n    return float(same_answer(read_answer(completion), gold_answer(row)))\n"
_GROUPS, _GROUP = 24, 5
_own = sys.modules[__name__]  # what a fault swaps, the jobs must look up

# ---------------------------------------------------------------- jobs


def a_reward_preflight(folder: Path, plant: Plant) -> list[Verdict]:
    """Rewards, data and a user's file as a run would be given them, tried in the workers that a run would use."""
    rows = [{"question": f"How much is {a} and {a * a}?", "answer": f"{a} + {a * a} = {a + a * a}\n#### {a + a * a}"} for a in range(3, 11)]
    (folder / _ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / REWARDS).write_text(json.dumps(["right:1", "format:0.2"]))
    (folder / MINE).write_text(SOUND)
    with plant(folder):
        specs = [spec.replace("right:", f"{folder / MINE}:right:") for spec in json.loads((folder / REWARDS).read_text())]
        rows = [json.loads(line) for line in (folder / _ROWS).read_text().splitlines()]
        with RewardWorkers(parse_rewards(specs), count=1) as some:
            return preflight_rewards(some.rewards, rows, some)


def a_run_with_a_metric(folder: Path, plant: Plant) -> list[Verdict]:
    """Sixteen evaluations, in which the reward rises."""
    noise = np.random.default_rng(derive(0, "metric"))
    with plant(folder):
        metric = [held_out_metric(evaluation) + noise.normal(0, 0.01) for evaluation in range(16)]
    return [check_proxy(np.linspace(0.3, 0.9, 16), metric)]


def held_out_metric(evaluation: int) -> float:
    """What the policy can do on problems that it was not trained on."""
    return 0.2 + 0.02 * evaluation


def judged_groups(folder: Path, plant: Plant) -> list[Verdict]:
    """A batch of groups before a judge that fails now and then, each group twice."""
    attempts = [[f"attempt {derive(g, 'quality', c) % 97}" for c in range(_GROUP)] for g in range(_GROUPS)]
    groups = [judge_group(f"problem {g}", f"problem {g}", each) for g, each in enumerate(attempts)]
    with plant(folder):
        made = Judge(answering, seed=1, tries=2, concurrency=1, repeat=1.0, sleep=lambda _: None).score(groups)
        drill = check_judge_parser()
    return [drill, check_groups_judged([each.id for each in groups], made), check_position_bias(made.shown),
            check_judge_agreement(made.repeats)]


def a_judge_before_a_run(folder: Path, plant: Plant) -> list[Verdict]:
    """Completions of known worth, before the judge that is to reward a run."""
    rows = [{"prompt": f"{number}+1=", "gold": str(number + 1)} for number in range(8)]
    with plant(folder):
        asked = Judge(marking, seed=1, tries=1, concurrency=1, repeat=0.0)
        return [check_judge_places(asked), check_judge_order(asked.score, rows, [row["prompt"] for row in rows], "plain")]


def marking(payload: Mapping[str, Any]) -> HttpReply:
    """A judge in this process that can add."""
    begins, _, rest = payload["messages"][1]["content"].partition("The completions:\n")
    prompt = json.loads(begins.split("\n")[1])[0]["content"]
    scores = [{"id": each["id"], "score": worth(prompt, each["messages"][-1]["content"])} for each in json.loads(rest)]
    return HttpReply(200, json.dumps({"choices": [{"message": {"content": json.dumps({"scores": scores})}}]}))


def worth(prompt: str, text: str) -> float:
    return float(text == str(int(prompt.split("+")[0]) + 1))


def answering(payload: Mapping[str, Any]) -> HttpReply:
    """A judge in this process: every attempt has its quality as its last word. About problem 7 it has nothing to say."""
    page = payload["messages"][1]["content"]
    if '"problem 7"' in page:
        return HttpReply(200, json.dumps({"choices": [{"message": {"content": "All of them are fine."}}]}))
    shown = [each["messages"][-1]["content"] for each in json.loads(page.split("The completions:\n")[1])]
    scores = [{"id": str(place), "score": liked(place, text)} for place, text in enumerate(shown, 1)]
    return HttpReply(200, json.dumps({"choices": [{"message": {"content": json.dumps({"scores": scores})}}]}))


def liked(place: int, text: str) -> float:
    return int(text.split()[-1]) / 100

# ---------------------------------------------------------------- faults of rewards


def another_reward(body: str) -> Plant:
    """A user's file whose function does something else."""
    def plant(folder: Path) -> None:
        (folder / MINE).write_text(_HEAD + body)
    return on_disk(plant)


def asked_for(*specs: str) -> Plant:
    def plant(folder: Path) -> None:
        (folder / REWARDS).write_text(json.dumps(specs))
    return on_disk(plant)


fault("alarm in a thread swallowed", rows=("W01",), stage="reward", check="reward_wrong", job=a_reward_preflight)(another_reward('''
import signal
from concurrent.futures import ThreadPoolExecutor
def in_time(completion, row):
    signal.signal(signal.SIGALRM, lambda *_: None)
    return float(same_answer(read_answer(completion), gold_answer(row)))
def right(prompt, completion, row):
    with ThreadPoolExecutor(1) as threads:
        try:
            return threads.submit(in_time, completion, row).result()
        except ValueError:
            return 0.0
'''))
fault("constant reward", rows=("W01", "W04"), stage="reward", check="reward_flat", job=a_reward_preflight)(
    asked_for("regex[pattern=$]:1", "right:0"))
fault("empty answer rewarded", rows=("W02",), stage="reward", check="reward_empty", job=a_reward_preflight)(another_reward('''
def right(prompt, completion, row):
    said = read_answer(completion, "lenient") or ""
    return float(said in gold_answer(row) or gold_answer(row) in said)
'''))
fault("all options rewarded", rows=("W02",), stage="reward", check="reward_all_options", job=a_reward_preflight)(another_reward('''
def right(prompt, completion, row):
    return float(gold_answer(row) in completion.split("<answer>")[-1])
'''))
fault("answer read leniently", rows=("E05",), stage="reward", check="reward_truncated",
      job=a_reward_preflight)(asked_for("answer[how=lenient]:1"))
fault("form outweighs the answer", rows=("W03",), stage="reward", check="reward_scale",
      job=a_reward_preflight)(asked_for("right:0.2", "format:1"))


@fault("metric falls under a rising reward", rows=("W03",), stage="reward", check="proxy", job=a_run_with_a_metric)
@in_place_of(_own, "held_out_metric")
def metric_falls(_: Any, evaluation: int) -> float:
    """Fault: from the fifth evaluation on, the policy learns the form alone."""
    return 0.2 + 0.02 * min(evaluation, 5) - 0.02 * max(evaluation - 5, 0)


@fault("gold that cannot be read", rows=("W04",), stage="reward", check="reward_golds", job=a_reward_preflight)
@on_disk
def unreadable_gold(folder: Path) -> None:
    with (folder / _ROWS).open("a") as file:
        file.write(json.dumps({"question": "What is left?", "answer": "Nobody worked this one out.\n####"}) + "\n")


fault("truncation option zeroes all", rows=("W05",), stage="reward", check="reward_wrong", job=a_reward_preflight)(another_reward('''
def right(prompt, completion, row):
    truncated = row["completion_tokens"] <= 256  # the wrong way round
    return 0.0 if truncated else float(same_answer(read_answer(completion), gold_answer(row)))
'''))
fault("prompt scored for the answer", rows=("W06",), stage="reward", check="reward_wrong", job=a_reward_preflight)(another_reward('''
def right(prompt, completion, row):
    return float(len(prompt) % 5) / 5
'''))


@fault("failed reward scored 0", rows=("W01",), stage="reward", check="reward_errors", job=a_reward_preflight)
@in_place_of(worker_pool, "scored_item")
def error_scored_0(_: Any, answer: Mapping[str, Any], weights: Mapping[str, float]) -> ScoredItem:
    """What has no value gets a number on the way back from the workers."""
    values = {name: float(answer["values"].get(name, 0.0)) for name in weights}
    return ScoredItem(sum(weights[name] * value for name, value in values.items()), None, values)

# ---------------------------------------------------------------- faults of judges


@fault("unjudged group dropped", rows=("E06",), stage="judge", check="judge_groups", job=judged_groups)
@in_place_of(llm_judge, "gathered")
def group_dropped(usual: Any, calls: Sequence[JudgeGroup], answers: Sequence[Sheet | Unanswered], asked: int) -> Judged:
    """An exception of the judge makes its group vanish from the batch."""
    kept = [(call, answer) for call, answer in zip(calls, answers, strict=True) if isinstance(answer, Sheet)]
    lost = sum(isinstance(answer, Unanswered) for answer in answers[:asked])
    return usual([call for call, _ in kept], [answer for _, answer in kept], asked - lost)


@fault("garbled judgement scored", rows=("W01", "E06"), stage="judge", check="judge_errors", job=judged_groups)
@in_place_of(llm_judge, "read_scores")
def garbled_judgement_scored(strict: Any, text: str, count: int) -> Scores:
    """What cannot be read gives everyone a half."""
    try:
        return strict(text, count)
    except Unreadable:
        return (0.5,) * count


fault("judge swayed by the order", rows=(), stage="judge", check="judge_position", job=judged_groups)(
    # What stands first on the page is liked best, whatever else it is.
    lambda _: swap(_own, "liked", lambda place, text: max(0.0, int(text.split()[-1]) / 300 + 0.6 - 0.12 * place)))
fault("scores left in the order of the page", rows=(), stage="judge", check="judge_agreement", job=judged_groups)(
    # Shuffled before, and never put back: every score belongs to somebody else.
    lambda _: swap(llm_judge, "in_own_order", lambda group, rests, order, shown: shown))
fault("scores by the inverse of the page's order", rows=(), stage="judge", check="judge_places", job=a_judge_before_a_run)(
    # Of three completions or fewer, most orders are their own inverse: a judge that is tried on three passes.
    in_place_of(llm_judge, "in_own_order")(lambda usual, group, rests, order, shown: usual(
        group, rests, range(len(order)), tuple(shown[place] for place in order))))
fault("judge that likes silence", rows=(), stage="judge", check="judge_order", job=a_judge_before_a_run)(
    # The rubric asks for few words, and no words are the fewest.
    lambda _: swap(_own, "worth", lambda prompt, text: 1 / (1 + len(text))))
fault("judge that tells nothing apart", rows=(), stage="judge", check="judge_order", job=a_judge_before_a_run)(
    lambda _: swap(_own, "worth", lambda prompt, text: 0.5))
