"""BPE tokenizer training, byte-level: every text has ids, every id sequence decodes to the bytes it came from.

Text is cut by Llama-3's expression before merging (see encode.py): a word takes one space or sign before it, numbers
are cut into at most `digits` digits, line ends stand together. Special tokens come first: <|endoftext|> is 0, and the
two chat markers are reserved so that a chat template can be added later without new rows in the model. The same texts
and size give the same tokenizer.json.
"""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from assay.data.data_files import Document, DocumentRule, TextSource, find_sources, iter_documents
from assay.data.encode import END_OF_DOCUMENT, Encoder, id_type, split_expression
from assay.errors import DataError, GuardStop, UsageError
from assay.model.sentencepiece_model import sentencepiece_document
from assay.model.tokenizer import Tokenizer
from assay.seeds import derive
from assay.store import durable

KNOWN_TEXT = "It's 1,024 naïve déjà-vus:\n\t— 東京 🙂 "
BPE_SPECIAL_TOKENS = (END_OF_DOCUMENT, "<|im_start|>", "<|im_end|>")
SMALLEST_VOCABULARY = 256 + len(BPE_SPECIAL_TOKENS)
COMPRESSION_SHARE, COMPRESSION_BYTES = 0.05, 4 << 20  # share of documents kept from training to measure bytes per token, and its most


@dataclass(frozen=True)
class Compression:
    """Bytes and tokens of each document that the tokenizer was not trained on."""

    bytes: list[int]
    tokens: list[int]


def train_tokenizer(texts: Iterable[Path], size: int, *, rule: DocumentRule, digits: int = 1,
                    seed: int = 0) -> tuple[Tokenizer, Compression]:
    """`size` counts all tokens, special ones included."""
    if size < SMALLEST_VOCABULARY:
        raise UsageError(f"--vocab-size is {size}; a byte-level tokenizer has at least {SMALLEST_VOCABULARY} tokens")
    if digits not in (1, 2, 3):
        raise UsageError(f"--digits is {digits}; expected 1, 2 or 3")
    sources = find_sources(texts)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split_expression(digits)), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(BPE_SPECIAL_TOKENS), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend.train_from_iterator((d.raw.decode() for d, kept in _read(sources, rule, seed) if not kept), trainer)
    if backend.get_vocab_size() < size:
        raise DataError(f"the text gives {backend.get_vocab_size()} tokens and no more, --vocab-size is {size}; "
                        "give more text or a smaller --vocab-size")
    tokenizer = Tokenizer.from_parts(backend.to_str(), bos_token=END_OF_DOCUMENT, eos_token=END_OF_DOCUMENT)
    return tokenizer, _measure(tokenizer, sources, rule, seed)


def train_sentencepiece(texts: Iterable[Path], size: int, kind: str, *, rule: DocumentRule, seed: int = 0) -> tuple[Tokenizer, Compression]:
    """A SentencePiece model, `bpe` or `unigram`: no text is normalised, no space is lost, and what no piece has is bytes."""
    try:
        import sentencepiece
    except ImportError:
        raise UsageError("--kind sentencepiece and unigram need the sentencepiece package to train; pip install sentencepiece") from None
    sources, file = find_sources(texts), io.BytesIO()
    lines = (line for document, kept in _read(sources, rule, seed) if not kept for line in document.raw.decode().splitlines() if line)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=file, vocab_size=size, model_type=kind, byte_fallback=True, minloglevel=2,
            normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, num_threads=1)
    except RuntimeError as error:
        raise DataError(f"sentencepiece could not make {size} pieces of this text: {str(error).strip().splitlines()[-1][:200]}; give more "
                        "text, or another --vocab-size") from None
    document, named = sentencepiece_document(file.getvalue(), "the trained model", {})
    tokenizer = Tokenizer(document, {"clean_up_tokenization_spaces": False} | named, {})
    return tokenizer, _measure(tokenizer, sources, rule, seed)


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    refuse_lossy(tokenizer)
    with durable.new_folder(out) as folder:
        for name, data in tokenizer.files().items():
            durable.write_file(folder / name, [data])


def refuse_lossy(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer before it is written unless a known text comes back from its ids, letter for letter, and a text has an end."""
    if (found := tokenizer.decode(tokenizer.encode(KNOWN_TEXT))) != KNOWN_TEXT:
        raise GuardStop(f"tokenizer: {KNOWN_TEXT!r} comes back from its ids as {found!r}; it is not written")
    if tokenizer.eos is None:
        raise GuardStop("tokenizer: no token ends a text, so that nothing could be taught to stop; it is not written")


def _measure(tokenizer: Tokenizer, sources: list[TextSource], rule: DocumentRule, seed: int) -> Compression:
    dtype = id_type(tokenizer)
    encoder, width = Encoder(tokenizer, dtype), int(dtype[-1])
    sizes: list[int] = []
    tokens: list[int] = []
    for document, kept in _read(sources, rule, seed):
        if kept and sum(sizes) < COMPRESSION_BYTES:
            sizes.append(len(document.raw))
            tokens.append(len(encoder.encode(document.raw)) // width)
    return Compression(sizes, tokens)


def _read(sources: list[TextSource], rule: DocumentRule, seed: int) -> Iterator[tuple[Document, bool]]:
    """Every document, and whether it is kept from training: never the first, which may be all there is. An empty text is an error here, not
    a useless tokenizer."""
    trained = 0
    left_out: Counter[str] = Counter()
    for source in sources:
        for document in iter_documents(source, rule, left_out):
            kept = trained > 0 and derive(seed, "tokenizer-sample", document.id) < COMPRESSION_SHARE * (1 << 63)
            trained += not kept
            yield document, kept
    if not trained:
        raise DataError(f"no text to train on in {', '.join(str(source.path) for source in sources)}")
