"""The closed forms against their plain dense formulas in float64, and what must hold of them."""

import pytest
import torch
from torch import Tensor

from assay.editing.solve import FLOOR, as_low_rank, moment_penalty, null_space_projector, solve_alphaedit, solve_memit, solve_rome
from assay.errors import DataError
from assay.seeds import generator

D, F, N = 7, 24, 5


def drawn(*shape: int, name: str) -> Tensor:
    return torch.randn(*shape, generator=generator(0, name), dtype=torch.float64)


def moment(rank: int = 200) -> Tensor:
    keys = drawn(rank, F, name="text") * torch.linspace(3, 0.01, F, dtype=torch.float64)
    return keys.T @ keys / rank


def relative(found: Tensor, due: Tensor) -> float:
    return float((found - due).norm() / due.norm())


def test_the_joint_solve_is_the_dense_formula():
    residuals, keys, text = drawn(D, N, name="r"), drawn(F, N, name="k"), moment()
    dense = residuals @ keys.T @ torch.linalg.inv(50 * text + keys @ keys.T)
    found = solve_memit(residuals, keys, 50 * text)
    assert relative(found.delta(), dense) < 1e-10
    part = as_low_rank(found)
    assert part.left.shape == (D, N)
    assert relative(part.delta().double(), dense) < 1e-6


def test_it_is_the_least_of_its_neighbours():
    residuals, keys, penalty = drawn(D, N, name="r"), drawn(F, N, name="k"), 50 * moment()

    def cost(delta: Tensor) -> float:
        return float((delta @ penalty * delta).sum() + (delta @ keys - residuals).square().sum())

    best = solve_memit(residuals, keys, penalty).delta()
    assert all(cost(best) < cost(best + 1e-3 * drawn(D, F, name=f"step {i}")) for i in range(20))


def test_two_solves_are_one_joint_solve():
    """Where the second knows the first's keys and asks for what is still missing."""
    residuals, keys, text = drawn(D, N, name="r"), drawn(F, N, name="k"), moment()
    both = solve_memit(residuals, keys, moment_penalty(text, 30, None)).delta()
    first = solve_memit(residuals[:, :2], keys[:, :2], moment_penalty(text, 30, None)).delta()
    missing = residuals[:, 2:] - first @ keys[:, 2:]
    second = solve_memit(missing, keys[:, 2:], moment_penalty(text, 30, keys[:, :2])).delta()
    assert relative(first + second, both) < 1e-9
    forgetful = solve_memit(missing, keys[:, 2:], moment_penalty(text, 30, None)).delta()
    assert relative(first + forgetful, both) > 1e-3


def test_one_edit_gives_its_key_its_value_and_is_the_dense_formula():
    residual, key, text = drawn(D, name="r"), drawn(F, name="k"), moment()
    found = solve_rome(residual, key, text).delta()
    direction = torch.linalg.inv(text + FLOOR * text.diagonal().mean() * torch.eye(F)) @ key
    assert relative(found, torch.outer(residual, direction) / (key @ direction)) < 1e-6
    assert relative(found @ key, residual) < 1e-10


def test_the_null_space_leaves_text_alone():
    text, residuals, keys = moment(), drawn(D, N, name="r"), drawn(F, N, name="k")
    projector = null_space_projector(text, 0.02)
    assert relative(projector @ projector, projector) < 1e-10
    assert float((projector @ text).trace() / text.trace()) <= 0.02
    delta = solve_alphaedit(projector, residuals, keys, 1e-3, None).delta()
    assert relative(delta @ projector, delta) < 1e-8
    assert relative(delta @ keys, residuals) < 0.1
    strongest = torch.linalg.eigh(text).eigenvectors[:, -5:]
    assert float((delta @ strongest).norm() / delta.norm()) < 1e-8


def test_text_that_lacks_directions_still_has_an_inverse():
    residuals, keys = drawn(D, N, name="r"), drawn(F, N, name="k")
    assert relative(solve_memit(residuals, keys, moment_penalty(moment(rank=3), 1, None)).delta() @ keys, residuals) < 0.05


def test_what_is_no_moment_is_refused():
    with pytest.raises(DataError, match="no positive matrix"):
        solve_memit(drawn(D, N, name="r"), drawn(F, N, name="k"), -torch.eye(F))
    with pytest.raises(DataError, match="no direction of the keys holds less"):
        null_space_projector(torch.eye(4), 0.1)


def test_more_edits_than_values_are_kept_as_their_product():
    part = as_low_rank(solve_memit(drawn(D, 9, name="r"), drawn(F, 9, name="k"), moment()))
    assert part.left.shape == (D, D)
    assert relative(part.delta().double(), solve_memit(drawn(D, 9, name="r"), drawn(F, 9, name="k"), moment()).delta()) < 1e-6
