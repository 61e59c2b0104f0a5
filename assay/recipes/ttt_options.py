"""Options of test-time training, apart from the recipe itself, so that `--help` loads no torch."""

from dataclasses import dataclass

from assay.config import argument, option
from assay.recipes.options import QUIET_HELP


@dataclass(frozen=True)
class Ttt:
    """Read documents in order while learning from them: each chunk is scored, its score is written down, and only then does a
    low-rank patch of the document's own take a step on it. Tells bits per byte with and without, document by document, and
    leaves the model as it was. The tokenizer is the model's own."""

    path: str = argument("checkpoint, Hugging Face folder, GGUF file or fetched name")
    text: str = option("the documents: rows of .jsonl or .parquet, or plain text cut into --document-bytes", group="data", metavar="FILE")
    out: str = option("folder of the run", group="run", metavar="FOLDER")
    document_bytes: int = option("plain text: a document ends at the first line end at or after so many bytes", group="data", least=1,
                                 default=8192)
    documents: int | None = option("read the first so many documents", group="data", least=1, default=None, default_text="all")
    chunk: int = option("tokens that are scored, and then learned from, at once", group="method", least=1, default=256)
    context: int | None = option("tokens of a window: a chunk and what it sees before it", group="method", least=2, default=None,
                                 default_text="4 chunks, or the model's context if less")
    steps_per_chunk: int = option("gradient steps on each chunk", group="method", least=1, default=1)
    rank: int = option("rank of the patch", group="method", least=1, default=8)
    scale: float = option("scale of the patch: weight + scale · left · right", group="method", default=1.0)
    targets: tuple[str, ...] = option("what is patched: some of q k v o mlp head", group="method", metavar="NAME",
                                      default=("q", "k", "v", "o", "mlp", "head"))
    learning_rate: float = option("learning rate of AdamW", group="optimizer", least=0, default=1e-3)
    betas: tuple[float, ...] = option("betas of AdamW", group="optimizer", default=(0.9, 0.95))
    weight_decay: float = option("weight decay of AdamW, on both factors", group="optimizer", least=0, default=0.0)
    warm_start: bool = option("a document begins with the right factors of the one before it, and left ones of 0, instead of fresh ones",
                              group="method", default=False)
    batch_size: int = option("documents that are read side by side, each with a patch of its own", group="memory", least=1, default=8)
    max_regression: float = option("how much more a document may cost than without, as a share", group="evaluation", least=0, default=0.05)
    max_drift: float = option("how many times larger or smaller than at first the kept factors may become", group="evaluation", above=1,
                              default=4.0)
    max_seconds: float | None = option("the most seconds that reading all documents with the patch may take, by the clock; more is refuted",
                                       group="evaluation", above=0, default=None, default_text="no limit")
    seed: int = option("seed of the first right factors", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None,
                                default_text="a GPU where there is one, else cpu")
    quiet: bool = option(QUIET_HELP, group="run", default=False)
    json: bool = option("print verdicts, estimates and documents as JSON", group="run", default=False)
