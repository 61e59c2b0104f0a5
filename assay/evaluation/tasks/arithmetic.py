"""Arithmetic task, made from a seed: sums, differences and products of one to three digits. No data, no leak."""

from assay.errors import UsageError
from assay.evaluation.task import GenerationTask, make_examples
from assay.evaluation.tasks import TaskRequest
from assay.evaluation.tasks.gsm8k import number_problems
from assay.seeds import derive

_MANY, _MOST = 200, 1_000_000
_SIGNS = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__}


def make(request: TaskRequest) -> GenerationTask:
    if request.limit is not None and not 1 <= request.limit <= _MOST:
        raise UsageError(f"--limit is {request.limit}; expected 1 to {_MOST:,} of these")
    return number_problems("arithmetic", make_examples(make_problem(number, request.seed) for number in range(request.limit or _MANY)))


def make_problem(number: int, seed: int) -> dict[str, str]:
    sign = list(_SIGNS)[derive(seed, "arithmetic", number, "sign") % len(_SIGNS)]
    digits = 1 + derive(seed, "arithmetic", number, "digits") % 3
    left, right = (derive(seed, "arithmetic", number, side) % 10**digits for side in ("left", "right"))
    return {"id": f"{seed}/{number}", "question": f"What is {left} {sign} {right}?", "answer": str(_SIGNS[sign](left, right))}
