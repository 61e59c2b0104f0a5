"""The data ledger: which examples a run consumed and how often, and whether that is what it was meant to consume."""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from assay.data.batch import Batch, Ids
from assay.errors import DataError
from assay.verdict import Verdict, proven, refuted

SHOWN = 5


class DataLedger:
    """Fed by the loop with what it really trained on; steps must follow one another, each once."""

    def __init__(self, start: int = 0):
        self.start = self.next = start
        self.counts: Counter[Hashable] = Counter()
        self.tokens = 0.0  # predicted, by weight

    def record(self, step: int, batch: Batch) -> str:
        """The step's digest of ids, for the metrics: a resumed run can be compared with it, step by step."""
        if step != self.next:
            raise DataError(f"step {step} consumed data after step {self.next - 1}; expected step {self.next}: "
                            "a step was skipped or taken twice")
        if not batch.ids:
            raise DataError(f"step {step}: the batch does not say which examples it holds, so they cannot be counted")
        self.next += 1
        self.counts.update(id for row in batch.ids for id in row)
        self.tokens += float(batch.weight.sum())
        return ids_digest(batch.ids)

    def repeats(self) -> dict[int, int]:
        """How many examples were consumed once, twice, …"""
        return dict(sorted(Counter(self.counts.values()).items()))

    def verdict(self, planned: Iterable[Iterable[Hashable]]) -> Verdict:
        """Against the ids of the steps it recorded, as the order of the data gives them."""
        return consumed_as_planned(planned, [self.counts.elements()])


def ids_digest(ids: Ids) -> str:
    """Equal for the same examples in the same rows and order."""
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def consumed_as_planned(planned: Iterable[Iterable[Hashable]], recorded: Iterable[Iterable[Hashable]]) -> Verdict:
    """Every example as often as planned: none lost on a resume, none read again because a position was not kept."""
    due, had = (Counter(id for ids in side for id in ids) for side in (planned, recorded))
    lost, surplus = due - had, had - due
    if lost or surplus:
        return refuted("data-ledger", f"{lost.total()} examples lost, {surplus.total()} consumed too often; "
                       f"lost {_shown(lost)}, surplus {_shown(surplus)}", lost=lost.total(), surplus=surplus.total())
    return proven("data-ledger", f"{due.total()} examples consumed, each as often as planned", examples=due.total())


def ranks_disjoint(by_rank: Sequence[Iterable[Hashable]]) -> Verdict:
    """No example is read by two ranks or workers of one step."""
    readers: dict[Hashable, set[int]] = {}
    for rank, ids in enumerate(by_rank):
        for id in ids:
            readers.setdefault(id, set()).add(rank)
    shared = Counter(id for id, ranks in readers.items() if len(ranks) > 1)
    if shared:
        return refuted("ranks-disjoint", f"{len(shared)} of {len(readers)} examples are read by more than one rank: "
                       f"{_shown(shared)}", shared=len(shared), examples=len(readers))
    return proven("ranks-disjoint", f"{len(readers)} examples, each read by one of {len(by_rank)} ranks",
                  examples=len(readers))


def reshuffled(epochs: Sequence[Sequence[Hashable]]) -> Verdict:
    """Every epoch reads the same examples in an order of its own."""
    orders = [ids_digest((tuple(ids),)) for ids in epochs]  # type: ignore[arg-type]
    again = [epoch for epoch, order in enumerate(orders) if order in orders[:epoch]]
    if again:
        return refuted("reshuffled", f"epoch {again[0]} reads in the order of epoch {orders.index(orders[again[0]])}",
                       orders=orders)
    if any(Counter(ids) != Counter(epochs[0]) for ids in epochs[1:]):
        return refuted("reshuffled", "the epochs do not read the same examples", orders=orders)
    return proven("reshuffled", f"{len(epochs)} epochs, each in an order of its own", orders=orders)


def _shown(ids: Counter[Hashable]) -> str:
    shown = ", ".join(str(id) for id in list(ids)[:SHOWN])
    return (shown + (", …" if len(ids) > SHOWN else "")) or "none"
