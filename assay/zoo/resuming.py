"""Faults between two sittings of a run: its place in the data, its moments, its corpus, and which of its weights were scored."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.data.batch import Batch
from assay.data.consumed import ids_digest
from assay.data.corpus import open_corpus
from assay.data.order import Order
from assay.errors import GuardStop
from assay.learn.ema import PREFIX, Ema
from assay.recipes import forms, handover, pretrain, run, training
from assay.recipes.options import Pretrain
from assay.recipes.pretrain import Pretraining
from assay.store.ledger import Ledger
from assay.verdict import Outcome, Verdict
from assay.zoo import practice
from assay.zoo.fault import Plant, fault
from assay.zoo.practice import corpus, make_corpus, sentences
from assay.zoo.stage import copy, swapped

ROWS, LENGTH, STEPS = 32, 16, 16  # into the second epoch
FIRST, SECOND = 11, 14  # where the sittings end, both in the second epoch

# ---------------------------------------------------------------- jobs


def a_second_sitting(folder: Path, plant: Plant) -> list[Verdict]:
    """A run was interrupted; the fault strikes while it goes on."""
    copy(first_sitting(), folder / "run")
    with plant(folder):
        work = sit(folder / "run", until=SECOND)
    return [*written_down(folder / "run"), *work.watch.verdicts]


def a_scored_run(folder: Path, plant: Plant) -> list[Verdict]:
    """A run with a moving average is looked at and saved; then its best checkpoint is read from the disk and scored again."""
    with plant(folder):
        work = sit(folder / "run", until=4, ema=0.9)
    best = work.looks.best_checkpoint(work.run.checkpoints)
    return [handover.check_look(work.looks, best)]


@functools.cache
def first_sitting() -> Path:
    """Made once, and copied by whoever goes on."""
    where = Path(practice.home().name) / "run"
    sit(where, until=FIRST)
    return where


def sit(where: Path, *, until: int, **options: Any) -> Pretraining:
    """The recipe itself, left after step `until`. It hands nothing over and its saves are not proven: no fault here strikes those."""
    config = Pretrain(corpus=str(corpus().folder), out=str(where), depth=1, tokens=STEPS * ROWS * LENGTH, epochs=2, length=LENGTH,
                      batch_tokens=ROWS * LENGTH, warmup=2, every=100, look_documents=4, device="cpu", **options)
    works: list[Pretraining] = []

    def remembered(given: Pretrain, say: Callable[[str], None]) -> Pretraining:
        works.append(Pretraining(given, say))
        return works[0]

    with (swapped(run, "Prover", NoProver), swapped(pretrain, "hand_over", lambda *_, **__: (None, [])),
          swapped(pretrain, "Pretraining", remembered),
          swapped(Pretraining, "over", lambda work: work.done >= until), contextlib.suppress(GuardStop)):
        pretrain.pretrain(config, say=lambda _: None)
    return works[0]


class NoProver:
    """In the place of `Prover`: saves stay without a hallmark."""

    busy = False

    def start(self, folder: Path, **_: Any) -> None:
        pass

    def finished(self) -> list[tuple[Path, list[Verdict]]]:
        return []

    close = finished


def written_down(folder: Path) -> list[Verdict]:
    """Every verdict in a run's ledger."""
    found = [verdict for event in Ledger(folder / "ledger.jsonl").events() for verdict in event.get("verdicts", [])]
    return [Verdict(v["check"], Outcome(v["outcome"]), v["reason"], v["evidence"]) for v in found]

# ---------------------------------------------------------------- the place in the data


@fault("place in the data lost", rows=("C15",), stage="resume", check="consumed", job=a_second_sitting)
def place_lost(_: Path) -> AbstractContextManager[None]:
    """The loader's position is not in the checkpoint: the text is read from its beginning again."""
    return going_on_with(lambda order, step: order.batch(step - FIRST))


@fault("order of the first epoch again", rows=("C16",), stage="resume", check="consumed", job=a_second_sitting)
def first_epoch_again(_: Path) -> AbstractContextManager[None]:
    """Batches are skipped up to the place, but in a sampler that believes it is in its first epoch."""
    return going_on_with(lambda order, step: order.batch(step % (order.windows // order.rows)))


@fault("rows of the shuffle buffer lost", rows=("C17",), stage="resume", check="consumed", job=a_second_sitting)
def buffer_lost(_: Path) -> AbstractContextManager[None]:
    """Sixteen rows had been drawn and not yet read; nobody reads them."""
    def later(order: Order, step: int) -> Batch:
        halves = replace(order, rows=order.rows // 2)
        one, two = halves.batch(2 * step + 1), halves.batch(2 * step + 2)
        streams: dict[str, Any] = {name: torch.cat([stream, two.streams()[name]]) for name, stream in one.streams().items()}
        return Batch(**streams, ids=one.ids + two.ids)

    return going_on_with(later)


@fault("another batch written down than was read", rows=("C15",), stage="resume", check="data ledger", job=a_second_sitting)
def another_batch_written_down(_: Path) -> AbstractContextManager[None]:
    """The loader is a batch ahead of the loop, and its log names what it has fetched."""
    return swapped(training, "ids_digest", lambda ids: ids_digest(tuple((window + 1,) for (window,) in ids)))


def going_on_with(batch: Callable[[Order, int], Batch]) -> AbstractContextManager[None]:
    return swapped(Pretraining, "planned_batches", lambda work: (batch(work.order, step) for step in range(work.start, STEPS)))

# ---------------------------------------------------------------- what is loaded


@fault("cold moments", rows=("C18",), stage="resume", check="resumed", job=a_second_sitting)
def cold_moments(_: Path) -> AbstractContextManager[None]:
    """There is no optimizer yet when its state is loaded."""
    return swapped(training, "load_state_tensors", lambda *_: None)


@fault("going on from the average", rows=("C19",), stage="resume", check="resumed", job=a_second_sitting)
def going_on_from_the_average(_: Path) -> AbstractContextManager[None]:
    """What is loaded as the model is another set of weights than training left."""
    whole = forms.open_artifact

    def averaged(path: Path) -> Any:
        saved = whole(path)
        return replace(saved, tensors={name: tensor * 0.999 for name, tensor in saved.tensors.items()})

    return swapped(forms, "open_artifact", averaged)


@fault("another held-out set", rows=("D20",), stage="eval", check="same data", job=a_second_sitting)
@contextlib.contextmanager
def another_held_out_set(folder: Path) -> Iterator[None]:
    """The text is the same; which of it is held out depends on the machine."""
    other = make_corpus(folder / "here", sentences(), seed=1).folder
    with swapped(pretrain, "open_corpus", lambda _: open_corpus(other)):
        yield

# ---------------------------------------------------------------- which weights were scored


@fault("average scored, raw weights saved for it", rows=("C19",), stage="save", check="score", job=a_scored_run)
def raw_saved_for_the_average(_: Path) -> AbstractContextManager[None]:
    return swapped(Ema, "tensors", lambda average: {PREFIX + name: parameter.detach() for name, parameter in average._live.items()})


@fault("raw weights scored for the average", rows=("C19",), stage="eval", check="score", job=a_scored_run)
def raw_scored_for_the_average(_: Path) -> AbstractContextManager[None]:
    return swapped(Ema, "swapped", lambda average: contextlib.nullcontext())
