"""Bits per byte and perplexity of texts: a plain file in paragraphs' worth of bytes, or one text a JSONL row."""

from collections import Counter

from assay.data.text import Rule, Source, documents
from assay.errors import UsageError
from assay.measure.task import Reading, column, make_examples
from assay.measure.tasks import TASKS, TaskRequest

PIECE_BYTES = 4096  # of a plain file, lengthened to the end of the line: one document alone would have no interval


def make(request: TaskRequest) -> Reading:
    if request.data is None:
        raise UsageError(f"task text needs --data FILE: {TASKS['text']}")
    if request.data.name.endswith((".jsonl", ".jsonl.gz", ".parquet", ".csv")):
        rows = request.rows()
    else:
        source, rule = Source(request.data, request.data.name), Rule(document_bytes=PIECE_BYTES)
        rows = [{"text": document.raw.decode()} for document in documents(source, rule, Counter())]
    return Reading("text", make_examples(rows, request.limit), lambda example: column(example.row, "text"))
