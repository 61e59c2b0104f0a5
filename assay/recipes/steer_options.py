"""Options of steering, apart from the recipe itself, so that `--help` loads no torch."""

from dataclasses import dataclass

from assay.config import argument, option


@dataclass(frozen=True)
class Steer:
    """Make a steering vector of pairs (chosen and rejected answers) and measure, on pairs that it was not made of, how far it moves the
    model towards the chosen ones, and what it costs on plain text. The model itself stays as it is, bit for bit."""

    model: str = argument("checkpoint, Hugging Face folder, GGUF file or fetched name")
    data: tuple[str, ...] = option("pairs as assay dpo reads them: chosen shows what is wanted, rejected does not", group="data",
                                   metavar="FILE")
    out: str = option("folder for steering.safetensors and steering.json", group="run", metavar="FOLDER")
    layer: int | None = option("the block after which the vector is added, counted from 0", group="method", least=0, default=None,
                               default_text="the middle one")
    scale: float = option("what the vector is multiplied by", group="method", default=1.0)
    held_out: float = option("share of the pairs that the effect is measured on", group="evaluation", above=0, below=1, default=0.5)
    text: str | None = option("plain text or rows of `text` that has nothing to do with it, whose loss is measured too", group="evaluation",
                              metavar="FILE", default=None, default_text="the cost is not measured, and that is said")
    max_cost: float = option("with --text: the most that its loss may rise, in nats per token", group="evaluation", least=0, default=0.1)
    max_length: int = option("most tokens of an answer with its prompt; longer pairs are dropped", group="data", least=2, default=1024)
    limit: int | None = option("read only the first so many rows of each file", group="data", least=1, default=None, default_text="all")
    seed: int = option("seed of which pairs are held out", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None,
                                default_text="a GPU where there is one, else cpu")
