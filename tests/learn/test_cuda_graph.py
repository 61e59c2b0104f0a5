"""CUDA graphs of a micro-batch, as far as a CPU can tell: which batches share a graph. What a graph computes is tested on a GPU."""

import pytest
import torch

from assay.data.batch import Batch
from assay.learn.cuda_graph import GraphedAccumulate
from assay.model.attention import document_starts


def with_documents(count: int, *, rows: int = 4, columns: int = 64) -> Batch:
    documents = (torch.arange(rows * columns) * count // (rows * columns)).view(rows, columns).int()
    return Batch(torch.zeros(rows, columns, dtype=torch.long), torch.zeros(rows, columns), documents, starts=document_starts(documents))


def same_starts(one: Batch, other: Batch) -> bool:
    return one.starts is not None and other.starts is not None and torch.equal(one.starts, other.starts)


def test_a_batch_of_a_few_documents_more_has_as_many_starts():
    assert len({len(with_documents(count).starts) for count in (114, 120, 128, 140, 200, 226)}) == 1  # type: ignore[arg-type]


def test_a_batch_with_fewer_starts_is_given_those_of_one_before():
    """The end repeated: documents of no tokens."""
    graphs, many, few, least = GraphedAccumulate(), with_documents(120), with_documents(90), with_documents(9)
    assert many.starts is not None
    assert few.starts is not None
    assert len(many.starts) == 2 * len(few.starts) - 1
    assert same_starts(graphs._with_known_starts(few), few)
    assert same_starts(graphs._with_known_starts(many), many)
    again = graphs._with_known_starts(few).starts
    assert again is not None
    assert torch.equal(again[: len(few.starts)], few.starts)
    assert len(again) == len(many.starts)
    assert set(again[len(few.starts):].tolist()) == {few.tokens.numel()}
    assert same_starts(graphs._with_known_starts(least), least), "four times as many would cost more than a graph"
    other = with_documents(90, columns=32)
    assert same_starts(graphs._with_known_starts(other), other), "another shape has a graph of its own anyway"
    plain = Batch(many.tokens, many.weight)
    assert graphs._with_known_starts(plain) is plain


def test_what_graphs_hold_is_what_their_pool_keeps_and_nobody_uses(monkeypatch: pytest.MonkeyPatch):
    segments = [{"segment_pool_id": (0, 0), "total_size": 900, "allocated_size": 100},
                {"segment_pool_id": (0, 7), "total_size": 500, "allocated_size": 40},
                {"segment_pool_id": (0, 7), "total_size": 300, "allocated_size": 300}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    graphs = GraphedAccumulate()
    assert graphs.held_bytes() == 0
    graphs._pool = (0, 7)
    assert graphs.held_bytes() == 460
