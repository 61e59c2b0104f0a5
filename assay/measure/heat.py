"""A trace as a picture: sites down, layers across; what is compared is shaded by how far it is above or below its bound."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.measure.parting import Comparison
from assay.measure.sites import IN_LAYER, Site
from assay.measure.trace import Trace
from assay.store import durable

Cells = dict[Site, float]
Panel = tuple[str, Cells, str, float | None]  # title, values, colours, and how far they reach on both sides of 0


def draw_trace(seen: Trace, where: Path) -> None:
    """A PNG at `where`, whole or not at all."""
    panels: list[Panel] = [
        ("root mean square (log10)", {site: _log(stats.rms) for site, stats in seen.items()}, "viridis", None),
        ("largest value over root mean square (log10)", {s: _log(t.max / t.rms) if t.rms else math.nan for s, t in seen.items()},
         "magma", None)]
    durable.replace_file(where, _rendered(panels, f"{len(seen)} sites"))


def draw_comparison(found: Comparison, where: Path) -> None:
    introduced = {gap.site: _log(gap.excess) for gap in found.gaps}
    free = {gap.site: _log(gap.free.error) for gap in found.gaps}
    first = found.first
    title = "no site parts"
    if first is not None:
        title = f"{first.site} is the first that parts: {first.introduced.worst:.1e}, bound {first.bound:.1e}"
    panels: list[Panel] = [
        ("introduced at the site, over its bound (log10): above 0 it parts", introduced, "coolwarm", 6.0),
        ("relative error, each from its own inputs (log10)", free, "viridis", None)]
    durable.replace_file(where, _rendered(panels, title))


def _rendered(panels: Sequence[Panel], title: str) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("matplotlib draws the map and is not installed; pip install matplotlib, or use --json") from None
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        _panel(figure, axes, *panel)
    figure.suptitle(title, fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _panel(figure: Any, axes: Any, title: str, cells: Cells, colours: str, around: float | None) -> None:
    """One map; `around`: shades are even on both sides of 0, up to this."""
    layers = [site.layer for site in cells if site.layer is not None]
    names = [name for name in IN_LAYER if any(site.name == name for site in cells)]
    table = [[cells.get(Site(layer, name), math.nan) for layer in range(max(layers) + 1)] for name in names]
    limits = {} if around is None else {"vmin": -around, "vmax": around}
    image = axes.imshow(table, aspect="auto", cmap=colours, interpolation="nearest", **limits)
    ends = "   ".join(f"{site.name} {value:.1f}" for site, value in cells.items() if site.layer is None)
    axes.set_title(f"{title}\n{ends}", fontsize=8)
    axes.set_xlabel("layer")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(image, ax=axes)


def _log(value: float) -> float:
    """Of nothing and of what is not finite: the ends of any scale."""
    if not math.isfinite(value):
        return 12.0
    return math.log10(value) if value > 0 else -12.0
