"""reasoning-gym: its own problems, scored by its own scorers, in our workers; what would run a model's words as code is refused."""

import json
from pathlib import Path

import pytest

from assay.cli import run as assay
from assay.errors import DataError, UsageError
from assay.evaluation.task import check_scoring
from assay.evaluation.tasks import TaskRequest, open_task
from assay.guard.reward_checks import preflight_rewards
from assay.reward import gym
from assay.reward.reward_functions import built_in_reward, parse_rewards
from assay.reward.worker_pool import RewardItem, RewardWorkers
from assay.verdict import Outcome

reasoning_gym = pytest.importorskip("reasoning_gym")

SOUND = ("chain_sum", "sudoku", "caesar_cipher", "family_relationships", "figlet_font")  # numbers, grids, words, names, and letters drawn
EVALUATING = {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
              "simple_integration", "spiral_matrix", "string_insertion"}  # of version 0.1.25, read by hand


def test_rows_pass_the_preflight_in_the_workers_and_the_task_its_oracles():
    with RewardWorkers(parse_rewards(["gym:1", "format:0.1"]), count=1) as workers:
        for name in SOUND:
            verdicts = preflight_rewards(workers.rewards, gym.gym_problems(name, 6, seed=1), workers)
            assert [f"{name}: {verdict}" for verdict in verdicts if verdict.outcome is not Outcome.PROVEN] == []
            task = open_task(TaskRequest("reasoning_gym", grader=name, limit=4))
            assert [verdict.outcome for verdict in check_scoring(task)] == [Outcome.PROVEN] * 3


def test_partial_marks_are_the_scorers_own_and_the_task_counts_full_ones_alone():
    row = gym.gym_problems("chain_sum", 3, seed=1)[0]
    dataset = reasoning_gym.create_dataset("chain_sum", size=3, seed=1)
    reward = built_in_reward(parse_rewards(["gym"])[0])
    for said in (row["answer"], "7", "", f"{row['answer']} or 7"):
        assert reward("", f"<answer>{said}</answer>", row) == (dataset.score_answer(said, dataset[0]) if said else 0.0)
    half = next(s for s in ("1" + row["answer"], row["answer"] + " or 7") if 0 < dataset.score_answer(s, dataset[0]) < 1)
    task = open_task(TaskRequest("reasoning_gym", grader="chain_sum", limit=3, seed=1))
    assert task.score(task.examples[0], f"<answer>{half}</answer>").value == 0
    assert task.score(task.examples[0], f"<answer>{row['answer']}</answer>").value == 1
    assert reward("", row["answer"], row) == 0.0, "the prompt asks for tags"


def test_what_is_scored_is_the_problem_that_the_row_names():
    row = gym.gym_problems("chain_sum", 3, seed=1)[2]
    assert gym.gym_score(row, row["answer"]) == 1
    with pytest.raises(DataError, match="asks something else under"):
        gym.gym_score({**row, "gym": {**row["gym"], "seed": 2}}, row["answer"])
    for broken in ({}, {"gym": {"dataset": "chain_sum"}}):
        with pytest.raises(DataError, match="assay data gym"):
            gym.gym_score(broken, "1")
    assert gym.gym_problems("chain_sum", 3, seed=2) != gym.gym_problems("chain_sum", 3, seed=1) == gym.gym_problems("chain_sum", 3, seed=1)


def test_an_error_in_the_worker_is_an_error_row_and_not_0():
    with RewardWorkers(parse_rewards(["gym:1"]), count=1) as workers:
        [scored] = workers.score([RewardItem("p", "<answer>1</answer>", {"gym": "nothing"})])
    assert scored.value is None
    assert "names no problem" in str(scored.error)


def test_scorers_that_evaluate_what_a_model_wrote_are_refused():
    from reasoning_gym.factory import DATASETS

    assert {name for name, (dataset, _) in DATASETS.items() if gym.evaluates_answers(dataset)} == EVALUATING
    with pytest.raises(UsageError, match="not run outside a sandbox"):
        gym.gym_problems("countdown", 2, seed=0)
    sources = {file.stem for file in Path(reasoning_gym.__file__).parent.rglob("*.py")
               if "contrib" not in file.parts and any(f"{word}(answer" in file.read_text() for word in gym.EVALUATORS)}
    assert sources == EVALUATING, "another one evaluates answers, out of sight of `evaluates`"


@pytest.mark.parametrize(("name", "words"), [("chain_sm", "not registered"), ("composite", "cannot be made"), ("rush_hour", "no answer")])
def test_a_dataset_that_cannot_be_used_is_a_sentence(name: str, words: str):
    with pytest.raises(UsageError, match=words):
        gym.gym_problems(name, 2, seed=0)


def test_the_verb_writes_rows_once_and_the_graded_task_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "sums.jsonl"
    asked = ["data", "gym", "chain_sum", "--n", "4", "--seed", "3", "--out", str(file)]
    assert assay(asked) == 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == gym.gym_problems("chain_sum", 4, seed=3)
    assert assay(asked) == 2
    assert assay(["data", "gym", "chain_sum"]) == 2
    assert assay(["data", "check", str(file)]) == 2
    assert "give --model" in capsys.readouterr().err
    task = open_task(TaskRequest("graded", file, grader="gym"))
    assert {verdict.outcome for verdict in check_scoring(task)} == {Outcome.PROVEN}
