"""Weights are compared element by element, and the rank of a difference is found through the rounding on top of it."""

import math

import pytest
import torch

from assay.comparison.weights_diff import SKETCH, diff_weights, rank_of, tensor_diff, weights_diff_json
from assay.seeds import generator


def drawn(*shape: int, name: str = "w") -> torch.Tensor:
    return torch.randn(shape, generator=generator(0, name, *shape))


def low_rank(rows: int, columns: int, rank: int) -> torch.Tensor:
    return drawn(rows, rank, name="left") @ drawn(rank, columns, name="right")


def test_what_is_said_of_one_tensor():
    a = drawn(40, 30)
    b = a.clone()
    b[3, 4] += 0.5
    found = tensor_diff("w", a, b)
    assert found.relative == pytest.approx(0.5 / float(a.norm()), rel=1e-5)
    assert found.cosine == pytest.approx(float((a * b).sum() / (a.norm() * b.norm())), rel=1e-5)
    assert found.moved == 1 / 1200
    assert found.largest == pytest.approx(0.5)
    assert (str(found.rank), found.rank.most) == ("1", pytest.approx(1.0))


def test_tensors_are_sorted_and_names_of_one_side_are_said():
    a = {"near": drawn(8, 8), "far": drawn(8, 8), "same": drawn(4), "gone": drawn(2), "shape": drawn(3, 2)}
    b = {"near": a["near"] + 0.001, "far": a["far"] + 1, "same": a["same"], "new": drawn(2), "shape": drawn(2, 3)}
    found = diff_weights(a, b)
    assert [one.name for one in found.tensors] == ["far", "near", "same"]
    assert (found.only_a, found.only_b, found.other_shape) == (["gone"], ["new"], ["shape"])
    assert not found.same
    assert found.tensors[-1].rank is None
    assert diff_weights(a, dict(a)).same
    assert weights_diff_json(found)["tensors"][0]["rank"]["value"] >= 1


@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (700, 900)])
@pytest.mark.parametrize("rank", [1, 8, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rank_of_an_adapter_is_found_through_rounding(rows: int, columns: int, rank: int, dtype: torch.dtype):
    """Small by all singular values, large by a sketch."""
    a = drawn(rows, columns).to(dtype)
    found = tensor_diff("w", a, (a.float() + 0.2 * low_rank(rows, columns, rank)).to(dtype))
    assert found.rank == (rank, False, pytest.approx(found.rank.most))


def test_a_sketch_says_at_least_where_it_cannot_count():
    full = rank_of(drawn(700, 900).double(), 1e-9)
    assert full.at_least
    assert str(full) == f"≥ {SKETCH}"
    assert rank_of(drawn(300, 900).double(), 1e-9) == (300, False, pytest.approx(0.0, abs=0.1))


def test_zeros_and_nans_are_not_numbers_of_agreement():
    zero = tensor_diff("z", torch.zeros(4, 4), torch.ones(4, 4))
    assert zero.relative == math.inf
    assert math.isnan(zero.cosine)
    spoiled = torch.ones(4, 4)
    spoiled[0, 0] = math.nan
    found = tensor_diff("n", torch.ones(4, 4), spoiled)
    assert math.isnan(found.relative)
    assert found.moved == 1 / 16
    assert not diff_weights({"n": torch.ones(4, 4)}, {"n": spoiled}).same
