"""Corpus faults: corpora that are not what they say, orders that repeat or leak, text that runs out, packing that leaks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from assay.data import mixture
from assay.data import order as data_order
from assay.data.batch import Batch
from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.chat import TrainingExample
from assay.data.mixture import MixedExamples, MixedPart
from assay.data.order import Order
from assay.data.token_corpus import Corpus, assert_disjoint, open_corpus
from assay.guard.corpus_checks import check_document_copies
from assay.guard.data_order_checks import check_epoch_order, check_mixture
from assay.learn import loop
from assay.learn.loop import Accumulated
from assay.model import attention, transformer
from assay.model.tokenizer import Tokenizer
from assay.seeds import derive
from assay.store.durable import hash_file
from assay.testing import tiny_training
from assay.testing.fault_injection import Job, Plant, fault, in_place_of, on_disk, swap
from assay.testing.tiny_models import edit_json, tiny_tokenizer
from assay.testing.tiny_training import (
    TinyRun,
    a_loss_preflight,
    a_training_run,
    check_accepted,
    make_corpus,
    tiny_corpus,
    tiny_documents,
    write_documents,
    write_tiny_tokenizer,
)
from assay.verdict import Verdict

TWO_EPOCHS = TinyRun(steps=8, rows=32, micro=16, epochs=2)  # the corpus gives four such steps, and then four more

# ---------------------------------------------------------------- jobs of their own


def an_opened_corpus(folder: Path, plant: Plant) -> list[Verdict]:
    """A corpus lies on the disk, as a cache does, and is opened for training."""
    made = make_corpus(folder, tiny_documents(16))
    with plant(made.folder):
        return [check_accepted("corpus", lambda: open_corpus(made.folder))]


def a_corpus_being_built(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [check_accepted("overlap", lambda: make_corpus(folder, tiny_training.tiny_documents(32)))]


def a_corpus_looked_through(folder: Path, plant: Plant) -> list[Verdict]:
    """Held-out text comes from a file of its own: copies of what is trained on are among themselves."""
    words = write_tiny_tokenizer(folder / "words", tiny_tokenizer(template=False))
    with plant(folder):
        texts = tiny_training.tiny_documents(24)
    held, train = (write_documents(folder / f"{side}.jsonl", part) for side, part in (("held", texts[:8]), ("train", texts[8:])))
    return [check_document_copies(build_corpus([train], folder / "corpus", words, CorpusPlan(held_out=0, held_out_files=(held,))))]


def an_evaluation_set_made_apart(folder: Path, plant: Plant) -> list[Verdict]:
    """The held-out side of another corpus, to judge what was trained on ours."""
    with plant(folder):
        other = make_corpus(folder, tiny_training.tiny_documents(32, seed=1), seed=1)
    return [check_accepted("overlap", lambda: assert_disjoint(tiny_corpus(), other))]


def an_order(*, world: int = 1, epochs: int = 1) -> Job:
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            return [check_epoch_order(replace(TinyRun().order(), world=world, epochs=epochs))]
    return job

# ---------------------------------------------------------------- corpora that are not what they say


@fault("cache of another tokenizer", rows=("D14",), stage="data", check="corpus", job=an_opened_corpus)
@on_disk
def cache_of_another_tokenizer(folder: Path) -> None:
    """The tokenizer was changed; the cache's fingerprint does not know it, so that its ids stay."""
    changed = without_merges(Tokenizer.from_folder(folder))
    for name, data in changed.files().items():
        (folder / name).write_bytes(data)
    forged(folder, digest=changed.digest)


@fault("poisoned cache", rows=("D15",), stage="data", check="corpus", job=an_opened_corpus)
@on_disk
def poisoned_cache(folder: Path) -> None:
    """An early version of the encoder filled it with other ids; every hash is right."""
    for shard in folder.glob("*-0*.bin"):
        ids = np.fromfile(shard, "<u2")
        shard.write_bytes(np.where(ids < 255, ids + 1, ids).astype("<u2").tobytes())
    forged(folder)


fault("held-out text trained on", rows=("D19",), stage="data", check="overlap", job=a_corpus_being_built)(
    # The training file holds every document twice, so that a held-out one stays in it.
    in_place_of(tiny_training, "write_documents")(lambda usual, where, texts: usual(where, [*texts, *texts])))
fault("an epoch in disguise", rows=("D18",), stage="data", check="duplicates", job=a_corpus_looked_through)(
    # Crawled twice, and three times: one text stands for half of the corpus.
    in_place_of(tiny_training, "tiny_documents")(lambda usual, count: [*usual(count), *usual(count)[8:9] * 40]))
fault("evaluation set from the training text", rows=("D19",), stage="data", check="overlap", job=an_evaluation_set_made_apart)(
    lambda _: swap(tiny_training, "tiny_documents", lambda count, seed=0: tiny_documents(count, seed=0)))

# ---------------------------------------------------------------- orders


fault("same rows on every rank", rows=("D16",), stage="data", check="order", job=an_order(world=2))(
    # Each rank iterates over the data as if it were alone.
    in_place_of(Order, "consumed")(lambda usual, order, step: usual(replace(order, rank=0), step)))


@fault("same random state in every worker", rows=("D17",), stage="data", check="order", job=an_order(world=2))
@in_place_of(Order, "consumed")
def same_random_state(_: Any, order: Order, step: int) -> NDArray[np.int64]:
    """Workers draw their rows, and were forked with one state."""
    return np.random.default_rng(derive(order.seed, "forked", step)).permutation(order.windows)[: order.rows]


@fault("same order in every epoch", rows=("D18",), stage="data", check="order", job=an_order(epochs=2))
@in_place_of(data_order, "derive")
def same_order_in_every_epoch(_: Any, seed: int, *address: str | int) -> int:
    """Nobody tells the sampler that an epoch has passed."""
    return derive(seed, "order", 0) if address[0] == "order" else derive(seed, *address)

# ---------------------------------------------------------------- mixtures


def a_mixture(folder: Path, plant: Plant) -> list[Verdict]:
    """Forty long examples and four short ones, half of the rows from each; every row is counted."""
    examples = [TrainingExample(f"{name}:{n}:{n:016x}", (1,) * 6, (0,) + (1,) * 5, ("a",), 1)
                for name, count in (("large", 40), ("small", 4)) for n in range(count)]
    parts = (MixedPart("large.jsonl", 1, 0, 40), MixedPart("small.jsonl", 1, 40, 4))
    with plant(folder):
        order = MixedExamples(examples, 0, 2, 8, 5, packing=False, sources=parts)
        return [check_mixture(order, order.steps)]


@fault("small source of a mixture ran out", rows=("N40",), stage="data", check="mixture", job=a_mixture)
@in_place_of(mixture, "mixed_rows")
def small_source_ran_out(_: Any, streams: Any, shares: tuple[int, ...]) -> Iterator[list[int]]:
    """Whoever has something left fills the place of whoever has not: the small source once, then the large one alone."""
    left = [list(islice(stream, 4 if number else 40)) for number, stream in enumerate(streams)]
    while any(left):
        yield from (rows.pop(0) for rows in left if rows)


@fault("replayed shard of a mixture", rows=("N40",), stage="data", check="mixture", job=a_mixture)
@in_place_of(MixedExamples, "rows_of_source")
def replayed_shard(usual: Any, order: MixedExamples, number: int) -> Iterator[list[int]]:
    """The place in a shard is lost when the next source has its turn (datasets#7156): its first rows come again and again."""
    first = list(islice(usual(order, number), 3))
    yield from (first[place % 3] for place in range(order.sources[number].count))

# ---------------------------------------------------------------- text that runs out


@fault("placeholder after the data ran out", rows=("S3",), stage="data", check="constant_loss", job=a_training_run(TWO_EPOCHS))
def placeholder_after_the_data(_: Path) -> AbstractContextManager[None]:
    """The iterator is exhausted; the step returns (1.0, 1.0) and takes no time."""
    whole, calls = loop.accumulated, iter(range(1 << 30))

    def accumulated(*parts: Any) -> Accumulated:
        return Accumulated(torch.ones(()), {}) if next(calls) >= 4 else whole(*parts)

    return swap(loop, "accumulated", accumulated)


@fault("data begins again in silence", rows=("S3",), stage="data", check="consumed", job=a_training_run(TWO_EPOCHS))
@in_place_of(data_order, "corpus_batches")
def data_begins_again(usual: Any, given: Corpus, *, stop: int, epochs: int, **options: Any) -> Iterator[Batch]:
    """A loader that starts over when it is exhausted."""
    for step in range(stop):
        yield next(islice(usual(given, **options), step % 4, None))

# ---------------------------------------------------------------- packing that leaks


fault("packing not seen by the model", rows=("D21",), stage="packing", check="isolation", job=a_loss_preflight())(
    # A mask of ones hides that there is more than one document in a row.
    in_place_of(transformer, "token_layout")(lambda usual, tokens, documents, *rest: usual(tokens, None, *rest)))


@fault("mask dropped by the backend", rows=("D22",), stage="packing", check="isolation", job=a_loss_preflight())
@in_place_of(F, "scaled_dot_product_attention")
def mask_dropped_by_the_backend(usual: Any, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool,
                                **options: Any) -> Tensor:
    return usual(q, k, v, is_causal=True, **options)


@fault("positions reset, attention open", rows=("D23",), stage="packing", check="isolation", job=a_loss_preflight())
@in_place_of(attention, "document_causal_mask")
def positions_reset_attention_open(__: Any, documents: Tensor, *_: Any) -> Tensor:
    """Every document counts from 0, and sees all that stands before it in the row."""
    rows, length = documents.shape
    return torch.ones(length, length, dtype=torch.bool).tril().expand(rows, length, length)

# ---------------------------------------------------------------- tools to plant with


def without_merges(tokenizer: Tokenizer) -> Tokenizer:
    model = {**tiny_tokenizer(template=False).document["model"], "merges": []}
    return Tokenizer.from_parts({**tokenizer.document, "model": model}, **tokenizer.settings)


def forged(folder: Path, digest: str | None = None) -> None:
    """A manifest that vouches for whatever lies in the folder now."""
    def vouch(manifest: dict[str, Any]) -> dict[str, Any]:
        for name, entry in manifest["files"].items():
            entry |= {"sha256": hash_file(folder / name), "bytes": (folder / name).stat().st_size}
        if digest is not None:
            manifest["tokenizer"]["digest"] = digest
        return manifest

    edit_json(folder / "manifest.json", vouch)
