"""Arithmetic, made from a seed: sums, differences and products of one to three digits. No data, no leak, any number of them."""

from assay.errors import UsageError
from assay.measure.task import Generation, make_examples
from assay.measure.tasks import TaskRequest
from assay.measure.tasks.gsm8k import problems
from assay.seeds import derive

MANY, MOST = 200, 1_000_000
SIGNS = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__}


def make(request: TaskRequest) -> Generation:
    if request.limit is not None and not 1 <= request.limit <= MOST:
        raise UsageError(f"--limit is {request.limit}; expected 1 to {MOST:,} of these")
    return problems("arithmetic", make_examples(made(number, request.seed) for number in range(request.limit or MANY)))


def made(number: int, seed: int) -> dict[str, str]:
    sign = list(SIGNS)[derive(seed, "arithmetic", number, "sign") % len(SIGNS)]
    digits = 1 + derive(seed, "arithmetic", number, "digits") % 3
    left, right = (derive(seed, "arithmetic", number, side) % 10**digits for side in ("left", "right"))
    return {"id": f"{seed}/{number}", "question": f"What is {left} {sign} {right}?", "answer": str(SIGNS[sign](left, right))}
