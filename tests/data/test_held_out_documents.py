"""Every raw byte of a held-out document is paid for exactly once, whatever the tokenizer, the packing and the row length."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from assay.data.batch import Batch
from assay.data.data_files import document_id
from assay.data.held_out_documents import document_losses, held_out_document_batches, measurable_documents
from assay.data.token_corpus import Corpus
from assay.errors import DataError, UsageError
from assay.statistics.estimate import bits_per_byte
from tests.data.conftest import made_text, write_jsonl

Make = Callable[..., Corpus]
LEADING = [" leading space", "no leading space", "  two of them", "tab\tand\nline ", "naïve café €5 😀", "UPPER lower", "ﬁne ligature"]


def held_out_documents(corpus: Corpus) -> list[tuple[int, np.ndarray, int]]:
    """(id, ids with the boundary on both sides, raw bytes) of every measurable document."""
    return [(int(record["id"]), corpus.held_out.document(int(number)).astype(np.int64), int(record["bytes"]))
            for number in measurable_documents(corpus) for record in [corpus.held_out.index[number]]]


def price(batch: Batch) -> torch.Tensor:
    """A stand-in for a model: token t costs t's id in nats plus what it learned from its place, or nothing unpredicted."""
    return (batch.tokens.double() + 1) * batch.weight


def losses(corpus: Corpus, **packing: int) -> dict[int, tuple[float, int]]:
    scored = ((batch, price(batch)) for batch in held_out_document_batches(corpus, **packing))  # type: ignore[arg-type]
    found = document_losses(corpus, scored)
    return {int(i): (float(n), int(b)) for i, n, b in zip(found.ids, found.nll, found.bytes, strict=True)}


@pytest.mark.parametrize("packing", [{"rows": 1, "length": 7}, {"rows": 3, "length": 64}, {"rows": 4, "length": 1000},
                                     {"rows": 3, "length": 64, "context": 30}, {"rows": 2, "length": 8, "context": 7}])
def test_a_documents_sum_is_that_of_its_tokens_and_its_end(corpus: Corpus, packing: dict[str, int]) -> None:
    expected = {i: (float((ids[1:] + 1).sum()), size) for i, ids, size in held_out_documents(corpus)}
    assert losses(corpus, **packing) == expected
    assert len(expected) == corpus.held_out.documents


def test_the_first_token_is_predicted_from_the_boundary(corpus: Corpus) -> None:
    for batch in held_out_document_batches(corpus, rows=4, length=1000):
        assert batch.documents is not None
        assert batch.positions is not None
        firsts = (batch.positions == 1) & (batch.documents >= 0)
        assert (batch.weight[firsts] == 1).all()
        assert (batch.tokens[(batch.positions == 0) & (batch.documents >= 0)] == corpus.boundary).all()


def test_pieces_of_one_document_never_share_a_row(corpus: Corpus) -> None:
    """Or a token could see what it must predict; and what a piece sees does not depend on its neighbours."""
    for batch in held_out_document_batches(corpus, rows=4, length=50, context=20):
        assert batch.documents is not None
        for documents, weight in zip(batch.documents, batch.weight, strict=True):
            own = documents[documents >= 0]
            assert all(weight[documents == number].sum() > 0 for number in own.unique())  # and none is context only
            changes = int((own[1:] != own[:-1]).sum()) + 1 if len(own) else 0
            assert changes == len(own.unique())


def test_a_token_scored_twice_or_never_is_an_error(corpus: Corpus) -> None:
    batches = list(held_out_document_batches(corpus, rows=4, length=50))
    with pytest.raises(DataError, match="exactly once"):
        document_losses(corpus, [(b, price(b)) for b in batches[:-1]])
    with pytest.raises(DataError, match="exactly once"):
        document_losses(corpus, [(b, price(b)) for b in [*batches, batches[0]]])
    with pytest.raises(DataError, match="no document was scored"):
        document_losses(corpus, [])


def test_a_smaller_sample_is_a_fixed_random_few(corpus: Corpus) -> None:
    few = measurable_documents(corpus, 5)
    assert len(few) == 5
    assert set(corpus.held_out.index["id"][few]) == set(np.sort(corpus.held_out.index["id"])[:5])
    sampled = document_losses(corpus, [(b, price(b)) for b in held_out_document_batches(corpus, rows=4, length=50, documents=few)])
    whole = losses(corpus, rows=4, length=50)
    assert {int(i): float(n) for i, n in zip(sampled.ids, sampled.nll, strict=True)} == {int(i): whole[int(i)][0] for i in sampled.ids}


def test_no_held_out_text_is_an_error_not_a_zero(make: Make) -> None:
    with pytest.raises(DataError, match="no held-out documents"):
        next(held_out_document_batches(make(held_out=0.0), rows=1, length=8))


def test_packing_that_cannot_be_is_refused(corpus: Corpus) -> None:
    with pytest.raises(UsageError, match="context below length"):
        next(held_out_document_batches(corpus, rows=1, length=8, context=8))


# ---------------------------------------------------------------- tokenizers whose bytes are tricky

def sentencepiece_like(folder: Path, *, normalizer: object = None, fallback: bool = True) -> Path:
    """Spaces as ▁, one put before the text and taken off when decoding; bytes for what is not in the vocabulary."""
    characters = sorted(set("".join(LEADING) + made_text(1, 400)) - {"€", "😀", "ï", "ﬁ"} - {" "})
    names = ["<|endoftext|>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *characters]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=fallback))
    backend.normalizer = normalizer  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


def tricky(make: Make, tmp_path: Path, tokenizer: Path) -> Corpus:
    train = write_jsonl(tmp_path / "train.jsonl", [made_text(1, 400)])
    valid = write_jsonl(tmp_path / "valid.jsonl", LEADING)
    return make(train, held_out=0.0, held_out_files=(valid,), tokenizer=tokenizer)


def kept(corpus: Corpus) -> set[str]:
    names = {document_id("valid.jsonl", i): text for i, text in enumerate(LEADING)}
    return {names[i] for i, _, _ in held_out_documents(corpus)}


def test_spaces_dropped_on_decoding_do_not_change_the_bytes(make: Make, tmp_path: Path) -> None:
    """Bytes are the source's. The space that this tokenizer swallows is one it does not pay for: not measured."""
    corpus = tricky(make, tmp_path, sentencepiece_like(tmp_path / "tokenizer"))
    assert corpus.held_out.bytes == sum(len(text.encode()) for text in LEADING)
    lost = {" leading space", "  two of them"}  # "▁" before a space that is there already is not put: a space is lost
    assert kept(corpus) == set(LEADING) - lost
    assert corpus.manifest["held_out"]["lossy"] == len(lost)
    for _, ids, size in held_out_documents(corpus):
        assert size <= len(ids) - 1 + 3  # a byte costs a token here, but for spaces and known letters beyond ASCII


def test_byte_fallback_is_counted_in_bytes(make: Make, tmp_path: Path) -> None:
    corpus = tricky(make, tmp_path, sentencepiece_like(tmp_path / "tokenizer"))
    sizes = {size: len(ids) for _, ids, size in held_out_documents(corpus)}
    text = "naïve café €5 😀"
    assert sizes[len(text.encode())] == 2 + 1 + sum(len(c.encode()) if c in "ï€😀" else 1 for c in text)


def test_a_normalizer_that_changes_the_text_is_not_measured(make: Make, tmp_path: Path) -> None:
    """Lower-casing makes text cheaper to predict: counted, it would look like a better model."""
    corpus = tricky(make, tmp_path, sentencepiece_like(tmp_path / "tokenizer", normalizer=normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.NFKC()])))
    assert not kept(corpus) & {"UPPER lower", "ﬁne ligature"}
    assert "no leading space" in kept(corpus)
    assert corpus.held_out.bytes == sum(len(text.encode()) for text in LEADING)


def test_unknown_tokens_are_not_measured(make: Make, tmp_path: Path) -> None:
    corpus = tricky(make, tmp_path, sentencepiece_like(tmp_path / "tokenizer", fallback=False))
    assert "naïve café €5 😀" not in kept(corpus)


def test_where_nothing_decodes_there_is_no_number(make: Make, tmp_path: Path) -> None:
    reverse = normalizers.Sequence([normalizers.Prepend("x")])
    corpus = tricky(make, tmp_path, sentencepiece_like(tmp_path / "tokenizer", normalizer=reverse))
    with pytest.raises(DataError, match="none of 7 held-out documents decodes to its own bytes"):
        next(held_out_document_batches(corpus, rows=1, length=8))


def test_two_tokenizers_of_one_uniform_model_agree_in_bits_per_byte(make: Make, tokenizer: Path, tmp_path: Path) -> None:
    """A model that gives each *byte* 2 bits has 2 bits per byte under any lossless tokenizer, whatever its tokens."""
    path = write_jsonl(tmp_path / "a.jsonl", [made_text(i, 60) for i in range(60)])
    names = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Backend(models.BPE({name: number for number, name in enumerate(names)}, []))
    bytes_only.pre_tokenizer, bytes_only.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytes_only.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "tokenizer.json").write_text(bytes_only.to_str())
    found = []
    for folder in (tokenizer, tmp_path / "bytes"):
        corpus = make(path, held_out=0.3, tokenizer=folder)
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        size = torch.tensor([bytes_of(backend.id_to_token(i)) for i in range(backend.get_vocab_size())]).double()
        batches = held_out_document_batches(corpus, rows=4, length=64)
        result = document_losses(corpus, ((batch, size[batch.tokens] * 2 * math.log(2)) for batch in batches))
        found.append(bits_per_byte(result.nll, result.bytes))
    assert found[0].mean == pytest.approx(2.0, abs=1e-12)
    assert found[1].mean == pytest.approx(2.0, abs=1e-12)
    assert found[0].n == found[1].n > 5


def bytes_of(token: str | None) -> int:
    """Behind a byte-level token, which writes each byte as one character; the boundary has none."""
    assert token is not None
    return 0 if token.startswith("<|") else len(token)
