"""assay corpus: turn text into hashed token shards, held-out documents apart."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.config import argument, option
from assay.verbs.terminal import progress_line

if TYPE_CHECKING:
    from assay.data.build_corpus import CorpusProgress
    from assay.data.token_corpus import Corpus


@dataclass(frozen=True)
class FLAGS:
    """Turn text into token shards with a manifest. Held-out documents are chosen by id before anything is read. Text that occurs both
    in training and in held-out documents is measured, and refused above a bound."""

    text: tuple[str, ...] = argument("texts: .txt, .jsonl (also .gz), .parquet, folders or URLs of these, or hub datasets, "
                                     "hf://OWNER/NAME[CONFIG][SPLIT]")
    tokenizer: str = option("folder with tokenizer.json", group="data", metavar="FOLDER")
    out: str = option("folder to write; it must not exist", group="run", metavar="FOLDER")
    held_out: float | None = option("share of documents to hold out", group="evaluation", default=None,
                                    default_text="0.05, or 0 with --held-out-files")
    held_out_files: tuple[str, ...] = option("files or folders to hold out entirely", group="evaluation", metavar="PATH", default=())
    seed: int = option("seed that chooses the held-out documents", group="evaluation", default=0)
    max_overlap: float = option("the largest share of the held-out text that may also occur in the training text",
                                group="evaluation", default=0.05)
    field: str = option("text field of JSONL rows, or column of parquet", group="data", default="text")
    split: str | None = option("text files: a line equal to this separates documents ('': a blank line)", group="data", metavar="LINE",
                               default=None, default_text="none; text files need this or --document-bytes")
    document_bytes: int | None = option("text files: cut into documents of this many bytes, extended to the end of the line", group="data",
                                        default=None, default_text="none; text files need this or --split")
    skip_invalid: bool = option("leave out documents that are not UTF-8 instead of refusing them", group="data", default=False)
    boundary: str | None = option("token to put before and after every document", group="data", metavar="TOKEN", default=None,
                                  default_text="the tokenizer's EOS")
    shard_tokens: int = option("tokens per shard file", group="run", default=100_000_000)
    workers: int = option("encoding processes; 0: one per core", group="run", default=0)
    json: bool = option("print the manifest as JSON", group="run", default=False)


EXAMPLES = """  assay corpus stories.jsonl.gz --tokenizer tokenizer --out corpus
  assay corpus enwik8.gz --document-bytes 65536 --tokenizer tokenizer --out corpus
  assay corpus train.txt --held-out-files valid.txt --document-bytes 65536 --tokenizer tokenizer --out corpus"""


def run(flags: FLAGS) -> int:
    from assay.data.build_corpus import CorpusPlan, build_corpus
    from assay.data.data_files import DocumentRule
    from assay.data.hub_datasets import local_data

    share = flags.held_out if flags.held_out is not None else 0.0 if flags.held_out_files else 0.05
    plan = CorpusPlan(DocumentRule(flags.field, flags.split, flags.document_bytes, flags.skip_invalid), share,
                tuple(map(Path, flags.held_out_files)), flags.seed, flags.boundary, flags.shard_tokens,
                flags.max_overlap)
    with progress_line() as show:
        corpus = build_corpus(map(local_data, flags.text), Path(flags.out), Path(flags.tokenizer), plan,
                       workers=flags.workers or os.cpu_count() or 1, progress=lambda progress: show(progress_words(progress)))
    print(json.dumps(corpus.manifest, ensure_ascii=False) if flags.json else corpus_summary(corpus))
    return 0


def corpus_summary(corpus: "Corpus") -> str:
    manifest = corpus.manifest
    lines = [f"{corpus.folder}: digest {corpus.digest[:12]}, tokenizer {corpus.tokenizer_digest[:12]}, "
             f"documents between two {manifest['boundary']['token']}"]
    for name, split in (("train", corpus.train), ("held out", corpus.held_out)):
        lines.append(f"{name:9} {split.documents:>12,} documents {split.tokens:>15,} tokens {split.bytes:>15,} bytes")
    overlap = manifest["overlap"]
    lines.append(f"overlap   {overlap['exact']} of {overlap['documents']} held-out documents stand whole in training; "
                 f"{overlap['shared']} of {overlap['grams']} of their {overlap['words']}-grams do; "
                 f"bound {overlap['bound']:.2%}")
    lines += [f"left out  {count} {kind} documents" for kind, count in manifest["left_out"].items()]
    if empty := [source["name"] for source in manifest["sources"] if not source["documents"]]:
        lines.append(f"left out  {len(empty)} of {len(manifest['sources'])} files, in which there is no document, such as {empty[0]}")
    if lossy := manifest["held_out"]["lossy"]:
        lines.append(f"warning: {lossy} held-out documents do not decode to their own bytes under this tokenizer; "
                     "bits per byte leaves them out")
    return "\n".join(lines)


def progress_words(progress: "CorpusProgress") -> str:
    done = f"{progress.done / 1e6:,.1f} MB"
    if progress.total:
        done += f" of {progress.total / 1e6:,.1f}, {progress.tokens:,} tokens"
    return f"{progress.stage} {done}, {progress.seconds:.0f} s"
