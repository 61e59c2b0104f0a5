"""Options of model arithmetic: which models are merged and how, or which layers of one stay."""

from dataclasses import dataclass
from typing import Literal

from assay.config import argument, option
from assay.recipes.options import DEVICE


@dataclass(frozen=True, kw_only=True)
class MeasuredWriting:
    """Options of every verb that makes a model out of models."""

    out: str = option("folder of the new model", group="run", metavar="FOLDER")
    data: str | None = option("conversations on which the loss is measured before and after",
                              group="evaluation", metavar="FILE", default=None,
                              default_text="the effect is not measured, and the output says so")
    max_length: int = option("the most tokens of a conversation; longer ones are cut",
                             needs="--data", group="evaluation", least=2, default=1024)
    device: str | None = option("where to compute the losses on --data: cpu or cuda", group="run", default=None,
                                default_text=DEVICE)


@dataclass(frozen=True, kw_only=True)
class MergeModels(MeasuredWriting):
    """Merge fine-tunes of one model into one; parents, arithmetic and the written file are proven."""

    models: tuple[str, ...] = argument("models to merge: PATH or PATH=WEIGHT, each a checkpoint, folder or adapter")
    base: str | None = option("the model that all were fine-tuned from; required by task, ties and dare", group="model", metavar="MODEL",
                              default=None)
    method: Literal["linear", "slerp", "task", "ties", "dare"] = option(
        "weighted mean (linear); spherical interpolation of two (slerp); or base plus task vectors: unchanged (task), the largest entries "
        "of the majority sign (ties), randomly kept entries, scaled up (dare)", group="method", default="linear")
    density: float = option("the share of each task vector's entries that is kept", needs="--method ties or --method dare", group="method",
                            above=0, most=1, default=0.5)
    seed: int = option("seed of which entries are kept", needs="--method dare", group="run", default=0)


@dataclass(frozen=True, kw_only=True)
class PruneLayers(MeasuredWriting):
    """Remove layers from a model: those with the least effect on --data, or those that are named."""

    model: str = argument("model to prune: a checkpoint, folder or adapter")
    layers: int | None = option("how many layers to remove: those whose output differs least from their input on --data",
                                group="method", least=1,
                                default=None)
    drop: tuple[int, ...] = option("layers to remove, counted from 0, instead of --layers", group="method", metavar="LAYER", default=())
