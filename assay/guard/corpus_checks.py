"""Corpus checks before step 1: enough held-out documents for an interval, and training documents that are not copies of each other."""

from pathlib import Path

import numpy as np

from assay.data.held_out_documents import measurable_documents
from assay.data.overlap import COPIES_REFUSED, COPIES_SAID
from assay.data.token_corpus import Corpus
from assay.errors import DataError
from assay.verdict import Verdict, proven, refuted, unproven

FEWEST_HELD_OUT = 2  # one alone shows no spread


def require_held_out(place: Path | str, count: int, of: str, advice: str) -> None:
    """Refuse too few held-out documents before anything is spent: with one, every evaluation, and the hand-over, would end in an error."""
    if count < FEWEST_HELD_OUT:
        raise DataError(f"{place}: {count} held-out {of}{'' if count == 1 else 's'}; one alone shows no spread, so that no score could "
                        f"have an interval; expected at least {FEWEST_HELD_OUT}: {advice}")


def require_held_out_documents(corpus: Corpus) -> None:
    require_held_out(corpus.folder, len(measurable_documents(corpus)), "document", "build the corpus with a larger --held-out, with more "
                     "and smaller documents (--document-bytes, --split), or with --held-out-files")


def check_document_copies(corpus: Corpus) -> Verdict:
    """Copies are an epoch in disguise: a model learns them by heart while the plan says that the text is read once."""
    index = corpus.train.index
    _, first, times = np.unique(index["text"], return_index=True, return_counts=True)
    copies, size = int(times.sum() - len(times)), len(index)
    repeated = index["bytes"].astype(np.int64).sum() - index["bytes"][first].astype(np.int64).sum()
    share = float(repeated / max(1, index["bytes"].astype(np.int64).sum()))
    words = f"{copies:,} of {size:,} training documents ({share:.0%} of the text) are exact copies of another"
    if share < COPIES_SAID:
        return proven("duplicates", words, copies=copies)
    most = int(times.argmax())
    document = index[first[most]]
    shown = f"{words}, one of them {int(times[most]):,} times (document {int(document['id']):016x}, number {int(first[most]) + 1})"
    advice = "remove them, and say --num-train-epochs for more passes"
    return (refuted if share >= COPIES_REFUSED else unproven)("duplicates", f"{shown}: {advice}", copies=copies, share=share)
