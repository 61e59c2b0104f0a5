"""First divergence of two forward passes, and the weights behind it.

B runs twice over A's tokens. Once freely: how far apart are the two at every site? Once with A's values put in the place of its own
behind every site, so that each site is computed from the same inputs in both: what differs now was introduced right there, and
nothing is carried on. A site diverges where that exceeds what rounding explains, and rounding is measured on the model at hand: its
twin, A's own weights in another precision, is a clean pair by construction. What both have, massive activations included, is no fault.

Shapes: B rows, T time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.model.transformer import ModelConfig
from assay.tracing.forward_modes import ForwardMode
from assay.tracing.hooks import ROTATED, Site, WeightSlice, forward_sites, site_weights
from assay.verdict import Verdict, proven, refuted, unproven

_SAFETY = 8.0  # clean pairs stay below a third of it: other dtypes, batches, caches and transformers
_FAINT = 0.1  # of the median token's length: a shorter one is measured as if it had that


class Distance(NamedTuple):
    """Distance of two values of one site, token by token."""

    error: float  # ‖a − b‖ / ‖a‖ over all tokens
    cosine: float
    worst: float  # of any token: ‖a − b‖ / ‖a‖ there
    token: int  # where that is


@dataclass(frozen=True)
class SiteGap:
    """How B stands to A at one site."""

    site: Site
    free: Distance  # each from its own inputs
    introduced: Distance  # both from A's inputs
    bound: float  # on introduced.worst

    @property
    def diverges(self) -> bool:
        return not self.introduced.worst <= self.bound  # NaN diverges

    @property
    def excess(self) -> float:
        return self.introduced.worst / self.bound if math.isfinite(self.introduced.worst) else math.inf


@dataclass(frozen=True)
class ReferencePass:
    """A's values at every site, and what rounding does to each of them. `values` are as large as all activations together."""

    config: ModelConfig
    tokens: Tensor
    values: dict[Site, Tensor]
    dtype: torch.dtype
    floors: dict[Site, float] = field(default_factory=dict)

    @property
    def infinite(self) -> list[Site]:
        return [site for site, value in self.values.items() if not value.isfinite().all()]


@dataclass(frozen=True)
class PassDivergence:
    gaps: list[SiteGap]  # in the order of computation
    unseen: list[Site]  # sites that B does not show
    infinite: list[Site]  # sites where A itself is not finite

    @property
    def diverging(self) -> list[SiteGap]:
        return [gap for gap in self.gaps if gap.diverges]

    @property
    def first(self) -> SiteGap | None:
        return next(iter(self.diverging), None)


class WeightChange(NamedTuple):
    """A weight tensor behind a site, in A and in B."""

    behind: WeightSlice
    relative: float  # ‖b − a‖ / ‖a‖


def run_reference(config: ModelConfig, run: ForwardMode, tokens_BT: Tensor, dtype: torch.dtype,
                  twin: ForwardMode | None = None) -> ReferencePass:
    """A's pass, kept. `dtype` is what it computes in; `twin` runs the same weights in B's dtype, or in float64 where that is A's."""
    values: dict[Site, list[Tensor]] = {}

    def look(site: Site, value: Tensor, start: int) -> None:
        values.setdefault(site, []).append(value.detach().clone())

    run(tokens_BT, look)
    joined = {site: torch.cat(values[site], 1) for site in forward_sites(config) if site in values}
    kept = ReferencePass(config, tokens_BT, joined, dtype)
    return kept if twin is None else measure_floors(kept, twin)


def measure_floors(kept: ReferencePass, twin: ForwardMode) -> ReferencePass:
    """A's pass with what rounding does at every site, by the same weights in another dtype. A itself need not be in memory any more."""
    return replace(kept, floors={site: distance.worst for site, distance in site_distances(kept, twin, spliced=True).items()})


def compare_passes(a: ReferencePass, b: ForwardMode, dtype: torch.dtype, tolerance: float | None = None) -> PassDivergence:
    """`dtype` is what B computes in. `tolerance` bounds every site alike, for pairs that differ by more than rounding."""
    free, introduced = site_distances(a, b, spliced=False), site_distances(a, b, spliced=True)
    gaps = [SiteGap(site, free[site], introduced[site], tolerance or site_bound(a, site, dtype)) for site in a.values if site in introduced]
    return PassDivergence(gaps, [site for site in a.values if site not in introduced], a.infinite)


def site_bound(a: ReferencePass, site: Site, dtype: torch.dtype) -> float:
    """Error that may be introduced at a site: a multiple of the rounding that was seen, and what one operation may add.

    A rotation's angle is a position times a frequency, and is rounded to float32: its error grows with the position.
    """
    unit = max(torch.finfo(a.dtype).eps, torch.finfo(dtype).eps) / 2
    angles = a.tokens.shape[1] * torch.finfo(torch.float32).eps / 2 if site.name in ROTATED else 0.0
    return _SAFETY * max(a.floors.get(site, 0.0), unit + angles)


def site_distances(a: ReferencePass, run: ForwardMode, *, spliced: bool) -> dict[Site, Distance]:
    """Distance between two passes at every site that both have. `spliced`: behind each site the pass goes on with A's value."""
    sums: dict[Site, list[Tensor]] = {}

    def look(site: Site, value: Tensor, start: int) -> Tensor | None:
        if site not in a.values:
            return None
        wanted = a.values[site][:, start : start + value.shape[1]]
        sums.setdefault(site, []).append(_products(wanted, value))
        return wanted if spliced else None

    run(a.tokens, look)
    return {site: _distance(torch.cat(sums[site], 1)) for site in a.values if site in sums}


def weight_changes(site: Site, config: ModelConfig, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[WeightChange]:
    """The weights behind a site and how far they are apart, furthest first. None moved: it is the code that differs."""
    found = []
    for behind in site_weights(site, config):
        one, other = behind.of(a).detach().double(), behind.of(b).detach().double()
        found.append(WeightChange(behind, float((other - one).norm() / one.norm().clamp(min=1e-300))))
    return sorted(found, key=lambda moved: -moved.relative)


def check_forward(found: PassDivergence, moved: list[WeightChange] | None = None) -> Verdict:
    """B computes what A computes, at every site."""
    if found.infinite:
        return unproven("forward", f"A itself is not finite from {found.infinite[0]} on, so nothing can be compared there")
    if not found.gaps:
        return unproven("forward", "B shows none of A's sites, so nothing was compared")
    nearest = max(found.gaps, key=lambda gap: gap.excess)
    first = found.first
    if first is None:
        return proven("forward", f"{len(found.gaps)} sites agree: the most that any introduces is {nearest.introduced.worst:.1e}, "
                                 f"bound {nearest.bound:.1e} ({nearest.site})", unseen=[str(site) for site in found.unseen])
    return refuted("forward", f"{first.site} is the first that diverges: from the same inputs it is {first.introduced.worst:.1e} away "
                              f"(token {first.introduced.token}), bound {first.bound:.1e}{_weights(moved)}",
                   first=str(first.site), diverging=[str(gap.site) for gap in found.diverging], introduced=str(first.introduced.worst))


def gap_json(gap: SiteGap) -> dict[str, Any]:
    return {"site": str(gap.site), "layer": gap.site.layer, "name": gap.site.name, "error": gap.free.error, "cosine": gap.free.cosine,
            "introduced": gap.introduced.worst, "token": gap.introduced.token, "bound": gap.bound, "diverges": gap.diverges}


def _weights(moved: list[WeightChange] | None) -> str:
    if moved is None:
        return ""
    differ = [f"{m.behind.parameter} ({m.relative:.1e})" for m in moved if m.relative > 0]
    if differ:
        return f"; behind it differ {', '.join(differ)}"
    return "; the weights behind it are the same, so the code differs" if moved else "; no weights stand behind it, so the code differs"


def _products(a: Tensor, b: Tensor) -> Tensor:
    """(B, T, 4) in float64: a·a, b·b, a·b and the squared difference of every token."""
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    one, other = a.to(wide).flatten(2), b.to(wide).reshape(*a.shape[:2], -1)
    gap = one - other
    return torch.stack([(x * y).sum(-1) for x, y in ((one, one), (other, other), (one, other), (gap, gap))], -1).double()


def _distance(products_BT4: Tensor) -> Distance:
    aa, bb, ab, gap = products_BT4.flatten(0, 1).sum(0).tolist()
    lengths_BT = products_BT4[..., 0].sqrt()
    lengths_BT = lengths_BT.clamp(min=_FAINT * float(lengths_BT.median()))
    gaps_BT = products_BT4[..., 3].sqrt()
    worst_BT = torch.where(gaps_BT == 0, gaps_BT, gaps_BT / lengths_BT).nan_to_num(nan=math.inf)
    token = int(worst_BT.amax(0).argmax())
    error = 0.0 if gap == 0 else math.sqrt(gap / aa) if aa > 0 else math.inf
    return Distance(error, ab / math.sqrt(aa * bb) if aa > 0 and bb > 0 else math.nan, float(worst_BT.max()), token)
