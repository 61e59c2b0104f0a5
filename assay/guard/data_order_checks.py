"""Data order checks: each step reads its own part of the corpus, every part once an epoch, in another order each time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from assay.data.mixture import MixedDraws, MixedExamples, MixedOrder
from assay.data.order import Order
from assay.data.packing import PackedExamples
from assay.data.token_corpus import Corpus
from assay.learn.loop import Step
from assay.verdict import Verdict, proven, refuted

PLACES = 4096  # of an epoch that `check_epoch_order` looks at: all of a small corpus, a sample of a large one
ENOUGH_ROWS = 16  # of a source, for two readings in one order to be no chance
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
    """Check that no window comes twice in an epoch, on whatever rank, and that the next epoch has an order of its own."""
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


@dataclass
class SourceCount:
    """Counts of one source of a mixture: rows, ids in their order, trained tokens, and when it had been read completely."""

    rows: int = 0
    read: list[int] = field(default_factory=list)  # examples or windows, by number
    learned: float = 0.0
    whole_at: int | None = None  # the step, counted from 1, with which it had been read once


def check_mixture(order: MixedExamples | MixedOrder | MixedDraws, steps: int) -> Verdict:
    """Check the mixture of the first `steps` steps (of prompts: rollouts), counted row by row: every source has its share, to a row or so;
    it is read whole before anything of it is read again, and in another order then."""
    names, sizes = source_sizes(order)
    found, total = [SourceCount() for _ in names], sum(order.shares)
    for step in range(steps):
        for numbers, learned in rows_of_step(order, step):
            source = order.source_of(numbers[0])
            here = found[source]
            here.rows, here.learned = here.rows + 1, here.learned + learned
            here.read += numbers
            if here.whole_at is None and len(here.read) >= sizes[source]:
                here.whole_at = step + 1
            rows = sum(each.rows for each in found)
            worst = max(abs(each.rows - rows * share / total) for each, share in zip(found, order.shares, strict=True))
            if worst > len(names):
                shown = _shares_in_words(names, found, order.shares, sizes)
                return refuted("mixture", f"step {step + 1}: {shown}: {worst:.0f} rows away from its share; a source ran out, and the "
                                          "others took its place, or rows were drawn otherwise", step=step + 1)
    for name, size, each in zip(names, sizes, found, strict=True):
        if (wrong := _odd_reading(each.read, size, rows=each.rows * size // max(len(each.read), 1))) is not None:
            return refuted("mixture", f"{name}: {wrong}", source=name)
    return proven("mixture", _shares_in_words(names, found, order.shares, sizes), steps=steps, sources={
        name: {"rows": each.rows, "asked": share / total, "learned_tokens": each.learned, "times_read": len(each.read) / size,
               "whole_at_step": each.whole_at} for name, share, size, each in zip(names, order.shares, sizes, found, strict=True)})


def source_sizes(order: MixedExamples | MixedOrder | MixedDraws) -> tuple[list[str], list[int]]:
    """Names of the sources, and how many examples, prompts or windows each has."""
    if isinstance(order, MixedExamples | MixedDraws):
        return [source.name for source in order.sources], [source.size for source in order.sources]
    return [str(corpus.folder) for corpus in order.corpora], [each.windows for each in order.orders]


def rows_of_step(order: MixedExamples | MixedOrder | MixedDraws, step: int) -> list[tuple[list[int], float]]:
    """Each row's examples by number, and how much of it is learned; of a window, nearly all, and of a prompt nothing."""
    if isinstance(order, MixedDraws):
        return [([prompt], 0.0) for prompt in order.drawn(step)]
    if isinstance(order, MixedExamples):
        return [(row, float(sum(order.examples[index].weight.sum() for index in row))) for row in order.plan(step)]
    return [([window], float(order.length - 1)) for window in order.consumed(step).tolist()]


def _odd_reading(read: Sequence[int], size: int, rows: int) -> str | None:
    """Message where something was read again before the rest was read, or in the same order as before, else None. Of few rows the same
    order may come twice by itself."""
    epochs = [read[start : start + size] for start in range(0, len(read), size)]
    for number, epoch in enumerate(epochs):
        often = Counter(epoch).most_common(1)[0]
        if often[1] > 1:
            return (f"part {often[0]} is read {often[1]} times in reading {number + 1}, before all {size} were read: a part of it is "
                    "replayed, and another never comes")
        if rows >= ENOUGH_ROWS and len(epoch) == size and epoch in epochs[:number]:
            return f"reading {number + 1} has the order of an earlier one: it is not shuffled anew"
    return None


def _shares_in_words(names: Sequence[str], found: Sequence[SourceCount], shares: Sequence[int], sizes: Sequence[int]) -> str:
    rows, learned = sum(each.rows for each in found), sum(each.learned for each in found)
    return "; ".join(f"{name}: {each.rows} of {rows} rows ({each.rows / max(rows, 1):.1%}, asked for {share / sum(shares):.1%})"
                     + (f", {each.learned / learned:.1%} of the learned tokens" if learned else "")
                     + (f", read whole by step {each.whole_at}" if each.whole_at is not None else "")
                     + (f" and {len(each.read) / size:.1f} times in all" if len(each.read) > size else "")
                     for name, each, share, size in zip(names, found, shares, sizes, strict=True))


def check_same_data(recorded: str, corpus: Corpus) -> Verdict:
    """Check that a resumed run has the corpus it began with: its training text, and the held-out text it is scored on."""
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
