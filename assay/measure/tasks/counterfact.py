"""CounterFact by likelihood: after an edit, is the new answer likelier than the old one; in other words; and where nothing changed?"""

from assay.edit.facts import joined, read_facts
from assay.errors import DataError, UsageError
from assay.measure.questions import Question, questions
from assay.measure.task import Choice, Choosing, Example, make_examples
from assay.measure.tasks import TASKS, TaskRequest


def make(request: TaskRequest) -> Choosing:
    """A question whose competing answer is not known cannot be scored by likelihood and is left to `assay edit`."""
    if request.data is None:
        raise UsageError(f"task counterfact needs --data FILE: {TASKS['counterfact']}")
    facts, refused = read_facts(request.data)
    if refused:
        raise DataError(f"{request.data}: {len(refused)} facts are unusable (first: {refused[0].name}: {refused[0].reason})")
    asked = [q for q in questions(facts[: request.limit]) if q.answer is not None and q.other is not None]
    examples = make_examples(row_of(q, number) for number, q in enumerate(asked))
    return Choosing("counterfact", examples, choice_of, by="token")


def row_of(question: Question, number: int) -> dict[str, str]:
    assert question.answer is not None
    assert question.other is not None
    return {"id": f"{question.fact}/{question.kind}/{number}", "fact": question.fact, "kind": question.kind, "prompt": question.prompt,
            "answer": question.answer, "other": question.other}


def choice_of(example: Example) -> Choice:
    row = example.row
    return Choice(row["prompt"], (joined(row["answer"]), joined(row["other"])), 0, part=row["kind"], unit=row["fact"])
