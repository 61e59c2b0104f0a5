"""Closed-form solves of editing, in float64: the change of one matrix that gives these keys these values.

Shapes: D values, F keys, n edits. `residuals_Dn` is what each edit's value lacks, `keys_Fn` what stands for it at the
matrix's input. Every solution is left_Dn @ right_nF: its rank is at most the number of edits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from assay.errors import DataError
from assay.model.patch import LowRank

FLOOR = 1e-6  # of the mean squared key: what a direction counts that the text never takes, so that C has an inverse


class Factors(NamedTuple):
    left_Dn: Tensor
    right_nF: Tensor

    def delta(self) -> Tensor:
        return self.left_Dn @ self.right_nF


def solve_memit(residuals_Dn: Tensor, keys_Fn: Tensor, penalty_FF: Tensor) -> Factors:
    """Δ = R Kᵀ (P + K Kᵀ)⁻¹, which minimises tr(Δ P Δᵀ) + ‖Δ K − R‖²: MEMIT with P = λ C."""
    keys = keys_Fn.double()
    factor, failed = torch.linalg.cholesky_ex(penalty_FF.double() + keys @ keys.T)
    if failed:
        raise DataError(f"what must stay is no positive matrix (at row {int(failed)} of {len(keys)}): the second moments are damaged "
                        "or all zero; compute them again, on text of the model's language")
    return Factors(residuals_Dn.double(), torch.cholesky_solve(keys, factor).T)


def solve_rome(residual_D: Tensor, key_F: Tensor, moment_FF: Tensor) -> Factors:
    """Δ = r (C⁻¹k)ᵀ / (kᵀC⁻¹k): ROME. One key in the solve and in the denominator, so that Δ k = r exactly.

    The original averaged the key over prefixes in one of the two places only; the denominator could come out near zero,
    and one edit then destroyed the model.
    """
    key = key_F.double()
    direction = solve_memit(residual_D[:, None], key[:, None],
                            floored_moment(moment_FF)).right_nF[0]  # C⁻¹k up to scale, by Sherman and Morrison
    return Factors(residual_D.double()[:, None], (direction / (direction @ key))[None])


def moment_penalty(moment_FF: Tensor, weight: float, earlier_Fm: Tensor | None) -> Tensor:
    """Penalty for what must stay: `weight` times the text's keys and the keys of earlier edits, so that two solves equal one joint
    solve."""
    penalty = weight * floored_moment(moment_FF)
    return penalty if earlier_Fm is None else penalty + earlier_Fm.double() @ earlier_Fm.double().T


def floored_moment(moment_FF: Tensor) -> Tensor:
    moment = moment_FF.double()
    return moment + FLOOR * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)


def null_space_projector(moment_FF: Tensor, share: float) -> Tensor:
    """The projector onto the directions in which text has the least: together at most `share` of its squared length."""
    values, vectors = torch.linalg.eigh(moment_FF.double())
    kept = values.clamp(min=0).cumsum(0) <= share * values.clamp(min=0).sum()
    if not kept.any():
        raise DataError(f"no direction of the keys holds less than {share:g} of the text's; raise the share, or use --method memit")
    return vectors[:, kept] @ vectors[:, kept].T


def solve_alphaedit(projector_FF: Tensor, residuals_Dn: Tensor, keys_Fn: Tensor, ridge: float, earlier_Fm: Tensor | None) -> Factors:
    """AlphaEdit: Δ moves keys inside the null space alone. `ridge` is relative to the projected keys' mean squared length."""
    keys = projector_FF @ keys_Fn.double()
    identity = torch.eye(len(keys), dtype=torch.float64)
    floor = ridge * float(keys.square().sum(0).mean())
    earlier = None if earlier_Fm is None else projector_FF @ earlier_Fm.double()
    return solve_memit(residuals_Dn, keys, moment_penalty(identity, floor, earlier))


def as_low_rank(factors: Factors) -> LowRank:
    """Solved factors as a LowRank patch in fp32, as patches are applied. Where there are more edits than dimensions, the product itself is
    the smaller thing to keep."""
    left, right = factors
    if left.shape[1] > min(left.shape[0], right.shape[1]):
        left, right = torch.eye(len(left), dtype=torch.float64), factors.delta()
    return LowRank(0, len(left), left.float(), right.float(), 1.0)
