"""Activation statistics of a forward pass: each site's mean, spread, extremes and NaNs, on the usual path.

    seen = trace_activations(plain_forward(model), tokens)
    seen[Site(3, "product")].std

Statistics are taken as the values pass by; no copy of them is kept. `first_divergence.py` compares two such passes.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from assay.model.transformer import Transformer
from assay.tracing.forward_modes import ForwardMode, plain_forward
from assay.tracing.hooks import ENTROPY, Site

CACHED = 1 << 17  # values at a time: a CPU's cache holds them between one operation and the next
FAR = 4.0  # a squared mean of so many variances costs a digit
STATISTICS = ("mean", "std", "rms", "max", "kurtosis", "nans")


@dataclass(frozen=True)
class SiteStatistics:
    """Activation statistics over all tokens and features of a site. `max` is of absolute values; a normal distribution's `kurtosis` is
    3."""

    mean: float
    std: float
    rms: float
    max: float
    kurtosis: float
    nans: float  # how many values are not finite; the other numbers are then not finite either


Trace = dict[Site, SiteStatistics]


def trace_activations(model: Transformer | ForwardMode, tokens_BT: Tensor) -> Trace:
    """Trace the activations of one forward pass. A Transformer is run plainly; `forward_modes.py` has other ways."""
    run = plain_forward(model) if isinstance(model, Transformer) else model
    seen: dict[Site, Tensor] = {}

    def look(site: Site, value: Tensor, start: int) -> None:
        assert site not in seen, f"{site} came twice: a trace is of one forward pass over all tokens"
        seen[site] = moments(value[..., ENTROPY] if site.name == "scores" else value)

    run(tokens_BT, look)
    rows = torch.stack(list(seen.values())).tolist()  # read back once: a GPU is not made to wait at every site
    return {site: SiteStatistics(**dict(zip(STATISTICS, row, strict=True))) for site, row in zip(seen, rows, strict=True)}


def moments(value: Tensor) -> Tensor:
    """FIELDS, as a tensor on the value's device."""
    value = value.detach()
    return centred_moments(value) if value.is_cuda else streamed_moments(value.flatten(0, -2) if value.dim() > 1 else value[None])


def centred_moments(value: Tensor) -> Tensor:
    """Mean first, then powers of what differs from it. Anything may be in `value`."""
    x = value.to(torch.promote_types(value.dtype, torch.float32))
    mean = x.mean()
    squares = (x - mean).square_()
    variance = squares.mean()
    kurtosis = squares.square().mean() / variance.square()
    bad = x.numel() - x.isfinite().sum()
    return torch.stack([mean, variance.sqrt(), (variance + mean.square()).sqrt(), x.abs().max(), kurtosis, bad.to(x.dtype)]).double()


def streamed_moments(rows: Tensor) -> Tensor:
    """Moments from sums of powers, some rows at a time while they are in the cache: a CPU waits for memory, not for arithmetic.

    A mean far from zero, or a value that is not finite, would spoil the sums; then the slower way is taken.
    """
    n, largest, powers = rows.numel(), 0.0, [0.0] * 4
    wide, at_once = torch.promote_types(rows.dtype, torch.float32), max(1, CACHED // rows.shape[1])
    room = torch.empty(min(n, at_once * rows.shape[1]), dtype=wide)
    for part in rows.split(at_once):
        x = part.to(wide).reshape(-1)
        squares = torch.mul(x, x, out=room[: len(x)])
        sums = x.sum(), torch.dot(x, x), torch.dot(squares, x), torch.dot(squares, squares)
        powers = [total + float(one) for total, one in zip(powers, sums, strict=True)]
        largest = max(largest, float(squares.max()))
    mean, second, third, fourth = (total / n for total in powers)
    variance = second - mean**2
    if not (0 < variance < math.inf and mean**2 <= FAR * variance):
        return centred_moments(rows)
    kurtosis = (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / variance**2
    return torch.tensor([mean, variance**0.5, second**0.5, largest**0.5, kurtosis, 0.0], dtype=torch.float64)


def trace_json(seen: Trace) -> list[dict[str, Any]]:
    return [{"site": str(site), "layer": site.layer, "name": site.name, **asdict(stats)} for site, stats in seen.items()]
