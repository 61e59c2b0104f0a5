"""reasoning-gym: of every dataset the gold answer scores 1 through our reward, and the same seed makes the same problems."""

from pathlib import Path

from assay.errors import AssayError
from assay.reward import gym
from assay.reward.reward_functions import built_in_reward, parse_rewards
from tests.judges.score import Score, first_words, packages

ASKS = "does the gold answer of this dataset's problems score 1 (and another problem's less), and does the seed reproduce them?"
PROBLEMS, SEED = 3, 7


def judge(folder: Path) -> Score:
    score = Score(packages("reasoning-gym"))
    from reasoning_gym.factory import DATASETS

    for name in sorted(DATASETS):
        try_dataset(score, name)
    return score


def try_dataset(score: Score, name: str) -> None:
    reward = built_in_reward(parse_rewards(["gym"])[0])
    try:
        rows = gym.gym_problems(name, PROBLEMS, seed=SEED)
    except AssayError as error:
        score.refusals[first_words(error).replace(name, "…")] += 1
        return
    gym.open_dataset.cache_clear()  # the second time is made anew
    gym.problem.cache_clear()
    again = gym.gym_problems(name, PROBLEMS, seed=SEED)
    marks = [reward(row["prompt"], row["gold_completion"], row) for row in rows]
    score.agree(rows == again and marks == [1.0] * PROBLEMS, name, f"marks {marks}, reproduced: {rows == again}")
