"""The causal-trace map as a picture: tokens down, layers across, effect as shade; written beside its JSON."""

import io
from pathlib import Path

from assay.edit.causal import GROUPS, Effects
from assay.errors import UsageError
from assay.store import durable


def draw(effects: Effects, chosen: list[int], where: Path) -> None:
    """A PNG at `where`, whole or not at all."""
    durable.replace_file(where, rendered(effects, chosen))


def rendered(effects: Effects, chosen: list[int]) -> bytes:
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
