"""assay tokenizer: train a byte-level BPE tokenizer, or one of SentencePiece's."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from assay.config import argument, option


@dataclass(frozen=True)
class FLAGS:
    """Train a byte-level BPE tokenizer on text, or a SentencePiece model, and write tokenizer.json and tokenizer_config.json."""

    text: tuple[str, ...] = argument("texts: .txt, .jsonl (also .gz), .parquet, or folders of these")
    out: str = option("folder to write; it must not exist", metavar="FOLDER")
    vocab_size: int = option("vocabulary size, special tokens included", default=8192)
    kind: Literal["bytes", "sentencepiece", "unigram"] = option("byte-level BPE (bytes), or SentencePiece's BPE (sentencepiece) or "
                                                                "unigram model, which need the sentencepiece package", default="bytes")
    digits: int = option("the most digits in one token: 1, 2 or 3", needs="--kind bytes", default=1)
    field: str = option("text field of JSONL rows, or column of parquet", default="text")
    document_bytes: int = option("text files: read in chunks of this many bytes, extended to the end of the line", default=16384)
    skip_invalid: bool = option("leave out documents that are not UTF-8 instead of refusing them", default=False)
    seed: int = option("seed that chooses the documents held out to measure compression", default=0)
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay tokenizer books/ --vocab-size 8192 --out tokenizer
  assay tokenizer data.jsonl.gz --vocab-size 32768 --digits 3 --out tokenizer
  assay tokenizer books/ --kind unigram --vocab-size 8192 --out tokenizer"""


def run(flags: FLAGS) -> int:
    from assay.data.bpe import train_sentencepiece, train_tokenizer, write_tokenizer
    from assay.data.data_files import DocumentRule
    from assay.statistics.estimate import ratio

    rule = DocumentRule(flags.field, document_bytes=flags.document_bytes, skip_invalid=flags.skip_invalid)
    if flags.kind == "bytes":
        tokenizer, compression = train_tokenizer(map(Path, flags.text), flags.vocab_size, rule=rule, digits=flags.digits, seed=flags.seed)
    else:
        kind = {"sentencepiece": "bpe"}.get(flags.kind, flags.kind)
        tokenizer, compression = train_sentencepiece(map(Path, flags.text), flags.vocab_size, kind, rule=rule, seed=flags.seed)
    write_tokenizer(tokenizer, Path(flags.out))
    enough = len(compression.bytes) > 1  # fewer have no interval, and a bare number does not travel
    bytes_per_token = ratio(compression.bytes, compression.tokens) if enough else None
    if flags.json:
        print(json.dumps({"path": str(flags.out), "tokens": tokenizer.size, "digest": tokenizer.digest,
                          "bytes_per_token": asdict(bytes_per_token) if bytes_per_token else None}))
        return 0
    print(f"{flags.out}: {tokenizer.size} tokens, digest {tokenizer.digest[:12]}")
    print(f"bytes per token on documents not trained on: {bytes_per_token or 'unknown, too few documents'}")
    return 0
