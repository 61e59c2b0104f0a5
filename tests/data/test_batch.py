"""A batch: aligned streams, nothing weighted that nothing predicts."""

import pytest
import torch

from assay.data.batch import Batch
from assay.errors import DataError


def batch(**changed: object) -> Batch:
    streams = {"tokens": torch.arange(12).view(3, 4), "weight": torch.tensor([[0.0, 1, 0, 1]] * 3),
               "documents": torch.tensor([[0, 0, 1, 1]] * 3, dtype=torch.int32),
               "positions": torch.tensor([[0, 1, 0, 1]] * 3, dtype=torch.int32), "ids": ((1,), (2, 3), ("d",))}
    return Batch(**{**streams, **changed})  # type: ignore[arg-type]


def test_parts_are_the_whole() -> None:
    whole = batch(advantage=torch.rand(3, 4), teacher_ids=torch.arange(24, dtype=torch.int32).view(3, 4, 2))
    parts = list(whole.split(2))
    assert [len(part) for part in parts] == [2, 1]
    assert sum((part.ids for part in parts), ()) == whole.ids
    for name, stream in whole.streams().items():
        assert torch.equal(torch.cat([part.streams()[name] for part in parts]), stream)
    assert next(Batch(whole.tokens, whole.weight).split(2)).documents is None
    assert batch().to("cpu").streams().keys() == {"tokens", "weight", "documents", "positions"}
    with pytest.raises(DataError, match="parts of 0 rows"):
        list(whole.split(0))


@pytest.mark.parametrize(("changed", "said"), [
    ({"weight": torch.zeros(3, 5)}, r"weight has shape \(3, 5\)"),
    ({"tokens": torch.arange(4)}, "rows, length"),
    ({"positions": torch.zeros(3, 4)}, "positions is torch.float32"),
    ({"tokens": torch.zeros(3, 4)}, "tokens is torch.float32"),
    ({"ids": ((1,),)}, "ids for 1"),
    ({"advantage": torch.zeros(3, 4, 1)}, r"advantage has shape \(3, 4, 1\)"),
    ({"teacher_ids": torch.zeros(3, 4, dtype=torch.int32)}, "rows, length, entries"),
    ({"teacher_ids": torch.zeros(3, 4, 2)}, "teacher_ids is torch.float32"),
    ({"weight": torch.ones(3, 4)}, "column 0 has weight 1"),
    ({"weight": torch.tensor([[0.0, 1, 0, 1], [0, 0, 0.5, 0], [0, 0, 0, 0]])}, "row 1, column 2: the first token"),
    ({"documents": torch.tensor([[0, 0, 1, -1]] * 3, dtype=torch.int32)}, "row 0, column 3: the first token of a document, or padding")])
def test_what_cannot_be_right_is_refused(changed: dict, said: str) -> None:
    with pytest.raises(DataError, match=said):
        batch(**changed)


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="no token"):
        Batch(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4))
