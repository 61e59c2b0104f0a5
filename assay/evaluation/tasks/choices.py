"""Multiple-choice task by likelihood: which option the model finds likeliest after the question. ARC's JSONL and its like."""

from collections.abc import Mapping
from typing import Any

from assay.errors import DataError
from assay.evaluation.task import MultipleChoice, MultipleChoiceTask, TaskExample, make_examples, text_column
from assay.evaluation.tasks import TaskRequest

_ASK = "Question: {question}\nAnswer:"


def make(request: TaskRequest) -> MultipleChoiceTask:
    examples = make_examples(request.rows(), request.limit)
    for example in examples:
        _choice_of(example)
    return MultipleChoiceTask("choices", examples, _choice_of, by="byte")


def _choice_of(example: TaskExample) -> MultipleChoice:
    texts, labels = options(example.row, example.id)
    return MultipleChoice(_ASK.format(question=text_column(example.row, "question").strip()), tuple(f" {text.strip()}" for text in texts),
                  right_one(example, texts, labels))


def options(row: Mapping[str, Any], id: str) -> tuple[list[str], list[str]]:
    """ARC has {"text": […], "label": […]}; a plain list is labelled A, B, C, …"""
    given = row.get("choices", row.get("options"))
    texts = given.get("text") if isinstance(given, Mapping) else given
    labels = given.get("label") if isinstance(given, Mapping) else [chr(ord("A") + i) for i in range(len(texts or ()))]
    if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels) or len(texts) < 2 or not all(texts):
        raise DataError(f"example {id}: `choices` is {given!r}; expected two texts or more, with a label each where labels are given")
    return [str(text) for text in texts], [str(label) for label in labels]


def right_one(example: TaskExample, texts: list[str], labels: list[str]) -> int:
    """The answer by its label, by its number, or in its own words."""
    answer = next((example.row[name] for name in ("answerKey", "answer", "label", "gold") if name in example.row), None)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return answer
    for known in (labels, texts):
        if known.count(str(answer)) == 1:
            return known.index(str(answer))
    raise DataError(f"example {example.id}: the answer {answer!r} is none of {', '.join(labels)}")
