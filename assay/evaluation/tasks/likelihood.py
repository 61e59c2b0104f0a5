"""Likelihood tasks: multiple choice (ARC and its like), CounterFact after an edit, and bits per byte of texts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from assay.data.data_files import DocumentRule, TextSource, iter_documents
from assay.editing.fact_questions import FactQuestion, fact_questions
from assay.editing.facts import read_facts, with_leading_space
from assay.errors import DataError, UsageError
from assay.evaluation.task import MultipleChoice, MultipleChoiceTask, PerplexityTask, TaskExample, make_examples, text_column
from assay.evaluation.tasks import TASKS, TaskRequest

# ---------------------------------------------------------------- multiple choice

ASK_A_QUESTION = "Question: {question}\nAnswer:"


def make_choices(request: TaskRequest) -> MultipleChoiceTask:
    """Multiple-choice task: which option the model finds likeliest after the question, for ARC's JSONL and its like."""
    examples = make_examples(request.rows(), request.limit)
    for example in examples:
        _choice_of_options(example)
    return MultipleChoiceTask("choices", examples, _choice_of_options, by="byte")


def _choice_of_options(example: TaskExample) -> MultipleChoice:
    texts, labels = options(example.row, example.id)
    context = ASK_A_QUESTION.format(question=text_column(example.row, "question").strip())
    return MultipleChoice(context, tuple(f" {text.strip()}" for text in texts), right_one(example, texts, labels))


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

# ---------------------------------------------------------------- CounterFact

def make_counterfact(request: TaskRequest) -> MultipleChoiceTask:
    """A question whose competing answer is not known cannot be scored by likelihood and is left to `assay edit`."""
    if request.data is None:
        raise UsageError(f"task counterfact needs --data FILE: {TASKS['counterfact']}")
    facts, refused = read_facts(request.data)
    if refused:
        raise DataError(f"{request.data}: {len(refused)} facts are unusable (first: {refused[0].name}: {refused[0].reason})")
    asked = [q for q in fact_questions(facts[: request.limit]) if q.answer is not None and q.other is not None]
    examples = make_examples(_row_of(q, number) for number, q in enumerate(asked))
    return MultipleChoiceTask("counterfact", examples, _choice_of_fact, by="token")


def _row_of(question: FactQuestion, number: int) -> dict[str, str]:
    assert question.answer is not None
    assert question.other is not None
    return {"id": f"{question.fact}/{question.kind}/{number}", "fact": question.fact, "kind": question.kind, "prompt": question.prompt,
            "answer": question.answer, "other": question.other}


def _choice_of_fact(example: TaskExample) -> MultipleChoice:
    row = example.row
    return MultipleChoice(row["prompt"], (with_leading_space(row["answer"]), with_leading_space(row["other"])), 0, part=row["kind"],
                          unit=row["fact"])

# ---------------------------------------------------------------- text

PIECE_BYTES = 4096  # of a plain file, lengthened to the end of the line: one document alone would have no interval


def make_text(request: TaskRequest) -> PerplexityTask:
    """Bits per byte and perplexity of a plain file in paragraphs' worth of bytes, or of one text a JSONL row."""
    if request.data is None:
        raise UsageError(f"task text needs --data FILE: {TASKS['text']}")
    if request.data.name.endswith((".jsonl", ".jsonl.gz", ".parquet", ".csv")):
        rows = request.rows()
    else:
        source, rule = TextSource(request.data, request.data.name), DocumentRule(document_bytes=PIECE_BYTES)
        rows = [{"text": document.raw.decode()} for document in iter_documents(source, rule, Counter())]
    return PerplexityTask("text", make_examples(rows, request.limit), lambda example: text_column(example.row, "text"))
