"""CounterFact task by likelihood: is the new answer likelier than the old, also rephrased, and are neighbours unchanged?"""

from assay.edit.fact_questions import FactQuestion, fact_questions
from assay.edit.facts import read_facts, with_leading_space
from assay.errors import DataError, UsageError
from assay.evaluation.task import MultipleChoice, MultipleChoiceTask, TaskExample, make_examples
from assay.evaluation.tasks import TASKS, TaskRequest


def make(request: TaskRequest) -> MultipleChoiceTask:
    """A question whose competing answer is not known cannot be scored by likelihood and is left to `assay edit`."""
    if request.data is None:
        raise UsageError(f"task counterfact needs --data FILE: {TASKS['counterfact']}")
    facts, refused = read_facts(request.data)
    if refused:
        raise DataError(f"{request.data}: {len(refused)} facts are unusable (first: {refused[0].name}: {refused[0].reason})")
    asked = [q for q in fact_questions(facts[: request.limit]) if q.answer is not None and q.other is not None]
    examples = make_examples(_row_of(q, number) for number, q in enumerate(asked))
    return MultipleChoiceTask("counterfact", examples, _choice_of, by="token")


def _row_of(question: FactQuestion, number: int) -> dict[str, str]:
    assert question.answer is not None
    assert question.other is not None
    return {"id": f"{question.fact}/{question.kind}/{number}", "fact": question.fact, "kind": question.kind, "prompt": question.prompt,
            "answer": question.answer, "other": question.other}


def _choice_of(example: TaskExample) -> MultipleChoice:
    row = example.row
    return MultipleChoice(row["prompt"], (with_leading_space(row["answer"]), with_leading_space(row["other"])), 0, part=row["kind"],
                          unit=row["fact"])
