"""Where faults of training strike: made-up text, a corpus of it, and tiny runs with the guards that a real one has.

A job enters `plant` around everything that the fault could touch: what a run does wrong, its guards must see while it runs.
"""

import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data import order as data_order
from assay.data.build import Plan, build
from assay.data.corpus import Corpus
from assay.data.files import write_file
from assay.data.order import Order
from assay.errors import AssayError, GuardStop, UsageError
from assay.guard.data import check_consumed
from assay.guard.parity import preflight
from assay.guard.update import Account, check_optimizer, check_steps, check_weights
from assay.guard.watch import Watch
from assay.learn import loop, objectives
from assay.learn.optim import adamw
from assay.learn.schedule import cosine
from assay.measure.choose import paired_noise, plan_stopping, should_stop
from assay.model.tiny import tiny_tokenizer
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.seeds import derive
from assay.verdict import Outcome, Verdict, proven, refuted
from assay.zoo.fault import Job, Plant
from assay.zoo.stage import tiny

WORDS = ("river", "song", "bread", "tower", "star", "friend", "bird", "king", "stone", "letter", "garden", "window", "road",
         "winter", "lamp", "boat", "market", "bell", "cloud", "bridge", "teacher", "forest", "candle", "silver", "morning")
DOCUMENTS, WORDS_EACH = 64, 16
ROWS, LENGTH, MICRO = 4, 32, 2
WORTH, PATIENCE = 0.01, 2  # what a run that may stop early waits for, and how long

# ---------------------------------------------------------------- text and corpora


def sentences(count: int = DOCUMENTS, seed: int = 0) -> list[str]:
    """Documents that nobody wrote; the first word of each names it."""
    words = random.Random(derive(seed, "practice"))
    return [f"n{number} " + " ".join(words.choice(WORDS) for _ in range(WORDS_EACH)) + "." for number in range(count)]


def write_sentences(where: Path, texts: Sequence[str]) -> Path:
    where.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return where


def write_tokenizer(where: Path, tokenizer: Tokenizer) -> Path:
    where.mkdir()
    for name, data in tokenizer.files().items():
        write_file(where / name, data)
    return where


def make_corpus(where: Path, texts: Sequence[str], *, tokenizer: Tokenizer | None = None, seed: int = 0) -> Corpus:
    """`where`/corpus, a quarter of it held out, made from `where`/text.jsonl."""
    where.mkdir(parents=True, exist_ok=True)
    words = write_tokenizer(where / "tokenizer", tokenizer or tiny_tokenizer(template=False))
    return build([write_sentences(where / "text.jsonl", texts)], where / "corpus", words, Plan(held_out=0.25, seed=seed))


@functools.cache
def home() -> tempfile.TemporaryDirectory:
    """For what is made once in a process; gone when it ends."""
    return tempfile.TemporaryDirectory(prefix="assay-zoo-")


@functools.cache
def corpus() -> Corpus:
    """Never changed: a fault that strikes a corpus makes its own."""
    return make_corpus(Path(home().name) / "practice", sentences())

# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Practice:
    """A tiny run. Its defaults leave every guard silent."""

    family: str = "llama"
    steps: int = 8
    lr: float = 1e-3
    rows: int = ROWS
    micro: int = MICRO
    epochs: int = 1
    seed: int = 0
    in_bf16: bool = False  # begin with weights that bf16 can hold, as a model of that dtype would

    def order(self) -> Order:
        return Order(corpus(), self.seed, self.rows, LENGTH, self.epochs)

    def multiplier(self, step: int) -> float:
        return cosine(step, self.steps, warmup=2)

    def model(self) -> Transformer:
        model = tiny(self.family, self.seed)
        with torch.no_grad():
            for parameter in model.parameters() if self.in_bf16 else ():
                parameter.copy_(parameter.bfloat16())
        return model


def practised(practice: Practice) -> list[Verdict]:
    """What the guards of a run say of it: those that read its steps, and those that account for its updates."""
    model, order = practice.model(), practice.order()
    trained = [name for name, _ in model.named_parameters()]
    optimizer = make_optimizer(model, practice.lr)
    watch = Watch([group["lr"] for group in optimizer.param_groups], practice.multiplier, vocab=model.config.vocab,
                  consumed=partial(check_consumed, order=order))
    held, account = check_optimizer(model, optimizer, trained), Account(model)
    taken, stopped = 0, []
    batches = data_order.corpus_batches(order.corpus, seed=order.seed, rows=order.rows, length=LENGTH, epochs=order.epochs,
                                        stop=practice.steps)
    try:
        for step in loop.train(model, optimizer, batches, objectives.next_token, micro=practice.micro, schedule=practice.multiplier):
            taken = step.index + 1
            watch.feed(step, [group["lr"] for group in optimizer.param_groups])
        watch.read()
    except GuardStop as stop:
        seen = any(verdict.outcome is Outcome.REFUTED for verdict in watch.verdicts)
        stopped = [] if seen else [refuted("finite", str(stop))]  # else it was the loop itself, before its step
    return [held, *stopped, *watch.verdicts, account.moved(), check_steps(optimizer, taken), check_weights(model)]


def make_optimizer(model: Transformer, lr: float) -> torch.optim.Optimizer:
    return adamw(model.named_parameters(), lr)


def reduce_gradients(ranks: Sequence[Transformer]) -> None:
    """Every replica gets the mean of all their gradients."""
    for copies in zip(*(model.named_parameters() for model in ranks), strict=True):
        reduce_gradient(copies[0][0], [parameter for _, parameter in copies])


def reduce_gradient(_: str, copies: Sequence[torch.nn.Parameter]) -> None:
    mean = torch.stack([copy.grad for copy in copies if copy.grad is not None]).mean(0)
    for copy in copies:
        copy.grad = mean.clone()


def decides_to_stop(history: Sequence[NDArray[np.float64]], evaluations: int) -> bool:
    """After each evaluation: whether there is evidence that no more is gained. Where there cannot be any, a run goes on."""
    try:
        rule = plan_stopping(paired_noise(history[-2], history[-1]), WORTH, patience=PATIENCE, evaluations=evaluations)
    except UsageError:
        return False
    return should_stop(history, rule).stop

# ---------------------------------------------------------------- jobs


def a_practice(of: Practice | None = None) -> Job:
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            return practised(of or Practice())
    return job


def a_preflight(family: str = "llama") -> Job:
    """The checks before step 1, on the first batch of the corpus."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            return preflight(tiny(family), objectives.next_token, Practice().order().batch(0))
    return job


def refusal(check: str, act: Callable[[], object]) -> Verdict:
    """An act that must be refused where it is faulty: the sentence of the refusal is the verdict's."""
    try:
        act()
    except AssayError as error:
        return refuted(check, str(error))
    return proven(check, "it was accepted")
