"""reasoning-gym task (extra): problems made from a seed, scored by its own verifier. `graded` scores rows that were kept."""

from assay.errors import UsageError
from assay.evaluation.task import GenerationTask, Score, TaskExample, make_examples
from assay.evaluation.tasks import TaskRequest
from assay.reward import gym
from assay.reward.answer import read_answer

_MANY = 100


def make(request: TaskRequest) -> GenerationTask:
    gym.reasoning_gym_package()
    if request.grader is None:
        raise UsageError("task reasoning_gym needs --grader NAME: one of its datasets, such as chain_sum")
    examples = make_examples(gym.gym_problems(request.grader, request.limit or _MANY, seed=request.seed))
    return GenerationTask(f"reasoning_gym/{request.grader}", examples, lambda e: e.row["prompt"], _score,
                          lambda e: e.row["gold_completion"],
                      _wrong, votes=True)


def _score(example: TaskExample, text: str) -> Score:
    """1 for full marks alone: what its scorers give for form or nearness is no right answer. What is right strictly is so leniently."""
    strict, lenient = read_answer(text, "strict", "tag"), read_answer(text, "lenient", "any")
    right, leniently = (answer is not None and gym.gym_score(example.row, answer) == 1 for answer in (strict, lenient))
    return Score(float(right), float(right or leniently), strict is not None, strict)


def _wrong(example: TaskExample) -> list[str]:
    return ["", "<answer></answer>", "<answer>I do not know.</answer>"]
