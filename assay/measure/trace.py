"""What a forward pass looks like from inside: every site's mean, spread, extremes and NaNs, on the path that everything else uses.

    seen = trace(plainly(model), tokens)
    seen[Site(3, "product")].std

Statistics are taken as the values pass by; no copy of them is kept. `parting.py` compares two such passes.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from assay.measure.sites import Site
from assay.measure.tap import ENTROPY
from assay.measure.ways import Runner, plainly
from assay.model.transformer import Transformer

FIELDS = ("mean", "std", "rms", "max", "kurtosis", "nans")


@dataclass(frozen=True)
class Stats:
    """Over all tokens and features of a site. `max` is of absolute values; a normal distribution's `kurtosis` is 3."""

    mean: float
    std: float
    rms: float
    max: float
    kurtosis: float
    nans: int  # values that are not finite; the other numbers are then not finite either


Trace = dict[Site, Stats]


def trace(model: Transformer | Runner, tokens_BT: Tensor) -> Trace:
    """One forward pass. A Transformer is run plainly; `ways.py` has others."""
    run = plainly(model) if isinstance(model, Transformer) else model
    seen: dict[Site, Tensor] = {}

    def look(site: Site, value: Tensor, start: int) -> None:
        assert site not in seen, f"{site} came twice: a trace is of one forward pass over all tokens"
        seen[site] = moments(value[..., ENTROPY] if site.name == "scores" else value)

    run(tokens_BT, look)
    rows = torch.stack(list(seen.values())).tolist()  # read back once: a GPU is not made to wait at every site
    return {site: Stats(*row[:-1], int(row[-1])) for site, row in zip(seen, rows, strict=True)}


def moments(value: Tensor) -> Tensor:
    """FIELDS, as a tensor on the value's device: two passes, centred, so that a large mean costs no digits."""
    x = value.detach().to(torch.promote_types(value.dtype, torch.float32)).reshape(-1)
    n = x.numel()
    mean = x.mean()
    squares = (x - mean).square_()
    variance = squares.mean()
    kurtosis = torch.dot(squares, squares) / n / variance.square()
    low, high = torch.aminmax(x)
    bad = n - x.isfinite().sum()
    return torch.stack([mean, variance.sqrt(), (variance + mean.square()).sqrt(), torch.maximum(high, -low), kurtosis, bad.to(x.dtype)])


def trace_json(seen: Trace) -> list[dict[str, Any]]:
    return [{"site": str(site), "layer": site.layer, "name": site.name, **asdict(stats)} for site, stats in seen.items()]
