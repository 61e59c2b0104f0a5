"""HumanEval: a function is completed from its signature and docstring; its unit tests run in the sandbox, out of its reach."""

from assay.measure.task import Example, Generation, Score, column, make_examples
from assay.measure.tasks import TaskRequest
from assay.reward.sandbox import judge, require

SCORERS = 4
STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")  # after the body, these begin something else


def make(request: TaskRequest) -> Generation:
    require()
    examples = make_examples(request.rows(), request.limit)
    for example in examples:
        for name in ("prompt", "test", "entry_point"):
            column(example.row, name)
    return Generation("humaneval", examples, lambda e: column(e.row, "prompt"), score, lambda e: e.row.get("canonical_solution"), wrong,
                      stop=STOP, raw=True, scorers=SCORERS)


def score(example: Example, text: str) -> Score:
    """What was set as the prompt, helpers included, is also on the tests' side; only the asked function is the program's."""
    row, entry = example.row, column(example.row, "entry_point")
    outcome = judge(row["prompt"] + text, f"{row['test']}\ncheck({entry})\n", names=[entry], setup=row["prompt"])
    return Score(float(outcome.passed), float(outcome.passed), parsed=bool(text.strip()))


def wrong(example: Example) -> list[str]:
    return ["", "    return None\n", "    raise SystemExit(0)\n", "    import os; os._exit(0)\n"]
