"""Task registry: `open_task` finds a task by its name; data come from a file of the user's, never from here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.config import nearest
from assay.data.data_files import read_rows
from assay.errors import DataError, UsageError
from assay.evaluation.task import Task
from assay.strict_json import read_json

# name → what its data look like
TASKS = {
    "gsm8k": "JSONL with `question` and `answer` (working, then #### and the number)",
    "arithmetic": "none: sums and products are made, from a seed",
    "humaneval": "JSONL with `prompt`, `entry_point`, `test`, `canonical_solution`",
    "mbpp": "JSON or JSONL with `prompt` or `text`, `code`, `test_list`",
    "choices": "JSONL with `question`, `choices` (a list, or ARC's text and label), `answerKey` or `answer`",
    "text": "a text file, or JSONL with `text`: bits per byte and perplexity",
    "counterfact": "CounterFact's JSON in either layout: efficacy, paraphrase and neighbourhood by likelihood",
    "instructions": "JSONL with `prompt`, `instruction_id_list` and `kwargs`, as IFEval has them",
    "reasoning_gym": "none: --grader names one of reasoning-gym's datasets (extra)",
    "graded": "any JSONL with `prompt` or `question`; --grader says how it is scored",
}


@dataclass(frozen=True)
class TaskRequest:
    name: str
    data: Path | None = None
    limit: int | None = None
    grader: str | None = None  # a reward's name or FILE.py:FUNCTION
    seed: int = 0  # of made data

    def rows(self) -> list[Mapping[str, Any]]:
        if self.data is None:
            raise UsageError(f"task {self.name} needs --data FILE: {TASKS[self.name]}")
        if self.data.suffix == ".json":
            return read_json(self.data, [dict], error=DataError)
        return [row.values for row in read_rows(self.data)]


def open_task(request: TaskRequest) -> Task:
    if request.name not in TASKS:
        raise UsageError(f"unknown task {request.name!r}{nearest(request.name, TASKS)}")
    if request.grader is not None and request.name not in ("graded", "reasoning_gym"):
        raise UsageError(f"task {request.name} has a scoring of its own; --grader is for graded and reasoning_gym")
    from assay.evaluation.tasks import answers, code, graded, likelihood  # which import what stands here

    makers: dict[str, Callable[[TaskRequest], Task]] = {
        "gsm8k": answers.make_gsm8k, "arithmetic": answers.make_arithmetic, "reasoning_gym": answers.make_reasoning_gym,
        "humaneval": code.make_humaneval, "mbpp": code.make_mbpp, "choices": likelihood.make_choices,
        "counterfact": likelihood.make_counterfact, "text": likelihood.make_text, "instructions": graded.make_instructions,
        "graded": graded.make_graded}
    return makers[request.name](request)
