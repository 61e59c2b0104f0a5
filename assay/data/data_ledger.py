"""The data ledger: which examples a run consumed and how often, counted from what every step wrote down of what it read."""

import hashlib
from collections import Counter
from collections.abc import Mapping

import numpy as np

from assay.data.batch import ExampleIds
from assay.data.order import Order
from assay.data.packing import PackedExamples
from assay.verdict import Verdict, proven, refuted


def ids_digest(ids: ExampleIds) -> str:
    """Digest of example ids, equal for the same examples in the same rows and order. A step writes down that of the batch it was given."""
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def check_data_ledger(recorded: Mapping[int, str], plan: Order | PackedExamples, steps: int) -> tuple[Verdict, dict[int, int]]:
    """Whether each of the first `steps` steps, over all sessions, consumed what was planned for it; and how many examples were
    read how often: {times: examples}, 0 for those that never were.

    A digest says which ids a step read because the plan can be asked for them: nothing else is kept while a run goes on.
    """
    read = []
    for step in range(steps):
        ids = plan.ids(step)
        due, had = ids_digest(ids), recorded.get(step)
        if had != due:
            words = "wrote nothing down" if had is None else f"wrote down that it read {had}, the plan has {due}"
            return refuted("data ledger", f"step {step} {words}: what the run consumed is not known", step=step), {}
        read.append(np.array([id for row in ids for id in row]))
    often = Counter(np.unique(np.concatenate(read), return_counts=True)[1].tolist()) if read else Counter[int]()
    times = {count: number for count, number in sorted({0: plan.parts - often.total(), **often}.items()) if number}
    shown = ", ".join(f"{number} {_times(count)}" for count, number in times.items())
    return proven("data ledger", f"{steps} steps consumed what was planned; of {plan.parts} examples: {shown}"), times


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
