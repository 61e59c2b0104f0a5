"""HumanEval task: a function is completed from its signature and docstring; its unit tests run in the sandbox."""

from assay.evaluation.task import GenerationTask, Score, TaskExample, make_examples, text_column
from assay.evaluation.tasks import TaskRequest
from assay.reward.sandbox import judge_program, require_sandbox

_SCORERS = 4
STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")  # after the body, these begin something else


def make(request: TaskRequest) -> GenerationTask:
    require_sandbox()
    examples = make_examples(request.rows(), request.limit)
    for example in examples:
        for name in ("prompt", "test", "entry_point"):
            text_column(example.row, name)
    return GenerationTask("humaneval", examples, lambda e: text_column(e.row, "prompt"), _score,
                          lambda e: e.row.get("canonical_solution"), _wrong,
                      stop=STOP, raw=True, scorers=_SCORERS)


def _score(example: TaskExample, text: str) -> Score:
    """What was set as the prompt, helpers included, is also on the tests' side; only the asked function is the program's."""
    row, entry = example.row, text_column(example.row, "entry_point")
    outcome = judge_program(row["prompt"] + text, f"{row['test']}\ncheck({entry})\n", names=[entry], setup=row["prompt"])
    return Score(float(outcome.passed), float(outcome.passed), parsed=bool(text.strip()))


def _wrong(example: TaskExample) -> list[str]:
    return ["", "    return None\n", "    raise SystemExit(0)\n", "    import os; os._exit(0)\n"]
