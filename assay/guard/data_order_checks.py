"""Data order checks: each step reads its own part of the corpus, every part once an epoch, in another order each time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from assay.data.order import Order
from assay.data.packing import PackedExamples
from assay.data.token_corpus import Corpus
from assay.learn.loop import Step
from assay.verdict import Verdict, proven, refuted

PLACES = 4096  # of an epoch that `check_epoch_order` looks at: all of a small corpus, a sample of a large one
NEARBY = 64  # steps among which `check_consumed` looks for the one whose data was read instead


def check_consumed(steps: Sequence[Step], order: Order | PackedExamples) -> Verdict:
    """Each step read the windows that the order has for its number, whole: no position was lost, reset or skipped."""
    for step in steps:
        had, due = [id for row in step.ids for id in row], order.consumed(step.index).tolist()
        if had != due:
            return refuted("consumed", f"step {step.index} read the windows {_shown(had)}, the plan has {_shown(due)}"
                                       f"{_whose(had, order, step.index)}", step=step.index)
        if step.tokens != order.rows * order.length:
            return refuted("consumed", f"step {step.index} read {step.tokens} tokens; a batch holds "
                                       f"{order.rows * order.length}", step=step.index)
    return proven("consumed", f"{len(steps)} steps read what was planned for them", steps=len(steps))


def check_epoch_order(order: Order) -> Verdict:
    """No window comes twice in an epoch, on whatever rank, and the next epoch has an order of its own."""
    readable = order.steps * order.rows * order.world  # a last step that the data does not fill is never taken
    places = min(order.windows, readable, PLACES)
    first = _global_rows(order, 0, places)
    if (again := places - len(np.unique(first))) or first.min() < 0 or first.max() >= order.windows:
        return refuted("order", f"{again} of the first {places} windows of an epoch are read more than once by the "
                                f"{order.world} rank(s), or are none of the corpus", repeated=again)
    seen = f"{places} of {order.windows} windows looked at, each read once"
    second = min(places, readable - order.windows)
    if second < 2:
        return proven("order", f"{seen}; there is no second epoch", places=places)
    if np.array_equal(first[:second], _global_rows(order, order.windows, second)):
        return refuted("order", "the second epoch reads in the order of the first: it is not shuffled anew")
    return proven("order", f"{seen}, in another order in the second epoch", places=places)


def check_same_data(recorded: str, corpus: Corpus) -> Verdict:
    """What a run goes on with is the corpus it began with: its training text, and the held-out text it is scored on."""
    if recorded != corpus.digest:
        return refuted("same data", f"{corpus.folder} is the corpus {corpus.digest[:12]} now, this run began with "
                                    f"{recorded[:12]}: the order of its data is another, and its held-out scores do not "
                                    "compare. Give the corpus back, or begin a new run")
    held_out = corpus.held_out_digest[:12]
    return proven("same data", f"the corpus is {corpus.digest[:12]} as before, its held-out text {held_out}")


def _global_rows(order: Order, first: int, count: int) -> NDArray[np.int64]:
    """The windows of `count` rows of the run from row `first` on, whichever rank reads them."""
    a_step = order.rows * order.world
    steps = range(first // a_step, -(-(first + count) // a_step))
    rows = [replace(order, rank=rank).consumed(step) for step in steps for rank in range(order.world)]
    return np.concatenate(rows)[first % a_step :][:count]


def _whose(had: list[int | str], order: Order | PackedExamples, step: int) -> str:
    near = {*range(min(NEARBY, order.steps)), *range(max(0, step - NEARBY), min(step + NEARBY, order.steps))}
    owners = [other for other in sorted(near) if order.consumed(other).tolist() == had]
    return f", which are those of step {owners[0]}" if owners else ""


def _shown(ids: Sequence[int | str]) -> str:
    return ", ".join(map(str, ids[:4])) + (", …" if len(ids) > 4 else "")
