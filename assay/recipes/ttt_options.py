"""Options of test-time training, apart from the recipe itself, so that `--help` loads no torch."""

from dataclasses import dataclass

from assay.config import argument, option
from assay.recipes.options import DEVICE, QUIET_HELP


@dataclass(frozen=True)
class Ttt:
    """Test-time training: read documents in chunks; each chunk is scored, its score is written down, and only then is the document's own
    low-rank adapter trained on it. Reports bits per byte with and without the adapter, for each document. The model's own tokenizer is
    used, and the model is left unchanged."""

    path: str = argument("checkpoint, Hugging Face folder, GGUF file or fetched name")
    text: str = option("documents: rows of .jsonl or .parquet, or plain text cut into pieces of --document-bytes",
                       group="data", metavar="FILE")
    out: str = option("folder of the run", group="run", metavar="FOLDER")
    document_bytes: int = option("plain text: a document ends at the first line end at or after this many bytes", group="data", least=1,
                                 default=8192)
    documents: int | None = option("read only the first N documents", group="data", least=1, default=None, default_text="all")
    chunk: int = option("tokens in a chunk, which is scored first and then trained on", group="method", least=1, default=256)
    context: int | None = option("tokens of the attention window: a chunk and the tokens before it", group="method", least=2, default=None,
                                 default_text="4 chunks, or the model's context if less")
    steps_per_chunk: int = option("gradient steps on each chunk", group="method", least=1, default=1)
    rank: int = option("rank of the low-rank adapter", group="method", least=1, default=8)
    scale: float = option("scale of the adapter: weight + scale · left · right", group="method", default=1.0)
    targets: tuple[str, ...] = option("layers to adapt: some of q k v o mlp head", group="method", metavar="NAME",
                                      default=("q", "k", "v", "o", "mlp", "head"))
    learning_rate: float = option("learning rate of AdamW", group="optimizer", least=0, default=1e-3)
    betas: tuple[float, ...] = option("betas of AdamW", group="optimizer", default=(0.9, 0.95))
    weight_decay: float = option("weight decay of AdamW, on both factors", group="optimizer", least=0, default=0.0)
    warm_start: bool = option("start each document with the right factors of the document before it, and left factors of 0, instead of "
                              "fresh ones",
                              group="method", default=False)
    carry_over: bool = option("one adapter reads all documents (dynamic evaluation): what a document taught stays for those after it, and "
                              "a step is taken on the chunks of --batch-size documents at a time",
                              group="method", default=False)
    batch_size: int = option("documents that are read in parallel, each with an adapter of its own unless --carry-over", group="memory",
                             least=1, default=8)
    max_regression: float = option("the most that a document's bits per byte may rise through test-time training, as a share",
                                   group="evaluation", least=0, default=0.05)
    max_drift: float = option("the factor by which the norm of the kept factors may grow or shrink",
                              needs="--warm-start or --carry-over", group="evaluation", above=1,
                              default=4.0)
    max_seconds: float | None = option("the most seconds of wall time that reading all documents with test-time training may take; more "
                                       "is refuted",
                                       group="evaluation", above=0, default=None, default_text="no limit")
    seed: int = option("seed of the first right factors", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None,
                                default_text=DEVICE)
    quiet: bool = option(QUIET_HELP, group="run", default=False)
    json: bool = option("print verdicts, estimates and documents as JSON", group="run", default=False)
