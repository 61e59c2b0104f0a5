"""Any JSONL with a grader: one of the built-in rewards, or a function (prompt, completion, row) → 0 … 1 in a file of the user's."""

import atexit

from assay.errors import DataError, UsageError
from assay.measure.task import Example, Generation, Score, column, make_examples
from assay.measure.tasks import TaskRequest
from assay.reward.canary import OWN_WORDS
from assay.reward.verify import parse_rewards
from assay.reward.workers import Item, Workers

SCORERS = 2


def make(request: TaskRequest) -> Generation:
    """The user's file is imported in worker processes, with time-outs, never here. What it cannot tell is an error, not 0."""
    if request.grader is None:
        raise UsageError("task graded needs --grader: the name of a reward, such as answer, or FILE.py:FUNCTION")
    if not 0 < len(rewards := parse_rewards([request.grader])) < 2 or rewards[0].weight != 1:
        raise UsageError(f"--grader {request.grader}: expected one reward, without a weight")
    workers = Workers(rewards, count=SCORERS)
    atexit.register(workers.close)
    examples = make_examples(request.rows(), request.limit)

    def score(example: Example, text: str) -> Score:
        [found] = workers.score([Item(prompt(example), text, example.row)])
        if found.value is None:
            raise DataError(f"the grader failed on example {example.id}: {found.error}")
        if not 0 <= found.value <= 1:
            raise DataError(f"the grader gave example {example.id} {found.value}; expected a number from 0 to 1")
        return Score(found.value, found.value, parsed=bool(text.strip()))

    return Generation("graded", examples, prompt, score, gold, wrong)


def prompt(example: Example) -> str:
    return column(example.row, "prompt", "question", "instruction")


def gold(example: Example) -> str | None:
    """The row's own right text, where it has one: `gold_completion`, or its gold or answer as it stands."""
    return next((str(example.row[name]) for name in (OWN_WORDS, "gold", "answer", "response") if example.row.get(name)), None)


def wrong(example: Example) -> list[str]:
    """Nothing, and the prompt said back: what no grader should pay for."""
    return ["", prompt(example)]
