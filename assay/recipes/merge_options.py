"""Options of model arithmetic: which models are merged and how, or which layers of one stay."""

from dataclasses import dataclass
from typing import Literal

from assay.config import argument, option


@dataclass(frozen=True, kw_only=True)
class MeasuredWriting:
    """What every verb has in common that makes a model out of models."""

    out: str = option("folder of the model that is made", group="run", metavar="FOLDER")
    data: str | None = option("conversations whose loss is measured before and after", group="evaluation", metavar="FILE", default=None,
                              default_text="the effect is not measured, and that is said")
    max_length: int = option("with --data: most tokens of a conversation; longer ones are cut", group="evaluation", least=2, default=1024)
    device: str | None = option("with --data: where to compute: cpu or cuda", group="run", default=None,
                                default_text="a GPU where there is one, else cpu")


@dataclass(frozen=True, kw_only=True)
class MergeModels(MeasuredWriting):
    """Merge fine-tunes of one model into one, whose parentage, arithmetic and bytes are proven."""

    models: tuple[str, ...] = argument("what is merged: PATH or PATH=WEIGHT, each a checkpoint, folder or adapter")
    base: str | None = option("the model that all were fine-tuned from; task, ties and dare need it", group="model", metavar="MODEL",
                              default=None)
    method: Literal["linear", "slerp", "task", "ties", "dare"] = option(
        "mean of weights (linear), along the arc between two (slerp), or base plus task vectors: as they are (task), the largest entries "
        "of the prevailing sign (ties), entries drawn by lot and scaled up (dare)", group="method", default="linear")
    density: float = option("with ties and dare: the share of each task vector's entries that stays", group="method", above=0, most=1,
                            default=0.5)
    seed: int = option("with dare: seed of the lot", group="run", default=0)


@dataclass(frozen=True, kw_only=True)
class PruneLayers(MeasuredWriting):
    """Take layers out of a model, those that do least on --data or those that are named."""

    model: str = argument("what is pruned: a checkpoint, folder or adapter")
    layers: int | None = option("how many layers go: those whose output differs least from their input on --data", group="method", least=1,
                                default=None)
    drop: tuple[int, ...] = option("the layers that go, counted from 0, instead of --layers", group="method", metavar="LAYER", default=())
