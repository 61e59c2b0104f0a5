"""Text task: bits per byte and perplexity of a plain file in paragraphs' worth of bytes, or of one text a JSONL row."""

from collections import Counter

from assay.data.data_files import DocumentRule, TextSource, iter_documents
from assay.errors import UsageError
from assay.evaluation.task import PerplexityTask, make_examples, text_column
from assay.evaluation.tasks import TASKS, TaskRequest

PIECE_BYTES = 4096  # of a plain file, lengthened to the end of the line: one document alone would have no interval


def make(request: TaskRequest) -> PerplexityTask:
    if request.data is None:
        raise UsageError(f"task text needs --data FILE: {TASKS['text']}")
    if request.data.name.endswith((".jsonl", ".jsonl.gz", ".parquet", ".csv")):
        rows = request.rows()
    else:
        source, rule = TextSource(request.data, request.data.name), DocumentRule(document_bytes=PIECE_BYTES)
        rows = [{"text": document.raw.decode()} for document in iter_documents(source, rule, Counter())]
    return PerplexityTask("text", make_examples(rows, request.limit), lambda example: text_column(example.row, "text"))
