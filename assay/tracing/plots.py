"""Plots as PNG files beside their numbers: activations, divergence of two passes, causal traces, test-time training."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.edit.causal_tracing import GROUPS, IndirectEffects
from assay.errors import UsageError
from assay.statistics.estimate import Estimate
from assay.store import durable
from assay.tracing.activations import Trace
from assay.tracing.first_divergence import PassDivergence
from assay.tracing.hooks import IN_LAYER, Site

Cells = dict[Site, float]
Panel = tuple[str, Cells, str, float | None]  # title, values, colours, and how far they reach on both sides of 0


def draw_activations(seen: Trace, where: Path) -> None:
    """A PNG at `where`, whole or not at all."""
    panels: list[Panel] = [
        ("root mean square (log10)", {site: _log(stats.rms) for site, stats in seen.items()}, "viridis", None),
        ("largest value over root mean square (log10)", {s: _log(t.max / t.rms) if t.rms else math.nan for s, t in seen.items()},
         "magma", None)]
    durable.replace_file(where, _rendered(panels, f"{len(seen)} sites"))


def draw_divergence(found: PassDivergence, where: Path) -> None:
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


def draw_causal_trace(effects: IndirectEffects, chosen: list[int], where: Path) -> None:
    """A PNG at `where`, whole or not at all."""
    durable.replace_file(where, causal_trace_png(effects, chosen))


def causal_trace_png(effects: IndirectEffects, chosen: list[int]) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("matplotlib draws the map and is not installed; pip install matplotlib, or read the JSON") from None
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    titles = (("one state put back", effects.state), (f"{effects.window} MLPs put back, from this layer on", effects.mlp))
    for axes, (title, table) in zip(figure.subplots(1, 2), titles, strict=True):
        numbers = [[float("nan") if value is None else value for value in row] for row in table]
        image = axes.imshow(numbers, aspect="auto", cmap="Purples", interpolation="nearest", vmin=0)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("layer")
        axes.set_yticks(range(len(GROUPS)), GROUPS, fontsize=8)
        figure.colorbar(image, ax=axes, label="indirect effect")
    axes.axvline(chosen[0], color="tab:red", linewidth=1)
    figure.suptitle(f"{len(effects.facts)} facts: probability of the answer {effects.clean:.2f}, subject blurred {effects.blurred:.2f}; "
                    f"layers {chosen[0]} to {chosen[-1]} chosen", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def draw_ttt_savings(saved: Sequence[float], mean: Estimate, where: Path) -> None:
    """A PNG at `where`, whole or not at all."""
    durable.replace_file(where, ttt_savings_png(saved, mean))


def ttt_savings_png(saved: Sequence[float], mean: Estimate) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("matplotlib draws the picture and is not installed; pip install matplotlib, or read the JSON") from None
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.bar(range(1, len(saved) + 1), saved, color=["tab:purple" if value >= 0 else "tab:red" for value in saved])
    axes.axhspan(mean.low, mean.high, color="tab:gray", alpha=0.3, linewidth=0)
    axes.axhline(mean.mean, color="black", linewidth=1)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlabel("document, in order")
    axes.set_ylabel("bits per byte saved")
    worse = sum(value < 0 for value in saved)
    axes.set_title(f"test-time training saved {mean} bits per byte; {worse} of {len(saved)} documents got worse", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
