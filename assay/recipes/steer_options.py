"""Options of steering, apart from the recipe itself, so that `--help` loads no torch."""

from dataclasses import dataclass

from assay.config import argument, option
from assay.recipes.options import DEVICE


@dataclass(frozen=True)
class Steer:
    """Compute a steering vector from pairs of chosen and rejected answers, and measure on held-out pairs how far it moves the model
    towards the chosen ones, and on plain text what it costs. The model's weights do not change."""

    model: str = argument("checkpoint, Hugging Face folder, GGUF file or fetched name")
    data: tuple[str, ...] = option("pairs in the columns of assay dpo: chosen shows the wanted behaviour, rejected does not", group="data",
                                   metavar="FILE")
    out: str = option("folder for steering.safetensors and steering.json", group="run", metavar="FOLDER")
    layer: int | None = option("the block after which the vector is added, counted from 0", group="method", least=0, default=None,
                               default_text="the middle one")
    scale: float = option("factor that the vector is multiplied by", group="method", default=1.0)
    held_out: float = option("share of the pairs on which the effect is measured", group="evaluation", above=0, below=1, default=0.5)
    text: str | None = option("unrelated plain text, or rows of `text`, on which the rise of the loss is measured", group="evaluation",
                              metavar="FILE", default=None, default_text="the cost is not measured, and the output says so")
    max_cost: float = option("the largest allowed rise of its loss, in nats per token",
                             needs="--text", group="evaluation", least=0, default=0.1)
    max_length: int = option("the most tokens of an answer with its prompt; longer pairs are dropped", group="data", least=2, default=1024)
    limit: int | None = option("read only the first N rows of each file", group="data", least=1, default=None, default_text="all")
    seed: int = option("seed that chooses the held-out pairs", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None,
                                default_text=DEVICE)
