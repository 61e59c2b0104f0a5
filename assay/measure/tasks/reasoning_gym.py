"""A dataset of reasoning-gym (extra): problems made from a seed, scored by its own verifier. `graded` scores rows that were kept."""

from assay.errors import UsageError
from assay.measure.task import Example, Generation, Score, make_examples
from assay.measure.tasks import TaskRequest
from assay.reward import gym
from assay.reward.answer import read_answer

MANY = 100


def make(request: TaskRequest) -> Generation:
    gym.package()
    if request.grader is None:
        raise UsageError("task reasoning_gym needs --grader NAME: one of its datasets, such as chain_sum")
    examples = make_examples(gym.problems(request.grader, request.limit or MANY, seed=request.seed))
    return Generation(f"reasoning_gym/{request.grader}", examples, lambda e: e.row["prompt"], score, lambda e: e.row["gold_completion"],
                      wrong, votes=True)


def score(example: Example, text: str) -> Score:
    """1 for full marks alone: what its scorers give for form or nearness is no right answer. What is right strictly is so leniently."""
    strict, lenient = read_answer(text, "strict", "tag"), read_answer(text, "lenient", "any")
    right, leniently = (answer is not None and gym.score(example.row, answer) == 1 for answer in (strict, lenient))
    return Score(float(right), float(right or leniently), strict is not None, strict)


def wrong(example: Example) -> list[str]:
    return ["", "<answer></answer>", "<answer>I do not know.</answer>"]
