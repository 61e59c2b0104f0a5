"""Graded task: any JSONL, scored by a built-in reward or by a function (prompt, completion, row) → 0 … 1 in a user's file."""

import atexit

from assay.errors import DataError, UsageError
from assay.evaluation.task import GenerationTask, Score, TaskExample, make_examples, text_column
from assay.evaluation.tasks import TaskRequest
from assay.reward.canary import GOLD_COMPLETION
from assay.reward.reward_functions import parse_rewards
from assay.reward.worker_pool import RewardItem, RewardWorkers

_SCORERS = 2


def make(request: TaskRequest) -> GenerationTask:
    """The user's file is imported in worker processes, with time-outs, never here. What it cannot tell is an error, not 0."""
    if request.grader is None:
        raise UsageError("task graded needs --grader: the name of a reward, such as answer, or FILE.py:FUNCTION")
    if not 0 < len(rewards := parse_rewards([request.grader])) < 2 or rewards[0].weight != 1:
        raise UsageError(f"--grader {request.grader}: expected one reward, without a weight")
    workers = RewardWorkers(rewards, count=_SCORERS)
    atexit.register(workers.close)
    examples = make_examples(request.rows(), request.limit)

    def score(example: TaskExample, text: str) -> Score:
        [found] = workers.score([RewardItem(_prompt(example), text, example.row)])
        if found.value is None:
            raise DataError(f"the grader failed on example {example.id}: {found.error}")
        if not 0 <= found.value <= 1:
            raise DataError(f"the grader gave example {example.id} {found.value}; expected a number from 0 to 1")
        return Score(found.value, found.value, parsed=bool(text.strip()))

    return GenerationTask("graded", examples, _prompt, score, _gold, _wrong)


def _prompt(example: TaskExample) -> str:
    return text_column(example.row, "prompt", "question", "instruction")


def _gold(example: TaskExample) -> str | None:
    """The row's own right text, where it has one: `gold_completion`, or its gold or answer as it stands."""
    return next((str(example.row[name]) for name in (GOLD_COMPLETION, "gold", "answer", "response") if example.row.get(name)), None)


def _wrong(example: TaskExample) -> list[str]:
    """Nothing, and the prompt said back: what no grader should pay for."""
    return ["", _prompt(example)]
