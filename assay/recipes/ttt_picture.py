"""What test-time training saved, document by document, as a picture: written beside its JSON."""

import io
from collections.abc import Sequence
from pathlib import Path

from assay.errors import UsageError
from assay.measure.estimate import Estimate
from assay.store import durable


def draw(saved: Sequence[float], mean: Estimate, where: Path) -> None:
    """A PNG at `where`, whole or not at all."""
    durable.replace_file(where, rendered(saved, mean))


def rendered(saved: Sequence[float], mean: Estimate) -> bytes:
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
