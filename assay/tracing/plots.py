"""Plots as PNG files beside their numbers: activations, divergence of two passes, causal traces, test-time training."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.editing.causal_tracing import GROUPS, IndirectEffects
from assay.errors import UsageError
from assay.statistics.estimate import Estimate
from assay.store import durable
from assay.tracing.activations import Trace
from assay.tracing.first_divergence import PassDivergence
from assay.tracing.hooks import IN_LAYER, Site

Cells = dict[Site, float]
Panel = tuple[str, Cells, str, float | None]  # title, values, colours, and how far they reach on both sides of 0


def draw_activations(seen: Trace, where: Path) -> None:
    """Sites down, layers across, by size and by largest value. Every plot is a PNG at `where`, whole or not at all."""
    largest = {site: _log(stats.max / stats.rms) if stats.rms else math.nan for site, stats in seen.items()}
    _draw_maps(where, f"{len(seen)} sites", [
        ("root mean square (log10)", {site: _log(stats.rms) for site, stats in seen.items()}, "viridis", None),
        ("largest value over root mean square (log10)", largest, "magma", None)])


def draw_divergence(found: PassDivergence, where: Path) -> None:
    """Shaded by how far each site is above or below its bound, and by the error that it has from its own inputs."""
    title = "no site diverges"
    if (first := found.first) is not None:
        title = f"{first.site} is the first that diverges: {first.introduced.worst:.1e}, bound {first.bound:.1e}"
    introduced = {gap.site: _log(gap.excess) for gap in found.gaps}
    _draw_maps(where, title, [
        ("introduced at the site, over its bound (log10): above 0 it diverges", introduced, "coolwarm", 6.0),
        ("relative error, each from its own inputs (log10)", {gap.site: _log(gap.free.error) for gap in found.gaps}, "viridis", None)])


def draw_causal_trace(effects: IndirectEffects, chosen: list[int], where: Path) -> None:
    """Groups of tokens down, layers across, indirect effect as shade."""
    figure = _figure(13, 3.6)
    titles = (("one state put back", effects.state), (f"{effects.window} MLPs put back, from this layer on", effects.mlp))
    for axes, (title, table) in zip(figure.subplots(1, 2), titles, strict=True):
        numbers = [[math.nan if value is None else value for value in row] for row in table]
        image = axes.imshow(numbers, aspect="auto", cmap="Purples", interpolation="nearest", vmin=0)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("layer")
        axes.set_yticks(range(len(GROUPS)), GROUPS, fontsize=8)
        figure.colorbar(image, ax=axes, label="indirect effect")
    axes.axvline(chosen[0], color="tab:red", linewidth=1)
    figure.suptitle(f"{len(effects.facts)} facts: probability of the answer {effects.clean:.2f}, subject blurred {effects.blurred:.2f}; "
                    f"layers {chosen[0]} to {chosen[-1]} chosen", fontsize=10)
    _write(figure, where)


def draw_ttt_savings(saved: Sequence[float], mean: Estimate, where: Path) -> None:
    """Bits per byte that test-time training saved, a bar per document."""
    figure = _figure(9, 3.4)
    axes = figure.subplots()
    axes.bar(range(1, len(saved) + 1), saved, color=["tab:purple" if value >= 0 else "tab:red" for value in saved])
    axes.axhspan(mean.low, mean.high, color="tab:gray", alpha=0.3, linewidth=0)
    axes.axhline(mean.mean, color="black", linewidth=1)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlabel("document, in order")
    axes.set_ylabel("bits per byte saved")
    worse = sum(value < 0 for value in saved)
    axes.set_title(f"test-time training saved {mean} bits per byte; {worse} of {len(saved)} documents got worse", fontsize=10)
    _write(figure, where)


def _draw_maps(where: Path, title: str, panels: Sequence[Panel]) -> None:
    figure = _figure(13, 4.6)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        _draw_map(figure, axes, *panel)
    figure.suptitle(title, fontsize=10)
    _write(figure, where)


def _draw_map(figure: Any, axes: Any, title: str, cells: Cells, colours: str, around: float | None) -> None:
    """Sites of a layer down, layers across; `around`: shades are even on both sides of 0, up to this."""
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


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("matplotlib draws the picture and is not installed; pip install matplotlib, or read the JSON") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Any, where: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    durable.replace_file(where, buffer.getvalue())


def _log(value: float) -> float:
    """log10 for a plot; 0 and values that are not finite become the ends of any scale."""
    if not math.isfinite(value):
        return 12.0
    return math.log10(value) if value > 0 else -12.0
