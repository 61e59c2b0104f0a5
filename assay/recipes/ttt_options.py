"""The options of test-time training, apart from the recipe itself, so that `--help` loads no torch."""

from dataclasses import dataclass

from assay.config import argument, option


@dataclass(frozen=True)
class Ttt:
    """Read documents in order while learning from them: each chunk is scored, its score is written down, and only then does a
    low-rank patch of the document's own take a step on it. Tells bits per byte with and without, document by document, and
    leaves the model as it was. The tokenizer is the model's own."""

    path: str = argument("checkpoint, Hugging Face folder, GGUF file or fetched name")
    text: str = option("the documents: rows of .jsonl or .parquet, or plain text cut into --document-bytes")
    out: str = option("folder of the run")
    document_bytes: int = option("plain text: a document ends at the first line end at or after so many bytes", least=1, default=8192)
    documents: int | None = option("read the first so many documents", least=1, default=None)
    chunk: int = option("tokens that are scored, and then learned from, at once", least=1, default=256)
    context: int | None = option("tokens of a window: a chunk and what it sees before it (4 chunks, or the model's most)",
                                 least=2, default=None)
    steps: int = option("gradient steps on each chunk", least=1, default=1)
    rank: int = option("of the patch", least=1, default=8)
    scale: float = option("of the patch: weight + scale · left · right", default=1.0)
    targets: tuple[str, ...] = option("what is patched: some of q k v o mlp head", default=("q", "k", "v", "o", "mlp", "head"))
    lr: float = option("learning rate of AdamW", least=0, default=1e-3)
    betas: tuple[float, ...] = option("of AdamW", default=(0.9, 0.95))
    weight_decay: float = option("of AdamW, on both factors", least=0, default=0.0)
    warm_start: bool = option("a document begins with the right factors of the one before it, left ones at 0 (else reset)", default=False)
    batch: int = option("documents that are read side by side, each with a patch of its own", least=1, default=8)
    max_regression: float = option("how much more a document may cost than without, as a share", least=0, default=0.05)
    max_drift: float = option("how many times larger or smaller than at first the kept factors may become", above=1, default=4.0)
    seed: int = option("seed of the first right factors", default=0)
    device: str | None = option("cpu or cuda (cuda where there is one)", default=None)
    json: bool = option("print verdicts, estimates and documents as JSON", default=False)
