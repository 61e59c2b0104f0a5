"""GSM8K task and its like: word problems whose answer is a number, stated once at the end; votes are over numbers."""

from assay.evaluation.task import GenerationTask, Score, TaskExample, make_examples, text_column
from assay.evaluation.tasks import TaskRequest
from assay.reward.answer import gold_answer, read_answer, read_number, same_answer
from assay.reward.canary import canaries, gold_completion

_ASK = "{question}\nWork step by step. End with a line that holds #### and then the answer as a number."


def make(request: TaskRequest) -> GenerationTask:
    examples = make_examples(request.rows(), request.limit)
    return number_problems("gsm8k", examples)


def number_problems(name: str, examples: tuple[TaskExample, ...]) -> GenerationTask:
    for example in examples:  # a row without a gold answer is found before anything is sampled
        gold_answer(example.row)
        text_column(example.row, "question")
    return GenerationTask(name, examples, _prompt, _score, _gold, _wrong, votes=True)


def _prompt(example: TaskExample) -> str:
    return _ASK.format(question=text_column(example.row, "question").strip())


def _score(example: TaskExample, text: str) -> Score:
    right = gold_answer(example.row)
    strict, lenient = read_answer(text, "strict"), read_answer(text, "lenient")
    return Score(float(same_answer(strict, right)), float(same_answer(lenient, right)), strict is not None, canonical(strict))


def canonical(answer: str | None) -> str | None:
    """Equal numbers are one answer however they are written; other words as they stand."""
    if answer is None:
        return None
    number = read_number(answer)
    return str(number) if number is not None else " ".join(answer.split()).casefold().removesuffix(".")


def _gold(example: TaskExample) -> str:
    return gold_completion(example.row, "hash")


def _wrong(example: TaskExample) -> list[str]:
    """Another answer after the right working, nothing, and the question said back."""
    made = canaries(example.row, (), "hash", _prompt(example))
    first_is_right = f"I think it is {gold_answer(example.row)}. No.\n{made['wrong'][0]}"
    return [*made["wrong"], *made["empty"], *made["echo"], first_is_right]
