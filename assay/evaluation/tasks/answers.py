"""Answer tasks: a problem has one answer, stated once at the end. GSM8K and its like, made arithmetic, reasoning-gym's datasets."""

from assay.errors import UsageError
from assay.evaluation.task import GenerationTask, Score, TaskExample, make_examples, text_column
from assay.evaluation.tasks import TaskRequest
from assay.reward import gym
from assay.reward.answer import gold_answer, read_answer, read_number, same_answer
from assay.reward.canary import canaries, gold_completion
from assay.seeds import derive

# ---------------------------------------------------------------- GSM8K and its like

ASK_FOR_NUMBER = "{question}\nWork step by step. End with a line that holds #### and then the answer as a number."


def make_gsm8k(request: TaskRequest) -> GenerationTask:
    """Word problems whose answer is a number, stated once at the end; votes are over numbers."""
    return number_problems("gsm8k", make_examples(request.rows(), request.limit))


def number_problems(name: str, examples: tuple[TaskExample, ...]) -> GenerationTask:
    for example in examples:  # a row without a gold answer is found before anything is sampled
        gold_answer(example.row)
        text_column(example.row, "question")
    return GenerationTask(name, examples, _number_prompt, _score_number, _gold_number, _wrong_numbers, votes=True)


def _number_prompt(example: TaskExample) -> str:
    return ASK_FOR_NUMBER.format(question=text_column(example.row, "question").strip())


def _score_number(example: TaskExample, text: str) -> Score:
    right = gold_answer(example.row)
    strict, lenient = read_answer(text, "strict"), read_answer(text, "lenient")
    return Score(float(same_answer(strict, right)), float(same_answer(lenient, right)), strict is not None, canonical(strict))


def canonical(answer: str | None) -> str | None:
    """Canonical form of an answer: equal numbers are one answer however they are written; other words as they stand."""
    if answer is None:
        return None
    number = read_number(answer)
    return str(number) if number is not None else " ".join(answer.split()).casefold().removesuffix(".")


def _gold_number(example: TaskExample) -> str:
    return gold_completion(example.row, "hash")


def _wrong_numbers(example: TaskExample) -> list[str]:
    """Wrong answers for the grader: another answer after the right working, nothing, and the question said back."""
    made = canaries(example.row, (), "hash", _number_prompt(example))
    first_is_right = f"I think it is {gold_answer(example.row)}. No.\n{made['wrong'][0]}"
    return [*made["wrong"], *made["empty"], *made["echo"], first_is_right]

# ---------------------------------------------------------------- arithmetic, made from a seed

ARITHMETIC, MOST_ARITHMETIC = 200, 1_000_000
_SIGNS = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__}


def make_arithmetic(request: TaskRequest) -> GenerationTask:
    """Sums, differences and products of one to three digits. No data, no leak, any number of them."""
    if request.limit is not None and not 1 <= request.limit <= MOST_ARITHMETIC:
        raise UsageError(f"--limit is {request.limit}; expected 1 to {MOST_ARITHMETIC:,} of these")
    return number_problems("arithmetic", make_examples(make_problem(number, request.seed) for number in range(request.limit or ARITHMETIC)))


def make_problem(number: int, seed: int) -> dict[str, str]:
    sign = list(_SIGNS)[derive(seed, "arithmetic", number, "sign") % len(_SIGNS)]
    digits = 1 + derive(seed, "arithmetic", number, "digits") % 3
    left, right = (derive(seed, "arithmetic", number, side) % 10**digits for side in ("left", "right"))
    return {"id": f"{seed}/{number}", "question": f"What is {left} {sign} {right}?", "answer": str(_SIGNS[sign](left, right))}

# ---------------------------------------------------------------- reasoning-gym

GYM_PROBLEMS = 100


def make_reasoning_gym(request: TaskRequest) -> GenerationTask:
    """One of its datasets (extra), scored by its own verifier. `graded` scores rows that were kept."""
    gym.reasoning_gym_package()
    if request.grader is None:
        raise UsageError("task reasoning_gym needs --grader NAME: one of its datasets, such as chain_sum")
    examples = make_examples(gym.gym_problems(request.grader, request.limit or GYM_PROBLEMS, seed=request.seed))
    return GenerationTask(f"reasoning_gym/{request.grader}", examples, lambda e: e.row["prompt"], _score_gym,
                          lambda e: e.row["gold_completion"], _wrong_for_gym, votes=True)


def _score_gym(example: TaskExample, text: str) -> Score:
    """1 for full marks alone: what its scorers give for form or nearness is no right answer. What is right strictly is so leniently."""
    strict, lenient = read_answer(text, "strict", "tag"), read_answer(text, "lenient", "any")
    right, leniently = (answer is not None and gym.gym_score(example.row, answer) == 1 for answer in (strict, lenient))
    return Score(float(right), float(right or leniently), strict is not None, strict)


def _wrong_for_gym(example: TaskExample) -> list[str]:
    return ["", "<answer></answer>", "<answer>I do not know.</answer>"]
