"""A dataset of reasoning-gym (extra): problems made from a seed, scored by its own verifier."""

from typing import Any

from assay.errors import UsageError
from assay.measure.task import Example, Generation, Score, make_examples
from assay.measure.tasks import TaskRequest
from assay.reward.answer import read_answer

MANY = 100


def make(request: TaskRequest) -> Generation:
    try:
        import reasoning_gym
    except ImportError:
        raise UsageError("task reasoning_gym needs the package of that name; pip install reasoning-gym") from None
    if request.grader is None:
        raise UsageError("task reasoning_gym needs --grader NAME: one of its datasets, such as chain_sum")
    try:
        dataset = reasoning_gym.create_dataset(request.grader, size=request.limit or MANY, seed=request.seed)
    except ValueError as error:
        raise UsageError(f"--grader {request.grader}: reasoning-gym says: {error}") from None
    entries: list[dict[str, Any]] = [dataset[i] for i in range(len(dataset))]
    examples = make_examples({"question": e["question"], "answer": str(e["answer"]), "number": i} for i, e in enumerate(entries))

    def score(example: Example, text: str) -> Score:
        strict, lenient = read_answer(text, "strict", "tag"), read_answer(text, "lenient", "any")
        entry = entries[example.row["number"]]
        worth = [answer is not None and dataset.score_answer(answer, entry) == 1 for answer in (strict, lenient)]
        return Score(float(worth[0]), float(worth[1]), strict is not None, strict)

    return Generation(f"reasoning_gym/{request.grader}", examples, prompt, score, lambda e: f"<answer>{e.row['answer']}</answer>", wrong,
                      votes=True)


def prompt(example: Example) -> str:
    return f"{example.row['question']}\nPut your answer between <answer> and </answer>."


def wrong(example: Example) -> list[str]:
    return ["", "<answer></answer>", "<answer>I do not know.</answer>"]
