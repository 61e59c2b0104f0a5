"""llama.cpp's vocabularies: its own test texts, and the ids that it gives them, against our tokenizer from the same GGUF file."""

from pathlib import Path

from assay.errors import AssayError
from assay.model.gguf_tokenizer import tokenizer_from_gguf
from assay.store.gguf_header import read_gguf_header
from tests.judges.score import Score, checkout, checkout_version, first_words

ASKS = "which ids does this vocabulary give this text?"
BETWEEN = "\n__ggml_vocab_test__\n"


def judge(folder: Path) -> Score:
    models = checkout(folder, "llama.cpp", "models")
    texts = sorted(models.glob("ggml-vocab-*.gguf.inp"))
    score = Score(checkout_version(folder, "llama.cpp", texts))
    absent = []
    for file in texts:
        if not file.with_suffix("").exists():
            absent.append(file.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp"))
            continue
        try_vocabulary(score, file.with_suffix(""), file)
    if absent:
        score.notes.append(f"no vocabulary file in the checkout for {', '.join(absent)}")
    return score


def try_vocabulary(score: Score, vocabulary: Path, texts: Path) -> None:
    asked = texts.read_text().split(BETWEEN)
    expected = [[int(id) for id in line.split()] for line in texts.with_suffix(".out").read_text().splitlines()]
    name = vocabulary.stem.removeprefix("ggml-vocab-")
    try:
        tokenizer = tokenizer_from_gguf(read_gguf_header(vocabulary).metadata, name)
    except AssayError as error:
        score.refusals[first_words(error)] += len(expected)
        return
    for text, ids in zip(asked, expected, strict=False):  # the file of texts ends with a separator
        found = tokenizer.encode(text)
        score.agree(found == ids, f"{name}, {text[:40]!r}", f"{found[:12]}, expected {ids[:12]}")
